// Activation functions of the MLP.
#pragma once
#include "common.cuh"

enum Kind { GELU_TANH, GELU, RELU, SILU, TANH };

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
constexpr float CUBE = 0.044715f;
constexpr float SQRT_HALF = 0.7071067811865476f;

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

/// sigmoid(2u) of the tanh approximation.
__device__ __forceinline__ float gate(float x) {
  return sigmoid(2 * SQRT_2_OVER_PI * (x + CUBE * x * x * x));
}

template <int KIND> __device__ __forceinline__ float value(float x) {
  switch (KIND) {
  case GELU_TANH: return x * gate(x);
  case GELU: return 0.5f * x * (1.f + erff(x * SQRT_HALF));
  case RELU: return fmaxf(x, 0.f);
  case SILU: return x * sigmoid(x);
  default: return tanhf(x);
  }
}
