// Where the numbers of quantised weights lie within their panels.
#pragma once

#include "quantise.h"

namespace motet {

// int4: panels [N/P][K/group] of such groups, each the P scales and P minima in half precision, then codes
// [group/8][P][4]: four k in the lower halves of the bytes, the next four in the upper ones.
struct Group {
  int64_t size;  // k

  int64_t bytes() const { return 2 * kPanel * sizeof(half) + kPanel * size / 2; }
  static half* scales(uint8_t* at) { return (half*)at; }
  static half* minima(uint8_t* at) { return (half*)at + kPanel; }
  static uint8_t* codes(uint8_t* at) { return at + 2 * kPanel * sizeof(half); }
  static const half* scales(const uint8_t* at) { return (const half*)at; }
  static const half* minima(const uint8_t* at) { return (const half*)at + kPanel; }
  static const uint8_t* codes(const uint8_t* at) { return at + 2 * kPanel * sizeof(half); }
};

constexpr int64_t kOctets = kPanel * kQuad;  // bytes of eight k of a panel

// int8: panels [N/P][K/4][P][4] of codes + 128, since the hardware multiplies unsigned by signed bytes. Their scales lie
// apart: [N] floats, one for each column; or [N/P][K/group][P] halves, one for each column's group of k.
constexpr int32_t kZero = 128;  // the byte that stands for a weight of 0

inline int64_t place(int64_t column, int64_t k, int64_t depth) {
  return (column / kPanel * depth + k / kQuad * kQuad) * kPanel + column % kPanel * kQuad + k % kQuad;
}

}  // namespace motet
