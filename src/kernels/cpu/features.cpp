// Which of the builds this processor runs. Called in the portable build, which runs anywhere.
#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {
#if defined(__x86_64__)

// XCR0: the registers that the operating system keeps for a thread that it puts aside. Without its word, none.
uint32_t kept_registers() {
  uint32_t a, b, c = 0, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return a;
}

bool has_avx512_bf16() {
  uint32_t a = 0, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);  // newer than some compilers: no name for it
}

#endif
}  // namespace

// Bits: 1 AVX2 with FMA, 2 AVX-512 (F, BW, DQ, VL), 4 AVX-512 VNNI beside it, 8 AVX-512 BF16 beside it.
MOTET_API int motet_cpu_features() {
  int features = 0;
#if defined(__x86_64__)
  constexpr uint32_t kYmm = 0x06, kZmm = 0xe6;
  const uint32_t kept = kept_registers();
  __builtin_cpu_init();
  if ((kept & kYmm) == kYmm && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) features |= 1;
  if ((kept & kZmm) == kZmm && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    features |= 2;
  if ((features & 2) && __builtin_cpu_supports("avx512vnni")) features |= 4;
  if ((features & 2) && has_avx512_bf16()) features |= 8;
#endif
  return features;
}
