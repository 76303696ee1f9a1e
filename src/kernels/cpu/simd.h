// Vectors of floats, as wide as the registers of the instruction set that this file is compiled for.
//
// All arithmetic of the library goes through these few names. `+ - * /` and comparisons are the compiler's own vector
// extensions; what those lack is here, once for each instruction set. No product is fused with a sum behind
// our back (-ffp-contract=off): the same numbers in the same order give the same bits wherever an op meets them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace motet {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef int16_t vs __attribute__((vector_size(kLanes * 4)));

using bf16 = uint16_t;  // the upper half of a float

#define MOTET_INLINE inline __attribute__((always_inline))

MOTET_INLINE vf splat(float x) { return x - vf{}; }
MOTET_INLINE vi splat_i(int32_t x) { return x - vi{}; }
// 0, 1, 2 ...
MOTET_INLINE vi lane_numbers() {
  vi x;
  for (int i = 0; i < kLanes; i++) x[i] = i;
  return x;
}
MOTET_INLINE vu bits(vf x) { return (vu)x; }
MOTET_INLINE vf from_bits(vu x) { return (vf)x; }

MOTET_INLINE vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
MOTET_INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

// The first n < kLanes numbers; the rest is 0, and not read.
MOTET_INLINE vf load_first(const float* p, int n) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  vf x = {};
  std::memcpy(&x, p, n * sizeof(float));
  return x;
#endif
}
MOTET_INLINE void store_first(float* p, vf x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#else
  std::memcpy(p, &x, n * sizeof(float));
#endif
}

// a * b + c, rounded once where the hardware can.
MOTET_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Each lane of `a` and `b` as two signed numbers of 16 bits: the sum of the two products.
MOTET_INLINE vi dot2(vs a, vs b) {
#if defined(__AVX512F__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((vi)a >> 16) * ((vi)b >> 16) + ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16);
#endif
}

// sums + each lane of `a` as four unsigned bytes times that of `b` as four signed ones. Exact: no step saturates, so
// every build gives the same integers.
MOTET_INLINE vi dot4(vi sums, vu a, vi b) {
#if defined(__AVX512VNNI__)
  // Not the intrinsic: GCC 12 spills around it what would fit the registers.
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
  return sums;
#else
  const vi even = dot2((vs)(a & 0x00ff00ffu), (vs)b << 8 >> 8);
  const vi odd = dot2((vs)(a >> 8 & 0x00ff00ffu), (vs)b >> 8);
  return sums + even + odd;
#endif
}

MOTET_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
MOTET_INLINE vi to_int(vf x) { return __builtin_convertvector(x, vi); }

MOTET_INLINE vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

// Whether a comparison holds in some lane.
MOTET_INLINE bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  typedef int64_t pairs __attribute__((vector_size(kLanes * 4)));
  int64_t found = 0;
  for (int i = 0; i < kLanes / 2; i++) found |= ((pairs)mask)[i];
  return found != 0;
#endif
}

MOTET_INLINE vf max(vf a, vf b) { return a > b ? a : b; }
MOTET_INLINE vi max(vi a, vi b) { return a > b ? a : b; }
MOTET_INLINE vf min(vf a, vf b) { return a < b ? a : b; }

// Sums and maxima of all lanes, vf or vi, always in the same order.
template <int Width, class V>
MOTET_INLINE V lanes_from(V x) {  // x[i + Width] in lane i
  vi from;
  for (int i = 0; i < kLanes; i++) from[i] = (i + Width) % kLanes;
  return __builtin_shuffle(x, from);
}
template <class V>
MOTET_INLINE auto sum(V x) {
  if constexpr (kLanes > 8) x = x + lanes_from<8>(x);
  if constexpr (kLanes > 4) x = x + lanes_from<4>(x);
  x = x + lanes_from<2>(x);
  return decltype(x[0] + 0)((x + lanes_from<1>(x))[0]);
}
template <class V>
MOTET_INLINE auto max(V x) {
  if constexpr (kLanes > 8) x = max(x, lanes_from<8>(x));
  if constexpr (kLanes > 4) x = max(x, lanes_from<4>(x));
  x = max(x, lanes_from<2>(x));
  return decltype(x[0] + 0)(max(x, lanes_from<1>(x))[0]);
}

// Lane j of square[i] and lane i of square[j] change places: shuffled as cards are, each round moves a bit of the row's
// number behind those of the lane's.
MOTET_INLINE void transpose(vu (&square)[kLanes]) {
  vi low, high;
  for (int i = 0; i < kLanes; i++) {
    low[i] = i / 2 + i % 2 * kLanes;
    high[i] = low[i] + kLanes / 2;
  }
  for (int round = 1; round < kLanes; round *= 2) {
    vu shuffled[kLanes];
    for (int i = 0; i < kLanes / 2; i++) {
      shuffled[2 * i] = __builtin_shuffle(square[i], square[i + kLanes / 2], low);
      shuffled[2 * i + 1] = __builtin_shuffle(square[i], square[i + kLanes / 2], high);
    }
    std::memcpy(square, shuffled, sizeof shuffled);
  }
}

// Rounds to the nearest whole number, halves to even. |x| < 2^22.
MOTET_INLINE vf round_even(vf x) {
  const vf shift = splat(12582912.0f);  // 1.5 * 2^23
  return (x + shift) - shift;
}

// e^x within 2 units in the last place; 0 below -87.3, as for -inf; x above 88 is taken as 88. NaN stays NaN.
MOTET_INLINE vf exp(vf x) {
  const vi vanishes = x < splat(-87.3f);
  x = min(splat(88.0f), x);
  x = select(vanishes, splat(0.0f), x);
  const vf n = round_even(x * splat(1.44269504f));
  vf r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const vi exponent = __builtin_convertvector(n, vi);
  const vf scaled = (vf)((vi)p + (exponent << 23));
  return select(vanishes, splat(0.0f), scaled);
}

// Within 2 units in the last place: a polynomial (Cephes' tanhf) where 1 - 2 / (e^2x + 1) would lose what is small.
MOTET_INLINE vf tanh(vf x) {
  const vf magnitude = from_bits(bits(x) & 0x7fffffffu);
  const vf square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  p = fma(p * square, x, x);
  const vf far = splat(1.0f) - splat(2.0f) / (exp(magnitude + magnitude) + splat(1.0f));
  const vf far_signed = from_bits(bits(far) | (bits(x) & 0x80000000u));
  return select(magnitude < splat(0.625f), p, far_signed);
}

// kLanes bf16 numbers -> floats.
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));
MOTET_INLINE vf widen(vh x) {
  // Not __builtin_convertvector alone: GCC 12 does it in halves, with four more shuffles.
#if defined(__AVX512F__)
  return from_bits((vu)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x) << 16);
#elif defined(__AVX2__)
  return from_bits((vu)_mm256_cvtepu16_epi32((__m128i)x) << 16);
#else
  return from_bits(__builtin_convertvector(x, vu) << 16);
#endif
}
MOTET_INLINE vf load(const bf16* p) {
  vh x;
  std::memcpy(&x, p, sizeof x);
  return widen(x);
}
MOTET_INLINE vf load_first(const bf16* p, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return widen((vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
#else
  vh x = {};
  std::memcpy(&x, p, n * sizeof(bf16));
  return widen(x);
#endif
}

// Pairs of bf16, one pair a lane -> the even or the odd ones as floats.
MOTET_INLINE vf even(vu pairs) { return from_bits(pairs << 16); }
MOTET_INLINE vf odd(vu pairs) { return from_bits(pairs & 0xffff0000u); }
MOTET_INLINE vu load_pairs(const bf16* p) {
  vu x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// kLanes floats, rounded to the nearest bf16, halves to even; NaN stays NaN.
MOTET_INLINE void store(bf16* p, vf x) {
  const vu rounded = (bits(x) + 0x7fffu + (bits(x) >> 16 & 1)) >> 16;
  const vu number = bits(select(x == x, from_bits(rounded), from_bits(bits(x) >> 16 | 0x40)));
  const vh narrow = __builtin_convertvector(number, vh);
  std::memcpy(p, &narrow, sizeof narrow);
}

#if !defined(__AVX512BF16__)
// 0 for what is too small to be a normal number.
MOTET_INLINE vf flush(vf x) {
  const vi normal = (vi)(bits(x) & 0x7f800000u) != 0;
  return from_bits(bits(x) & ((vu)normal | 0x80000000u));
}
#endif

// sums + each lane of `a` as two bf16 times that of `b`: VDPBF16PS, or what Intel's manual says that it computes, which
// is two multiply-adds, the odd pair's first, each rounded to nearest, halves to even, with 0 in place of subnormal
// numbers on their way in and out. (A product of two bf16 has no more digits than a float, so nothing but one beyond a
// float's range shows whether `fma` rounds it.)
MOTET_INLINE vf dot2(vf sums, vu a, vu b) {
#if defined(__AVX512BF16__)
  // Not the intrinsic: as in `dot4`.
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
  return sums;
#else
  sums = flush(fma(flush(odd(a)), flush(odd(b)), flush(sums)));
  return flush(fma(flush(even(a)), flush(even(b)), sums));
#endif
}

// Bytes, four a lane.
MOTET_INLINE vu load_quads(const uint8_t* p) {
  vu x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
MOTET_INLINE void store_quads(uint8_t* p, vu x) { std::memcpy(p, &x, sizeof x); }

// IEEE half precision: as scales of weights are stored.
using half = uint16_t;

MOTET_INLINE vf load_half(const half* p) {
  vh x;
  std::memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#else
  const vu wide = __builtin_convertvector(x, vu);
  const vf size = from_bits((wide & 0x7fff) << 13) * splat(0x1p112f);
  const vu infinite = (vu)(size >= splat(65536.0f)) & 0x7f800000;  // or NaN
  return from_bits(bits(size) | infinite | (wide & 0x8000) << 16);
#endif
}

// Rounded to nearest, halves to even; what is too large becomes the largest; NaN stays NaN.
MOTET_INLINE vf round_to_half(vf x) {
  const vu sign = bits(x) & 0x80000000u;
  const vf size = min(splat(65504.0f), from_bits(bits(x) ^ sign));
  const vf tiny = (size + splat(0.75f)) - splat(0.75f);  // a multiple of 2^-24, the smallest half
  const vf usual = from_bits((bits(size) + 0xfff + (bits(size) >> 13 & 1)) & ~0x1fffu);
  return from_bits(bits(select(size < splat(0x1p-14f), tiny, usual)) | sign);
}
// Of numbers that are halves.
MOTET_INLINE void store_half(half* p, vf x) {
  const vu sign = bits(x) >> 31 << 15;
  const vf size = from_bits(bits(x) & 0x7fffffff);
  const vi tiny = to_int(size * splat(0x1p24f));
  const vi usual = (vi)((bits(size) >> 13) - (112 << 10));
  const vf number = select(size < splat(0x1p-14f), (vf)tiny, (vf)usual);
  const vi magnitude = (vi)select(size == size, number, (vf)splat_i(0x7e00));
  const vh narrow = __builtin_convertvector((vu)magnitude | sign, vh);
  std::memcpy(p, &narrow, sizeof narrow);
}

MOTET_INLINE float to_float(float x) { return x; }
MOTET_INLINE float to_float(bf16 x) {
  const uint32_t wide = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &wide, sizeof y);
  return y;
}

// Rounded to nearest, halves to even; NaN stays NaN.
MOTET_INLINE bf16 to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40);
  return (bf16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
MOTET_INLINE void assign(float& to, float x) { to = x; }
MOTET_INLINE void assign(bf16& to, float x) { to = to_bf16(x); }

// Doubles, half as many to a register: for sums and shares over a vocabulary.
constexpr int kWideLanes = kLanes / 2;
typedef double vd __attribute__((vector_size(kLanes * 4)));
typedef int64_t vl __attribute__((vector_size(kLanes * 4)));

MOTET_INLINE vd splat_wide(double x) { return x - vd{}; }
MOTET_INLINE vd load_wide(const float* p) {
  typedef float half __attribute__((vector_size(kLanes * 2)));
  half x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vd);
}
MOTET_INLINE vd load(const double* p) {
  vd x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
MOTET_INLINE void store(double* p, vd x) { std::memcpy(p, &x, sizeof x); }

MOTET_INLINE vd fma(vd a, vd b, vd c) {
#if defined(__AVX512F__)
  return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__ARM_NEON)
  return (vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

MOTET_INLINE vd select(vl mask, vd yes, vd no) { return (vd)((mask & (vl)yes) | (~mask & (vl)no)); }

// e^x for x <= 700, with an error of 1e-14 of it; 0 below -700, for -inf and for NaN.
MOTET_INLINE vd exp(vd x) {
  const vl possible = x >= splat_wide(-700.0);
  x = select(possible, x, vd{});
  const vd shift = splat_wide(6755399441055744.0);  // 1.5 * 2^52: behind it the sum's low bits are a whole number
  const vd shifted = fma(x, splat_wide(1.4426950408889634), shift);
  const vd n = shifted - shift;
  vd r = fma(n, splat_wide(-6.93147180369123816490e-01), x);  // ln 2 in two parts
  r = fma(n, splat_wide(-1.90821492927058770002e-10), r);
  constexpr double kInverseFactorials[] = {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                           1.0 / 120,     1.0 / 24,     1.0 / 6,     0.5,        1.0, 1.0};
  vd p = splat_wide(1.0 / 39916800);
  for (double coefficient : kInverseFactorials) p = fma(p, r, splat_wide(coefficient));
  return select(possible, (vd)((vl)p + ((vl)shifted << 52)), vd{});
}

}  // namespace motet
