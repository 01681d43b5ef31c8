// Kernels with known mistakes that the shim must notice.
#include "common.cuh"

/// Reverses a block's numbers through shared memory, with or without the necessary barrier.
template <bool WITH_BARRIER> __device__ void reverse(int *numbers) {
  SHARED(int[128], copy);
  copy[threadIdx.x] = numbers[threadIdx.x];
  if (WITH_BARRIER) __syncthreads();
  numbers[threadIdx.x] = copy[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void reverse_right(int *numbers) { reverse<true>(numbers); }
LAUNCHER(reverse_right)
extern "C" __global__ void reverse_without_barrier(int *numbers) { reverse<false>(numbers); }
LAUNCHER(reverse_without_barrier)

/// Half of the threads wait for the others, which have returned.
extern "C" __global__ void divergent_barrier(int *numbers) {
  if (threadIdx.x < 64) return;
  __syncthreads();
  numbers[threadIdx.x] = 0;
}
LAUNCHER(divergent_barrier)

/// Writes one element past the end of a list of 128.
extern "C" __global__ void beyond_the_end(int *numbers) { numbers[threadIdx.x + 1] = 7; }
LAUNCHER(beyond_the_end)

/// Reads 16 bytes by one instruction from wherever it is told.
extern "C" __global__ void wide_load(const unsigned char *from, int *to) {
  Vector<float> x = *reinterpret_cast<const Vector<float> *>(from);
  to[threadIdx.x] = int(__float_as_uint(x.at[0]));
}
LAUNCHER(wide_load)
