// Tiles of 64 vectors of width 64 in shared memory, and their products on tensor cores (mma.sync m16n8k16).
// Layouts of a lane's fragments are in mma.cuh.
#pragma once
#include "stages.cuh"
#include "shape.cuh"

#ifndef CPU_SHIM
/// 2^x; a power below the smallest normal number is 0.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

constexpr int WIDTH = 64;       // of a head
constexpr int ROWS = 64;        // of a tile: 16 a warp
constexpr int THREADS = 128;
constexpr int QUERIES = 128;    // of a block where a warp owns 32: two fragments of 16, which share what is read for them
constexpr int PITCH = WIDTH + 8; // 144 bytes: the eight rows of a matrix are in different banks

template <class T> using Tile = T[ROWS][PITCH];

/// Starts filling a tile with rows `0 .. count`, at least one, which begin at `row(i)`; the others are zeros.
template <class T, class Row> __device__ __forceinline__ void fill(Tile<T> &tile, int count, const Row &row) {
  constexpr int RUNS = WIDTH / WIDE;
#pragma unroll
  for (int step = 0; step < ROWS * RUNS / THREADS; step++) {
    int at = step * THREADS + threadIdx.x, i = at / RUNS, e = at % RUNS * WIDE;
    copy_later(&tile[i][e], row(i < count ? i : 0) + e, i < count);
  }
}

/// 16 rows of a tile as left operand of a product over the width.
template <class T> struct Left {
  unsigned at[WIDTH / 16][4];

  __device__ __forceinline__ void read(const Tile<T> &tile, int row) {
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
      load_matrices<false>(at[k], &tile[row + lane() % 16][k * 16 + lane() / 16 * 8]);
  }
};

/// s (16, 16) = left (16, width) rows `row .. row + 16` of the tile, transposed.
template <class T>
__device__ __forceinline__ void scores(float (&s)[2][4], const Left<T> &left, const Tile<T> &tile, int row) {
#pragma unroll
  for (int r = 0; r < 4; r++) s[0][r] = s[1][r] = 0.f;
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++) {
    unsigned right[4];
    load_matrices<false>(right, &tile[row + lane() / 16 * 8 + lane() % 8][k * 16 + lane() / 8 % 2 * 8]);
    mma<T>(s[0], left.at[k], right);
    mma<T>(s[1], left.at[k], right + 2);
  }
}

/// The same for two fragments of rows, which share each fragment of the tile.
template <class T>
__device__ __forceinline__ void scores(float (&s)[2][2][4], const Left<T> (&left)[2], const Tile<T> &tile, int row) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int r = 0; r < 4; r++) s[m][0][r] = s[m][1][r] = 0.f;
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++) {
    unsigned right[4];
    load_matrices<false>(right, &tile[row + lane() / 16 * 8 + lane() % 8][k * 16 + lane() / 8 % 2 * 8]);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      mma<T>(s[m][0], left[m].at[k], right);
      mma<T>(s[m][1], left[m].at[k], right + 2);
    }
  }
}

/// sum (16, width) += weights (16, 16) rows `row .. row + 16` of the tile.
template <class T>
__device__ __forceinline__ void add_weighted(float (&sum)[WIDTH / 8][4], const float (&weights)[2][4],
                                             const Tile<T> &tile, int row) {
  unsigned left[4];
#pragma unroll
  for (int r = 0; r < 4; r++) left[r] = pack<T>(weights[r / 2][r % 2 * 2], weights[r / 2][r % 2 * 2 + 1]);
#pragma unroll
  for (int n = 0; n < WIDTH / 8; n += 2) {
    unsigned right[4];
    load_matrices<true>(right, &tile[row + lane() % 16][n * 8 + lane() / 16 * 8]);
    mma<T>(sum[n], left, right);
    mma<T>(sum[n + 1], left, right + 2);
  }
}

/// The same for two fragments of rows.
template <class T>
__device__ __forceinline__ void add_weighted(float (&sum)[2][WIDTH / 8][4], const float (&weights)[2][2][4],
                                             const Tile<T> &tile, int row) {
  unsigned left[2][4];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int r = 0; r < 4; r++)
      left[m][r] = pack<T>(weights[m][r / 2][r % 2 * 2], weights[m][r / 2][r % 2 * 2 + 1]);
#pragma unroll
  for (int n = 0; n < WIDTH / 8; n += 2) {
    unsigned right[4];
    load_matrices<true>(right, &tile[row + lane() % 16][n * 8 + lane() / 16 * 8]);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      mma<T>(sum[m][n], left[m], right);
      mma<T>(sum[m][n + 1], left[m], right + 2);
    }
  }
}

/// `f(m, n, r, x)` for each element of two results (16, 16).
template <class F> __device__ __forceinline__ void each(float (&s)[2][2][4], const F &f) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int r = 0; r < 4; r++) f(m, n, r, s[m][n][r]);
}

/// `f(n, r, x)` for each element of a result (16, 16).
template <class F> __device__ __forceinline__ void each(float (&s)[2][4], const F &f) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int r = 0; r < 4; r++) f(n, r, s[n][r]);
}

/// Row and column within a result (16, 16) of element r of half n.
__device__ __forceinline__ int row_of(int r) { return lane() / 4 + r / 2 * 8; }
__device__ __forceinline__ int column_of(int n, int r) { return n * 8 + lane() % 4 * 2 + r % 2; }

/// Sum and maximum over the four lanes that share the rows of a result.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
