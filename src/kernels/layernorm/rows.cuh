// Parameters of a norm, rows in the registers of a block, and sums over them whose bits do not depend on the number of
// threads.
#pragma once
#include "common.cuh"

constexpr int RUNS = 4;          // runs of WIDE neighbours that a thread holds at most
constexpr int LINE = 32 * WIDE;  // elements of a row whose runs the lanes of one warp hold

/// A parameter (c) of which one form is there: FP16 of the base, or FP32 that is trained.
struct Parameter {
  const half_t *frozen;
  const float *trained;
};

__device__ __forceinline__ void fetch(const half_t *parameter, int at, int c, float (&to)[WIDE]) {
  load(parameter + at, c - at, to);
}
__device__ __forceinline__ void fetch(const Parameter &parameter, int at, int c, float (&to)[WIDE]) {
  if (parameter.trained) load(parameter.trained + at, c - at, to);
  else load(parameter.frozen + at, c - at, to);
}

/// `f(k, at)` for each run that this thread holds of a row (c): run k begins at element `at`.
template <class F> __device__ __forceinline__ void each_run(int c, const F &f) {
#pragma unroll
  for (int k = 0; k < RUNS; k++) {
    int at = (k * blockDim.x + threadIdx.x) * WIDE;
    if (at < c) f(k, at);
  }
}

__device__ __forceinline__ float run_sum(const float (&v)[WIDE]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WIDE; i++) sum += v[i];
  return sum;
}

/// Sum of the squares of v - mean, of the first `count` elements.
__device__ __forceinline__ float run_squares(const float (&v)[WIDE], float mean, int count) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WIDE; i++)
    if (i < count) sum += (v[i] - mean) * (v[i] - mean);
  return sum;
}

/// Totals over a row (c) of N values of each run; 0 in `own` where there is no run. 128 N bytes of shared memory for
/// each line of the row, and every thread of the block.
///
/// A lane adds its runs line by line and then the lanes are added as in `warp_sum`: the order follows from c alone.
template <int N> __device__ __forceinline__ void row_sums(const float (&own)[RUNS][N], int c, float (&total)[N]) {
  DYNAMIC_SHARED(float, parts); // [line][N][lane]
  int lines = (c + LINE - 1) / LINE, warps = blockDim.x / 32;
#pragma unroll
  for (int k = 0; k < RUNS; k++) {
    int line = k * warps + warp();
    if (line >= lines) break;
#pragma unroll
    for (int i = 0; i < N; i++) parts[(line * N + i) * 32 + lane()] = own[k][i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) {
    float sum = 0;
    for (int line = 0; line < lines; line++) sum += parts[(line * N + i) * 32 + lane()];
    total[i] = warp_sum(sum);
  }
  __syncthreads(); // the next call writes `parts` again
}
