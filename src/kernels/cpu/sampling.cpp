// From logits to tokens: the likeliest, a draw, log-probabilities. Rows are independent and shared out one by one.
//
// Nothing here sorts a vocabulary. Filters keep the likeliest of a row, so each is a threshold: a least logit, and of
// those that equal it the first ids. A few passes with several pivots at once narrow it to a window of logits, and
// radix selection over the bits of what lies in there finds it (after Quickselect, Hoare 1961). A draw sums the weights
// of blocks of ids, and looks into the one block where the sum passes its number.
//
// Weights and their sums are double, as temperatures may be tiny and a vocabulary is long.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "abi.h"
#include "selection.h"
#include "simd.h"

namespace motet {
namespace {

constexpr int64_t kBlock = 256;  // ids whose largest logit and sum of weights are kept

int64_t num_blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

// What the work on one row needs, reused for the next. Pages that are not written cost nothing: most rows have few
// candidates.
struct Scratch {
  explicit Scratch(int64_t size)
      : maxima(new float[num_blocks(size)]),
        sums(new double[num_blocks(size)]),
        weights(new double[size + kWideLanes]),
        candidates(new Candidate[size]) {}

  std::unique_ptr<float[]> maxima;    // the largest logit of each block
  std::unique_ptr<double[]> sums;     // of each block's weights
  std::unique_ptr<double[]> weights;  // of each id; of a block that sums to 0, and behind the last, anything
  std::unique_ptr<Candidate[]> candidates;
};

// body(row, scratch) for all rows.
template <class Body>
void for_rows(Threads& threads, int64_t rows, int64_t size, const Body& body) {
  std::atomic<int64_t> next{0};
  threads.run(std::min<int64_t>(rows, threads.count()), [&](int64_t) {
    Scratch scratch(size);
    for (int64_t row; (row = next.fetch_add(1)) < rows;) body(row, scratch);
  });
}

// The logits of one row.
struct Row {
  const float* logits;
  int64_t size;

  int64_t blocks() const { return num_blocks(size); }
  int64_t first(int64_t block) const { return block * kBlock; }
  int64_t last(int64_t block) const { return std::min(size, (block + 1) * kBlock); }
};

// The largest of each block and of the row; NaN counts as nothing. `check` (0, or NaN for ever) meets every number.
float find_maxima(const Row& row, float* maxima, float* check) {
  float largest = -kInfinity;
  vf checks[4] = {};
  for (int64_t block = 0; block < row.blocks(); block++) {
    vf best[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
    const auto meet = [&](int chain, vf x) {
      best[chain] = max(x, best[chain]);
      checks[chain] = fma(x, vf{}, checks[chain]);
    };
    int64_t i = row.first(block);
    const int64_t last = row.last(block);
    for (; i + 4 * kLanes <= last; i += 4 * kLanes)
      for (int chain = 0; chain < 4; chain++) meet(chain, load(row.logits + i + chain * kLanes));
    for (; i + kLanes <= last; i += kLanes) meet(0, load(row.logits + i));
    maxima[block] = max(max(max(best[0], best[1]), max(best[2], best[3])));
    for (; i < last; i++) {
      maxima[block] = std::max(maxima[block], row.logits[i]);
      *check += row.logits[i] * 0.0f;
    }
    largest = std::max(largest, maxima[block]);
  }
  *check += sum((checks[0] + checks[1]) + (checks[2] + checks[3]));
  return largest;
}

// The first id with the row's largest logit; 0 where nothing is possible.
int64_t first_of(const Row& row, float largest, const float* maxima) {
  for (int64_t block = 0; block < row.blocks(); block++)
    if (maxima[block] == largest)
      for (int64_t id = row.first(block); id < row.last(block); id++)
        if (row.logits[id] == largest) return id;
  return 0;
}

double add_up(const double* x, int64_t count) {
  vd sums = {};
  int64_t i = 0;
  for (; i + kWideLanes <= count; i += kWideLanes) sums += load(x + i);
  double total = 0;
  for (int lane = 0; lane < kWideLanes; lane++) total += sums[lane];
  for (; i < count; i++) total += x[i];
  return total;
}

// weights[id] = weigh(logits, id) where `kept` has id, else 0, for a vector of logits from id on; each block's sum.
// Returns the row's.
template <class Weigh>
double weigh_kept(const Row& row, const Kept& kept, Scratch& scratch, const Weigh& weigh) {
  double total = 0;
  const auto weigh_range = [&](int64_t first, int64_t last, float least) {
    const auto weigh_or_0 = [&](vd logits, int64_t id) {
      return select(logits >= splat_wide(least), weigh(logits, id), vd{});
    };
    double* weights = scratch.weights.get();
    int64_t id = first;
    for (; id + kWideLanes <= last; id += kWideLanes)
      store(weights + id, weigh_or_0(load_wide(row.logits + id), id));
    for (; id < last; id++) {
      const vd of_one = weigh_or_0(splat_wide(row.logits[id]), id);
      weights[id] = of_one[0];
    }
  };
  for (int64_t block = 0; block < row.blocks(); block++) {
    scratch.sums[block] = 0;
    if (scratch.maxima[block] < kept.least) continue;
    const int64_t first = row.first(block), last = row.last(block);
    const int64_t split = std::clamp(kept.last_equal + 1, first, last);
    weigh_range(first, split, kept.least);
    weigh_range(split, last, std::nextafter(kept.least, kInfinity));
    scratch.sums[block] = add_up(scratch.weights.get() + first, last - first);
    total += scratch.sums[block];
  }
  return total;
}

// The logits [low, high) in which a threshold lies: what is at least `high` measures `above`, less than the bound.
struct Window {
  float low, high;
  double above;
};

// Some passes over the row, each with several pivots.
template <class Measure>
void narrow(const Row& row, double bound, const Scratch& scratch, const Measure& measure, Window& window) {
  constexpr int kPivots = 4, kPasses = 4;  // to a 625th
  for (int pass = 0; pass < kPasses; pass++) {
    const double low = window.low, high = std::min(window.high, std::numeric_limits<float>::max());
    float pivots[kPivots];
    for (int j = 0; j < kPivots; j++) pivots[j] = (float)(low + (high - low) * (j + 1) / (kPivots + 1));
    vd sums[kPivots] = {};
    const auto meet = [&](vd logits, vd measured) {
      for (int j = 0; j < kPivots; j++) sums[j] += select(logits >= splat_wide(pivots[j]), measured, vd{});
    };
    for (int64_t block = 0; block < row.blocks(); block++) {
      if (scratch.maxima[block] < window.low) continue;
      int64_t id = row.first(block);
      for (; id + kWideLanes <= row.last(block); id += kWideLanes)
        meet(load_wide(row.logits + id), measure(id));
      for (; id < row.last(block); id++) meet(splat_wide(row.logits[id]), vd{measure(id)[0]});
    }
    for (int j = kPivots - 1; j >= 0 && pivots[j] > window.low; j--) {
      double above = 0;
      for (int lane = 0; lane < kWideLanes; lane++) above += sums[j][lane];
      if (above >= bound) {
        window.low = pivots[j];
        break;
      }
      window.high = pivots[j];
      window.above = above;
    }
  }
}

// The ids in the window, in order; how many.
template <class Measure>
int64_t gather(const Row& row, const Window& window, const Measure& measure, Scratch& scratch) {
  int64_t n = 0;
  const auto meet = [&](int64_t id) {
    const float logit = row.logits[id];
    if (logit >= window.low && logit < window.high)
      scratch.candidates[n++] = Candidate{measure(id)[0], key_of(logit), (int32_t)id};
  };
  for (int64_t block = 0; block < row.blocks(); block++) {
    if (scratch.maxima[block] < window.low) continue;
    int64_t id = row.first(block);
    for (; id + kLanes <= row.last(block); id += kLanes) {
      const vf logits = load(row.logits + id);
      if (!any((logits >= splat(window.low)) & (logits < splat(window.high)))) continue;
      for (int lane = 0; lane < kLanes; lane++) meet(id + lane);
    }
    for (; id < row.last(block); id++) meet(id);
  }
  return n;
}

// Likeliest first, the ids before which the others' measures sum to less than `bound`; at least one. `low`: those that
// reach it measure no less than the bound. measure(id): the measures of a vector of ids from id on.
template <class Measure>
Kept select_likeliest(const Row& row, float largest, float low, double bound, const Measure& measure,
                      Scratch& scratch) {
  bound = std::max(bound, std::numeric_limits<double>::min());
  Window window{low, std::nextafter(largest, kInfinity), 0};
  if (low > -kInfinity) narrow(row, bound, scratch, measure, window);
  const int64_t n = gather(row, window, measure, scratch);
  if (n == 0) return Kept{low};
  return select_among(scratch.candidates.get(), n, window.above, bound);
}

Kept select_top_k(const Row& row, float largest, float low, int64_t k, Scratch& scratch) {
  return select_likeliest(row, largest, low, (double)k, [](int64_t) { return splat_wide(1.0); }, scratch);
}

// A logit that at least k reach, as the largest of k blocks do.
float floor_of_top_k(const float* maxima, int64_t blocks, int64_t k) {
  if (k > blocks) return -kInfinity;
  std::vector<float> largest(maxima, maxima + blocks);
  std::nth_element(largest.begin(), largest.begin() + (k - 1), largest.end(), std::greater<float>());
  return largest[k - 1];
}

float least_possible(const Row& row) {
  const vf none = splat(kInfinity);
  vf least = none;
  int64_t id = 0;
  for (; id + kLanes <= row.size; id += kLanes) {
    const vf logits = load(row.logits + id);
    least = min(select(logits > -none, logits, none), least);
  }
  float of_row = -max(-least);
  for (; id < row.size; id++)
    if (row.logits[id] > -kInfinity) of_row = std::min(of_row, row.logits[id]);
  return of_row;
}

// The weights of what top_k, top_p and min_p leave of a row, as `Ops.sample` has them; their sum.
double weigh(const Row& row, float largest, double temperature, int64_t top_k, double top_p, double min_p,
             Scratch& scratch) {
  Kept kept;
  if (top_k > 0 && top_k < row.size) {
    const float floor = floor_of_top_k(scratch.maxima.get(), row.blocks(), top_k);
    kept = select_top_k(row, largest, floor > -kInfinity ? floor : least_possible(row), top_k, scratch);
  }
  const vd shift = splat_wide(largest), inverse = splat_wide(1.0 / std::max(temperature, 1e-300));
  const double total = weigh_kept(row, kept, scratch, [&](vd x, int64_t) { return exp((x - shift) * inverse); });
  if (top_p >= 1 && min_p == 0) return total;
  const double* weights = scratch.weights.get();
  if (top_p < 1) {
    // All that weigh less than this are together less than 1 - top_p, so they are cut; half of it, for rounding.
    const double cut = 0.5 * (1 - top_p) * total / (double)row.size;
    const float floor = std::max(kept.least, (float)(largest + temperature * std::log(cut)));
    const auto measure = [=](int64_t id) { return load(weights + id); };
    kept = select_likeliest(row, largest, floor, top_p * total, measure, scratch);
  }
  return weigh_kept(row, kept, scratch, [=](vd, int64_t id) {
    const vd weight = load(weights + id);
    return select(weight >= splat_wide(min_p), weight, vd{});
  });
}

// The first id at which the sum of weights, in the order of ids, exceeds the target; the last that weighs something,
// should rounding let none.
int64_t find(const Row& row, double target, const Scratch& scratch) {
  double through = 0, before = 0;
  int64_t chosen_block = 0;
  for (int64_t block = 0; block < row.blocks() && through <= target; block++) {
    if (scratch.sums[block] == 0) continue;
    chosen_block = block;
    before = through;
    through += scratch.sums[block];
  }
  int64_t chosen = row.first(chosen_block);
  for (int64_t id = chosen; id < row.last(chosen_block) && before <= target; id++) {
    if (scratch.weights[id] == 0) continue;
    chosen = id;
    before += scratch.weights[id];
  }
  return chosen;
}

float log_sum_exp(const Row& row, float largest) {
  double total = 0;
  for (int64_t block = 0; block < row.blocks(); block++) {
    vf sums = {};
    int64_t id = row.first(block);
    for (; id + kLanes <= row.last(block); id += kLanes) sums += exp(load(row.logits + id) - splat(largest));
    total += sum(sums);
    for (; id < row.last(block); id++) total += std::exp(row.logits[id] - largest);
  }
  return (float)std::log(total);
}

// The k likeliest of a row, likeliest first, equals in the order of their ids.
void likeliest(const Row& row, float largest, int64_t k, Scratch& scratch, int64_t* ids) {
  const float floor = floor_of_top_k(scratch.maxima.get(), row.blocks(), k);
  const Kept kept = select_top_k(row, largest, floor, k, scratch);
  Candidate* candidates = scratch.candidates.get();
  Candidate* end = candidates + gather(row, {kept.least, kInfinity, 0}, [](int64_t) { return vd{}; }, scratch);
  end = std::remove_if(candidates, end, [&](const Candidate& c) {
    return c.key == key_of(kept.least) && c.id > kept.last_equal;
  });
  std::stable_sort(candidates, end, [](const Candidate& a, const Candidate& b) { return a.key > b.key; });
  for (int64_t i = 0; i < k; i++) ids[i] = candidates + i < end ? candidates[i].id : 0;
}

// The first word of Philox4x32-10 (Salmon et al., SC 2011), see philox.py.
uint32_t philox(uint64_t seed, uint64_t position, uint32_t choice, uint32_t purpose) {
  uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = choice, c3 = purpose;
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c0;
}

}  // namespace
}  // namespace motet

using namespace motet;

MOTET_API void motet_greedy(Threads* threads, const float* logits, int64_t rows, int64_t size, int64_t* ids,
                            uint8_t* finite) {
  for_rows(*threads, rows, size, [=](int64_t r, Scratch& scratch) {
    const Row row{logits + r * size, size};
    float check = 0;
    const float largest = find_maxima(row, scratch.maxima.get(), &check);
    ids[r] = first_of(row, largest, scratch.maxima.get());
    finite[r] = check == 0;
  });
}
MOTET_RECORDABLE(motet_greedy)

MOTET_API void motet_uniform(Threads*, const uint64_t* seeds, const uint64_t* positions, const uint64_t* choices,
                             int64_t purpose, int64_t count, double* numbers) {
  for (int64_t i = 0; i < count; i++)
    numbers[i] = (philox(seeds[i], positions[i], (uint32_t)choices[i], (uint32_t)purpose) >> 8) * 0x1p-24;
}
MOTET_RECORDABLE(motet_uniform)

MOTET_API void motet_sample(Threads* threads, const float* logits, int64_t rows, int64_t size,
                            const double* temperature, const int64_t* top_k, const float* top_p, const float* min_p,
                            const double* uniform, int64_t* ids) {
  for_rows(*threads, rows, size, [=](int64_t r, Scratch& scratch) {
    const Row row{logits + r * size, size};
    float check = 0;
    const float largest = find_maxima(row, scratch.maxima.get(), &check);
    ids[r] = first_of(row, largest, scratch.maxima.get());
    if (temperature[r] == 0 || std::isinf(largest)) return;
    const double total = weigh(row, largest, temperature[r], top_k[r], top_p[r], min_p[r], scratch);
    ids[r] = find(row, uniform[r] * total, scratch);
  });
}
MOTET_RECORDABLE(motet_sample)

MOTET_API void motet_logprobs(Threads* threads, const float* logits, int64_t rows, int64_t size,
                              const int64_t* chosen, int64_t k, float* of_chosen, int64_t* top_ids, float* top) {
  for_rows(*threads, rows, size, [=](int64_t r, Scratch& scratch) {
    const Row row{logits + r * size, size};
    float check = 0;
    const float largest = find_maxima(row, scratch.maxima.get(), &check);
    const float log_sum = log_sum_exp(row, largest);
    of_chosen[r] = row.logits[chosen[r]] - largest - log_sum;
    if (k == 0) return;
    likeliest(row, largest, k, scratch, top_ids + r * k);
    for (int64_t i = 0; i < k; i++) top[r * k + i] = row.logits[top_ids[r * k + i]] - largest - log_sum;
  });
}
MOTET_RECORDABLE(motet_logprobs)
