// The activation function of the MLP and its derivative, computed in FP32 for every type of activations.
//
// Grid: ceil(count / 2048) blocks of 256 threads; a thread takes 8 elements. `kind` numbers the variants of
// `Activation` in their order.
#include "activation/value.cuh"

template <int KIND> __device__ __forceinline__ float derivative(float x) {
  switch (KIND) {
  case GELU_TANH: {
    // y = x s with s = sigmoid(2u), so dy/dx = s + x s (1 - s) 2 du/dx. For large |x| the square in du/dx
    // overflows before s (1 - s) vanishes; the product is 0 there.
    float s = gate(x), curve = s * (1.f - s);
    float slope = 2 * SQRT_2_OVER_PI * (1.f + 3 * CUBE * x * x);
    return s + (curve == 0.f ? 0.f : x * curve * slope);
  }
  case GELU: return 0.5f * (1.f + erff(x * SQRT_HALF)) + x * expf(-0.5f * x * x) * 0.3989422804014327f;
  case RELU: return x > 0.f ? 1.f : 0.f;
  case SILU: {
    float s = sigmoid(x);
    return s * (1.f + x * (1.f - s));
  }
  default: {
    float t = tanhf(x);
    return 1.f - t * t;
  }
  }
}

template <int KIND, class T> __device__ void forward(const T *x, T *y, i64 count) {
  i64 at = own();
  float v[WIDE];
  load(x + at, count - at, v);
#pragma unroll
  for (int i = 0; i < WIDE; i++) v[i] = value<KIND>(v[i]);
  store(v, count - at, y + at);
}

template <int KIND, class T> __device__ void backward(const T *x, T *d, i64 count) {
  i64 at = own();
  float v[WIDE], gradient[WIDE];
  load(x + at, count - at, v);
  load(d + at, count - at, gradient);
#pragma unroll
  for (int i = 0; i < WIDE; i++) gradient[i] *= derivative<KIND>(v[i]);
  store(gradient, count - at, d + at);
}

// A grid has one kind, so the branch is the same for every thread.
#define BY_KIND(function)                                                                                        \
  switch (kind) {                                                                                                \
  case GELU_TANH: return function<GELU_TANH>(x, y, count);                                                       \
  case GELU: return function<GELU>(x, y, count);                                                                 \
  case RELU: return function<RELU>(x, y, count);                                                                 \
  case SILU: return function<SILU>(x, y, count);                                                                 \
  default: return function<TANH>(x, y, count);                                                                   \
  }

/// y (count) = f(x (count)).
template <class T> __device__ void activation_forward(int kind, const T *x, T *y, i64 count) {
  BY_KIND(forward)
}
EXPORT(activation_forward, (int kind, const T *x, T *y, i64 count), (kind, x, y, count))

/// y (count) *= f'(x (count)): from the gradient of the output to that of the input.
template <class T> __device__ void activation_backward(int kind, const T *x, T *y, i64 count) {
  BY_KIND(backward)
}
EXPORT(activation_backward, (int kind, const T *x, T *y, i64 count), (kind, x, y, count))
