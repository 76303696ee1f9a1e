// Products with weights of 4 bits: y = x · wᵀ (+ bias), x and y in float32 (W4A8).
//
// A group of k in a column has a scale and a minimum, w ≈ scale · code + minimum with codes from 0 to 15, and the same group
// of a row of x has a scale of its own (see linear_int8.cpp). With the bytes q of x a group's share is
// x_scale · (scale · Σ code · q + minimum · Σ q): the sums exact in 32 bits, groups in their order as floats.
#include "abi.h"
#include "layouts.h"

namespace motet {
namespace {

constexpr int kLevels = 15;
constexpr int64_t kLargestGroup = 64;

struct Product {
  QuantisedRows x;
  int64_t columns;
  const uint8_t* w;
  const float* bias;
  float* y;

  const uint8_t* weights(int64_t panel, int64_t g) const {
    return w + (panel * x.groups + g) * Group{x.group}.bytes();
  }
};

// As `multiply`, of codes as they are stored.
template <int R>
MOTET_INLINE void multiply_codes(vi (&dots)[R][kVectors], const int8_t* x, int64_t stride, const uint8_t* codes,
                                 int64_t depth) {
  vi upper[R][kVectors] = {};  // sums of their own: half as long a chain
  for (int64_t k = 0; k < depth; k += 2 * kQuad, codes += kOctets)
    for (int v = 0; v < kVectors; v++) {
      const vu octets = load_quads(codes + v * kLanes * kQuad);
      const vu first = octets & 0x0f0f0f0fu, second = octets >> 4 & 0x0f0f0f0fu;
      for (int r = 0; r < R; r++) {
        const int8_t* q = x + r * stride + k;
        dots[r][v] = dot4(dots[r][v], first, splat_i(load_quad(q)));
        upper[r][v] = dot4(upper[r][v], second, splat_i(load_quad(q + kQuad)));
      }
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) dots[r][v] += upper[r][v];
}

// Codes a byte each, [depth/4][P][4], so that unpacking costs once what many tiles then read.
void unpack_codes(const uint8_t* codes, int64_t depth, uint8_t* bytes) {
  for (int64_t k = 0; k < depth; k += 2 * kQuad, codes += kOctets, bytes += 2 * kOctets)
    for (int i = 0; i < kOctets; i += kLanes * kQuad) {
      const vu octets = load_quads(codes + i);
      store_quads(bytes + i, octets & 0x0f0f0f0fu);
      store_quads(bytes + kOctets + i, octets >> 4 & 0x0f0f0f0fu);
    }
}

// A group's share of rows [row, row + R), its dots at hand.
template <int R>
MOTET_INLINE void add_group(const QuantisedRows& x, int64_t row, int64_t g, const uint8_t* weights,
                            const vi (&dots)[R][kVectors], Sums<R>& sums) {
  for (int v = 0; v < kVectors; v++) {
    const vf scale = load_half(Group::scales(weights) + v * kLanes);
    const vf minimum = load_half(Group::minima(weights) + v * kLanes);
    for (int r = 0; r < R; r++) {
      const int64_t i = (row + r) * x.groups + g;
      const vf x_scale = splat(x.scale[i]), x_sum = x_scale * to_float(splat_i(x.sum[i]));
      const vf sum = fma(minimum, x_sum, sums.at[r][v]);
      sums.at[r][v] = fma(scale * x_scale, to_float(dots[r][v]), sum);
    }
  }
}

// A few rows of one panel, from its codes as they are stored.
template <int R>
void narrow_tile(const Product& p, int64_t row, int64_t panel, Ahead& ahead) {
  const QuantisedRows& x = p.x;
  Sums<R> sums;
  sums.clear();
  for (int64_t g = 0; g < x.groups; g++) {
    ahead.fetch();
    const uint8_t* weights = p.weights(panel, g);
    vi dots[R][kVectors] = {};
    multiply_codes<R>(dots, x.q + row * x.depth + g * x.group, x.depth, Group::codes(weights), x.group);
    add_group<R>(x, row, g, weights, dots, sums);
  }
  const int64_t column = panel * kPanel;
  sums.store_to(p.y + row * p.columns + column, p.columns, panel_width(p.columns, column),
                p.bias ? p.bias + column : nullptr);
}

// Groups [first, last) of rows [row, row + R) and one panel, whose codes are unpacked in `bytes`.
template <int R>
void tile(const Product& p, int64_t row, int64_t panel, int64_t first, int64_t last, const uint8_t* bytes,
          Ahead& ahead) {
  const QuantisedRows& x = p.x;
  const int64_t column = panel * kPanel;
  const int width = panel_width(p.columns, column);
  float* y = p.y + row * p.columns + column;
  Sums<R> sums;
  sums.load_from(first == 0 ? nullptr : y, p.columns, width);
  for (int64_t g = first; g < last; g++, bytes += kPanel * x.group) {
    ahead.fetch();
    vi dots[R][kVectors] = {};
    multiply<R>(dots, x.q + row * x.depth + g * x.group, x.depth, bytes, x.group);
    add_group<R>(x, row, g, p.weights(panel, g), dots, sums);
  }
  sums.store_to(y, p.columns, width, last == x.groups && p.bias ? p.bias + column : nullptr);
}

void wide_panel(const Product& p, Rows rows, int64_t panel, Ahead& ahead) {
  constexpr int64_t kDepth = 768;  // unpacked, they stay in the first-level cache
  alignas(64) uint8_t bytes[kDepth * kPanel];
  const int64_t group = p.x.group, step = equal_part(p.x.groups, kDepth / group);
  for (int64_t first = 0; first < p.x.groups; first += step) {
    const int64_t last = std::min(p.x.groups, first + step);
    for (int64_t g = first; g < last; g++)
      unpack_codes(Group::codes(p.weights(panel, g)), group, bytes + (g - first) * group * kPanel);
    for_tiles<kTileRows>(
        rows, [&](int64_t row, auto size) { tile<size>(p, row, panel, first, last, bytes, ahead); });
  }
}

void linear(Threads& threads, const float* x, const Product& p) {
  constexpr int kNarrow = kTileRows < 4 ? kTileRows : 4;
  if (p.x.rows == 0) return;
  p.x.fill(threads, x);
  const int64_t bytes = p.x.groups * Group{p.x.group}.bytes();
  for_panels(threads, p.x.rows, p.columns, [&](Rows rows, int64_t panel, int64_t next) {
    const bool wide = rows.count > kNarrow;
    Ahead ahead(p.weights(next, 0), bytes, p.x.groups * (wide ? num_tiles<kTileRows>(rows.count) : 1));
    if (wide) return wide_panel(p, rows, panel, ahead);
    for_size<kNarrow>((int)rows.count, rows.begin,
                      [&](int64_t row, auto size) { narrow_tile<size>(p, row, panel, ahead); });
  });
}

// kLanes columns of one group, [size] vectors, while their codes are sought.
struct Fit {
  const vf* w;
  int64_t size;
  vf scale = {}, minimum = {}, error = splat(__builtin_inff());

  static vf code(vf w, vf minimum, vf inverse) {
    return min(max(round_even((w - minimum) * inverse), vf{}), splat(kLevels));
  }
  static vf inverse(vf scale) { return select(scale > splat(1e-30f), splat(1.0f) / scale, vf{}); }

  // Keeps this scale and minimum, as halves, if their codes are nearer to the weights than what was best so far.
  void offer(vf new_scale, vf new_minimum) {
    new_scale = round_to_half(new_scale), new_minimum = round_to_half(new_minimum);
    const vf inverted = inverse(new_scale);
    vf new_error = {};
    for (int64_t k = 0; k < size; k++) {
      const vf off = code(w[k], new_minimum, inverted) * new_scale + new_minimum - w[k];
      new_error = new_error + off * off;
    }
    const vi better = new_error < error;
    scale = select(better, new_scale, scale);
    minimum = select(better, new_minimum, minimum);
    error = select(better, new_error, error);
  }

  // The line through the codes that this scale and minimum give, by least squares.
  void offer_line(vf from_scale, vf from_minimum) {
    const vf inverted = inverse(from_scale), n = splat((float)size);
    vf c = {}, cc = {}, cw = {}, ww = {};  // sums
    for (int64_t k = 0; k < size; k++) {
      const vf q = code(w[k], from_minimum, inverted);
      c = c + q, cc = cc + q * q, cw = cw + q * w[k], ww = ww + w[k];
    }
    const vf spread = n * cc - c * c;
    const vf slope = select(spread > splat(0.5f), (n * cw - c * ww) / spread, vf{});
    offer(slope, (ww - slope * c) / n);
  }
};

// The scale and minimum of each column whose codes come nearest to its weights, by the sum of squares: of the whole range
// cut into 15 steps, and of the least-squares lines through the codes of that and of somewhat wider and narrower ranges.
Fit fit(const vf* w, int64_t size) {
  vf low = w[0], high = w[0], poison = {};
  for (int64_t k = 0; k < size; k++) {
    low = min(w[k], low), high = max(w[k], high);
    poison = poison + w[k] * splat(0.0f);  // NaN if any is not finite
  }
  const vf range = high - low;
  Fit fit{w, size};
  fit.offer(range * splat(1.0f / kLevels), low);
  for (int i = -4; i <= 2; i++) {
    const float beyond = 0.5f * (float)i;  // levels; the ends are cut off, or left unused, alike
    const vf scale = range * splat(1.0f / (kLevels + beyond));
    fit.offer_line(scale, low + scale * splat(0.5f * beyond));
  }
  fit.minimum = fit.minimum + poison;
  return fit;
}

void pack_group(const float (*block)[kPanel], int64_t size, uint8_t* at) {
  std::memset(Group::codes(at), 0, kPanel * size / 2);
  for (int v = 0; v < kVectors; v++) {
    vf w[kLargestGroup] = {};
    for (int64_t k = 0; k < size; k++) w[k] = load(block[k] + v * kLanes);
    const Fit best = fit(w, size);
    store_half(Group::scales(at) + v * kLanes, best.scale);
    store_half(Group::minima(at) + v * kLanes, best.minimum);
    const vf inverse = Fit::inverse(best.scale);
    for (int64_t k = 0; k < size; k++) {
      uint8_t* octets = Group::codes(at) + k / (2 * kQuad) * kOctets + v * kLanes * kQuad;
      const vu code = (vu)to_int(Fit::code(w[k], best.minimum, inverse));
      store_quads(octets, load_quads(octets) | code << (int)(k % kQuad * 8 + k / kQuad % 2 * 4));
    }
  }
}

template <class W>
void pack(Threads& threads, const W* weight, int64_t columns, int64_t inner, int64_t group, uint8_t* packed) {
  const int64_t groups = (inner + group - 1) / group;
  threads.run(num_panels(columns), [&](int64_t panel) {
    const int64_t column = panel * kPanel;
    const int width = panel_width(columns, column);
    alignas(64) float block[kLargestGroup][kPanel];
    for (int64_t g = 0; g < groups; g++) {
      const int64_t begin = g * group, size = std::min(group, inner - begin);
      std::memset(block, 0, sizeof block);
      for (int n = 0; n < width; n++)
        for (int64_t k = 0; k < group; k++)  // behind the last k its weight again: it meets activations of 0
          block[k][n] = to_float(weight[(column + n) * inner + begin + std::min(k, size - 1)]);
      pack_group(block, group, packed + (panel * groups + g) * Group{group}.bytes());
    }
  });
}

// Weights [column, k) of one group into `out`.
template <class W>
void unpack_group(const uint8_t* at, int64_t lane, int64_t size, W* out) {
  float scale[kPanel], minimum[kPanel];
  for (int v = 0; v < kPanel; v += kLanes) {
    store(scale + v, load_half(Group::scales(at) + v));
    store(minimum + v, load_half(Group::minima(at) + v));
  }
  for (int64_t k = 0; k < size; k++) {
    const uint8_t octet = Group::codes(at)[k / (2 * kQuad) * kOctets + lane * kQuad + k % kQuad];
    assign(out[k], (float)(octet >> (k / kQuad % 2 * 4) & kLevels) * scale[lane] + minimum[lane]);
  }
}

template <class W>
void unpack_column(const uint8_t* packed, int64_t column, int64_t inner, int64_t group, W* out) {
  const int64_t groups = (inner + group - 1) / group;
  for (int64_t g = 0; g < groups; g++)
    unpack_group(packed + (column / kPanel * groups + g) * Group{group}.bytes(), column % kPanel,
                 std::min(group, inner - g * group), out + g * group);
}

}  // namespace
}  // namespace motet

using namespace motet;

// group: 32 or 64. scratch: see `QuantisedRows`.
MOTET_API void motet_linear_int4(Threads* threads, const float* x, int64_t rows, int64_t inner, int64_t columns,
                                 int64_t group, const uint8_t* w, const float* bias, float* scratch, float* y) {
  linear(*threads, x, Product{QuantisedRows(rows, inner, group, scratch), columns, w, bias, y});
}
MOTET_RECORDABLE(motet_linear_int4)

// The rows `ids` of the weight: a tied output head's weight is the embedding's table.
MOTET_API void motet_gather_int4(Threads* threads, const int64_t* ids, int64_t count, const uint8_t* packed,
                                 int64_t inner, int64_t group, float* out) {
  threads->run(count, [&](int64_t i) { unpack_column(packed, ids[i], inner, group, out + i * inner); });
}
MOTET_RECORDABLE(motet_gather_int4)

#define MOTET_INT4(W, SUFFIX)                                                                                      \
  MOTET_API void motet_pack_int4_##SUFFIX(Threads* threads, const W* weight, int64_t columns, int64_t inner,       \
                                          int64_t group, uint8_t* packed) {                                        \
    pack(*threads, weight, columns, inner, group, packed);                                                         \
  }                                                                                                                \
  MOTET_API void motet_unpack_int4_##SUFFIX(Threads* threads, const uint8_t* packed, int64_t columns,              \
                                            int64_t inner, int64_t group, W* weight) {                             \
    threads->run(columns, [&](int64_t n) { unpack_column(packed, n, inner, group, weight + n * inner); });         \
  }

MOTET_INT4(float, f32)
MOTET_INT4(bf16, bf16)
