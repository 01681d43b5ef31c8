// Layer normalisation, forward and backward: a block for each row, which is read once and stays in registers.
//
// Grid: n blocks of 32, 64, .. threads; `row_threads` of cuda.rs takes few threads where there are many rows, and a
// whole row at once where there are few. Threads change no bit of a result: see `row_sums`.
#include "layernorm/rows.cuh"

/// y (n, c) and stats (n, 2) = mean and rstd of x (n, c).
template <class T, class P>
__device__ __forceinline__ void normalise(const T *x, P gain, P bias, float epsilon, T *y, float *stats, int c) {
  i64 row = blockIdx.x;
  x += row * c, y += row * c;
  float v[RUNS][WIDE], own[RUNS][1] = {}, total[1];
  each_run(c, [&](int k, int at) {
    load(x + at, c - at, v[k]);
    own[k][0] = run_sum(v[k]);
  });
  row_sums(own, c, total);
  float mean = total[0] / c;
  // From the values themselves: mean(x^2) - mean^2 would cancel in FP32.
  each_run(c, [&](int k, int at) { own[k][0] = run_squares(v[k], mean, c - at); });
  row_sums(own, c, total);
  float rstd = 1.f / sqrtf(total[0] / c + epsilon);
  each_run(c, [&](int k, int at) {
    float g[WIDE], b[WIDE];
    fetch(gain, at, c, g);
    fetch(bias, at, c, b);
#pragma unroll
    for (int i = 0; i < WIDE; i++) v[k][i] = (v[k][i] - mean) * rstd * g[i] + b[i];
    store(v[k], c - at, y + at);
  });
  if (threadIdx.x == 0) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
}

template <class T>
__device__ void layernorm_forward(const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y,
                                  float *stats, int c) {
  normalise(x, gain, bias, epsilon, y, stats, c);
}
EXPORT(layernorm_forward,
       (const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y, float *stats, int c),
       (x, gain, bias, epsilon, y, stats, c))

/// The same with a gain or a bias that is trained; of each one form is there.
template <class T>
__device__ void layernorm_forward_trained(const T *x, const half_t *gain, const float *trained_gain, const half_t *bias,
                                          const float *trained_bias, float epsilon, T *y, float *stats, int c) {
  normalise(x, Parameter{gain, trained_gain}, Parameter{bias, trained_bias}, epsilon, y, stats, c);
}
EXPORT(layernorm_forward_trained,
       (const T *x, const half_t *gain, const float *trained_gain, const half_t *bias, const float *trained_bias,
        float epsilon, T *y, float *stats, int c),
       (x, gain, trained_gain, bias, trained_bias, epsilon, y, stats, c))

/// dx (n, c) += rstd (g - mean(g) - x_hat mean(g x_hat)), g = dy gain.
template <class T, class G>
__device__ __forceinline__ void add_gradient(const T *dy, const T *x, const float *stats, const G *gain, T *dx, int c) {
  i64 row = blockIdx.x;
  dy += row * c, x += row * c, dx += row * c;
  float mean = stats[2 * row], rstd = stats[2 * row + 1];
  float g[RUNS][WIDE], x_hat[RUNS][WIDE], own[RUNS][2] = {}, total[2];
  each_run(c, [&](int k, int at) {
    float w[WIDE];
    load(dy + at, c - at, g[k]);
    load(x + at, c - at, x_hat[k]);
    load(gain + at, c - at, w); // 0 past the end, hence g too
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      g[k][i] *= w[i], x_hat[k][i] = (x_hat[k][i] - mean) * rstd;
      own[k][0] += g[k][i], own[k][1] += g[k][i] * x_hat[k][i];
    }
  });
  row_sums(own, c, total);
  float mean_g = total[0] / c, mean_gx = total[1] / c;
  each_run(c, [&](int k, int at) {
    float sum[WIDE];
    load(dx + at, c - at, sum);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum[i] += rstd * (g[k][i] - mean_g - x_hat[k][i] * mean_gx);
    store(sum, c - at, dx + at);
  });
}

template <class T>
__device__ void layernorm_backward(const T *dy, const T *x, const float *stats, const half_t *gain, T *dx, int c) {
  add_gradient(dy, x, stats, gain, dx, c);
}
EXPORT(layernorm_backward, (const T *dy, const T *x, const float *stats, const half_t *gain, T *dx, int c),
       (dy, x, stats, gain, dx, c))

/// The same with a gain that is trained.
template <class T>
__device__ void layernorm_backward_trained(const T *dy, const T *x, const float *stats, const float *gain, T *dx,
                                           int c) {
  add_gradient(dy, x, stats, gain, dx, c);
}
EXPORT(layernorm_backward_trained, (const T *dy, const T *x, const float *stats, const float *gain, T *dx, int c),
       (dy, x, stats, gain, dx, c))

/// parts (splits, 2, c): shares of the sums over n rows of dy x_hat, and of dy. A share is whole rows, added in order.
/// Grid: (ceil(c / 256), splits) blocks of 256.
template <class T>
__device__ void layernorm_parameters(const T *dy, const T *x, const float *stats, float *parts, int n, int c) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= c) return;
  int share = (n + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share, end = min(n, first + share);
  float gain = 0, bias = 0;
  for (int row = first; row < end; row++) {
    i64 at = i64(row) * c + column;
    float d = widen(dy[at]);
    gain += d * ((widen(x[at]) - stats[2 * row]) * stats[2 * row + 1]);
    bias += d;
  }
  parts += i64(blockIdx.y) * 2 * c + column;
  parts[0] = gain, parts[c] = bias;
}
EXPORT(layernorm_parameters, (const T *dy, const T *x, const float *stats, float *parts, int n, int c),
       (dy, x, stats, parts, n, c))

/// gain (c) and bias (c), either of which may be missing, += sums of parts (splits, 2, c), in order.
/// Grid: ceil(c / 256) blocks of 256.
extern "C" __global__ void layernorm_parameters_finish(const float *parts, int splits, float *gain, float *bias, int c) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= c) return;
  float d_gain = 0, d_bias = 0;
  for (int part = 0; part < splits; part++) {
    d_gain += parts[i64(part) * 2 * c + column];
    d_bias += parts[(i64(part) * 2 + 1) * c + column];
  }
  if (gain) gain[column] += d_gain;
  if (bias) bias[column] += d_bias;
}
LAUNCHER(layernorm_parameters_finish)
