// Products with weights of 8 bits: y = x · wᵀ (+ bias), x and y in float32 (W8A8).
//
// A row of x has a scale for each group of k, found anew in every step: some channels of a language model's activations
// are a hundred times as large as others (arXiv 2208.07339) and with one scale would leave those no bits. The weights
// have one for each column, or for each column's group, a half. Products of bytes are summed exactly in 32 bits within a
// group, groups in their order as floats; 128 · the sum of the group's activations takes off what the bytes are above
// the weights' codes (see layouts.h). What lacks to whole panels and quads meets activations of 0.
#include <type_traits>
#include <vector>

#include "abi.h"
#include "layouts.h"

namespace motet {
namespace {

// After so many k a tile fetches some more of what comes next: few lines at once, as in linear.cpp.
constexpr int64_t kFetchDepth = 16;

// Scale: float, for each column, up to whole panels; or half, for each group.
template <class Scale>
struct Product {
  QuantisedRows x;
  int64_t columns;
  const uint8_t* w;
  const Scale* scales;
  const float* bias;
  float* y;
};

// Rows [row, row + R) of one panel.
template <int R, class Scale>
void tile(const Product<Scale>& p, int64_t row, int64_t panel, Ahead& ahead) {
  constexpr bool kGrouped = std::is_same_v<Scale, half>;
  const QuantisedRows& x = p.x;
  const int64_t depth = round_up(x.inner, kQuad), column = panel * kPanel;
  const uint8_t* w = p.w + panel * kPanel * depth;
  Sums<R> sums;
  sums.clear();
  for (int64_t g = 0; g < x.groups; g++) {
    const int64_t begin = g * x.group, end = std::min(depth, begin + x.group);
    const float* x_scale = x.scale + row * x.groups + g;
    const int32_t* sum = x.sum + row * x.groups + g;
    vi dots[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) dots[r][v] = splat_i(sum[r * x.groups]);
    for (int64_t k = begin; k < end; k += kFetchDepth) {
      ahead.fetch();
      multiply<R>(dots, x.q + row * x.depth + k, x.depth, w + k * kPanel, std::min(kFetchDepth, end - k));
    }
    for (int v = 0; v < kVectors; v++) {
      vf w_scale = {};
      if constexpr (kGrouped) w_scale = load_half(p.scales + (panel * x.groups + g) * kPanel + v * kLanes);
      for (int r = 0; r < R; r++) {
        vf scale = splat(x_scale[r * x.groups]);
        if constexpr (kGrouped) scale *= w_scale;
        sums.at[r][v] = fma(to_float(dots[r][v]), scale, sums.at[r][v]);
      }
    }
  }
  if constexpr (!kGrouped)
    for (int v = 0; v < kVectors; v++) {
      const vf scale = load(p.scales + column + v * kLanes);
      for (int r = 0; r < R; r++) sums.at[r][v] *= scale;
    }
  sums.store_to(p.y + row * p.columns + column, p.columns, panel_width(p.columns, column),
                p.bias ? p.bias + column : nullptr);
}

template <class Scale>
void linear(Threads& threads, const float* x, const Product<Scale>& p) {
  if (p.x.rows == 0) return;
  p.x.fill(threads, x);
  const int64_t bytes = round_up(p.x.inner, kQuad) * kPanel;
  for_panels(threads, p.x.rows, p.columns, [&](Rows rows, int64_t panel, int64_t next) {
    const int64_t fetches = p.x.groups * (p.x.group / kFetchDepth);
    Ahead ahead(p.w + next * bytes, bytes, num_tiles<kTileRows>(rows.count) * fetches, rows.count <= 4);
    for_tiles<kTileRows>(rows, [&](int64_t row, auto size) { tile<size>(p, row, panel, ahead); });
  });
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

// Of a column that is packed with one scale for each group of k, or, group 0, for all of it.
struct Column {
  const uint8_t* packed;
  int64_t index, inner;

  template <class W>
  void unpack(const float* scales, W* out) const {
    unpack(0, inner, scales[index], out);
  }
  template <class W>
  void unpack(const half* scales, int64_t group, W* out) const {
    const int64_t groups = (inner + group - 1) / group, lane = index % kLanes;
    for (int64_t g = 0; g < groups; g++) {
      const half* at = scales + (index / kPanel * groups + g) * kPanel + index % kPanel - lane;
      unpack(g * group, std::min(inner, (g + 1) * group), load_half(at)[lane], out);
    }
  }

 private:
  template <class W>
  void unpack(int64_t k, int64_t end, float scale, W* out) const {
    const int64_t depth = round_up(inner, kQuad);
    for (; k < end; k++) assign(out[k], (float)(packed[place(index, k, depth)] - kZero) * scale);
  }
};

}  // namespace
}  // namespace motet

using namespace motet;

// group: of activations that share a scale. scratch: see `QuantisedRows`.
MOTET_API void motet_linear_int8(Threads* threads, const float* x, int64_t rows, int64_t inner, int64_t columns,
                                 int64_t group, const uint8_t* w, const float* scales, const float* bias,
                                 float* scratch, float* y) {
  linear(*threads, x,
         Product<float>{QuantisedRows(rows, inner, group, scratch, -kZero), columns, w, scales, bias, y});
}
MOTET_RECORDABLE(motet_linear_int8)

// group: of weights as well.
MOTET_API void motet_linear_int8_grouped(Threads* threads, const float* x, int64_t rows, int64_t inner,
                                         int64_t columns, int64_t group, const uint8_t* w, const half* scales,
                                         const float* bias, float* scratch, float* y) {
  linear(*threads, x,
         Product<half>{QuantisedRows(rows, inner, group, scratch, -kZero), columns, w, scales, bias, y});
}
MOTET_RECORDABLE(motet_linear_int8_grouped)

// The rows `ids` of the weight: a tied output head's weight is the embedding's table.
MOTET_API void motet_gather_int8(Threads* threads, const int64_t* ids, int64_t count, const uint8_t* packed,
                                 const float* scales, int64_t inner, float* out) {
  threads->run(count, [&](int64_t i) { Column{packed, ids[i], inner}.unpack(scales, out + i * inner); });
}
MOTET_RECORDABLE(motet_gather_int8)

MOTET_API void motet_gather_int8_grouped(Threads* threads, const int64_t* ids, int64_t count, const uint8_t* packed,
                                         const half* scales, int64_t inner, int64_t group, float* out) {
  threads->run(count, [&](int64_t i) { Column{packed, ids[i], inner}.unpack(scales, group, out + i * inner); });
}
MOTET_RECORDABLE(motet_gather_int8_grouped)

#define MOTET_INT8(W, SUFFIX)                                                                                     \
  MOTET_API void motet_pack_int8_##SUFFIX(Threads* threads, const W* weight, int64_t columns, int64_t inner,      \
                                          uint8_t* packed, float* scales) {                                       \
    pack(*threads, weight, columns, inner, packed, scales);                                                       \
  }                                                                                                               \
  MOTET_API void motet_unpack_int8_##SUFFIX(Threads* threads, const uint8_t* packed, const float* scales,         \
                                            int64_t columns, int64_t inner, W* weight) {                          \
    threads->run(columns, [&](int64_t n) { Column{packed, n, inner}.unpack(scales, weight + n * inner); });       \
  }                                                                                                               \
  MOTET_API void motet_unpack_int8_grouped_##SUFFIX(Threads* threads, const uint8_t* packed, const half* scales,  \
                                                    int64_t columns, int64_t inner, int64_t group, W* weight) {   \
    threads->run(columns, [&](int64_t n) { Column{packed, n, inner}.unpack(scales, group, weight + n * inner); }); \
  }

MOTET_INT8(float, f32)
MOTET_INT8(bf16, bf16)
