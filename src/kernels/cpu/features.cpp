// Which of the builds this processor runs. Called in the portable build, which runs anywhere.
#include "abi.h"

// Bits: 1 AVX2 with FMA, 2 AVX-512 (F, BW, DQ, VL), 4 AVX-512 VNNI beside it.
MOTET_API int motet_cpu_features() {
  int features = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) features |= 1;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    features |= 2;
  if ((features & 2) && __builtin_cpu_supports("avx512vnni")) features |= 4;
#endif
  return features;
}
