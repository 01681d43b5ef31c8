// Norm and finite check of the gradient, and AdamW over the flat FP32 store, in one launch each.
#include "adamw.cuh"

constexpr int PIECE = 1 << 15; // elements that a block sums up

/// parts (ceil(count / 32768)): sums of squares of pieces of g (count), in f64. Grid: a block of 256 for each piece.
extern "C" __global__ void square_sum_parts(const float *g, i64 count, double *parts) {
  i64 first = i64(blockIdx.x) * PIECE;
  double sum = 0;
  float x[WIDE];
  for (int at = threadIdx.x * WIDE; at < PIECE && first + at < count; at += blockDim.x * WIDE) {
    load(g + first + at, count - first - at, x);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum += double(x[i]) * double(x[i]);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
LAUNCHER(square_sum_parts)

/// The norm and the factor of a scaled loss's gradient from parts (count). Grid: one block of 256.
///
/// The sum is finite exactly when every element is: squares of floats cannot overflow f64. A gradient that is
/// not finite sets `skip`, and the update's kernels then change nothing.
extern "C" __global__ void square_sum_finish(const double *parts, int count, float loss_scale, double clip,
                                             Control *control) {
  double sum = 0;
  for (int at = threadIdx.x; at < count; at += blockDim.x) sum += parts[at];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  double norm = sqrt(sum) / loss_scale;
  double factor = clip > 0 ? fmin(1.0, clip / (norm + 1e-6)) : 1.0; // as PyTorch's clip_grad_norm_
  *control = {sum / loss_scale / loss_scale, float(norm), float(factor / loss_scale), norm < INFINITY ? 0u : 1u, 0};
}
LAUNCHER(square_sum_finish)

/// Updates values and both moments (count) in place. Grid: ceil(count / 1024) blocks of 256.
extern "C" __global__ void adamw(float *values, const float *gradient, float *first, float *second, i64 count,
                                 Factors factors, const Control *control) {
  if (control->skip) return;
  i64 at = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * RUN, left = count - at;
  if (left >= RUN && aligned(values) && aligned(gradient) && aligned(first) && aligned(second)) {
    auto wide = [at](auto *list) { return reinterpret_cast<Vector<float> *>(const_cast<float *>(list + at)); };
    Vector<float> w = *wide(values), g = *wide(gradient), m = *wide(first), v = *wide(second);
#pragma unroll
    for (int i = 0; i < RUN; i++) factors.apply(w.at[i], g.at[i] * control->factor, m.at[i], v.at[i]);
    *wide(values) = w, *wide(first) = m, *wide(second) = v;
  } else {
    for (i64 i = at; i < min(at + RUN, count); i++)
      factors.apply(values[i], gradient[i] * control->factor, first[i], second[i]);
  }
}
LAUNCHER(adamw)
