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
#include "attention_step.h"

namespace motet {
namespace {

constexpr int64_t kStretchTiles = 512 / kTile;  // what is merged

// Rows times tiles that are worth a part of their own: some 2 µs.
constexpr int64_t kLeastWork = 64;

// As `PagedAttentionPlan` in Python lays it out: what differs from step to step.
struct Plan {
  int64_t num_sequences, table_width, block_size, window;  // window: 0 for none
  const int64_t *cu_seqlens_q, *seq_lens, *block_tables;
};
static_assert(sizeof(Plan) == 7 * sizeof(int64_t), "the header is made of int64");

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Memory = std::unique_ptr<float[], Free>;

Memory allocate(int64_t floats) {
  void* p = std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return Memory(static_cast<float*>(p));
}

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
