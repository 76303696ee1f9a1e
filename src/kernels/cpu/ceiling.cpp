// What this machine can do at most with the means that the ops have: these threads, these vectors. The benchmarks
// hold every op against it.
#include "abi.h"
#include "simd.h"

namespace motet {
namespace {

// Floats that a part reads: about what a part of a linear does.
constexpr int64_t kBlock = 1 << 15;

// Sums that do not wait for each other: more than a multiply-add takes cycles times the units that do it, and few
// enough for the registers.
constexpr int kChains = 12;

float sum_of(const float* x, int64_t count) {
  vf sums[8] = {};
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes)
    for (int v = 0; v < 8; v++) sums[v] += load(x + i + v * kLanes);
  vf total = {};
  for (const vf& each : sums) total += each;
  return sum(total);
}

float multiply_add(int64_t part, int64_t steps) {
  vf sums[kChains];
  for (int i = 0; i < kChains; i++) sums[i] = splat((float)(part + i));  // or the compiler makes one of them all
  const vf factor = splat(0.5f), term = splat(1.0f);
  for (int64_t step = 0; step < steps; step++)
    for (vf& each : sums) each = fma(each, factor, term);
  vf total = {};
  for (const vf& each : sums) total += each;
  return sum(total);
}

float pair_products(int64_t part, int64_t steps) {
  vf sums[kChains];
  for (int i = 0; i < kChains; i++) sums[i] = splat((float)(part + i));
  const vu zeros = (vu)splat_i((int32_t)(part >> 40));  // unknown to the compiler
  for (int64_t step = 0; step < steps; step++)
    for (vf& each : sums) each = dot2(each, bits(each), zeros);
  vf total = {};
  for (const vf& each : sums) total += each;
  return sum(total);
}

int32_t dot_products(int64_t part, int64_t steps) {
  vi sums[kChains];
  for (int i = 0; i < kChains; i++) sums[i] = splat_i((int32_t)part + i);
  const vi zeros = splat_i((int32_t)(part >> 40));  // unknown to the compiler
  for (int64_t step = 0; step < steps; step++)
    for (vi& each : sums) each = dot4(each, (vu)each, zeros);
  vi total = {};
  for (const vi& each : sums) total += each;
  return total[0];
}

}  // namespace
}  // namespace motet

using namespace motet;

// Reads `count` floats, whole blocks of 2^15, once: sums[i] of the i-th block.
MOTET_API void motet_ceiling_read(Threads* threads, const float* x, int64_t count, float* sums) {
  threads->run(count / kBlock, [&](int64_t part) { sums[part] = sum_of(x + part * kBlock, kBlock); });
}

// `steps` times 12 multiply-adds of whole vectors in each of `parts` parts, in registers alone. Writes to `sums`
// [parts], so that nobody leaves the work out, and the floating-point operations of all to `operations` [1].
MOTET_API void motet_ceiling_f32(Threads* threads, int64_t parts, int64_t steps, float* sums, int64_t* operations) {
  threads->run(parts, [&](int64_t part) { sums[part] = multiply_add(part, steps); });
  *operations = parts * steps * kChains * kLanes * 2;
}

// The same of pairs of bf16, two products added to each lane's float at once.
MOTET_API void motet_ceiling_bf16(Threads* threads, int64_t parts, int64_t steps, float* sums, int64_t* operations) {
  threads->run(parts, [&](int64_t part) { sums[part] = pair_products(part, steps); });
  *operations = parts * steps * kChains * kLanes * 2 * 2;
}

// The same of bytes, four products added to each lane's int32 at once.
MOTET_API void motet_ceiling_int8(Threads* threads, int64_t parts, int64_t steps, int32_t* sums, int64_t* operations) {
  threads->run(parts, [&](int64_t part) { sums[part] = dot_products(part, steps); });
  *operations = parts * steps * kChains * kLanes * 4 * 2;
}
