// Casts between element types, and sums of flat FP32 lists.
//
// Grid: ceil(count / 2048) blocks of 256 threads; a thread takes 8 elements.
#include "common.cuh"

/// y (count) = x (count), to nearest even; values beyond FP16's largest become infinite.
template <class From, class To> __device__ void cast(const From *x, To *y, i64 count) {
  i64 at = own();
  float values[WIDE];
  load(x + at, count - at, values);
  store(values, count - at, y + at);
}

#define CAST(from, From, to, To)                                                                                 \
  extern "C" __global__ void cast_##from##_##to(const From *x, To *y, i64 count) { cast(x, y, count); }          \
  LAUNCHER(cast_##from##_##to)
CAST(f32, float, f16, half_t)
CAST(f32, float, bf16, bf16_t)
CAST(f16, half_t, f32, float)
CAST(bf16, bf16_t, f32, float)
CAST(f16, half_t, bf16, bf16_t)

/// to (count) += from (count).
extern "C" __global__ void add_f32(const float *from, float *to, i64 count) {
  i64 at = own();
  float x[WIDE], sum[WIDE];
  load(from + at, count - at, x);
  load(to + at, count - at, sum);
#pragma unroll
  for (int i = 0; i < WIDE; i++) sum[i] += x[i];
  store(sum, count - at, to + at);
}
LAUNCHER(add_f32)

/// x (count) *= factor.
extern "C" __global__ void scale_f32(float *x, float factor, i64 count) {
  i64 at = own();
  float values[WIDE];
  load(x + at, count - at, values);
#pragma unroll
  for (int i = 0; i < WIDE; i++) values[i] *= factor;
  store(values, count - at, x + at);
}
LAUNCHER(scale_f32)
