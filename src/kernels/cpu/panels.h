// Weights [N, K] lie in panels of 32 columns (of y = x · wᵀ), each read from end to end; this is what all formats of them
// share: the sums of a tile of rows and one panel, and how rows are cut into tiles.
#pragma once

#include <type_traits>

#include "simd.h"

namespace motet {

constexpr int kPanel = 32;
constexpr int kVectors = kPanel / kLanes;

inline int64_t num_panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

// How many columns of the panel that begins at `column` there are.
inline int panel_width(int64_t columns, int64_t column) {
  return (int)(columns - column < kPanel ? columns - column : kPanel);
}

// The sums of R rows and one panel: [R][kPanel].
template <int R>
struct Sums {
  vf at[R][kVectors];

  MOTET_INLINE void clear() {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) at[r][v] = vf{};
  }
  // Where a part of K before left them; y null: from 0.
  MOTET_INLINE void load_from(const float* y, int64_t stride, int width) {
    if (!y) return clear();
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) {
        const int left = width - v * kLanes;
        const float* p = y + r * stride + v * kLanes;
        at[r][v] = left >= kLanes ? load(p) : left > 0 ? load_first(p, left) : vf{};
      }
  }
  MOTET_INLINE void store_to(float* y, int64_t stride, int width, const float* bias) const {
    for (int v = 0; v < kVectors; v++) {
      const int left = width - v * kLanes;
      if (left <= 0) return;
      vf b = {};
      if (bias) b = left >= kLanes ? load(bias + v * kLanes) : load_first(bias + v * kLanes, left);
      for (int r = 0; r < R; r++) {
        float* p = y + r * stride + v * kLanes;
        const vf sum = bias ? at[r][v] + b : at[r][v];
        if (left >= kLanes)
          store(p, sum);
        else
          store_first(p, sum, left);
      }
    }
  }
};

// body(row, size) for tiles of at most R rows that make up `rows`; size is a constant of the type
// std::integral_constant. They are as equal as can be: a last one of a row or two would read the panel for little.
template <int R, class Body>
MOTET_INLINE void for_size(int count, int64_t row, const Body& body) {
  if constexpr (R > 1) {
    if (count < R) return for_size<R - 1>(count, row, body);
  }
  body(row, std::integral_constant<int, R>{});
}

template <int R, class Body>
void for_tiles(int64_t rows, const Body& body) {
  const int64_t tiles = (rows + R - 1) / R;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t row = i * rows / tiles, end = (i + 1) * rows / tiles;
    for_size<R>((int)(end - row), row, body);
  }
}

}  // namespace motet
