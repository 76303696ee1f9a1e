// Products with packed bf16 weights of activations that are rounded to bf16 as well: y = x · wᵀ (+ bias), two products
// by each instruction, on processors that have one for it (see `dot2`; the others would gain nothing).
//
// A weight lies as in linear.cpp, [N/P][K/2][P][2]. Each y sums its pairs of products one by one in the order of k,
// however many rows there are: a row's result does not depend on its company.
#include <algorithm>

#include "abi.h"
#include "panels.h"

namespace motet {
namespace {

constexpr int64_t kPair = 2;

// Rows whose sums, with the weights they meet, fit the registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 1;
#endif

// Of a panel, as many k as stay in the first-level cache, with a tile of rows, while tile after tile meets them.
constexpr int64_t kDepth = 256;

struct Product {
  const bf16* x;  // [rows][depth]
  int64_t rows, depth, columns;
  const float* bias;
  float* y;
};

// Rows of `inner` floats as bf16, with a 0 behind an odd number of them.
void round_rows(Threads& threads, const float* x, int64_t rows, int64_t inner, bf16* rounded) {
  const int64_t depth = inner + inner % kPair;
  for_row_runs(threads, rows, inner, [&](int64_t row, int64_t last) {
    for (; row < last; row++) {
      const float* from = x + row * inner;
      bf16* to = rounded + row * depth;
      int64_t k = 0;
      for (; k + kLanes <= inner; k += kLanes) store(to + k, load(from + k));
      for (; k < inner; k++) to[k] = to_bf16(from[k]);
      if (k < depth) to[k] = 0;
    }
  });
}

// A pair in every lane.
MOTET_INLINE vu splat_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (vu)splat_i(pair);
}

template <int R>
MOTET_INLINE void multiply(Sums<R>& sums, const bf16* x, int64_t stride, const bf16* w, int64_t depth) {
  for (int64_t k = 0; k < depth; k += kPair, w += kPanel * kPair) {
    vu weights[kVectors];
    for (int v = 0; v < kVectors; v++) weights[v] = load_pairs(w + v * kLanes * kPair);
    for (int r = 0; r < R; r++) {
      const vu pair = splat_pair(x + r * stride + k);
      for (int v = 0; v < kVectors; v++) sums.at[r][v] = dot2(sums.at[r][v], pair, weights[v]);
    }
  }
}

// Rows [row, row + R) of one panel, over k in [begin, end).
template <int R>
void tile(const Product& p, int64_t row, int64_t column, const bf16* panel, int64_t begin, int64_t end) {
  const int width = panel_width(p.columns, column);
  float* y = p.y + row * p.columns + column;
  Sums<R> sums;
  sums.load_from(begin == 0 ? nullptr : y, p.columns, width);
  multiply<R>(sums, p.x + row * p.depth + begin, p.depth, panel + begin * kPanel, end - begin);
  sums.store_to(y, p.columns, width, end == p.depth && p.bias ? p.bias + column : nullptr);
}

void panel_product(const Product& p, int64_t column, const bf16* panel) {
  const int64_t step = p.rows > kTileRows ? kDepth : p.depth;
  for (int64_t k = 0; k < p.depth; k += step)
    for_tiles<kTileRows>(Rows{0, p.rows}, [&](int64_t row, auto size) {
      tile<size>(p, row, column, panel, k, std::min(p.depth, k + step));
    });
}

}  // namespace
}  // namespace motet

using namespace motet;

// scratch: for rows · K/2 (rounded up) pairs of bf16.
MOTET_API void motet_linear_bf16_pairs(Threads* threads, const float* x, int64_t rows, int64_t inner, int64_t columns,
                                       const bf16* w, const float* bias, bf16* scratch, float* y) {
  round_rows(*threads, x, rows, inner, scratch);
  const Product p{scratch, rows, inner + inner % kPair, columns, bias, y};
  threads->run(rows == 0 ? 0 : num_panels(columns), [&](int64_t panel) {
    panel_product(p, panel * kPanel, w + panel * p.depth * kPanel);
  });
}
MOTET_RECORDABLE(motet_linear_bf16_pairs)
