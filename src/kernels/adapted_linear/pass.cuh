// One pass over the gradient of a product with a fused delta: dy (n, out) is read once for d_xa = dy B and for
// dB = dy^T xa, on tensor cores. The gradients of the two factors of a delta are sums over rows, whose shares are
// added in order afterwards.
//
// A block of 4 warps owns 256 columns, 64 a warp, and a share of the rows. They pass through shared memory 32 at a
// time: two such stages are on their way while a third is used. Columns are cut too because a share of dB (out, r) is
// then written for fewer shares of the rows; the shares of d_xa that this costs, one for 256 columns, are smaller.
#pragma once
#include "fused.cuh"
#include "stages.cuh"

namespace pass {

constexpr int THREADS = 128, WARPS = THREADS / 32, COLUMNS = 256, OWN = COLUMNS / WARPS, ROWS = 32, STAGES = 3;
constexpr int PITCH = COLUMNS + 8; // 528 bytes: the eight rows of a matrix are in different banks

/// Rows of a stage: of dy, and of xa.
template <class T, int TILES> struct Stage {
  T rows[ROWS][PITCH];
  T ranks[ROWS][8 * TILES];
};

/// Starts filling a stage with the rows from `row` to `end` of x (n, columns), from `column` on; zeros beyond.
template <class T, int TILES>
__device__ __forceinline__ void fill(Stage<T, TILES> &stage, const T *x, int row, int end, int column, int columns) {
  constexpr int RUNS = COLUMNS / WIDE;
#pragma unroll
  for (int step = 0; step < ROWS * RUNS / THREADS; step++) {
    int at = step * THREADS + threadIdx.x, i = row + at / RUNS, j = column + at % RUNS * WIDE;
    bool exists = i < end && j < columns;
    copy_later(&stage.rows[at / RUNS][at % RUNS * WIDE], x + (exists ? i64(i) * columns + j : 0), exists);
  }
}

/// The same of xa (n, R).
template <class T, int TILES>
__device__ __forceinline__ void fill_ranks(Stage<T, TILES> &stage, const T *xa, int row, int end) {
  if (threadIdx.x >= ROWS * TILES) return;
  int i = row + threadIdx.x / TILES, j = threadIdx.x % TILES * WIDE;
  bool exists = i < end;
  copy_later(&stage.ranks[threadIdx.x / TILES][j], xa + (exists ? i64(i) * 8 * TILES + j : 0), exists);
}

/// The columns of a warp of the gradient of a factor (columns, r): 16 columns and 8 ranks a product.
template <int TILES> using Gradient = float[OWN / 16][TILES][4];

/// gradient += rows^T ranks of a stage; `change(half, m, left)` may change 16 columns m of 16 of the rows, transposed,
/// before they are multiplied.
template <class T, int TILES, class Change>
__device__ __forceinline__ void accumulate(Gradient<TILES> &gradient, const Stage<T, TILES> &stage,
                                           const Change &change) {
  int own = warp() * OWN;
  unsigned right[TILES][4]; // 32 rows: two of each are those of a product
#pragma unroll
  for (int j = 0; j < TILES; j++) load_matrices<true>(right[j], &stage.ranks[lane()][j * 8]);
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int m = 0; m < OWN / 16; m++) {
      unsigned left[4];
      int row = half * 16 + lane() / 16 * 8 + lane() % 8;
      load_matrices<true>(left, &stage.rows[row][own + m * 16 + lane() / 8 % 2 * 8]);
      change(half, m, left);
#pragma unroll
      for (int j = 0; j < TILES; j++) mma<T>(gradient[m][j], left, right[j] + 2 * half);
    }
}

struct alignas(8) Two {
  float at[2];
};

/// Writes a warp's columns, from `column` of the block on, to the share `to` (columns, 8 TILES).
template <int TILES>
__device__ __forceinline__ void keep(const Gradient<TILES> &gradient, float *to, int column, int columns) {
  int group = lane() / 4, pair = lane() % 4 * 2;
#pragma unroll
  for (int m = 0; m < OWN / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int at = column + warp() * OWN + m * 16 + half * 8 + group;
      if (at >= columns) continue;
#pragma unroll
      for (int j = 0; j < TILES; j++)
        *reinterpret_cast<Two *>(to + i64(at) * 8 * TILES + j * 8 + pair) = {
            {gradient[m][j][2 * half], gradient[m][j][2 * half + 1]}};
    }
}

template <class T, int TILES>
__device__ __forceinline__ void run(const T *dy, const T *xa, const float *b, float *d_xa, float *db, int n,
                                    int outputs, int rank, int share) {
  constexpr int RANKS = 8 * TILES;
  typedef Stage<T, TILES> Own;
  typedef float Sums[WARPS][ROWS][RANKS];
  DYNAMIC_SHARED(Own, stages);
  SHARED(Sums, sums);
  int column = blockIdx.x * COLUMNS, first = blockIdx.y * share, end = min(n, first + share);
  int group = lane() / 4, pair = lane() % 4 * 2, own = warp() * OWN;
  auto value = [=](int at, int r) {
    return r < rank && at < outputs ? b[i64(at) * rank + r] * fused::LIFT : 0.f;
  };
  unsigned right[OWN / 16][TILES][2]; // B of the warp's columns
#pragma unroll
  for (int k = 0; k < OWN / 16; k++)
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int at = column + own + k * 16 + pair + 8 * r;
        right[k][j][r] = pack<T>(value(at, j * 8 + group), value(at + 1, j * 8 + group));
      }
  Gradient<TILES> gradient = {};
  int count = (end - first + ROWS - 1) / ROWS;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) {
      fill(stages[s], dy, first + s * ROWS, end, column, outputs);
      fill_ranks(stages[s], xa, first + s * ROWS, end);
    }
    close_copies();
  }
  for (int s = 0; s < count; s++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads(); // all copies of this stage are there, and nobody reads the stage before it any more
    int next = s + STAGES - 1;
    if (next < count) {
      fill(stages[next % STAGES], dy, first + next * ROWS, end, column, outputs);
      fill_ranks(stages[next % STAGES], xa, first + next * ROWS, end);
    }
    close_copies();
    const Own &stage = stages[s % STAGES];
    float sum[2][TILES][4] = {};
#pragma unroll
    for (int k = 0; k < OWN / 16; k++)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        unsigned left[4];
        load_matrices<false>(left, &stage.rows[m * 16 + lane() % 16][own + k * 16 + lane() / 16 * 8]);
#pragma unroll
        for (int j = 0; j < TILES; j++) mma<T>(sum[m][j], left, right[k][j]);
      }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int r = 0; r < 4; r++)
          sums[warp()][m * 16 + group + r / 2 * 8][j * 8 + pair + r % 2] = sum[m][j][r];
    accumulate(gradient, stage, [](int, int, unsigned(&)[4]) {});
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * RANKS; at += THREADS) {
      int row = first + s * ROWS + at / RANKS;
      float total = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) total += sums[w][at / RANKS][at % RANKS];
      if (row < end) d_xa[(i64(blockIdx.x) * n + row) * RANKS + at % RANKS] = total / fused::LIFT;
    }
  }
  keep<TILES>(gradient, db + i64(blockIdx.y) * outputs * RANKS, column, outputs);
}

/// d_xa (n, RANKS) of a row before `end` and a rank: its shares in order; 0 of other rows.
template <int RANKS>
__device__ __forceinline__ float joined(const float *parts, int groups, int row, int end, int n, int rank) {
  float sum = 0;
  if (row >= end) return sum;
  parts += i64(row) * RANKS + rank;
#pragma unroll 4
  for (int group = 0; group < groups; group++) sum += parts[i64(group) * n * RANKS];
  return sum;
}

/// gradient (columns, rank), or (rank, columns) if `transposed`, += scale * sum of shares (count, columns, 8 TILES),
/// in order: one element a thread, the blocks from `first` on.
template <int TILES>
__device__ __forceinline__ void add_shares(const float *shares, int count, int columns, int rank, float scale,
                                           float *gradient, int first, bool transposed) {
  constexpr int RANKS = 8 * TILES;
  i64 at = i64(blockIdx.x - first) * blockDim.x + threadIdx.x;
  if (at >= i64(columns) * rank) return;
  i64 column = at / rank, r = at % rank;
  shares += column * RANKS + r;
  float sum = 0;
#pragma unroll 4
  for (int share = 0; share < count; share++) sum += shares[i64(share) * columns * RANKS];
  gradient[transposed ? r * columns + column : at] += scale * sum;
}

/// After a pass: d_xa (n, R) from its shares, dx = scale d_xa A unless dx is null, and the gradient of B.
template <class T, int TILES>
__device__ __forceinline__ void spread(const float *parts, int groups, const float *a, T *d_xa, T *dx, int n, int inputs,
                                       int rank, float scale, const float *shares, int count, int outputs,
                                       float *db) {
  constexpr int RANKS = 8 * TILES;
  SHARED(fused::Thin<TILES>, sums);
  int blocks = (n + fused::ROWS - 1) / fused::ROWS, row = blockIdx.x * fused::ROWS;
  if (int(blockIdx.x) >= blocks) return add_shares<TILES>(shares, count, outputs, rank, scale, db, blocks, false);
  for (int at = threadIdx.x; at < fused::SHARES * fused::ROWS * RANKS; at += fused::THREADS) {
    int share = at / (fused::ROWS * RANKS), i = at / RANKS % fused::ROWS;
    float sum = 0;
    if (row + i < n)
      for (int g = share; g < groups; g += fused::SHARES) sum += parts[(i64(g) * n + row + i) * RANKS + at % RANKS];
    sums[share][i][at % RANKS] = sum;
  }
  __syncthreads();
  fused::keep<T, TILES>(sums, 1.f, d_xa, n, row);
  if (!dx) return;
  auto value = [=](int r, int column) { return r < rank && column < inputs ? a[i64(r) * inputs + column] : 0.f; };
  fused::widened<T, TILES>(sums, 1.f, inputs, value, [=](int at, int column, float(&v)[WIDE]) {
    if (row + at >= n || column >= inputs) return;
#pragma unroll
    for (int i = 0; i < WIDE; i++) v[i] *= scale;
    store(v, WIDE, dx + i64(row + at) * inputs + column);
  });
}

} // namespace pass

/// Shares of d_xa (n, R) = dy (n, out) B (out, r), (ceil(out / 256), n, R), and of dB / scale = dy^T xa, (shares, out,
/// R), over `share` rows each; R is the rank rounded up to 8 or 16, and xa (n, R). out is a multiple of 8, rows of dy
/// and xa begin at multiples of 16 bytes. Grid: (ceil(out / 256), ceil(n / share)) blocks of 128, with 3 stages of
/// shared memory.
template <class T>
__device__ void delta_pass(const T *dy, const T *xa, const float *b, float *d_xa, float *db, int n, int outputs, int rank,
                           int share) {
  if (rank <= 8) return pass::run<T, 1>(dy, xa, b, d_xa, db, n, outputs, rank, share);
  pass::run<T, 2>(dy, xa, b, d_xa, db, n, outputs, rank, share);
}
EXPORT_16(delta_pass, __launch_bounds__(128),
          (const T *dy, const T *xa, const float *b, float *d_xa, float *db, int n, int outputs, int rank, int share),
          (dy, xa, b, d_xa, db, n, outputs, rank, share))

/// From the shares of a pass, added in order: d_xa (n, R), rounded; dx (n, in) = scale d_xa A (r, in) unless dx is
/// null; dB (out, r) += scale sum. Grid: ceil(n / 32) blocks of 128, and after them ceil(out r / 128) unless B has no
/// gradient.
template <class T>
__device__ void delta_spread(const float *parts, int groups, const float *a, T *d_xa, T *dx, int n, int inputs, int rank,
                             float scale, const float *shares, int count, int outputs, float *db) {
  if (rank <= 8)
    return pass::spread<T, 1>(parts, groups, a, d_xa, dx, n, inputs, rank, scale, shares, count, outputs, db);
  pass::spread<T, 2>(parts, groups, a, d_xa, dx, n, inputs, rank, scale, shares, count, outputs, db);
}
EXPORT_16(delta_spread, __launch_bounds__(128),
          (const float *parts, int groups, const float *a, T *d_xa, T *dx, int n, int inputs, int rank, float scale,
           const float *shares, int count, int outputs, float *db),
          (parts, groups, a, d_xa, dx, n, inputs, rank, scale, shares, count, outputs, db))
