// Gradient of || P P^T - I ||_F of a factor P (r, n), in FP32. Sums are made in a fixed order: no atomics.
#include "common.cuh"

/// gram (rank, rank) = P P^T - I, with p (rank, len), or (len, rank) where it is transposed.
/// Grid: (rank, rank) blocks of 128.
extern "C" __global__ void orthogonality_products(const float *p, float *gram, int rank, int len, int transposed) {
  int i = blockIdx.x, j = blockIdx.y, step = transposed ? rank : 1;
  const float *x = transposed ? p + i : p + i64(i) * len, *y = transposed ? p + j : p + i64(j) * len;
  double sum = 0;
  for (int k = threadIdx.x; k < len; k += blockDim.x) sum += double(x[i64(k) * step]) * double(y[i64(k) * step]);
  sum = block_sum(sum);
  if (threadIdx.x == 0) gram[i * rank + j] = float(sum - (i == j ? 1. : 0.));
}
LAUNCHER(orthogonality_products)

/// to += 2 weight / norm gram P, in the layout of p, where norm is that of gram; nothing where it is 0.
/// Grid: ceil(rank len / 1024) blocks of 256.
extern "C" __global__ void orthogonality_backward(const float *p, const float *gram, float weight, float *to, int rank,
                                                  int len, int transposed) {
  SHARED(float[1], scale);
  double squares = 0;
  for (int at = threadIdx.x; at < rank * rank; at += blockDim.x) squares += double(gram[at]) * double(gram[at]);
  squares = block_sum(squares);
  if (threadIdx.x == 0) scale[0] = squares > 0 ? float(2. * double(weight) / sqrt(squares)) : 0.f;
  __syncthreads();
  i64 count = i64(rank) * len, first = i64(blockIdx.x) * 1024;
  for (i64 at = first + threadIdx.x; at < min(first + 1024, count); at += blockDim.x) {
    int i = transposed ? at % rank : at / len;
    i64 k = transposed ? at / rank : at % len;
    float sum = 0;
    for (int j = 0; j < rank; j++) sum += gram[i * rank + j] * (transposed ? p[k * rank + j] : p[i64(j) * len + k]);
    to[at] += scale[0] * sum;
  }
}
LAUNCHER(orthogonality_backward)
