// Layer normalisation, forward and backward; a warp for each row, so that no sum leaves the warp.
//
// Grid: ceil(n / 4) blocks of 128 threads. A row is read again for each pass over it, from the L1 cache.
#include "common.cuh"

constexpr int STRIDE = 32 * WIDE; // elements that a warp loads by one instruction

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

/// y (n, c) and stats (n, 2) = mean and rstd of x (n, c).
template <class T, class P>
__device__ __forceinline__ void normalise(const T *x, P gain, P bias, float epsilon, T *y, float *stats, int n, int c) {
  i64 row = i64(blockIdx.x) * 4 + warp();
  if (row >= n) return;
  x += row * c, y += row * c;
  float v[WIDE], sum = 0, squares = 0;
  for (int at = lane() * WIDE; at < c; at += STRIDE) {
    load(x + at, c - at, v);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum += v[i];
  }
  float mean = warp_sum(sum) / c;
  // The variance takes a second pass: mean(x^2) - mean^2 would cancel in FP32.
  for (int at = lane() * WIDE; at < c; at += STRIDE) {
    load(x + at, c - at, v);
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      if (at + i < c) squares += (v[i] - mean) * (v[i] - mean);
  }
  float rstd = 1.f / sqrtf(warp_sum(squares) / c + epsilon);
  for (int at = lane() * WIDE; at < c; at += STRIDE) {
    float g[WIDE], b[WIDE];
    load(x + at, c - at, v);
    fetch(gain, at, c, g);
    fetch(bias, at, c, b);
#pragma unroll
    for (int i = 0; i < WIDE; i++) v[i] = (v[i] - mean) * rstd * g[i] + b[i];
    store(v, c - at, y + at);
  }
  if (lane() == 0) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
}

template <class T>
__device__ void layernorm_forward(const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y,
                                  float *stats, int n, int c) {
  normalise(x, gain, bias, epsilon, y, stats, n, c);
}
EXPORT(layernorm_forward,
       (const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y, float *stats, int n, int c),
       (x, gain, bias, epsilon, y, stats, n, c))

/// The same with a gain or a bias that is trained; of each one form is there.
template <class T>
__device__ void layernorm_forward_trained(const T *x, const half_t *gain, const float *trained_gain, const half_t *bias,
                                          const float *trained_bias, float epsilon, T *y, float *stats, int n, int c) {
  normalise(x, Parameter{gain, trained_gain}, Parameter{bias, trained_bias}, epsilon, y, stats, n, c);
}
EXPORT(layernorm_forward_trained,
       (const T *x, const half_t *gain, const float *trained_gain, const half_t *bias, const float *trained_bias,
        float epsilon, T *y, float *stats, int n, int c),
       (x, gain, trained_gain, bias, trained_bias, epsilon, y, stats, n, c))

/// dx (n, c) += rstd (g - mean(g) - x_hat mean(g x_hat)), g = dy gain.
template <class T, class G>
__device__ __forceinline__ void add_gradient(const T *dy, const T *x, const float *stats, const G *gain, T *dx, int n,
                                             int c) {
  i64 row = i64(blockIdx.x) * 4 + warp();
  if (row >= n) return;
  dy += row * c, x += row * c, dx += row * c;
  float mean = stats[2 * row], rstd = stats[2 * row + 1];
  float g[WIDE], x_hat[WIDE], w[WIDE], g_sum = 0, gx_sum = 0;
  auto fetch = [&](int at) {
    load(dy + at, c - at, g);
    load(x + at, c - at, x_hat);
    load(gain + at, c - at, w); // 0 past the end, hence g too
#pragma unroll
    for (int i = 0; i < WIDE; i++) g[i] *= w[i], x_hat[i] = (x_hat[i] - mean) * rstd;
  };
  for (int at = lane() * WIDE; at < c; at += STRIDE) {
    fetch(at);
#pragma unroll
    for (int i = 0; i < WIDE; i++) g_sum += g[i], gx_sum += g[i] * x_hat[i];
  }
  float mean_g = warp_sum(g_sum) / c, mean_gx = warp_sum(gx_sum) / c;
  for (int at = lane() * WIDE; at < c; at += STRIDE) {
    float sum[WIDE];
    fetch(at);
    load(dx + at, c - at, sum);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum[i] += rstd * (g[i] - mean_g - x_hat[i] * mean_gx);
    store(sum, c - at, dx + at);
  }
}

template <class T>
__device__ void layernorm_backward(const T *dy, const T *x, const float *stats, const half_t *gain, T *dx, int n,
                                   int c) {
  add_gradient(dy, x, stats, gain, dx, n, c);
}
EXPORT(layernorm_backward,
       (const T *dy, const T *x, const float *stats, const half_t *gain, T *dx, int n, int c),
       (dy, x, stats, gain, dx, n, c))

/// The same with a gain that is trained.
template <class T>
__device__ void layernorm_backward_trained(const T *dy, const T *x, const float *stats, const float *gain, T *dx, int n,
                                           int c) {
  add_gradient(dy, x, stats, gain, dx, n, c);
}
EXPORT(layernorm_backward_trained,
       (const T *dy, const T *x, const float *stats, const float *gain, T *dx, int n, int c),
       (dy, x, stats, gain, dx, n, c))

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
