// Cross-entropy: the step of head and loss between the two products with the head.
#include "common.cuh"

/// Softmax statistics of part of a row: largest value, sum of exp(z - largest).
struct Statistics {
  float most, sum;

  /// The first `count` of z (8), at least one.
  __device__ void add(const float (&z)[WIDE], int count) {
    float larger = most;
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      if (i < count) larger = fmaxf(larger, z[i]);
    sum *= expf(most - larger), most = larger;
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      if (i < count) sum += expf(z[i] - most);
  }

  __device__ Statistics joined(Statistics other) const {
    float larger = fmaxf(most, other.most);
    if (larger == -INFINITY) return {larger, 0.f}; // both are empty
    return {larger, sum * expf(most - larger) + other.sum * expf(other.most - larger)};
  }
};

/// Joins the statistics of all threads, in a fixed order.
__device__ Statistics joined_over_block(Statistics own) {
  SHARED(Statistics[32], parts);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    Statistics other = {__shfl_xor_sync(~0u, own.most, step), __shfl_xor_sync(~0u, own.sum, step)};
    own = own.joined(other);
  }
  if (lane() == 0) parts[warp()] = own;
  __syncthreads();
  Statistics all = parts[0];
  for (int i = 1; i < int(blockDim.x / 32); i++) all = all.joined(parts[i]);
  return all;
}

/// The loss of a row whose logits have these statistics and this sum; writes it where it is not null, and returns the
/// logarithm of the sum of exponentials.
__device__ __forceinline__ float row_loss(Statistics own, float total, float at_target, float smoothing, int v,
                                          float *loss) {
  Statistics all = joined_over_block(own);
  float lse = all.most + logf(all.sum), mean = block_sum(total) / v;
  if (threadIdx.x == 0) *loss = (1.f - smoothing) * (lse - at_target) + smoothing * (lse - mean);
  return lse;
}

/// The gradient of 8 logits x of a row from column `at` on, in their place; 0 in columns after the vocabulary.
struct RowGradient {
  float lse, factor, smoothing;
  int target, v;

  __device__ __forceinline__ void apply(int at, float (&x)[WIDE]) const {
    float uniform = factor * smoothing / v;
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      x[i] = at + i < v ? factor * expf(x[i] - lse) - uniform : 0.f;
      if (at + i == target) x[i] -= factor * (1.f - smoothing);
    }
  }
};

/// Loss of one row of logits z (v), and its gradient dz where that is not null. Grid: a block of 512 for each row.
///
/// dz may share the bytes of z: all threads have read a chunk before any of it is written, and no write reaches past
/// the chunks that were read.
template <class T>
__device__ void cross_entropy(float *z, i64 ld, const int *targets, float smoothing, float factor, float *losses,
                              T *dz, i64 ld_dz, int v) {
  z += blockIdx.x * ld;
  int target = targets[blockIdx.x];
  float at_target = z[target], total = 0;
  Statistics own = {-INFINITY, 0.f};
  float x[WIDE];
  for (int at = threadIdx.x * WIDE; at < v; at += blockDim.x * WIDE) {
    load(z + at, v - at, x);
    own.add(x, v - at);
#pragma unroll
    for (int i = 0; i < WIDE; i++) total += x[i];
  }
  float lse = row_loss(own, total, at_target, smoothing, v, losses + blockIdx.x);
  if (!dz) return;

  dz += blockIdx.x * ld_dz;
  RowGradient gradient = {lse, factor, smoothing, target, v};
  int padded = min(ld, ld_dz);
  for (int first = 0; first < padded; first += blockDim.x * WIDE) {
    int at = first + threadIdx.x * WIDE;
    load(z + at, v - at, x);
    gradient.apply(at, x);
    __syncthreads(); // all have read
    store(x, padded - at, dz + at);
  }
}
EXPORT(cross_entropy,
       (float *z, i64 ld, const int *targets, float smoothing, float factor, float *losses, T *dz, i64 ld_dz, int v),
       (z, ld, targets, smoothing, factor, losses, dz, ld_dz, v))

/// The same with one read of z, which stays in shared memory until its gradient is made: 4 bytes for each of v columns,
/// rounded up to 8. Grid: a block of 1024 for each row. dz may share the bytes of z: all are read before any is written.
template <class T>
__device__ void cross_entropy_once(const float *z, i64 ld, const int *targets, float smoothing, float factor,
                                   float *losses, T *dz, i64 ld_dz, int v) {
  constexpr int LOADS = 2; // on their way at a time, of each thread
  DYNAMIC_SHARED(float, row);
  z += blockIdx.x * ld, dz += blockIdx.x * ld_dz;
  int target = targets[blockIdx.x], step = blockDim.x * WIDE;
  float at_target = z[target], total = 0;
  Statistics own = {-INFINITY, 0.f};
  for (int first = threadIdx.x * WIDE; first < v; first += LOADS * step) {
    float x[LOADS][WIDE];
#pragma unroll
    for (int i = 0; i < LOADS; i++) load(z + first + i * step, v - first - i * step, x[i]);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      int at = first + i * step;
      if (at >= v) break;
      own.add(x[i], v - at);
      store(x[i], WIDE, row + at); // zeros after the vocabulary
#pragma unroll
      for (int e = 0; e < WIDE; e++) total += x[i][e];
    }
  }
  float lse = row_loss(own, total, at_target, smoothing, v, losses + blockIdx.x);
  RowGradient gradient = {lse, factor, smoothing, target, v};
  int padded = min(ld, ld_dz);
  for (int at = threadIdx.x * WIDE; at < padded; at += step) { // what this thread wrote itself
    float x[WIDE];
    load(row + at, v - at, x);
    gradient.apply(at, x);
    store(x, padded - at, dz + at);
  }
}
#define ONCE(suffix, type)                                                                                       \
  EXPORT_AS(cross_entropy_once, suffix, type, __launch_bounds__(1024),                                           \
            (const float *z, i64 ld, const int *targets, float smoothing, float factor, float *losses, T *dz,    \
             i64 ld_dz, int v),                                                                                  \
            (z, ld, targets, smoothing, factor, losses, dz, ld_dz, v))
ONCE(f32, float)
ONCE(f16, half_t)
ONCE(bf16, bf16_t)
