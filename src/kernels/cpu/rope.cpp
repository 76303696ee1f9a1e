// Rotary position embeddings (RoPE, arXiv 2104.09864), and the way of keys and values into the paged cache.
#include <cmath>

#include "abi.h"
#include "kv.h"

namespace motet {
namespace {

// x cos + swapped(x) sin, each product rounded: the halves layout as transformers computes it.
void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  float *a = x, *b = x + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vf first = load(a + i), second = load(b + i);
    store(a + i, first * load(cos + i) + second * load(sin + i));
    store(b + i, second * load(cos + half + i) + first * load(sin + half + i));
  }
  for (; i < half; i++) {
    const float first = a[i], second = b[i];
    a[i] = first * cos[i] + second * sin[i];
    b[i] = second * cos[half + i] + first * sin[half + i];
  }
}

// One token's key and value of one head. Lanes that belong to other tokens are not touched: another thread may be
// writing them.
template <class D>
void store_token(const KVShape& shape, D* tile, int64_t lane, const float* k, const float* v) {
  const int64_t width = shape.width();
  D* values = tile + shape.values_behind_keys();
  for (int64_t d = 0; d < shape.head_dim; d++) {
    assign(tile[place<D>(d, lane, kTile)], k[d]);
    assign(values[place<D>(lane, d, width)], v[d]);
  }
  for (int64_t d = shape.head_dim; d < width; d++) assign(values[place<D>(lane, d, width)], 0.0f);
}

template <class D>
struct RopeAndStore {
  float* qkv;
  const float *cos, *sin;
  int64_t turning;  // dimensions of each head that turn
  D* cache;
  const int64_t* slots;
  int64_t num_heads;
  KVShape shape;

  void token(int64_t t) const {
    const int64_t dim = shape.head_dim;
    float* heads = qkv + t * (num_heads + 2 * shape.num_heads) * dim;
    for (int64_t h = 0; h < num_heads + shape.num_heads; h++)
      rotate(heads + h * dim, cos + t * turning, sin + t * turning, turning / 2);
    if (slots[t] < 0) return;
    const int64_t block = slots[t] / shape.block_size, offset = slots[t] % shape.block_size;
    const float* k = heads + num_heads * dim;
    const float* v = k + shape.num_heads * dim;
    for (int64_t h = 0; h < shape.num_heads; h++)
      store_token(shape, cache + shape.keys(block, h, offset / kTile), offset % kTile, k + h * dim, v + h * dim);
  }
};

template <class D>
void rope_and_store(Threads& threads, const RopeAndStore<D>& op, int64_t rows) {
  // The tokens of a tile share cache lines: where there are many, leave them to one thread.
  const int64_t together = rows > 64 ? 16 : 4;
  threads.run((rows + together - 1) / together, [&](int64_t part) {
    for (int64_t t = part * together; t < (part + 1) * together && t < rows; t++) op.token(t);
  });
}

}  // namespace
}  // namespace motet

using namespace motet;

#define MOTET_ROPE(D, SUFFIX)                                                                                     \
  MOTET_API void motet_rope_and_store_kv_##SUFFIX(Threads* threads, float* qkv, int64_t rows, const float* cos,   \
                                                  const float* sin, int64_t turning, D* cache,                    \
                                                  const int64_t* slots, int64_t num_heads, int64_t num_kv_heads,  \
                                                  int64_t head_dim, int64_t block_size) {                         \
    const KVShape shape{num_kv_heads, head_dim, block_size};                                                      \
    rope_and_store(*threads, RopeAndStore<D>{qkv, cos, sin, turning, cache, slots, num_heads, shape}, rows);      \
  }                                                                                                              \
  MOTET_RECORDABLE(motet_rope_and_store_kv_##SUFFIX)

MOTET_ROPE(float, f32)
MOTET_ROPE(bf16, bf16)

// cos, sin [rows, 2 pairs]: of each pair's angle, for both its halves; sin's first half negated.
MOTET_API void motet_rope_cos_sin(Threads* threads, const int64_t* positions, int64_t rows, const float* frequencies,
                                  int64_t pairs, float magnitude, float* cos, float* sin) {
  constexpr int64_t kTogether = 4;
  threads->run((rows + kTogether - 1) / kTogether, [&](int64_t part) {
    for (int64_t t = part * kTogether; t < (part + 1) * kTogether && t < rows; t++)
      for (int64_t i = 0; i < pairs; i++) {
        const float angle = (float)positions[t] * frequencies[i];
        const float c = std::cos(angle) * magnitude, s = std::sin(angle) * magnitude;
        float* cos_row = cos + t * 2 * pairs;
        float* sin_row = sin + t * 2 * pairs;
        cos_row[i] = cos_row[pairs + i] = c;
        sin_row[i] = -s;
        sin_row[pairs + i] = s;
      }
  });
}
MOTET_RECORDABLE(motet_rope_cos_sin)

MOTET_API void motet_copy_kv_blocks(Threads* threads, char* cache, const int64_t* sources,
                                    const int64_t* destinations, int64_t count, int64_t block_bytes) {
  threads->run(count, [&](int64_t i) {
    std::memcpy(cache + destinations[i] * block_bytes, cache + sources[i] * block_bytes, block_bytes);
  });
}
