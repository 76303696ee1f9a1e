// What a forward pass does number by number and row by row: norms, activations, the residual stream. Rows are
// contiguous float32.
//
// These ops move little memory and wait for it; what counts is that a few rows run as one part, on the calling thread,
// and meet no barrier.
#include <algorithm>
#include <cmath>

#include "abi.h"
#include "simd.h"

namespace motet {
namespace {

// As `kLightPart`, of numbers that are put through an exponential.
constexpr int64_t kHeavyPart = 4096;

// to(i) = f(i) for the places [0, count), a vector at a time: f(i, n) gives the vector of the places [i, i + n).
template <class F>
MOTET_INLINE void map(float* to, int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, f(i, kLanes));
  if (i < count) store_first(to + i, f(i, (int)(count - i)), (int)(count - i));
}

MOTET_INLINE vf load_up_to(const float* p, int n) { return n == kLanes ? load(p) : load_first(p, n); }

// The numbers of `to` are independent of one another: cut into parts anywhere.
template <class F>
void map_flat(Threads& threads, float* to, int64_t count, const F& f) {
  threads.run((count + kLightPart - 1) / kLightPart, [&](int64_t part) {
    const int64_t first = part * kLightPart;
    map(to + first, std::min(kLightPart, count - first), [&](int64_t i, int n) { return f(first + i, n); });
  });
}

float sum_of_squares(const float* x, int64_t size) {
  constexpr int kChains = 4;  // sums on the way at once, as each addition takes several cycles
  vf sums[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes)
    for (int c = 0; c < kChains; c++) {
      const vf v = load(x + i + c * kLanes);
      sums[c] = fma(v, v, sums[c]);
    }
  for (; i < size; i += kLanes) {
    const vf v = load_up_to(x + i, (int)std::min<int64_t>(kLanes, size - i));
    sums[0] = fma(v, v, sums[0]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467). y may be x.
void norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
  const vf scale = splat(1.0f / std::sqrt(sum_of_squares(x, size) / (float)size + eps));
  map(y, size, [&](int64_t i, int n) { return load_up_to(x + i, n) * scale * load_up_to(weight + i, n); });
}

void add(const float* x, float* residual, int64_t size) {
  map(residual, size, [&](int64_t i, int n) { return load_up_to(residual + i, n) + load_up_to(x + i, n); });
}

vf silu(vf x) { return x / (splat(1.0f) + exp(-x)); }

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x^3) (arXiv 1606.08415), which is x * sigmoid(2u).
vf gelu_tanh(vf x) {
  const vf u = x * fma(x * x, splat(0.0356774081f), splat(0.797884561f));
  return x / (splat(1.0f) + exp(splat(-2.0f) * u));
}

// y = activation(x[:, :size]) * x[:, size:] of rows x [rows, 2 size].
template <class Activation>
void gate(Threads& threads, const float* x, int64_t rows, int64_t size, float* y, const Activation& activation) {
  const int64_t count = rows * size;
  threads.run((count + kHeavyPart - 1) / kHeavyPart, [&](int64_t part) {
    const int64_t last = std::min(count, (part + 1) * kHeavyPart);
    for (int64_t first = part * kHeavyPart, row = first / size; first < last; row++) {
      const int64_t end = std::min(last, (row + 1) * size);
      const float* gated = x + first + row * size;
      map(y + first, end - first, [&](int64_t i, int n) {
        return activation(load_up_to(gated + i, n)) * load_up_to(gated + size + i, n);
      });
      first = end;
    }
  });
}

}  // namespace
}  // namespace motet

using namespace motet;

MOTET_API void motet_rms_norm(Threads* threads, const float* x, const float* weight, int64_t rows, int64_t size,
                              float eps, float* y) {
  for_row_runs(*threads, rows, size, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) norm(x + row * size, weight, size, eps, y + row * size);
  });
}
MOTET_RECORDABLE(motet_rms_norm)

MOTET_API void motet_add_rms_norm(Threads* threads, const float* x, float* residual, const float* weight,
                                  int64_t rows, int64_t size, float eps, float* y) {
  for_row_runs(*threads, rows, size, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      add(x + row * size, residual + row * size, size);
      norm(residual + row * size, weight, size, eps, y + row * size);
    }
  });
}
MOTET_RECORDABLE(motet_add_rms_norm)

// In place, of each run of `size` numbers in the columns [first, last) of x [rows, stride].
MOTET_API void motet_rms_norm_heads(Threads* threads, float* x, int64_t rows, int64_t stride, int64_t first,
                                    int64_t last, const float* weight, int64_t size, float eps) {
  for_row_runs(*threads, rows, last - first, [=](int64_t row, int64_t end) {
    for (; row < end; row++)
      for (float* head = x + row * stride + first; head < x + row * stride + last; head += size)
        norm(head, weight, size, eps, head);
  });
}
MOTET_RECORDABLE(motet_rms_norm_heads)

MOTET_API void motet_silu_and_mul(Threads* threads, const float* x, int64_t rows, int64_t size, float* y) {
  gate(*threads, x, rows, size, y, silu);
}
MOTET_RECORDABLE(motet_silu_and_mul)

MOTET_API void motet_gelu_tanh_and_mul(Threads* threads, const float* x, int64_t rows, int64_t size, float* y) {
  gate(*threads, x, rows, size, y, gelu_tanh);
}
MOTET_RECORDABLE(motet_gelu_tanh_and_mul)

MOTET_API void motet_zero(Threads* threads, float* y, int64_t count) {
  map_flat(*threads, y, count, [](int64_t, int) { return vf{}; });
}
MOTET_RECORDABLE(motet_zero)

MOTET_API void motet_scale(Threads* threads, float* x, int64_t count, float by) {
  map_flat(*threads, x, count, [=](int64_t i, int n) { return load_up_to(x + i, n) * splat(by); });
}
MOTET_RECORDABLE(motet_scale)

MOTET_API void motet_add_residual(Threads* threads, const float* x, float* residual, int64_t count) {
  map_flat(*threads, residual, count,
           [=](int64_t i, int n) { return load_up_to(residual + i, n) + load_up_to(x + i, n); });
}
MOTET_RECORDABLE(motet_add_residual)

MOTET_API void motet_take_rows(Threads* threads, const float* x, int64_t size, const int64_t* rows, int64_t count,
                               float* y) {
  for_row_runs(*threads, count, size, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) std::memcpy(y + i * size, x + rows[i] * size, size * sizeof(float));
  });
}
MOTET_RECORDABLE(motet_take_rows)

MOTET_API void motet_fill_sampled(Threads*, int64_t* ids, const int64_t* sampled, const int64_t* source,
                                  int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (source[i] >= 0) ids[i] = sampled[source[i]];
}
MOTET_RECORDABLE(motet_fill_sampled)

// cap * tanh(x / cap), in place (arXiv 2408.00118).
MOTET_API void motet_softcap(Threads* threads, float* x, int64_t count, float cap) {
  map_flat(*threads, x, count,
           [=](int64_t i, int n) { return tanh(load_up_to(x + i, n) / splat(cap)) * splat(cap); });
}
MOTET_RECORDABLE(motet_softcap)
