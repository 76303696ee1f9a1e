// Weights [N, K] lie in panels of P = kPanel columns (of y = x · wᵀ), each read from end to end; this is what all
// formats of them share: the sums of a tile of rows and one panel, and how the work is cut up and fed from memory.
#pragma once

#include <type_traits>

#include "simd.h"
#include "threads.h"

namespace motet {

// Three vectors make the tile whose sums fill the registers about as wide as it is high: the fewest loads for its
// products, which else leave the multipliers waiting.
constexpr int kVectors = 3;
constexpr int kPanel = kVectors * kLanes;

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

// What a thread will read next, fetched bit by bit while it computes: else memory would rest while a panel that
// has come meets its rows, and the hardware's own prefetching starts anew at each page.
class Ahead {
 public:
  // All of `bytes` in the course of so many fetches. few_rows: those that have come meet so little work that the core
  // waits for memory anyway; the hardware fetches most by itself then, and is but shown the way.
  Ahead(const void* from, int64_t bytes, int64_t fetches, bool few_rows = false)
      : at_((const char*)from), until_(at_), step_((bytes + fetches - 1) / fetches),
        stride_(few_rows ? 8 * kLine : kLine) {}
  MOTET_INLINE void fetch() {
    for (until_ += step_; at_ < until_; at_ += stride_) __builtin_prefetch(at_, 0, 2);  // into the second-level cache
  }

 private:
  static constexpr int64_t kLine = 64;
  const char *at_, *until_;
  int64_t step_, stride_;
};

struct Rows {
  int64_t begin, count;
};

// Rows whose activations stay in the second-level cache while panel after panel meets them.
constexpr int64_t kBlockRows = 128;

// body(rows, panel, next) for every panel and every block of rows; `next` is the panel that the same thread will
// probably meet then.
template <class Body>
void for_panels(Threads& threads, int64_t rows, int64_t columns, const Body& body) {
  const int64_t panels = num_panels(columns), blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t parts = blocks * panels;
  threads.run(parts, [&](int64_t part) {
    const int64_t block = part / panels, begin = block * rows / blocks, end = (block + 1) * rows / blocks;
    const int64_t after = part + 1;  // threads take neighbours
    body(Rows{begin, end - begin}, part % panels, (after < parts ? after : part) % panels);
  });
}

// `count` in equal parts of at most `most`: the size of one; the last may have less.
inline int64_t equal_part(int64_t count, int64_t most) {
  const int64_t parts = (count + most - 1) / most;
  return (count + parts - 1) / parts;
}

// body(row, size) for tiles of at most R rows that make up `rows`; size is a constant of the type
// std::integral_constant. They are as equal as can be: a last one of a row or two would read the panel for little.
template <int R, class Body>
MOTET_INLINE void for_size(int count, int64_t row, const Body& body) {
  if constexpr (R > 1) {
    if (count < R) return for_size<R - 1>(count, row, body);
  }
  body(row, std::integral_constant<int, R>{});
}

template <int R>
int64_t num_tiles(int64_t rows) {
  return (rows + R - 1) / R;
}

template <int R, class Body>
void for_tiles(Rows rows, const Body& body) {
  const int64_t tiles = num_tiles<R>(rows.count);
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t first = i * rows.count / tiles, end = (i + 1) * rows.count / tiles;
    for_size<R>((int)(end - first), rows.begin + first, body);
  }
}

}  // namespace motet
