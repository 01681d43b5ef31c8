// Token plus position embedding. Grid: a block for each row.
#include "common.cuh"

/// x (n, c) = wte[ids (n)] + wpe[positions (n)].
template <class T>
__device__ void embed(const unsigned *ids, const unsigned *positions, const Weight<T> *wte, const half_t *wpe, T *x,
                      int c) {
  i64 row = blockIdx.x;
  const Weight<T> *token = wte + i64(ids[row]) * c;
  const half_t *position = wpe + i64(positions[row]) * c;
  for (int at = threadIdx.x * WIDE; at < c; at += blockDim.x * WIDE) {
    float sum[WIDE], other[WIDE];
    load(token + at, c - at, sum);
    load(position + at, c - at, other);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum[i] += other[i];
    store(sum, c - at, x + row * c + at);
  }
}
EXPORT(embed,
       (const unsigned *ids, const unsigned *positions, const Weight<T> *wte, const half_t *wpe, T *x, int c),
       (ids, positions, wte, wpe, x, c))
