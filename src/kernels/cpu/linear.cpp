// Products with packed weights: y = x · wᵀ (+ bias), x and y in float32, w in float32 or bf16.
//
// A weight [N, K] lies in panels of P columns (of y), so that a panel is read from end to end: float32 as
// [N/P][K][P], bf16 as [N/P][K/2][P][2]; what lacks to whole panels and pairs is 0. Each y sums its K products one
// by one in the order of k, by fused multiply-adds, however many rows there are: a row's result does not depend
// on its company. (After "Anatomy of High-Performance Matrix Multiplication", Goto and van de Geijn, 2008.)
#include "abi.h"
#include "panels.h"

namespace motet {
namespace {

// Rows whose sums, with the weights they meet, fit the registers.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kTileRows = 8;  // of 32 registers
#else
constexpr int kTileRows = 4;  // of 16
#endif

// Of a panel, as many k at most as stay in the second-level cache, with all rows of a block and what comes next, while
// tile after tile meets them.
constexpr int64_t kDepth = 768;

// After so many k a tile fetches some more of what comes next: few lines at once, for a core has room for few on their
// way.
constexpr int64_t kFetchDepth = 4;

struct Product {
  const float* x;
  int64_t rows, inner, columns;
  const float* bias;
  float* y;
};

template <int R>
MOTET_INLINE void multiply(Sums<R>& sums, const float* x, int64_t stride, const float* w, int64_t depth,
                           Ahead& ahead) {
  for (int64_t k = 0; k < depth; k++, w += kPanel) {
    if (k % kFetchDepth == 0) ahead.fetch();
    vf weights[kVectors];
    for (int v = 0; v < kVectors; v++) weights[v] = load(w + v * kLanes);
    for (int r = 0; r < R; r++) {
      const vf xk = splat(x[r * stride + k]);
      for (int v = 0; v < kVectors; v++) sums.at[r][v] = fma(xk, weights[v], sums.at[r][v]);
    }
  }
}

template <int R>
MOTET_INLINE void multiply(Sums<R>& sums, const float* x, int64_t stride, const bf16* w, int64_t depth,
                           Ahead& ahead) {
  int64_t k = 0;
  for (; k + 1 < depth; k += 2, w += 2 * kPanel) {
    if (k % kFetchDepth == 0) ahead.fetch();
    vu pairs[kVectors];
    for (int v = 0; v < kVectors; v++) pairs[v] = load_pairs(w + 2 * v * kLanes);
    for (int r = 0; r < R; r++) {
      const vf xk = splat(x[r * stride + k]);
      for (int v = 0; v < kVectors; v++) sums.at[r][v] = fma(xk, even(pairs[v]), sums.at[r][v]);
    }
    for (int r = 0; r < R; r++) {
      const vf xk = splat(x[r * stride + k + 1]);
      for (int v = 0; v < kVectors; v++) sums.at[r][v] = fma(xk, odd(pairs[v]), sums.at[r][v]);
    }
  }
  if (k < depth)
    for (int v = 0; v < kVectors; v++) {
      const vf first = even(load_pairs(w + 2 * v * kLanes));
      for (int r = 0; r < R; r++) sums.at[r][v] = fma(splat(x[r * stride + k]), first, sums.at[r][v]);
    }
}

// Rows [row, row + R) of one panel, over k in [begin, begin + depth).
template <int R, class W>
void tile(const Product& p, int64_t row, int64_t panel, const W* w, int64_t begin, int64_t depth, Ahead& ahead) {
  const int64_t column = panel * kPanel;
  const int width = panel_width(p.columns, column);
  float* y = p.y + row * p.columns + column;
  Sums<R> sums;
  sums.load_from(begin == 0 ? nullptr : y, p.columns, width);
  multiply<R>(sums, p.x + row * p.inner + begin, p.inner, w, depth, ahead);
  const bool last = begin + depth == p.inner;
  sums.store_to(y, p.columns, width, last && p.bias ? p.bias + column : nullptr);
}

template <class W>
void all_rows(const Product& p, Rows rows, int64_t panel, const W* w, int64_t begin, int64_t depth, Ahead& ahead) {
  for_tiles<kTileRows>(rows, [&](int64_t row, auto size) { tile<size>(p, row, panel, w, begin, depth, ahead); });
}

// Of K, as many as a panel holds.
int64_t depth_of(const float*, int64_t inner) { return inner; }
int64_t depth_of(const bf16*, int64_t inner) { return (inner + 1) / 2 * 2; }

// Of a tile; a few more where K is met in parts.
int64_t num_fetches(int64_t inner) { return inner / kFetchDepth + 1; }

template <class W>
void panel_product(const Product& p, Rows rows, int64_t panel, const W* w, const W* next) {
  const int64_t size = depth_of(w, p.inner) * kPanel, tiles = num_tiles<kTileRows>(rows.count);
  Ahead ahead(next, size * sizeof *w, tiles * num_fetches(p.inner), rows.count == 1);
  const int64_t step = tiles > 1 ? 2 * equal_part((p.inner + 1) / 2, kDepth / 2) : p.inner;
  for (int64_t k = 0; k < p.inner; k += step)
    all_rows(p, rows, panel, w + k * kPanel, k, p.inner - k < step ? p.inner - k : step, ahead);
}

template <class W>
void linear(Threads& threads, const Product& p, const W* w) {
  if (p.rows == 0) return;
  const int64_t size = depth_of(w, p.inner) * kPanel;
  for_panels(threads, p.rows, p.columns, [&](Rows rows, int64_t panel, int64_t next) {
    panel_product(p, rows, panel, w + panel * size, w + next * size);
  });
}

// Where weight [column, k] lies.
int64_t place(const float*, int64_t column, int64_t k, int64_t inner) {
  return (column / kPanel * inner + k) * kPanel + column % kPanel;
}
int64_t place(const bf16* packed, int64_t column, int64_t k, int64_t inner) {
  return (column / kPanel * depth_of(packed, inner) + k / 2 * 2) * kPanel + column % kPanel * 2 + k % 2;
}

// What lies together along K is 32 bits: of these a row of a square holds as many as lanes, rounded to W.
MOTET_INLINE void load_row(const float* weight, float* to) { std::memcpy(to, weight, sizeof(vf)); }
MOTET_INLINE void load_row(const bf16* weight, bf16* to) { std::memcpy(to, weight, sizeof(vf)); }
MOTET_INLINE void load_row(const bf16* weight, float* to) { store(to, load(weight)); }
MOTET_INLINE void load_row(const float* weight, bf16* to) {
  store(to, load(weight));
  store(to + kLanes, load(weight + kLanes));
}

template <class From, class W>
void pack(Threads& threads, const From* weight, int64_t columns, int64_t inner, W* packed) {
  constexpr int64_t kUnit = 4 / sizeof(W), kSide = kLanes * kUnit;
  const int64_t depth = depth_of(packed, inner), squares = inner / kSide;
  threads.run(num_panels(columns), [&](int64_t panel) {
    const int64_t first = panel * kPanel;
    const int width = panel_width(columns, first);
    if (width < kPanel || depth > inner) std::memset(packed + first * depth, 0, kPanel * depth * sizeof(W));
    for (int64_t k = 0; k < squares * kSide; k += kSide)
      for (int lane = 0; lane < kPanel; lane += kLanes) {
        vu square[kLanes] = {};
        for (int i = 0; i < kLanes && lane + i < width; i++)
          load_row(weight + (first + lane + i) * inner + k, (W*)&square[i]);
        transpose(square);
        for (int i = 0; i < kLanes; i++)
          std::memcpy(packed + place(packed, first + lane, k + i * kUnit, inner), &square[i], sizeof(vu));
      }
    for (int64_t n = first; n < first + width; n++)
      for (int64_t k = squares * kSide; k < inner; k++)
        assign(packed[place(packed, n, k, inner)], to_float(weight[n * inner + k]));
  });
}

template <class W>
void unpack(Threads& threads, const W* packed, int64_t columns, int64_t inner, W* weight) {
  threads.run(columns, [&](int64_t n) {
    for (int64_t k = 0; k < inner; k++) weight[n * inner + k] = packed[place(packed, n, k, inner)];
  });
}

// The rows `ids` of the weight, as float32: a tied output head's weight is the embedding's table.
template <class W>
void gather(Threads& threads, const int64_t* ids, int64_t count, const W* packed, int64_t inner, float* out) {
  threads.run(count, [&](int64_t i) {
    for (int64_t k = 0; k < inner; k++) out[i * inner + k] = to_float(packed[place(packed, ids[i], k, inner)]);
  });
}

}  // namespace
}  // namespace motet

using namespace motet;

#define MOTET_LINEAR(W, SUFFIX)                                                                                  \
  MOTET_API void motet_linear_##SUFFIX(Threads* threads, const float* x, int64_t rows, int64_t inner,            \
                                       int64_t columns, const W* w, const float* bias, float* y) {               \
    linear(*threads, Product{x, rows, inner, columns, bias, y}, w);                                              \
  }                                                                                                              \
  MOTET_RECORDABLE(motet_linear_##SUFFIX)                                                                        \
  MOTET_API void motet_pack_##SUFFIX##_f32(Threads* threads, const float* weight, int64_t columns,               \
                                    int64_t inner, W* packed) {                                                  \
    pack(*threads, weight, columns, inner, packed);                                                              \
  }                                                                                                              \
  MOTET_API void motet_pack_##SUFFIX##_bf16(Threads* threads, const bf16* weight, int64_t columns,               \
                                    int64_t inner, W* packed) {                                                  \
    pack(*threads, weight, columns, inner, packed);                                                              \
  }                                                                                                              \
  MOTET_API void motet_unpack_##SUFFIX(Threads* threads, const W* packed, int64_t columns, int64_t inner,        \
                                       W* weight) {                                                              \
    unpack(*threads, packed, columns, inner, weight);                                                            \
  }                                                                                                              \
  MOTET_API void motet_gather_##SUFFIX(Threads* threads, const int64_t* ids, int64_t count, const W* packed,     \
                                       int64_t inner, float* out) {                                              \
    gather(*threads, ids, count, packed, inner, out);                                                            \
  }                                                                                                              \
  MOTET_RECORDABLE(motet_gather_##SUFFIX)

// How many columns a panel has: those of all formats, as whoever allocates packed weights must know.
MOTET_API int64_t motet_panel_columns() { return kPanel; }

MOTET_LINEAR(float, f32)
MOTET_LINEAR(bf16, bf16)
