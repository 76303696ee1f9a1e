// softmax(scale · q · kᵀ) · v over paged keys and values: decode and prefill are one op.
//
// The query rows of one KV head (its query heads are rows too: GQA, arXiv 2305.13245) go together over the context,
// 64 tokens at a time, each with a running maximum, a sum of weights and a weighted sum of values (online softmax,
// arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691). Whatever goes together, a row meets its tokens in one
// order, in steps that lie at absolute positions, and skips those that it does not see: its result has the same
// bits alone, in any batch, and however its prompt is cut into chunks. Every 512 tokens a row begins anew and the
// outcomes are merged, in order: so the stretches of a long context can be shared out (Flash-Decoding), and are or
// are not with the same result.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "kv.h"

namespace motet {
namespace {

constexpr int kStep = 64;                             // tokens between two looks at the maximum
constexpr int kStepTiles = kStep / kTile;
constexpr int64_t kStretchTiles = 512 / kTile;        // what is merged
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

// Rows times tiles that are worth a part of their own: some 2 µs.
constexpr int64_t kLeastWork = 64;

constexpr float kInfinity = __builtin_inff();

// As `CpuAttentionPlan` in Python lays it out: what differs from step to step.
struct Plan {
  int64_t num_sequences, table_width, block_size, window;  // window: 0 for none
  const int64_t *cu_seqlens_q, *seq_lens, *block_tables;
};

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

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Memory = std::unique_ptr<float[], Free>;

Memory allocate(int64_t floats) {
  void* p = std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return Memory(static_cast<float*>(p));
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
void merge(const State& into, const State& from, int64_t rows, int64_t width) {
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
void unpack(const bf16* from, int64_t rows, int64_t width, float* out) {
  for (int64_t row = 0; row < rows; row += 2)
    for (int64_t c = 0; c < width; c += kLanes) {
      const bf16* p = from + place<bf16>(row, c, width);
      store(out + row * width + c, even_row(p, width));
      store(out + (row + 1) * width + c, odd_row(p, width));
    }
}

Step<float> unpacked(const Step<bf16>& packed, const KVShape& kv, float* memory) {
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
const Step<float>& unpacked(const Step<float>& step, const KVShape&, float*) { return step; }

// Some of a sequence's rows of one KV head (row = its position among the step's · group + query head), and the
// tiles of the context that they meet.
struct Part {
  int64_t sequence, head, row, rows, tile, end_tile;
  int64_t partial;  // where among the partial states its own is left; -1: nowhere, the result is complete

  int64_t work() const { return rows * (end_tile - tile); }
  int64_t num_stretches() const { return (end_tile - 1) / kStretchTiles - tile / kStretchTiles + 1; }
};

template <class D>
class PagedAttention {
 public:
  PagedAttention(const Heads& heads, const Plan& plan, const float* q, int64_t q_stride, const D* cache, float* out)
      : heads_(heads), plan_(plan), q_(q), q_stride_(q_stride), cache_(cache), out_(out) {}

  void run(Threads& threads) {
    const std::vector<Part> parts = all_parts();
    int64_t work = 0;
    for (const Part& part : parts) work += part.work();
    // A part that would keep one thread busy while the others have nothing left is split; it makes no difference to
    // the result.
    std::vector<Part> pieces, split;
    int64_t partials = 0;
    for (Part part : parts) {
      if (part.num_stretches() == 1 || part.work() * 4 * threads.count() <= work) {
        pieces.push_back(part);
        continue;
      }
      part.partial = partials;
      split.push_back(part);
      for (Part piece = part; piece.tile < part.end_tile; piece.tile = piece.end_tile) {
        piece.end_tile = std::min(part.end_tile, (piece.tile / kStretchTiles + 1) * kStretchTiles);
        piece.partial = partials;
        partials += state_size(part);
        pieces.push_back(piece);
      }
    }
    const Memory memory = allocate(partials);
    const int64_t count = pieces.size(), together = 1 + kLeastWork * count / (work + 1);
    threads.run((count + together - 1) / together, [&](int64_t i) {
      for (int64_t p = i * together; p < std::min(count, (i + 1) * together); p++) attend(pieces[p], memory.get());
    });
    threads.run(split.size(), [&](int64_t i) { merge_all(split[i], memory.get()); });
  }

 private:
  int64_t width() const { return heads_.kv.width(); }
  int64_t state_size(const Part& part) const { return (State::size(part.rows, width()) + 15) / 16 * 16; }
  int64_t num_rows(int64_t sequence) const { return plan_.cu_seqlens_q[sequence + 1] - plan_.cu_seqlens_q[sequence]; }

  // How many tokens a row sees, up to its own.
  int64_t end(int64_t sequence, int64_t row) const {
    return plan_.seq_lens[sequence] - num_rows(sequence) + row / heads_.group() + 1;
  }
  int64_t begin(int64_t end) const { return plan_.window ? std::max<int64_t>(0, end - plan_.window) : 0; }
  int64_t tile_of(int64_t position) const {
    return position / plan_.block_size * heads_.kv.tiles_per_block() + position % plan_.block_size / kTile;
  }

  std::vector<Part> all_parts() const {
    std::vector<Part> parts;
    for (int64_t s = 0; s < plan_.num_sequences; s++) {
      const int64_t rows = num_rows(s) * heads_.group(), tiles = (rows + kMaxRows - 1) / kMaxRows;
      for (int64_t i = tiles - 1; i >= 0; i--) {  // the longest first
        const int64_t row = i * rows / tiles, last = (i + 1) * rows / tiles - 1;
        const int64_t tile = tile_of(begin(end(s, row))), end_tile = tile_of(end(s, last) - 1) + 1;
        for (int64_t head = 0; head < heads_.kv.num_heads; head++)
          parts.push_back({s, head, row, last + 1 - row, tile / kStepTiles * kStepTiles, end_tile, -1});
      }
    }
    return parts;
  }

  void attend(const Part& part, float* partials) const {
    const int64_t dim = heads_.kv.head_dim, size = state_size(part);
    const Memory memory = allocate(2 * size + kStepTiles * heads_.kv.tile_size() + part.rows * dim);
    float* const unpacked = memory.get() + 2 * size;
    float* const q = unpacked + kStepTiles * heads_.kv.tile_size();
    Sight sight;
    for (int64_t r = 0; r < part.rows; r++) {
      std::memcpy(q + r * dim, q_ + place_of(part, r, q_stride_), dim * sizeof(float));
      sight.end[r] = end(part.sequence, part.row + r);
      sight.begin[r] = begin(sight.end[r]);
    }
    const State state(part.partial < 0 ? memory.get() : partials + part.partial, part.rows, width());
    const State stretch(memory.get() + size, part.rows, width());
    state.forget(part.rows, width());
    for (int64_t tile = part.tile; tile < part.end_tile;) {
      const int64_t end_tile = std::min(part.end_tile, (tile / kStretchTiles + 1) * kStretchTiles);
      const bool first = tile == part.tile;
      if (!first) stretch.forget(part.rows, width());
      for (; tile < end_tile; tile += kStepTiles)
        meet_step(part, tile, end_tile, sight, q, unpacked, first ? state : stretch);
      if (!first) merge(state, stretch, part.rows, width());
    }
    if (part.partial < 0) finish(part, state);
  }

  void meet_step(const Part& part, int64_t tile, int64_t end_tile, const Sight& sight, const float* q, float* memory,
                 const State& state) const {
    const int64_t* table = plan_.block_tables + part.sequence * plan_.table_width;
    const Step<D> step = step_at(cache_, heads_.kv, table, part.head, tile, end_tile);
    int64_t first = 0, last = part.rows;
    while (first < last && sight.end[first] <= step.begin) first++;
    while (first < last && sight.begin[last - 1] >= step.end) last--;
    if (last - first <= kFewRows)
      meet_all(heads_, step, sight, first, last, q, state);
    else
      meet_all(heads_, unpacked(step, heads_.kv, memory), sight, first, last, q, state);
  }

  void merge_all(const Part& part, float* partials) const {
    float* p = partials + part.partial;
    const State state(p, part.rows, width());
    for (int64_t i = 1; i < part.num_stretches(); i++)
      merge(state, State(p + i * state_size(part), part.rows, width()), part.rows, width());
    finish(part, state);
  }

  void finish(const Part& part, const State& state) const {
    const int64_t dim = heads_.kv.head_dim;
    for (int64_t r = 0; r < part.rows; r++) {
      float* out = out_ + place_of(part, r, heads_.num_heads * dim);
      const float* values = state.values + r * width();
      const vf weight = splat(sum(load(state.weight + r * kLanes)));
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) store(out + d, load(values + d) / weight);
      if (d < dim) store_first(out + d, load(values + d) / weight, (int)(dim - d));
    }
  }

  // Where a part's row lies in q or out, whose rows are `stride` apart.
  int64_t place_of(const Part& part, int64_t r, int64_t stride) const {
    const int64_t group = heads_.group(), row = part.row + r;
    const int64_t head = part.head * group + row % group;
    return (plan_.cu_seqlens_q[part.sequence] + row / group) * stride + head * heads_.kv.head_dim;
  }

  const Heads heads_;
  const Plan plan_;
  const float* const q_;
  const int64_t q_stride_;
  const D* const cache_;
  float* const out_;
};

}  // namespace
}  // namespace motet

using namespace motet;

#define MOTET_ATTENTION(D, SUFFIX)                                                                               \
  MOTET_API void motet_paged_attention_##SUFFIX(                                                                 \
      Threads* threads, const float* q, int64_t q_stride, const D* cache, const Plan* plan, int64_t num_heads,   \
      int64_t num_kv_heads, int64_t head_dim, float scale, float softcap, float* out) {                          \
    const Heads heads{num_heads, {num_kv_heads, head_dim, plan->block_size}, scale, softcap};                    \
    PagedAttention<D>(heads, *plan, q, q_stride, cache, out).run(*threads);                                      \
  }                                                                                                              \
  MOTET_RECORDABLE(motet_paged_attention_##SUFFIX)

MOTET_ATTENTION(float, f32)
MOTET_ATTENTION(bf16, bf16)
