// AdamW with 8-bit moments: a CUDA block of 256 threads for each block of 256 elements that share a scale.
#include "../adamw/adamw.cuh"

constexpr int BLOCK = 256;
constexpr int ZERO = 127; // code of zero in the signed book

/// Index of the value nearest to x >= 0 in `size` ascending values from 0, of two equally near ones the lower.
__device__ int nearest(const float *values, int size, float x) {
  int low = 0, high = size; // values[low] <= x < values[high]
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (values[middle] <= x) low = middle;
    else high = middle;
  }
  if (high == size) return low;
  // The sum of two floats of similar size is exact in f64.
  double border = (double(values[low]) + double(values[high])) / 2;
  return double(x) > border ? high : low;
}

/// The largest absolute value of the block, at most the largest float: an infinite scale would decode to NaN.
__device__ float scale_of(float x) {
  SHARED(float[BLOCK / 32], parts);
  float most = warp_max(fabsf(x));
  if (lane() == 0) parts[warp()] = most;
  __syncthreads();
  for (int i = 0; i < BLOCK / 32; i++) most = fmaxf(most, parts[i]);
  __syncthreads(); // the next call writes `parts` again
  return fminf(most, 3.402823466e38f);
}

/// Updates values (count), blocks of one tensor of which the last may be shorter, and both moments: codes (count),
/// scales (ceil(count / 256)). books (512): the values of the signed and of the unsigned book, ascending.
/// Grid: ceil(count / 256) blocks of 256.
extern "C" __global__ void adamw8(float *values, const float *gradient, uint8_t *first_codes, float *first_scales,
                                  uint8_t *second_codes, float *second_scales, i64 count, Factors factors,
                                  const Control *control, const float *books) {
  if (control->skip) return;
  SHARED(float[2][256], book);
  book[0][threadIdx.x] = books[threadIdx.x];
  book[1][threadIdx.x] = books[256 + threadIdx.x];
  __syncthreads();
  i64 at = i64(blockIdx.x) * BLOCK + threadIdx.x;
  bool exists = at < count;
  float m = 0, v = 0;
  if (exists) {
    m = book[0][first_codes[at]] * first_scales[blockIdx.x];
    v = book[1][second_codes[at]] * second_scales[blockIdx.x];
    factors.apply(values[at], gradient[at] * control->factor, m, v);
  }
  // After these calls every thread has read the old scales.
  float m_scale = scale_of(m), v_scale = scale_of(v);
  if (threadIdx.x == 0) first_scales[blockIdx.x] = m_scale, second_scales[blockIdx.x] = v_scale;
  if (!exists) return;
  float m_part = m / (m_scale == 0.f ? 1.f : m_scale), v_part = v / (v_scale == 0.f ? 1.f : v_scale);
  int steps = nearest(book[0] + ZERO, 256 - ZERO, fabsf(m_part));
  first_codes[at] = m_part < 0.f ? ZERO - min(steps, ZERO) : ZERO + steps;
  // A second moment above zero never becomes zero: see `adamw8`.
  second_codes[at] = max(nearest(book[1], 256, v_part), v > 0.f ? 1 : 0);
}
LAUNCHER(adamw8)
