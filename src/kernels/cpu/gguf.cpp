// Weights that llama.cpp quantised, in our panels: each block's scale, minimum and codes are kept as they are.
//
// A row is blocks of 32 k: Q4_0 is w = scale · (code − 8), Q4_1 is w = scale · code + minimum, Q8_0 is w = scale · code.
// The first two become int4 in groups of 32, whose minimum for Q4_0 is −8 · scale; the last one int8 with a scale for
// each group. Or a row becomes floats.
#include "abi.h"
#include "layouts.h"

namespace motet {
namespace {

constexpr int64_t kBlock = 32;

// Four-bit codes: byte i holds that of k = i in its lower half, and of k = 16 + i in its upper one.
struct Q4_0 {
  half scale;
  uint8_t codes[kBlock / 2];
};
struct Q4_1 {
  half scale, minimum;
  uint8_t codes[kBlock / 2];
};
struct Q8_0 {
  half scale;
  int8_t codes[kBlock];
};
static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q8_0) == 34, "as they lie in the file");

MOTET_INLINE uint32_t quad(const void* bytes) { return (uint32_t)load_quad(bytes); }

// One column's 32 codes, to the four octets of its group.
void put_codes(const uint8_t* codes, uint8_t* to) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  const uint32_t a = quad(codes), b = quad(codes + 4), c = quad(codes + 8), d = quad(codes + 12);
  const uint32_t octets[] = {(a & kLow) | (b & kLow) << 4, (c & kLow) | (d & kLow) << 4,
                             (a >> 4 & kLow) | (b & ~kLow), (c >> 4 & kLow) | (d & ~kLow)};
  for (int i = 0; i < 4; i++) std::memcpy(to + i * kOctets, &octets[i], sizeof octets[i]);
}

half minimum_of(const Q4_1& block) { return block.minimum; }
half minimum_of(const Q4_0& block) {
  half lanes[kLanes] = {block.scale};
  store_half(lanes, load_half(lanes) * splat(-8.0f));
  return lanes[0];
}

// body(column's row of blocks, its place among all columns) for columns [first, first + columns), each by the thread
// that has its panel.
template <class Block, class Body>
void for_columns(Threads& threads, const Block* blocks, int64_t columns, int64_t groups, int64_t first,
                 const Body& body) {
  const int64_t first_panel = first / kPanel;
  threads.run(num_panels(first + columns) - first_panel, [&](int64_t i) {
    const int64_t begin = (first_panel + i) * kPanel;
    for (int64_t n = std::max(first, begin); n < std::min(first + columns, begin + kPanel); n++)
      body(blocks + (n - first) * groups, n);
  });
}

template <class Block>
void pack_int4(Threads& threads, const Block* blocks, int64_t columns, int64_t inner, int64_t first, uint8_t* packed) {
  const int64_t groups = inner / kBlock;
  for_columns(threads, blocks, columns, groups, first, [&](const Block* row, int64_t n) {
    const int64_t lane = n % kPanel;
    for (int64_t g = 0; g < groups; g++) {
      uint8_t* at = packed + (n / kPanel * groups + g) * Group{kBlock}.bytes();
      Group::scales(at)[lane] = row[g].scale;
      Group::minima(at)[lane] = minimum_of(row[g]);
      put_codes(row[g].codes, Group::codes(at) + lane * kQuad);
    }
  });
}

void pack_int8(Threads& threads, const Q8_0* blocks, int64_t columns, int64_t inner, int64_t first, uint8_t* packed,
               half* scales) {
  const int64_t groups = inner / kBlock;
  for_columns(threads, blocks, columns, groups, first, [&](const Q8_0* row, int64_t n) {
    for (int64_t g = 0; g < groups; g++) {
      scales[(n / kPanel * groups + g) * kPanel + n % kPanel] = row[g].scale;
      for (int64_t k = 0; k < kBlock; k += kQuad) {
        const uint32_t bytes = quad(row[g].codes + k) ^ 0x80808080u;
        std::memcpy(packed + place(n, g * kBlock + k, inner), &bytes, sizeof bytes);
      }
    }
  });
}

// A half, wherever it lies: no lane behind it is read.
float to_float_from(half x) {
  const half lanes[kLanes] = {x};
  return load_half(lanes)[0];
}

void expand(const Q4_0& block, float* to) {
  const float scale = to_float_from(block.scale);
  for (int i = 0; i < kBlock / 2; i++) {
    to[i] = scale * (float)((block.codes[i] & 15) - 8);
    to[kBlock / 2 + i] = scale * (float)((block.codes[i] >> 4) - 8);
  }
}

void expand(const Q4_1& block, float* to) {
  const float scale = to_float_from(block.scale), minimum = to_float_from(block.minimum);
  for (int i = 0; i < kBlock / 2; i++) {
    to[i] = scale * (float)(block.codes[i] & 15) + minimum;
    to[kBlock / 2 + i] = scale * (float)(block.codes[i] >> 4) + minimum;
  }
}

void expand(const Q8_0& block, float* to) {
  const float scale = to_float_from(block.scale);
  for (int i = 0; i < kBlock; i++) to[i] = scale * (float)block.codes[i];
}

template <class Block, class T>
void expand(Threads& threads, const Block* blocks, int64_t count, T* to) {
  for_row_runs(threads, count, kBlock, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      float values[kBlock];
      expand(blocks[i], values);
      for (int64_t j = 0; j < kBlock; j++) assign(to[i * kBlock + j], values[j]);
    }
  });
}

}  // namespace
}  // namespace motet

using namespace motet;

// Rows of blocks become the columns [first, first + columns) of a weight that holds more of them.
MOTET_API void motet_pack_q4_0(Threads* threads, const void* blocks, int64_t columns, int64_t inner, int64_t first,
                               uint8_t* packed) {
  pack_int4(*threads, (const Q4_0*)blocks, columns, inner, first, packed);
}

MOTET_API void motet_pack_q4_1(Threads* threads, const void* blocks, int64_t columns, int64_t inner, int64_t first,
                               uint8_t* packed) {
  pack_int4(*threads, (const Q4_1*)blocks, columns, inner, first, packed);
}

MOTET_API void motet_pack_q8_0(Threads* threads, const void* blocks, int64_t columns, int64_t inner, int64_t first,
                               uint8_t* packed, half* scales) {
  pack_int8(*threads, (const Q8_0*)blocks, columns, inner, first, packed, scales);
}

// Blocks become floats, in their order.
#define MOTET_EXPAND(BLOCK, NAME, T, SUFFIX)                                                                     \
  MOTET_API void motet_expand_##NAME##_##SUFFIX(Threads* threads, const void* blocks, int64_t count, T* to) {    \
    expand(*threads, (const BLOCK*)blocks, count, to);                                                           \
  }

MOTET_EXPAND(Q4_0, q4_0, float, f32)
MOTET_EXPAND(Q4_0, q4_0, bf16, bf16)
MOTET_EXPAND(Q4_1, q4_1, float, f32)
MOTET_EXPAND(Q4_1, q4_1, bf16, bf16)
MOTET_EXPAND(Q8_0, q8_0, float, f32)
MOTET_EXPAND(Q8_0, q8_0, bf16, bf16)
