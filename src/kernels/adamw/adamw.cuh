// The arithmetic of one AdamW update, shared by FP32 and 8-bit moments.
#pragma once
#include "common.cuh"

constexpr int RUN = 4; // elements that a thread of the FP32 update takes

/// Results of the gradient's norm that the update reads, in device memory.
struct Control {
  double square_sum; // of the unscaled gradient
  float norm;
  float factor; // unscaling and clipping
  unsigned skip;
  unsigned pad;
};

/// Numbers that all elements of an update share: the fields of the CPU side's `Factors`.
struct Factors {
  float b1, b2, c1, c2, step_size, root, keep, epsilon;

  __device__ __forceinline__ void apply(float &w, float g, float &m, float &v) const {
    m = b1 * m + c1 * g;
    v = b2 * v + c2 * g * g;
    w = w * keep - step_size * m / (sqrtf(v) * root + epsilon);
  }
};
