// A layer norm and the delta of the product after it, on tensor cores: the forward makes xa from rows that it has in
// registers, the backward adds s d_xa A to the gradient that it reads. So neither is a pass of its own.
//
// A block owns 16 rows. A warp has lines of 32 columns of them, the warps one after another, at most 4 a warp; a lane
// has 8 neighbours of two rows, as operands of a product whose terms are reordered alike on both sides (see `thin`).
#pragma once
#include "pass.cuh"

namespace normed {

constexpr int ROWS = 16, STEPS = 4, MOST_WARPS = 16, LINE = 32;
/// Factor of s B^T and divisor of xa where they are part of the product: keeps small B from FP16's subnormals.
constexpr float BALANCE = 16.f;

using fused::Words;
using fused::packed;

template <class T> __device__ __forceinline__ void open(const Words &words, float (&x)[WIDE]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float two[2];
    unpack<T>(words.at[i], two);
    x[2 * i] = two[0], x[2 * i + 1] = two[1];
  }
}

/// `f(step, line, column)` for the lines of this warp in a row (c): the first column of each, and this lane's.
template <class F> __device__ __forceinline__ void each_line(int c, const F &f) {
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    int line = (step * int(blockDim.x / 32) + warp()) * LINE;
    if (line < c) f(step, line, line + lane() % 4 * WIDE);
  }
}

/// Totals over whole rows of N values of a lane for each of its two rows; every thread of the block.
template <int N> __device__ __forceinline__ void totals(float (&own)[2][N], float (&total)[2][N]) {
  typedef float Parts[MOST_WARPS][ROWS][N];
  SHARED(Parts, parts);
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < N; i++) {
      float x = own[half][i];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      if (lane() % 4 == 0) parts[warp()][lane() / 4 + 8 * half][i] = x;
    }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < N; i++) {
      total[half][i] = 0;
      for (int w = 0; w < int(blockDim.x / 32); w++) total[half][i] += parts[w][lane() / 4 + 8 * half][i];
    }
  __syncthreads(); // the next call writes `parts` again
}

/// y (n, c + R) = norm of x (n, c), then xa / BALANCE; stats (n, 2); xa (n, R) = normed A^T.
template <class T, int TILES>
__device__ __forceinline__ void start(const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y,
                                      float *stats, const float *a, T *xa, int n, int c, int rank) {
  constexpr int RANKS = 8 * TILES;
  typedef float Shares[MOST_WARPS][ROWS][RANKS];
  SHARED(Shares, shares);
  int row = blockIdx.x * ROWS, group = lane() / 4, pair = lane() % 4 * 2, width = c + RANKS;
  Words v[STEPS][2] = {};
  float own[2][1] = {}, total[2][1], mean[2], rstd[2];
  each_line(c, [&](int step, int, int at) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int i = row + group + 8 * half;
      if (i >= n || at >= c) continue;
      v[step][half] = *reinterpret_cast<const Words *>(x + i64(i) * c + at);
    }
  });
  each_line(c, [&](int step, int, int) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float e[WIDE];
      open<T>(v[step][half], e);
#pragma unroll
      for (int i = 0; i < WIDE; i++) own[half][0] += e[i];
    }
  });
  totals(own, total);
  mean[0] = total[0][0] / c, mean[1] = total[1][0] / c;
  own[0][0] = own[1][0] = 0;
  // From the values themselves: mean(x^2) - mean^2 would cancel in FP32.
  each_line(c, [&](int step, int, int at) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float e[WIDE];
      open<T>(v[step][half], e);
#pragma unroll
      for (int i = 0; i < WIDE; i++)
        if (at < c) own[half][0] += (e[i] - mean[half]) * (e[i] - mean[half]);
    }
  });
  totals(own, total);
  rstd[0] = 1.f / sqrtf(total[0][0] / c + epsilon), rstd[1] = 1.f / sqrtf(total[1][0] / c + epsilon);
  float sum[TILES][4] = {};
  each_line(c, [&](int step, int, int at) {
    float g[WIDE], b[WIDE];
    load(gain + at, c - at, g);
    load(bias + at, c - at, b);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float e[WIDE];
      open<T>(v[step][half], e);
#pragma unroll
      for (int i = 0; i < WIDE; i++) e[i] = (e[i] - mean[half]) * rstd[half] * g[i] + b[i];
      v[step][half] = packed<T>(e, 1.f); // zeros beyond c
      int i = row + group + 8 * half;
      if (i < n && at < c) *reinterpret_cast<Words *>(y + i64(i) * width + at) = v[step][half];
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      int r = j * 8 + group;
      float f[WIDE];
      load(a + i64(r) * c + at, r < rank ? c - at : 0, f);
      Words right = packed<T>(f, 1.f);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        unsigned left[4] = {v[step][0].at[2 * half], v[step][1].at[2 * half], v[step][0].at[2 * half + 1],
                            v[step][1].at[2 * half + 1]};
        mma<T>(sum[j], left, right.at + 2 * half);
      }
    }
  });
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int r = 0; r < 4; r++) shares[warp()][group + r / 2 * 8][j * 8 + pair + r % 2] = sum[j][r];
  if (warp() == 0 && pair == 0)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int i = row + group + 8 * half;
      if (i < n) stats[2 * i64(i)] = mean[half], stats[2 * i64(i) + 1] = rstd[half];
    }
  __syncthreads();
  for (int at = threadIdx.x; at < ROWS * RANKS; at += blockDim.x) {
    int i = row + at / RANKS, r = at % RANKS;
    if (i >= n) break;
    float all = 0;
    for (int w = 0; w < int(blockDim.x / 32); w++) all += shares[w][at / RANKS][r];
    xa[i64(i) * RANKS + r] = narrow<T>(all);
    y[i64(i) * width + c + r] = narrow<T>(all / BALANCE);
  }
}

/// rows (R, out) = BALANCE scale B (out, r)^T: 8 columns a thread, the blocks from `first` on.
template <class T, int TILES>
__device__ __forceinline__ void rows_of_b(const float *b, T *rows, int outputs, int rank, float scale, int first) {
  int runs = outputs / WIDE, run = (blockIdx.x - first) * blockDim.x + threadIdx.x;
  int r = run / runs, column = run % runs * WIDE;
  if (r >= 8 * TILES) return;
  float v[WIDE];
#pragma unroll
  for (int i = 0; i < WIDE; i++) v[i] = r < rank ? b[i64(column + i) * rank + r] * (scale * BALANCE) : 0.f;
  *reinterpret_cast<Words *>(rows + i64(r) * outputs + column) = packed<T>(v, 1.f);
}

/// What a pass over rows of x takes of the norm that they are the input of: gain and bias of a lane's columns.
struct Columns {
  float gain[pass::OWN / 16][2], bias[pass::OWN / 16][2];
};

/// Shares of dA^T / scale = normed^T d_xa (c, R), over `share` rows each. normed is made again from x (n, c), and d_xa
/// from its own shares.
template <class T, int TILES>
__device__ __forceinline__ void pass_of_inputs(const T *x, const float *stats, const half_t *gain, const half_t *bias,
                                               const float *parts, int groups, float *shares, int n, int c,
                                               int share) {
  constexpr int RANKS = 8 * TILES;
  typedef pass::Stage<T, TILES> Own;
  typedef pass::Two Stats[pass::ROWS];
  DYNAMIC_SHARED(Own, stages);
  SHARED(Stats, of_rows);
  int column = blockIdx.x * pass::COLUMNS, first = blockIdx.y * share, end = min(n, first + share);
  int group = lane() / 4, pair = lane() % 4 * 2;
  Columns own = {};
#pragma unroll
  for (int m = 0; m < pass::OWN / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int at = column + warp() * pass::OWN + m * 16 + half * 8 + group;
      if (at < c) own.gain[m][half] = widen(gain[at]), own.bias[m][half] = widen(bias[at]);
    }
  pass::Gradient<TILES> gradient = {};
  int count = (end - first + pass::ROWS - 1) / pass::ROWS;
#pragma unroll
  for (int s = 0; s < pass::STAGES - 1; s++) {
    if (s < count) pass::fill(stages[s], x, first + s * pass::ROWS, end, column, c);
    close_copies();
  }
  for (int s = 0; s < count; s++) {
    wait_for_copies<pass::STAGES - 2>();
    __syncthreads(); // all copies of this stage are there, and nobody reads the stage before it any more
    int next = s + pass::STAGES - 1, row = first + s * pass::ROWS;
    if (next < count) pass::fill(stages[next % pass::STAGES], x, first + next * pass::ROWS, end, column, c);
    close_copies();
    Own &stage = stages[s % pass::STAGES];
    // Zeros for rows that are not there: they add nothing.
    for (int at = threadIdx.x; at < pass::ROWS * RANKS; at += pass::THREADS)
      stage.ranks[at / RANKS][at % RANKS] =
          narrow<T>(pass::joined<RANKS>(parts, groups, row + at / RANKS, end, n, at % RANKS));
    if (threadIdx.x < pass::ROWS) {
      i64 i = row + threadIdx.x;
      of_rows[threadIdx.x] = i < end ? pass::Two{{stats[2 * i], stats[2 * i + 1]}} : pass::Two{{0.f, 0.f}};
    }
    __syncthreads();
    pass::accumulate(gradient, stage, [&](int half, int m, unsigned(&left)[4]) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        float two[2];
        unpack<T>(left[r], two);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          pass::Two row = of_rows[half * 16 + r / 2 * 8 + pair + i];
          two[i] = (two[i] - row.at[0]) * row.at[1] * own.gain[m][r % 2] + own.bias[m][r % 2];
        }
        left[r] = pack<T>(two[0], two[1]);
      }
    });
  }
  pass::keep<TILES>(gradient, shares + i64(blockIdx.y) * c * RANKS, column, c);
}

/// Shares of the gradient of a factor, what they are added to, and how many.
struct Shares {
  const float *from;
  float *to;
  int count, columns;
};

/// dx (n, c) += gradient of a layer norm whose output has the gradient dy (n, c) + scale d_xa A; d_xa (n, R) is the
/// sum of `groups` shares.
template <class T, int TILES>
__device__ __forceinline__ void back(const T *dy, const T *x, const float *stats, const half_t *gain, T *dx,
                                     const float *parts, int groups, const float *a, int n, int c, int rank,
                                     float scale) {
  constexpr int RANKS = 8 * TILES;
  typedef float Ranks[ROWS][RANKS];
  SHARED(Ranks, d_xa);
  int row = blockIdx.x * ROWS, group = lane() / 4, pair = lane() % 4 * 2;
  Words g[STEPS][2] = {}, v[STEPS][2] = {};
  each_line(c, [&](int step, int, int at) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int i = row + group + 8 * half;
      if (i >= n || at >= c) continue;
      g[step][half] = *reinterpret_cast<const Words *>(dy + i64(i) * c + at);
      v[step][half] = *reinterpret_cast<const Words *>(x + i64(i) * c + at);
    }
  });
  for (int at = threadIdx.x; at < ROWS * RANKS; at += blockDim.x)
    d_xa[at / RANKS][at % RANKS] =
        pass::joined<RANKS>(parts, groups, row + at / RANKS, n, n, at % RANKS);
  __syncthreads();
  unsigned left[4];
#pragma unroll
  for (int r = 0; r < 4; r++) {
    int i = group + r % 2 * 8, k = pair + r / 2 * 8;
    left[r] = r / 2 < TILES ? pack<T>(d_xa[i][k % RANKS], d_xa[i][(k + 1) % RANKS]) : 0u;
  }
  float mean[2] = {}, rstd[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    i64 i = row + group + 8 * half;
    if (i < n) mean[half] = stats[2 * i], rstd[half] = stats[2 * i + 1];
  }
  auto value = [=](int r, int column) { return r < rank && column < c ? a[i64(r) * c + column] : 0.f; };
  float own[2][2] = {}, total[2][2];
  each_line(c, [&](int step, int line, int at) {
    float delta[4][4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int column = line + group / 2 * 8 + j * 2 + group % 2;
      unsigned right[2] = {};
#pragma unroll
      for (int r = 0; r < TILES; r++)
        right[r] = pack<T>(value(pair + 8 * r, column), value(pair + 8 * r + 1, column));
      mma<T>(delta[j], left, right);
    }
    float w[WIDE];
    load(gain + at, c - at, w);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float d[WIDE], e[WIDE];
      open<T>(g[step][half], d);
#pragma unroll
      for (int i = 0; i < WIDE; i++) d[i] += scale * delta[i / 2][half * 2 + i % 2];
      g[step][half] = packed<T>(d, 1.f);
      open<T>(g[step][half], d);
      open<T>(v[step][half], e);
#pragma unroll
      for (int i = 0; i < WIDE; i++) {
        float own_g = d[i] * w[i];
        own[half][0] += own_g, own[half][1] += own_g * ((e[i] - mean[half]) * rstd[half]);
      }
    }
  });
  totals(own, total);
  each_line(c, [&](int step, int, int at) {
    float w[WIDE];
    load(gain + at, c - at, w);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int i = row + group + 8 * half;
      if (i >= n || at >= c) continue;
      float d[WIDE], e[WIDE], sum[WIDE];
      open<T>(g[step][half], d);
      open<T>(v[step][half], e);
      T *place = dx + i64(i) * c + at;
      load(place, WIDE, sum);
      float mean_g = total[half][0] / c, mean_gx = total[half][1] / c;
#pragma unroll
      for (int k = 0; k < WIDE; k++)
        sum[k] += rstd[half] * (d[k] * w[k] - mean_g - (e[k] - mean[half]) * rstd[half] * mean_gx);
      store(sum, WIDE, place);
    }
  });
}

} // namespace normed

/// A layer norm of x (n, c) and what the product after it takes in of a delta: y (n, c + R) = [normed | xa / 16],
/// stats (n, 2), xa (n, R) = normed A (r, c)^T, and rows (R, out) = 16 scale B (out, r)^T, which follow the rows of the
/// product's weight. R is the rank rounded up to 8 or 16; c and out are multiples of 8, c at most 128 a warp; rows
/// begin at multiples of 16 bytes. Grid: ceil(n / 16) blocks, and after them ceil(R out / 8 / threads).
template <class T>
__device__ void delta_norm(const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y, float *stats,
                           const float *a, T *xa, const float *b, T *rows, int n, int c, int outputs, int rank,
                           float scale) {
  int blocks = (n + normed::ROWS - 1) / normed::ROWS;
  if (int(blockIdx.x) >= blocks) {
    if (rank <= 8) return normed::rows_of_b<T, 1>(b, rows, outputs, rank, scale, blocks);
    return normed::rows_of_b<T, 2>(b, rows, outputs, rank, scale, blocks);
  }
  if (rank <= 8) return normed::start<T, 1>(x, gain, bias, epsilon, y, stats, a, xa, n, c, rank);
  normed::start<T, 2>(x, gain, bias, epsilon, y, stats, a, xa, n, c, rank);
}
EXPORT_16(delta_norm, __launch_bounds__(512),
          (const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y, float *stats, const float *a, T *xa,
           const float *b, T *rows, int n, int c, int outputs, int rank, float scale),
          (x, gain, bias, epsilon, y, stats, a, xa, b, rows, n, c, outputs, rank, scale))

/// Backward of the same norm: dx (n, c) += its gradient, from dy (n, c), the product's alone, and the shares of d_xa;
/// and the gradients of B (out, r) and A (r, c), of scale times the sums of their shares. Grid: ceil(n / 16) blocks,
/// and after them those of B and of A, ceil(elements / threads) each, or none.
template <class T>
__device__ void delta_norm_back(const T *dy, const T *x, const float *stats, const half_t *gain, T *dx,
                                const float *parts, int groups, const float *a, int n, int c, int rank, float scale,
                                normed::Shares of_b, normed::Shares of_a) {
  int blocks = (n + normed::ROWS - 1) / normed::ROWS;
  if (int(blockIdx.x) >= blocks) {
    int threads = blockDim.x, sums = of_b.to ? (of_b.columns * rank + threads - 1) / threads : 0;
    bool is_a = int(blockIdx.x) >= blocks + sums;
    normed::Shares of = is_a ? of_a : of_b;
    int first = is_a ? blocks + sums : blocks;
    if (rank <= 8) return pass::add_shares<1>(of.from, of.count, of.columns, rank, scale, of.to, first, is_a);
    return pass::add_shares<2>(of.from, of.count, of.columns, rank, scale, of.to, first, is_a);
  }
  if (rank <= 8) return normed::back<T, 1>(dy, x, stats, gain, dx, parts, groups, a, n, c, rank, scale);
  normed::back<T, 2>(dy, x, stats, gain, dx, parts, groups, a, n, c, rank, scale);
}
EXPORT_16(delta_norm_back, __launch_bounds__(512),
          (const T *dy, const T *x, const float *stats, const half_t *gain, T *dx, const float *parts, int groups,
           const float *a, int n, int c, int rank, float scale, normed::Shares of_b, normed::Shares of_a),
          (dy, x, stats, gain, dx, parts, groups, a, n, c, rank, scale, of_b, of_a))

/// Shares of dA^T / scale, (shares, c, R), from the input x (n, c) of the norm and the shares of d_xa, which are
/// `groups`. Grid: (ceil(c / 256), ceil(n / share)) blocks of 128, with 3 stages of shared memory.
template <class T>
__device__ void delta_norm_pass(const T *x, const float *stats, const half_t *gain, const half_t *bias, const float *parts,
                                int groups, float *shares, int n, int c, int rank, int share) {
  if (rank <= 8)
    return normed::pass_of_inputs<T, 1>(x, stats, gain, bias, parts, groups, shares, n, c, share);
  normed::pass_of_inputs<T, 2>(x, stats, gain, bias, parts, groups, shares, n, c, share);
}
EXPORT_16(delta_norm_pass, __launch_bounds__(128),
          (const T *x, const float *stats, const half_t *gain, const half_t *bias, const float *parts, int groups,
           float *shares, int n, int c, int rank, int share),
          (x, stats, gain, bias, parts, groups, shares, n, c, rank, share))
