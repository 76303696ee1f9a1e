// Products with weights of 8 bits: y = x · wᵀ (+ bias), x and y in float32 (W8A8).
//
// Each column of y has a scale of its weights, each row of x one of its activations, found anew in every step
// (arXiv 2206.01861, without its groups); a product of bytes is summed exactly in 32 bits and scaled once. Sums of integers
// have no order, so every build, tile and thread gives the same bits. Weights are stored as w + 128, since the
// hardware multiplies unsigned by signed bytes; 128 · the sum of the row's bytes is taken off again.
// Panels: [N/32][K/4][32][4]; what lacks to whole panels and quads meets activations of 0.
#include <vector>

#include "abi.h"
#include "panels.h"
#include "quantise.h"

namespace motet {
namespace {

constexpr int32_t kZero = 128;  // the byte that stands for a weight of 0
constexpr int64_t kQuads = kPanel * kQuad;  // bytes of four k of a panel

// Rows whose sums, with the weights they meet, fit the registers.
#if defined(__AVX512VNNI__)
constexpr int kTileRows = 12;
#elif defined(__AVX512F__)
constexpr int kTileRows = 8;
#elif defined(__AVX2__)
constexpr int kTileRows = 2;
#else
constexpr int kTileRows = 1;
#endif

struct Product {
  QuantisedRows x;
  int64_t columns;
  const uint8_t* w;
  const float* scales;  // [columns], then anything up to whole panels
  const float* bias;
  float* y;
};

MOTET_INLINE int32_t load_quad(const int8_t* q) {
  int32_t quad;
  std::memcpy(&quad, q, sizeof quad);
  return quad;
}

// Rows [row, row + R) of one panel.
template <int R>
void tile(const Product& p, int64_t row, int64_t panel) {
  vi dots[R][kVectors];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) dots[r][v] = splat_i(-kZero * p.x.sum[row + r]);

  const int8_t* x = p.x.q + row * p.x.depth;
  const uint8_t* w = p.w + panel * kPanel * p.x.depth;
  for (int64_t k = 0; k < p.x.depth; k += kQuad, w += kQuads) {
    vu weights[kVectors];
    for (int v = 0; v < kVectors; v++) weights[v] = load_quads(w + v * kLanes * kQuad);
    for (int r = 0; r < R; r++) {
      const vi quad = splat_i(load_quad(x + r * p.x.depth + k));
      for (int v = 0; v < kVectors; v++) dots[r][v] = dot4(dots[r][v], weights[v], quad);
    }
  }

  Sums<R> sums;
  const int64_t column = panel * kPanel;
  for (int v = 0; v < kVectors; v++) {
    const vf scale = load(p.scales + column + v * kLanes);
    for (int r = 0; r < R; r++)
      sums.at[r][v] = to_float(dots[r][v]) * (splat(p.x.scale[row + r]) * scale);
  }
  sums.store_to(p.y + row * p.columns + column, p.columns, panel_width(p.columns, column),
                p.bias ? p.bias + column : nullptr);
}

void linear(Threads& threads, const float* x, const Product& p) {
  if (p.x.rows == 0) return;
  p.x.fill(threads, x);
  threads.run(num_panels(p.columns), [&](int64_t panel) {
    for_tiles<kTileRows>(p.x.rows, [&](int64_t row, auto size) { tile<size>(p, row, panel); });
  });
}

// Where the byte of weight [column, k] lies.
int64_t place(int64_t column, int64_t k, int64_t depth) {
  return (column / kPanel * depth + k / kQuad * kQuad) * kPanel + column % kPanel * kQuad + k % kQuad;
}

template <class W>
void pack(Threads& threads, const W* weight, int64_t columns, int64_t inner, uint8_t* packed, float* scales) {
  const int64_t depth = round_up(inner, kQuad);
  threads.run(num_panels(columns), [&](int64_t panel) {
    std::vector<int8_t> row(depth);
    for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; n++) {
      scales[n] = 0.0f;
      std::fill(row.begin(), row.end(), 0);
      if (n < columns) quantise(weight + n * inner, inner, row.data(), scales + n);
      for (int64_t k = 0; k < depth; k += kQuad) {
        const uint32_t quad = (uint32_t)load_quad(&row[k]) ^ 0x80808080u;
        std::memcpy(packed + place(n, k, depth), &quad, sizeof quad);
      }
    }
  });
}

MOTET_INLINE float value(const uint8_t* packed, const float* scales, int64_t column, int64_t k, int64_t depth) {
  return (float)(packed[place(column, k, depth)] - kZero) * scales[column];
}

template <class W>
void unpack(Threads& threads, const uint8_t* packed, const float* scales, int64_t columns, int64_t inner,
            W* weight) {
  const int64_t depth = round_up(inner, kQuad);
  threads.run(columns, [&](int64_t n) {
    for (int64_t k = 0; k < inner; k++) assign(weight[n * inner + k], value(packed, scales, n, k, depth));
  });
}

}  // namespace
}  // namespace motet

using namespace motet;

// scratch: of `QuantisedRows`, one group for the whole row.
MOTET_API void motet_linear_int8(Threads* threads, const float* x, int64_t rows, int64_t inner, int64_t columns,
                                 const uint8_t* w, const float* scales, const float* bias, float* scratch,
                                 float* y) {
  const QuantisedRows quantised(rows, inner, round_up(inner, kQuad), scratch);
  linear(*threads, x, Product{quantised, columns, w, scales, bias, y});
}
MOTET_RECORDABLE(motet_linear_int8)

// The rows `ids` of the weight: a tied output head's weight is the embedding's table.
MOTET_API void motet_gather_int8(Threads* threads, const int64_t* ids, int64_t count, const uint8_t* packed,
                                 const float* scales, int64_t inner, float* out) {
  const int64_t depth = round_up(inner, kQuad);
  threads->run(count, [&](int64_t i) {
    for (int64_t k = 0; k < inner; k++) out[i * inner + k] = value(packed, scales, ids[i], k, depth);
  });
}
MOTET_RECORDABLE(motet_gather_int8)

#define MOTET_INT8(W, SUFFIX)                                                                                     \
  MOTET_API void motet_pack_int8_##SUFFIX(Threads* threads, const W* weight, int64_t columns, int64_t inner,      \
                                          uint8_t* packed, float* scales) {                                       \
    pack(*threads, weight, columns, inner, packed, scales);                                                       \
  }                                                                                                               \
  MOTET_API void motet_unpack_int8_##SUFFIX(Threads* threads, const uint8_t* packed, const float* scales,         \
                                            int64_t columns, int64_t inner, W* weight) {                          \
    unpack(*threads, packed, scales, columns, inner, weight);                                                     \
  }

MOTET_INT8(float, f32)
MOTET_INT8(bf16, bf16)
