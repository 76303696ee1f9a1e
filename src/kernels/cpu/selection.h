// Selection by radix: of candidates for a token, the likeliest that together reach a bound.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace motet {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Candidate {
  double weight;
  uint32_t key;  // orders as the logits do
  int32_t id;
};

// Bits that order as the numbers do, -0 as 0.
inline uint32_t key_of(float x) {
  uint32_t u;
  x += 0.0f;
  std::memcpy(&u, &x, sizeof u);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
inline float number_of(uint32_t key) {
  const uint32_t u = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

// What a filter keeps: the ids with a logit above `least`, and those up to `last_equal` where it equals.
struct Kept {
  float least = -kInfinity;
  int64_t last_equal = std::numeric_limits<int64_t>::max() - 1;
};

// Of n > 0 candidates, likeliest first, those before which the others' weights, and `before`, sum to less than `bound`;
// at least one. By radix: digit by digit from the highest. Leaves others of the candidates, or none.
inline Kept select_among(Candidate* candidates, int64_t n, double before, double bound) {
  constexpr int kBins = 2048;
  uint32_t differing = 0;
  for (int64_t i = 0; i < n; i++) differing |= candidates[i].key ^ candidates[0].key;
  for (int shift : {21, 10, 0}) {  // the last digit shares its first bit with the second
    if ((differing >> shift & (kBins - 1)) == 0) continue;
    const auto digit_of = [=](const Candidate& c) { return (int)(c.key >> shift & (kBins - 1)); };
    double bins[kBins] = {};
    int lowest = kBins - 1;
    for (int64_t i = 0; i < n; i++) {
      bins[digit_of(candidates[i])] += candidates[i].weight;
      lowest = std::min(lowest, digit_of(candidates[i]));
    }
    int digit = kBins - 1;
    while (digit > lowest && before + bins[digit] < bound) before += bins[digit--];
    n = std::remove_if(candidates, candidates + n, [&](const Candidate& c) { return digit_of(c) != digit; }) -
        candidates;
  }
  int64_t equals = 1;
  while (equals < n && before + (double)equals * candidates[0].weight < bound) equals++;
  return Kept{number_of(candidates[0].key), candidates[equals - 1].id};
}

}  // namespace motet
