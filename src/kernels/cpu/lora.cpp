// What adapters add to a linear's output, each row's own adapter at its own rank (SGMV, arXiv 2310.18547):
// y = scale · y + shift + B · (A · x), where A is [rank, inner] and B is [rank, columns], so transposed.
//
// Both products run along contiguous memory, shrink (A · x) along the inputs and expand (B · h) along the outputs, so
// that any rank fills the vectors. With few rows per adapter it is the adapters' weights that cost: they are read once
// from memory, end to end in huge pages, where the hardware's own prefetching does best. Every number is summed in an
// order that depends on its own row and adapter alone, however the work is shared out.
#include <memory>
#include <vector>

#include "abi.h"
#include "simd.h"

namespace motet {
namespace {

constexpr int kRows = 4;           // rows that meet a piece of A or B while it is in registers
constexpr int kRanks = 4;          // rows of A, or of B, that meet them there; 8 if there is but one row
constexpr int64_t kColumns = 512;  // of B and of the output, as much as stays in the first-level cache

// Less than so many multiply-adds (of kRows rows each) are not worth a barrier.
constexpr int64_t kSmall = 24 << 10;

// One projection's part of an adapter: offsets into the arena, -1: there is none.
struct Entry {
  int64_t a, b, rank, scale, shift;

  bool acts() const { return rank > 0 || scale >= 0 || shift >= 0; }
};

struct Segment {
  int64_t slot, first, last;  // rows [first, last)
};

// What differs between steps: the header of `CpuLoRA`.
struct Plan {
  const void* arena;
  const Entry* table;  // [slots][projections]
  int64_t projections;
  const bool* acts;  // of each site: whether any adapter of the step does anything there
  const Segment* segments;
  int64_t num_segments;
};
static_assert(sizeof(Plan) == 6 * sizeof(int64_t), "the header is made of int64");

// One linear, or with `ids` instead of `x` the embedding: a row is then 1 at its id and 0 elsewhere.
struct Site {
  const float* x;
  const int64_t* ids;
  int64_t inner;
  float* out;
  int64_t stride;  // of out's rows
};

// One segment's rows at one projection.
struct Task {
  Entry entry;
  int64_t first, rows, left, columns;
  float* h;  // A · x: [rows][rank]

  int64_t cost(int64_t inner) const { return entry.rank * (inner + columns) * ((rows + kRows - 1) / kRows); }
};

// Of each 2 * Width lanes the two halves added, those of `a` before those of `b`.
template <int Width>
MOTET_INLINE vf add_halves(vf a, vf b) {
  vi low;
  for (int i = 0; i < kLanes; i++) low[i] = i / Width * 2 * Width + i % Width;
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + Width);
}

// The sums of four vectors, each added up as `sum` does it, in half as many steps.
MOTET_INLINE void store_sums(float* y, vf a, vf b, vf c, vf d) {
  vf sums = add_halves<kLanes / 4>(add_halves<kLanes / 2>(a, b), add_halves<kLanes / 2>(c, d));
  if constexpr (kLanes > 8) sums = sums + lanes_from<2>(sums);
  if constexpr (kLanes > 4) sums = sums + lanes_from<1>(sums);
  for (int i = 0; i < 4; i++) y[i] = sums[i * (kLanes / 4)];
}

// h[r][j] = A[j] · x[r] for R rows and J ranks.
template <int R, int J, class W>
MOTET_INLINE void dots(const float* x, const W* a, int64_t inner, float* h, int64_t rank) {
  vf sums[R][J] = {};
  int64_t k = 0;
  for (; k + kLanes <= inner; k += kLanes) {
    vf rows[R];
    for (int r = 0; r < R; r++) rows[r] = load(x + r * inner + k);
    for (int j = 0; j < J; j++) {
      const vf weights = load(a + j * inner + k);
      for (int r = 0; r < R; r++) sums[r][j] = fma(rows[r], weights, sums[r][j]);
    }
  }
  if (const int left = (int)(inner - k))
    for (int r = 0; r < R; r++) {
      const vf row = load_first(x + r * inner + k, left);
      for (int j = 0; j < J; j++) sums[r][j] = fma(row, load_first(a + j * inner + k, left), sums[r][j]);
    }
  for (int r = 0; r < R; r++) {
    const vf* of_row = sums[r];
    int j = 0;
    for (; j + 4 <= J; j += 4)
      store_sums(h + r * rank + j, of_row[j], of_row[j + 1], of_row[j + 2], of_row[j + 3]);
    for (; j < J; j++) h[r * rank + j] = sum(of_row[j]);
  }
}

template <int R, class W>
void shrink_rows(const float* x, const W* a, int64_t inner, int64_t begin, int64_t end, float* h, int64_t rank) {
  constexpr int J = R == 1 ? 2 * kRanks : kRanks;
  int64_t j = begin;
  for (; j + J <= end; j += J) dots<R, J>(x, a + j * inner, inner, h + j, rank);
  for (; j < end; j++) dots<R, 1>(x, a + j * inner, inner, h + j, rank);
}

// h of the task's ranks [begin, end).
template <class W>
void shrink(const Site& site, const W* arena, const Task& task, int64_t begin, int64_t end) {
  const int64_t rank = task.entry.rank, inner = site.inner;
  const W* a = arena + task.entry.a;
  if (site.ids) {
    for (int64_t r = 0; r < task.rows; r++)
      for (int64_t j = begin; j < end; j++)
        task.h[r * rank + j] = to_float(a[j * inner + site.ids[task.first + r]]);
    return;
  }
  // A few rows of A at a time, so that they stay in the cache for all rows of x.
  const int64_t step = task.rows > kRows ? 2 * kRanks : end - begin;
  for (int64_t j = begin; j < end; j += step) {
    const int64_t stop = end - j < step ? end : j + step;
    int64_t r = 0;
    for (; r + kRows <= task.rows; r += kRows)
      shrink_rows<kRows>(site.x + (task.first + r) * inner, a, inner, j, stop, task.h + r * rank, rank);
    for (; r + 2 <= task.rows; r += 2)
      shrink_rows<2>(site.x + (task.first + r) * inner, a, inner, j, stop, task.h + r * rank, rank);
    for (; r < task.rows; r++)
      shrink_rows<1>(site.x + (task.first + r) * inner, a, inner, j, stop, task.h + r * rank, rank);
  }
}

// out[r][c] += h[r] · B[:, c] for R rows, J ranks and all columns.
template <int R, int J, class W>
MOTET_INLINE void add_product(const float* h, int64_t rank, const W* b, int64_t b_stride, float* out, int64_t stride,
                              int64_t columns) {
  vf factors[R][J];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < J; j++) factors[r][j] = splat(h[r * rank + j]);
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    vf weights[J];
    for (int j = 0; j < J; j++) weights[j] = load(b + j * b_stride + c);
    for (int r = 0; r < R; r++) {
      vf y = load(out + r * stride + c);
      for (int j = 0; j < J; j++) y = fma(factors[r][j], weights[j], y);
      store(out + r * stride + c, y);
    }
  }
  if (const int left = (int)(columns - c))
    for (int r = 0; r < R; r++) {
      vf y = load_first(out + r * stride + c, left);
      for (int j = 0; j < J; j++) y = fma(factors[r][j], load_first(b + j * b_stride + c, left), y);
      store_first(out + r * stride + c, y, left);
    }
}

template <int R, class W>
void expand_rows(const float* h, int64_t rank, const W* b, int64_t b_stride, float* out, int64_t stride,
                 int64_t columns) {
  constexpr int J = R == 1 ? 2 * kRanks : kRanks;
  int64_t j = 0;
  for (; j + J <= rank; j += J) add_product<R, J>(h + j, rank, b + j * b_stride, b_stride, out, stride, columns);
  for (; j < rank; j++) add_product<R, 1>(h + j, rank, b + j * b_stride, b_stride, out, stride, columns);
}

template <class W>
void rescale(const W* arena, const Entry& entry, int64_t column, float* out, int64_t columns) {
  const W* scale = entry.scale < 0 ? nullptr : arena + entry.scale + column;
  const W* shift = entry.shift < 0 ? nullptr : arena + entry.shift + column;
  for (int64_t c = 0; c < columns; c++) {
    float y = out[c];
    if (scale) y *= to_float(scale[c]);
    if (shift) y += to_float(shift[c]);
    out[c] = y;
  }
}

// The task's columns [begin, end) of the output, rescaled and the product added.
template <class W>
void expand(const Site& site, const W* arena, const Task& task, int64_t begin, int64_t end) {
  const int64_t rank = task.entry.rank, stride = site.stride;
  const bool rescales = task.entry.scale >= 0 || task.entry.shift >= 0;
  for (int64_t c = begin; c < end; c += kColumns) {
    const int64_t columns = end - c < kColumns ? end - c : kColumns;
    float* out = site.out + task.first * stride + task.left + c;
    const W* b = arena + task.entry.b + c;
    if (rescales)
      for (int64_t r = 0; r < task.rows; r++) rescale(arena, task.entry, c, out + r * stride, columns);
    int64_t r = 0;
    for (; r + kRows <= task.rows; r += kRows)
      expand_rows<kRows>(task.h + r * rank, rank, b, task.columns, out + r * stride, stride, columns);
    for (; r + 2 <= task.rows; r += 2)
      expand_rows<2>(task.h + r * rank, rank, b, task.columns, out + r * stride, stride, columns);
    for (; r < task.rows; r++)
      expand_rows<1>(task.h + r * rank, rank, b, task.columns, out + r * stride, stride, columns);
  }
}

// Of all segments and projections those where an adapter does anything.
std::vector<Task> find_tasks(const Plan& plan, int64_t first, int64_t slices, const int64_t* bounds) {
  std::vector<Task> tasks;
  tasks.reserve(plan.num_segments * slices);
  for (int64_t s = 0; s < plan.num_segments; s++) {
    const Segment& segment = plan.segments[s];
    const Entry* entries = plan.table + segment.slot * plan.projections + first;
    const int64_t rows = segment.last - segment.first;
    for (int64_t p = 0; p < slices && rows > 0; p++)
      if (entries[p].acts())
        tasks.push_back({entries[p], segment.first, rows, bounds[p], bounds[p + 1] - bounds[p], nullptr});
  }
  return tasks;
}

template <class W>
void add_lora(Threads& threads, const Site& site, const Plan& plan, std::vector<Task> tasks) {
  const W* arena = static_cast<const W*>(plan.arena);
  int64_t size = 0, cost = 0, largest = 0;
  for (const Task& task : tasks) {
    size += task.rows * task.entry.rank;
    cost += task.cost(site.inner);
    largest = task.cost(site.inner) > largest ? task.cost(site.inner) : largest;
  }
  const std::unique_ptr<float[]> h(new float[size]);
  float* at = h.get();
  for (Task& task : tasks) {
    task.h = at;
    at += task.rows * task.entry.rank;
  }

  const auto whole = [&](int64_t i) {
    shrink(site, arena, tasks[i], 0, tasks[i].entry.rank);
    expand(site, arena, tasks[i], 0, tasks[i].columns);
  };
  const int64_t count = (int64_t)tasks.size();
  if (cost < kSmall || threads.count() == 1) {
    for (int64_t i = 0; i < count; i++) whole(i);
  } else if (largest * threads.count() <= cost) {
    threads.run(count, whole);
  } else {
    // One task outweighs the others: all are cut, first by their ranks and then by their columns.
    const int64_t pieces = 4 * threads.count();
    threads.run(count * pieces, [&](int64_t part) {
      const Task& task = tasks[part / pieces];
      const int64_t piece = part % pieces, rank = task.entry.rank;
      shrink(site, arena, task, rank * piece / pieces, rank * (piece + 1) / pieces);
    });
    threads.run(count * pieces, [&](int64_t part) {
      const Task& task = tasks[part / pieces];
      const int64_t piece = part % pieces, blocks = (task.columns + kLanes - 1) / kLanes;
      const int64_t end = blocks * (piece + 1) / pieces * kLanes;
      expand(site, arena, task, blocks * piece / pieces * kLanes, end < task.columns ? end : task.columns);
    });
  }
}

}  // namespace
}  // namespace motet

using namespace motet;

#define MOTET_LORA(W, SUFFIX)                                                                                    \
  MOTET_API void motet_add_lora_##SUFFIX(Threads* threads, const float* x, const int64_t* ids, int64_t inner,    \
                                         const Plan* plan, int64_t site, int64_t first, int64_t slices,          \
                                         const int64_t* bounds, float* out, int64_t stride) {                    \
    if (plan->acts[site])                                                                                        \
      add_lora<W>(*threads, Site{x, ids, inner, out, stride}, *plan, find_tasks(*plan, first, slices, bounds));  \
  }                                                                                                              \
  MOTET_RECORDABLE(motet_add_lora_##SUFFIX)

MOTET_LORA(float, f32)
MOTET_LORA(bf16, bf16)
