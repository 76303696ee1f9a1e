// One layer's paged keys and values: where they lie.
//
// Tokens stand in tiles of 16, so that a vector holds one dimension of K of all of a tile's tokens, or some
// dimensions of V of one. A block is, for each KV head, its tiles; a tile is K [head_dim][16], then V
// [16][head_dim], in bf16 with every two rows interleaved: K [head_dim / 2][16][2], V [8][head_dim][2]. (The layout
// of K: arXiv 2309.06180 packs it likewise.) A block_size that is no multiple of 16 leaves lanes of each block's
// last tile unused, a head_dim that is none leaves the last dimensions.
#pragma once

#include <cstdint>

#include "simd.h"

namespace motet {

constexpr int kTile = 16;  // tokens

struct KVShape {
  int64_t num_heads, head_dim, block_size;

  int64_t width() const { return (head_dim + 15) / 16 * 16; }
  int64_t tiles_per_block() const { return (block_size + kTile - 1) / kTile; }
  int64_t tile_size() const { return 2 * kTile * width(); }  // in elements, as all below
  int64_t keys(int64_t block, int64_t head, int64_t tile) const {
    return ((block * num_heads + head) * tiles_per_block() + tile) * tile_size();
  }
  int64_t values_behind_keys() const { return kTile * width(); }
};

// A matrix of rows of `width` numbers: one behind the other in float32, every two interleaved in bf16. Where a
// number stands:
template <class D>
constexpr int64_t place(int64_t row, int64_t column, int64_t width) {
  if constexpr (sizeof(D) == sizeof(bf16)) return (row / 2 * width + column) * 2 + row % 2;
  return row * width + column;
}

// kLanes columns of a row of even index, and of the row behind it; p points to the first column in the former.
MOTET_INLINE vf even_row(const float* p, int64_t) { return load(p); }
MOTET_INLINE vf odd_row(const float* p, int64_t width) { return load(p + width); }
MOTET_INLINE vf even_row(const bf16* p, int64_t) { return even(load_pairs(p)); }
MOTET_INLINE vf odd_row(const bf16* p, int64_t) { return odd(load_pairs(p)); }

}  // namespace motet
