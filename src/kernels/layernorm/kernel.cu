// Layer normalisation, forward and backward; a warp for each row, so that no sum leaves the warp.
//
// Grid: ceil(n / 4) blocks of 128 threads. A row is read again for each pass over it, from the L1 cache.
#include "common.cuh"

constexpr int STRIDE = 32 * WIDE; // elements that a warp loads by one instruction

/// y (n, c) and stats (n, 2) = mean and rstd of x (n, c).
template <class T>
__device__ void layernorm_forward(const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y,
                                  float *stats, int n, int c) {
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
    load(gain + at, c - at, g);
    load(bias + at, c - at, b);
#pragma unroll
    for (int i = 0; i < WIDE; i++) v[i] = (v[i] - mean) * rstd * g[i] + b[i];
    store(v, c - at, y + at);
  }
  if (lane() == 0) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
}
EXPORT(layernorm_forward,
       (const T *x, const half_t *gain, const half_t *bias, float epsilon, T *y, float *stats, int n, int c),
       (x, gain, bias, epsilon, y, stats, n, c))

/// dx (n, c) += rstd (g - mean(g) - x_hat mean(g x_hat)), g = dy gain.
template <class T>
__device__ void layernorm_backward(const T *dy, const T *x, const float *stats, const half_t *gain, T *dx, int n,
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
EXPORT(layernorm_backward,
       (const T *dy, const T *x, const float *stats, const half_t *gain, T *dx, int n, int c),
       (dy, x, stats, gain, dx, n, c))
