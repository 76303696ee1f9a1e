// Attention's arithmetic: how some query rows meet up to 64 tokens of a context, and what they know afterwards.
#pragma once

#include <algorithm>

#include "kv.h"

namespace motet {

constexpr int kStep = 64;                             // tokens between two looks at the maximum
constexpr int kStepTiles = kStep / kTile;
constexpr int64_t kMaxRows = 64;                      // query rows that go together

// Sums of rows × vectors that fit the registers beside what they meet.
constexpr int kVectors = 4;
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 3;
#endif

// Above so many rows, bf16 is unpacked once for all instead of once for each kTileRows.
constexpr int64_t kFewRows = 2 * kTileRows;

constexpr float kInfinity = __builtin_inff();

struct Heads {
  int64_t num_heads;
  KVShape kv;
  float scale, softcap;  // softcap: 0 for none

  int64_t group() const { return num_heads / kv.num_heads; }
};

// sums[r] += a[r] · row
template <int R, int V>
MOTET_INLINE void add_row(vf (&sums)[R][V], const float* a, int64_t stride, const vf (&row)[V]) {
  for (int r = 0; r < R; r++) {
    const vf by = splat(a[r * stride]);
    for (int v = 0; v < V; v++) sums[r][v] = fma(by, row[v], sums[r][v]);
  }
}

// sums[r] += a[r][i] · b[i] for the rows [from, to) of b, in their order. b[v]: the v-th vector of columns of row 0.
template <int R, int V, class D>
MOTET_INLINE void multiply(vf (&sums)[R][V], const float* a, int64_t stride, const D* const (&b)[V], int64_t width,
                           int64_t from, int64_t to) {
  vf row[V];
  int64_t i = from;
  if (i % 2 && i < to) {
    for (int v = 0; v < V; v++) row[v] = odd_row(b[v] + (i - 1) * width, width);
    add_row(sums, a + i, stride, row);
    i++;
  }
  for (; i + 1 < to; i += 2) {
    for (int v = 0; v < V; v++) row[v] = even_row(b[v] + i * width, width);
    add_row(sums, a + i, stride, row);
    for (int v = 0; v < V; v++) row[v] = odd_row(b[v] + i * width, width);
    add_row(sums, a + i + 1, stride, row);
  }
  if (i < to) {
    for (int v = 0; v < V; v++) row[v] = even_row(b[v] + i * width, width);
    add_row(sums, a + i, stride, row);
  }
}

// What rows know of the tokens that they have met.
struct State {
  float* values;  // [rows][width], the sum of values weighted by e^(score - best)
  float* weight;  // [rows][kLanes], the sum of those weights, lane by lane
  float* best;    // [rows], the largest score

  static int64_t size(int64_t rows, int64_t width) { return rows * (width + kLanes + 1); }
  State(float* memory, int64_t rows, int64_t width)
      : values(memory), weight(values + rows * width), best(weight + rows * kLanes) {}

  void forget(int64_t rows, int64_t width) const {
    std::fill_n(values, rows * (width + kLanes), 0.0f);
    std::fill_n(best, rows, -kInfinity);
  }
};

// Adds what rows know of a later stretch of tokens; of which some may have seen nothing.
inline void merge(const State& into, const State& from, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++) {
    if (from.best[r] == -kInfinity) continue;
    const float best = std::max(into.best[r], from.best[r]);
    const vf keep = exp(splat(into.best[r] - best)), add = exp(splat(from.best[r] - best));
    const auto blend = [&](float* a, const float* b) { store(a, fma(load(b), add, load(a) * keep)); };
    into.best[r] = best;
    blend(into.weight + r * kLanes, from.weight + r * kLanes);
    for (int64_t d = r * width; d < (r + 1) * width; d += kLanes) blend(into.values + d, from.values + d);
  }
}

// Up to 64 tokens of a context. Tiles that are not needed repeat the first one, as tiles without tokens.
template <class D>
struct Step {
  const D* keys[kStepTiles];
  const D* values[kStepTiles];
  int64_t first[kStepTiles];  // position of the tile's first token
  int64_t count[kStepTiles];  // its tokens
  int64_t begin, end;         // of all positions

  // The lanes of a tile at positions [begin, end).
  int64_t lane_from(int tile, int64_t begin) const { return std::max<int64_t>(0, begin - first[tile]); }
  int64_t lane_to(int tile, int64_t end) const { return std::min(count[tile], end - first[tile]); }
};

template <class D>
Step<D> step_at(const D* cache, const KVShape& kv, const int64_t* table, int64_t head, int64_t tile, int64_t end_tile) {
  Step<D> step;
  for (int i = 0; i < kStepTiles; i++) {
    const bool needed = tile + i < end_tile;
    const int64_t index = needed ? tile + i : tile;
    const int64_t block = index / kv.tiles_per_block(), inner = index % kv.tiles_per_block();
    step.keys[i] = cache + kv.keys(table[block], head, inner);
    step.values[i] = step.keys[i] + kv.values_behind_keys();
    step.first[i] = block * kv.block_size + inner * kTile;
    step.count[i] = needed ? std::min<int64_t>(kTile, kv.block_size - inner * kTile) : 0;
    if (needed) step.end = step.first[i] + step.count[i];
  }
  step.begin = step.first[0];
  return step;
}

// Row r sees the positions [begin[r], end[r]); neither ever falls from row to row.
struct Sight {
  int64_t begin[kMaxRows], end[kMaxRows];
};

// scores[r] = q[r] · k of a step's tokens.
template <int R, class D>
MOTET_INLINE void score(const float* q, int64_t stride, int64_t dim, const Step<D>& step, float* scores) {
  constexpr int kTogether = kVectors * kLanes;
  for (int first = 0; first < kStep; first += kTogether) {
    const D* keys[kVectors];
    for (int v = 0; v < kVectors; v++) {
      const int lane = first + v * kLanes;
      keys[v] = step.keys[lane / kTile] + place<D>(0, lane % kTile, kTile);
    }
    vf sums[R][kVectors] = {};
    multiply(sums, q, stride, keys, kTile, 0, dim);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) store(scores + r * kStep + first + v * kLanes, sums[r][v]);
  }
}

// One row's scores become weights, and what it knew is scaled to the new maximum.
template <class D>
MOTET_INLINE void weigh(const Heads& heads, const Step<D>& step, int64_t begin, int64_t end, float* scores, float& best,
                        float* weight, float* values) {
  constexpr int kCount = kStep / kLanes;
  vf x[kCount], highest = splat(best);
  for (int v = 0; v < kCount; v++) {
    x[v] = load(scores + v * kLanes) * splat(heads.scale);
    if (heads.softcap > 0) x[v] = tanh(x[v] / splat(heads.softcap)) * splat(heads.softcap);
  }
  if (begin > step.begin || end < step.begin + kStep || step.end < step.begin + kStep)
    for (int v = 0; v < kCount; v++) {
      const int tile = v * kLanes / kTile, lane = v * kLanes % kTile;
      const vi from = splat_i((int32_t)(step.lane_from(tile, begin) - lane));
      const vi to = splat_i((int32_t)(step.lane_to(tile, end) - lane));
      x[v] = select((lane_numbers() >= from) & (lane_numbers() < to), x[v], splat(-kInfinity));
    }
  for (int v = 0; v < kCount; v++) highest = max(x[v], highest);
  const float new_best = max(highest);
  vf total = {};
  for (int v = 0; v < kCount; v++) {
    const vf w = exp(x[v] - splat(new_best));
    store(scores + v * kLanes, w);
    total = total + w;
  }
  if (new_best == best) return store(weight, load(weight) + total);
  const vf keep = exp(splat(best - new_best));
  best = new_best;
  store(weight, fma(load(weight), keep, total));
  for (int64_t d = 0; d < heads.kv.width(); d += kLanes) store(values + d, load(values + d) * keep);
}

// values[r] += weights[r] · v of a step's tokens at positions [begin, end), for V vectors of dimensions.
template <int R, int V, class D>
MOTET_INLINE void add_columns(const float* weights, const Step<D>& step, int64_t begin, int64_t end, int64_t dim,
                              int64_t width, float* values) {
  vf sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = load(values + r * width + dim + v * kLanes);
  for (int i = 0; i < kStepTiles; i++) {
    const D* columns[V];
    for (int v = 0; v < V; v++) columns[v] = step.values[i] + place<D>(0, dim + v * kLanes, width);
    multiply(sums, weights + i * kTile, kStep, columns, width, step.lane_from(i, begin), step.lane_to(i, end));
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(values + r * width + dim + v * kLanes, sums[r][v]);
}

template <int R, class D>
MOTET_INLINE void add_values(const float* weights, const Step<D>& step, int64_t begin, int64_t end, int64_t width,
                             float* values) {
  if (begin >= end) return;
  int64_t dim = 0;
  for (; dim + kVectors * kLanes <= width; dim += kVectors * kLanes)
    add_columns<R, kVectors>(weights, step, begin, end, dim, width, values);
  for (; dim < width; dim += kLanes) add_columns<R, 1>(weights, step, begin, end, dim, width, values);
}

// R rows, from `row` on, meet a step of which each sees something.
template <int R, class D>
void meet(const Heads& heads, const Step<D>& step, const Sight& sight, int64_t row, const float* q,
          const State& state) {
  alignas(64) float scores[R * kStep];
  const int64_t dim = heads.kv.head_dim, width = heads.kv.width();
  score<R>(q + row * dim, dim, dim, step, scores);
  for (int64_t r = row; r < row + R; r++)
    weigh(heads, step, sight.begin[r], sight.end[r], scores + (r - row) * kStep, state.best[r],
          state.weight + r * kLanes, state.values + r * width);
  // What all rows see is added together; what only some see, before and behind it, one by one: a weight of 0 would
  // not do, as values that a row may not see can be NaN.
  float* values = state.values + row * width;
  const int64_t begin = std::max(step.begin, sight.begin[row + R - 1]);
  const int64_t end = std::max(begin, std::min(step.end, sight.end[row]));
  if (begin > step.begin)
    for (int r = 0; r < R; r++)
      add_values<1>(scores + r * kStep, step, std::max(step.begin, sight.begin[row + r]),
                    std::min(begin, sight.end[row + r]), width, values + r * width);
  add_values<R>(scores, step, begin, end, width, values);
  for (int r = 0; r < R; r++)
    add_values<1>(scores + r * kStep, step, end, std::min(step.end, sight.end[row + r]), width, values + r * width);
}

template <int R, class D>
void meet_with(int count, const Heads& heads, const Step<D>& step, const Sight& sight, int64_t row, const float* q,
               const State& state) {
  if constexpr (R > 1) {
    if (count < R) return meet_with<R - 1>(count, heads, step, sight, row, q, state);
  }
  meet<R>(heads, step, sight, row, q, state);
}

// Rows [first, last) meet a step, as few tiles of rows as can be, of like sizes.
template <class D>
void meet_all(const Heads& heads, const Step<D>& step, const Sight& sight, int64_t first, int64_t last, const float* q,
              const State& state) {
  const int64_t rows = last - first, tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t begin = i * rows / tiles, end = (i + 1) * rows / tiles;
    meet_with<kTileRows>((int)(end - begin), heads, step, sight, first + begin, q, state);
  }
}

// A step's bf16 as float32, so that unpacking costs once what many rows then read.
inline void unpack(const bf16* from, int64_t rows, int64_t width, float* out) {
  for (int64_t row = 0; row < rows; row += 2)
    for (int64_t c = 0; c < width; c += kLanes) {
      const bf16* p = from + place<bf16>(row, c, width);
      store(out + row * width + c, even_row(p, width));
      store(out + (row + 1) * width + c, odd_row(p, width));
    }
}

inline Step<float> unpacked(const Step<bf16>& packed, const KVShape& kv, float* memory) {
  Step<float> step{{}, {}, {}, {}, packed.begin, packed.end};
  for (int i = 0; i < kStepTiles; i++) {
    float* keys = memory + i * kv.tile_size();
    float* values = keys + kv.values_behind_keys();
    unpack(packed.keys[i], kv.head_dim, kTile, keys);
    unpack(packed.values[i], packed.count[i], kv.width(), values);
    step.keys[i] = keys, step.values[i] = values;
    step.first[i] = packed.first[i], step.count[i] = packed.count[i];
  }
  return step;
}
inline const Step<float>& unpacked(const Step<float>& step, const KVShape&, float*) { return step; }

}  // namespace motet
