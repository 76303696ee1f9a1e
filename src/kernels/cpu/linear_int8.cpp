// Products with weights of 8 bits: y = x · wᵀ (+ bias), x and y in float32 (W8A8).
//
// Each column of y has a scale of its weights. A row of x has one for each group of k, found anew in every step: some
// channels of a language model's activations are a hundred times as large as others (arXiv 2208.07339) and with one scale
// would leave those no bits. Products of bytes are summed exactly in 32 bits within a group, groups in their order as
// floats. Weights are stored as w + 128, since the hardware multiplies unsigned by signed bytes; 128 · the sum of
// the group's activations is taken off again.
// Panels: [N/32][K/4][32][4]; what lacks to whole panels and quads meets activations of 0.
#include <vector>

#include "abi.h"
#include "quantise.h"

namespace motet {
namespace {

constexpr int32_t kZero = 128;  // the byte that stands for a weight of 0

struct Product {
  QuantisedRows x;
  int64_t columns;
  const uint8_t* w;
  const float* scales;  // [columns], then anything up to whole panels
  const float* bias;
  float* y;
};

// Rows [row, row + R) of one panel.
template <int R>
void tile(const Product& p, int64_t row, int64_t panel) {
  const QuantisedRows& x = p.x;
  const int64_t depth = round_up(x.inner, kQuad);
  const uint8_t* w = p.w + panel * kPanel * depth;
  Sums<R> sums;
  sums.clear();
  for (int64_t g = 0; g < x.groups; g++) {
    const int64_t begin = g * x.group;
    const float* scale = x.scale + row * x.groups + g;
    const int32_t* sum = x.sum + row * x.groups + g;
    vi dots[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) dots[r][v] = splat_i(-kZero * sum[r * x.groups]);
    multiply<R>(dots, x.q + row * x.depth + begin, x.depth, w + begin * kPanel, std::min(x.group, depth - begin));
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++)
        sums.at[r][v] = fma(to_float(dots[r][v]), splat(scale[r * x.groups]), sums.at[r][v]);
  }
  const int64_t column = panel * kPanel;
  for (int v = 0; v < kVectors; v++) {
    const vf scale = load(p.scales + column + v * kLanes);
    for (int r = 0; r < R; r++) sums.at[r][v] *= scale;
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

// group: of activations that share a scale. scratch: see `QuantisedRows`.
MOTET_API void motet_linear_int8(Threads* threads, const float* x, int64_t rows, int64_t inner, int64_t columns,
                                 int64_t group, const uint8_t* w, const float* scales, const float* bias,
                                 float* scratch, float* y) {
  linear(*threads, x, Product{QuantisedRows(rows, inner, group, scratch), columns, w, scales, bias, y});
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
