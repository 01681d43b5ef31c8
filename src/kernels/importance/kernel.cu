// Importance of the triplets of deltas, in FP32. Means over rows and columns are summed in f64, in a fixed order.
#include "common.cuh"

/// Numbers that all values of an update share: the fields that `smooth` of the host writes.
struct Smoothing {
  float b1, b2, c1, c2, factor;
};

/// mean and uncertainty (count) from values and gradient (count). Grid: ceil(count / 1024) blocks of 256.
extern "C" __global__ void importance_smooth(const float *values, const float *gradient, float *mean,
                                             float *uncertainty, i64 count, Smoothing by) {
  i64 first = i64(blockIdx.x) * 1024;
  for (i64 at = first + threadIdx.x; at < min(first + 1024, count); at += blockDim.x) {
    float importance = fabsf(values[at] * (gradient[at] * by.factor));
    float m = by.b1 * mean[at] + by.c1 * importance;
    mean[at] = m;
    uncertainty[at] = by.b2 * uncertainty[at] + by.c2 * fabsf(importance - m);
  }
}
LAUNCHER(importance_smooth)

/// scores (rank) of one delta, with A (rank, inputs) at `a`, B (outputs, rank) at `b` and d (rank) at `d` of mean and
/// uncertainty. Grid: rank blocks of 256.
extern "C" __global__ void importance_scores(const float *mean, const float *uncertainty, i64 a, i64 b, i64 d,
                                             float *scores, int rank, int inputs, int outputs) {
  int k = blockIdx.x;
  double row = 0, column = 0;
  for (int i = threadIdx.x; i < inputs; i += blockDim.x) {
    i64 at = a + i64(k) * inputs + i;
    row += double(mean[at] * uncertainty[at]);
  }
  for (int o = threadIdx.x; o < outputs; o += blockDim.x) {
    i64 at = b + i64(o) * rank + k;
    column += double(mean[at] * uncertainty[at]);
  }
  double sum = block_sum(row / inputs + column / outputs);
  if (threadIdx.x == 0) scores[k] = float(double(mean[d + k] * uncertainty[d + k]) + sum);
}
LAUNCHER(importance_scores)

/// d (count) = 0 where kept (count) is. Grid: ceil(count / 256) blocks of 256.
extern "C" __global__ void importance_keep(const float *kept, float *d, int count) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count && kept[at] == 0.f) d[at] = 0.f;
}
LAUNCHER(importance_keep)
