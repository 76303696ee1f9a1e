// What products with quantised weights share: numbers as bytes, x ≈ scale · q with q in [-127, 127] (activations in each
// step, int8 weights once), and the exact products of such bytes.
#pragma once

#include <algorithm>
#include <cmath>

#include "panels.h"
#include "threads.h"

namespace motet {

// As many quantised numbers as go into one lane of `dot4`.
constexpr int64_t kQuad = 4;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// kLanes numbers from p as floats; where there are fewer, 0 for the rest.
template <class X>
MOTET_INLINE vf load_some(const X* p, int64_t left) {
  if (left >= kLanes) return load(p);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < left; i++) lanes[i] = to_float(p[i]);
  return load((const float*)lanes);
}

// q[0..size) and, as 0, what follows up to a multiple of kQuad; returns their sum. `scale` is the largest |x| / 127, so
// nothing is cut off; NaN, of which all products are NaN, if any x is not finite.
template <class X>
int32_t quantise(const X* x, int64_t size, int8_t* q, float* scale) {
  vi largest = {};  // without their signs, floats are in the order of their bits, infinity and NaN last
  for (int64_t i = 0; i < size; i += kLanes)
    largest = max((vi)load_some(x + i, size - i) & 0x7fffffff, largest);
  const float most = from_bits((vu)splat_i(max(largest)))[0];
  if (!std::isfinite(most)) {
    *scale = __builtin_nanf("");
    std::memset(q, 0, round_up(size, kQuad));
    return 0;
  }
  *scale = most * (1.0f / 127.0f);
  // What is too small to be divided by counts as 0.
  const vf inverse = splat(most > 1e-30f ? 127.0f / most : 0.0f);
  vi total = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const vi rounded = to_int(round_even(load_some(x + i, size - i) * inverse));
    total += rounded;
    typedef int8_t vb __attribute__((vector_size(kLanes)));
    const vb bytes = __builtin_convertvector(rounded, vb);
    if (size - i >= kLanes)
      std::memcpy(q + i, &bytes, kLanes);
    else
      std::memcpy(q + i, &bytes, round_up(size - i, kQuad));
  }
  return sum(total);
}

// One lane of `dot4`.
MOTET_INLINE int32_t load_quad(const void* bytes) {
  int32_t quad;
  std::memcpy(&quad, bytes, sizeof quad);
  return quad;
}

// dots += the products of R rows of x (`stride` bytes apart) and a panel of unsigned bytes [depth/4][P][4].
template <int R>
MOTET_INLINE void multiply(vi (&dots)[R][kVectors], const int8_t* x, int64_t stride, const uint8_t* w,
                           int64_t depth) {
  for (int64_t k = 0; k < depth; k += kQuad, w += kPanel * kQuad) {
    vu weights[kVectors];
    for (int v = 0; v < kVectors; v++) weights[v] = load_quads(w + v * kLanes * kQuad);
    for (int r = 0; r < R; r++) {
      const vi quad = splat_i(load_quad(x + r * stride + k));
      for (int v = 0; v < kVectors; v++) dots[r][v] = dot4(dots[r][v], weights[v], quad);
    }
  }
}

// Rows whose sums within a group and over all groups, with the weights that they meet, fit the registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 1;
#endif

// Rows of activations, quantised in groups of `group` along k (the last one may be shorter) with a scale each.
struct QuantisedRows {
  int64_t rows, inner, group;
  int64_t groups = (inner + group - 1) / group;
  int64_t depth = round_up(inner, group);  // bytes of a row
  float* scale;                            // [rows][groups]
  int32_t factor;
  int32_t* sum;                            // [rows][groups]: of the group's bytes, times `factor`
  int8_t* q;                               // [rows][depth]

  // In memory of rows · (2 · groups + depth / 4) floats; `group` is a multiple of kQuad.
  QuantisedRows(int64_t rows, int64_t inner, int64_t group, float* scratch, int32_t factor = 1)
      : rows(rows), inner(inner), group(group), scale(scratch), factor(factor), sum((int32_t*)(scale + rows * groups)),
        q((int8_t*)(sum + rows * groups)) {}

  // Each row by itself, whatever its company.
  void fill(Threads& threads, const float* x) const {
    for_row_runs(threads, rows, inner, [&](int64_t row, int64_t last) {
      for (; row < last; row++)
        for (int64_t g = 0; g < groups; g++) fill_group(x + row * inner, row, g);
    });
  }

 private:
  void fill_group(const float* x, int64_t row, int64_t g) const {
    const int64_t begin = g * group, size = std::min(group, inner - begin);
    int8_t* to = q + row * depth + begin;
    sum[row * groups + g] = factor * quantise(x + begin, size, to, scale + row * groups + g);
    const int64_t written = round_up(size, kQuad);
    std::memset(to + written, 0, group - written);
  }
};

}  // namespace motet
