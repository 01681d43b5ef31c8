// The largest logit of each row. The order of comparisons changes nothing: of two equal logits the lower id is taken.
#include "common.cuh"

/// A logit with its id; none yet where the id is below 0.
struct Choice {
  int id;
  float logit;

  /// Whether it comes before `other`: logits that are not finite first, by id; then by size, equal ones by id.
  __device__ __forceinline__ bool before(const Choice &other) const {
    if (id < 0 || other.id < 0) return other.id < 0;
    bool wrong = !(fabsf(logit) < INFINITY), other_wrong = !(fabsf(other.logit) < INFINITY);
    if (wrong != other_wrong) return wrong;
    if (wrong || logit == other.logit) return id < other.id;
    return logit > other.logit;
  }

  __device__ __forceinline__ void join(const Choice &other) {
    if (other.before(*this)) *this = other;
  }
};

/// The first of all choices of a warp, in lane 0.
__device__ __forceinline__ Choice first_of_warp(Choice own) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    own.join({__shfl_xor_sync(~0u, own.id, step), __shfl_xor_sync(~0u, own.logit, step)});
  return own;
}

/// to (rows, 2) = id and bits of the choice in each row of logits (rows, v). Grid: rows blocks of up to 1024 threads.
extern "C" __global__ void argmax(const float *logits, unsigned *to, int v) {
  SHARED(Choice[32], choices);
  logits += i64(blockIdx.x) * v;
  Choice own = {-1, 0.f};
#pragma unroll 4
  for (int id = threadIdx.x; id < v; id += blockDim.x) own.join({id, logits[id]});
  own = first_of_warp(own);
  if (lane() == 0) choices[warp()] = own;
  __syncthreads();
  if (warp() > 0) return;
  own = first_of_warp(lane() < int(blockDim.x / 32) ? choices[lane()] : Choice{-1, 0.f});
  if (lane() == 0) to[2 * blockIdx.x] = own.id, to[2 * blockIdx.x + 1] = __float_as_uint(own.logit);
}
LAUNCHER(argmax)
