// Uniform noise on embeddings, by the generator of the host.
#include "common.cuh"
#include "rng.cuh"

/// x (n, c) += magnitude * (2 u - 1) for tokens whose id is below vocab; elements are numbered by rows of the optimizer
/// step, of `stride` tokens each. Grid: n blocks.
template <class T>
__device__ void noise(const unsigned *ids, T *x, unsigned long long key, float magnitude, int first_row, int seq_len,
                      int stride, int vocab, int c) {
  i64 token = blockIdx.x;
  if (ids[token] >= unsigned(vocab)) return;
  i64 place = (first_row + token / seq_len) * stride + token % seq_len;
  for (int at = threadIdx.x * WIDE; at < c; at += blockDim.x * WIDE) {
    float sum[WIDE];
    load(x + token * c + at, c - at, sum);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum[i] += magnitude * (2.f * uniform(key, place * c + at + i) - 1.f);
    store(sum, c - at, x + token * c + at);
  }
}
EXPORT(noise,
       (const unsigned *ids, T *x, unsigned long long key, float magnitude, int first_row, int seq_len, int stride,
        int vocab, int c),
       (ids, x, key, magnitude, first_row, seq_len, stride, vocab, c))
