// A cuBLASLt for machines without a GPU: one product by plain loops, exactly as its descriptors say.
//
// It refuses operands outside of the device's memory or less aligned than the algorithm was chosen for, an algorithm of
// another product, and too little workspace. Algorithms for more than 16 bytes of alignment add in another order, so that
// a program whose buffers decide the algorithm shows other bits.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "record.h"

typedef int Result; // 0: success
typedef void *Handle;
constexpr Result INVALID = 7;
enum Type { F32 = 0, F16 = 2, BF16 = 14 };
enum Attribute { TRANSPOSE_A = 3, TRANSPOSE_B = 4, EPILOGUE = 7, BIAS = 8, SIDE = 11, SIDE_STRIDE = 12 };
constexpr int SUMS_IN_F32 = 68;
/// Epilogues, as in cublasLt.h: GELU is that of tanh; its input is written to the side matrix, or read from there.
enum Epilogue { PLAIN = 1, WITH_BIAS = 4, GELU = 160, GELU_WITH_BIAS = 164, GELU_GRADIENT = 192 };
/// Attributes of a preference: most bytes of workspace, then the alignment of A, B, C and D.
enum Preferred { WORKSPACE = 1, ALIGNMENT = 5 };

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Product {
  int transpose_a, transpose_b, epilogue;
  const void *bias;
  void *side;
  int64_t side_stride;

  bool has_bias() const { return epilogue == WITH_BIAS || epilogue == GELU_WITH_BIAS; }
  bool has_side() const { return epilogue >= GELU; }
};
struct Preference {
  uint64_t workspace;
  uint32_t aligned[4];
};
/// What an algorithm was chosen for: sizes of D and of the sums, types, alignments, workspace.
struct Algorithm {
  uint32_t m, n, k;
  uint8_t factors, result, aligned[4], epilogue;
  uint64_t workspace;
};
struct Choice {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

static Result refuse(const char *why) { return fprintf(stderr, "shim: cuBLASLt: %s\n", why), INVALID; }

static float gelu(float x, bool derivative) {
  float u = 0.7978845608028654f * (x + 0.044715f * x * x * x), t = tanhf(u);
  if (!derivative) return 0.5f * x * (1 + t);
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608028654f * (1 + 3 * 0.044715f * x * x);
}

static float get(int type, const void *from, size_t at) {
  if (type == F32) return static_cast<const float *>(from)[at];
  if (type == F16) return float(static_cast<const _Float16 *>(from)[at]);
  uint32_t bits = uint32_t(static_cast<const uint16_t *>(from)[at]) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void put(int type, void *to, size_t at, float value) {
  if (type == F32) {
    static_cast<float *>(to)[at] = value;
  } else if (type == F16) {
    static_cast<_Float16 *>(to)[at] = _Float16(value);
  } else {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    static_cast<uint16_t *>(to)[at] = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

extern "C" {
Result cublasLtCreate(Handle *library) { return *library = malloc(1), 0; }
Result cublasLtDestroy(Handle library) { return free(library), 0; }
Result cublasLtMatrixLayoutCreate(Handle *layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  if (stride < int64_t(rows)) return refuse("columns overlap");
  return *layout = new Layout{type, rows, columns, stride}, 0;
}
Result cublasLtMatrixLayoutDestroy(Handle layout) { return delete static_cast<Layout *>(layout), 0; }
Result cublasLtMatmulDescCreate(Handle *product, int sums, int scale) {
  if (sums != SUMS_IN_F32 || scale != F32) return refuse("sums are not FP32");
  return *product = new Product{0, 0, PLAIN}, 0;
}
Result cublasLtMatmulDescDestroy(Handle product) { return delete static_cast<Product *>(product), 0; }
Result cublasLtMatmulDescSetAttribute(Handle handle, int attribute, const void *value, size_t size) {
  Product &product = *static_cast<Product *>(handle);
  if (attribute == BIAS && size == 8) return memcpy(&product.bias, value, size), 0;
  if (attribute == SIDE && size == 8) return memcpy(&product.side, value, size), 0;
  if (attribute == SIDE_STRIDE && size == 8) return memcpy(&product.side_stride, value, size), 0;
  int number = 0;
  if (size != sizeof number) return refuse("an attribute of another size");
  memcpy(&number, value, size);
  if (attribute == TRANSPOSE_A) return product.transpose_a = number, 0;
  if (attribute == TRANSPOSE_B) return product.transpose_b = number, 0;
  if (attribute == EPILOGUE) return product.epilogue = number, 0;
  return refuse("an attribute that the shim does not know");
}
Result cublasLtMatmulPreferenceCreate(Handle *preference) {
  return *preference = new Preference{0, {256, 256, 256, 256}}, 0;
}
Result cublasLtMatmulPreferenceDestroy(Handle preference) { return delete static_cast<Preference *>(preference), 0; }
Result cublasLtMatmulPreferenceSetAttribute(Handle handle, int attribute, const void *value, size_t size) {
  Preference &own = *static_cast<Preference *>(handle);
  if (attribute == WORKSPACE && size == 8) return memcpy(&own.workspace, value, size), 0;
  int operand = attribute - ALIGNMENT;
  if (operand >= 0 && operand < 4 && size == 4) memcpy(&own.aligned[operand], value, size);
  return 0;
}

/// The sizes that an algorithm is for; false where the matrices do not fit.
static bool describe(const Product &product, const Layout &a, const Layout &b, const Layout &d, Algorithm *of) {
  bool ta = product.transpose_a, tb = product.transpose_b;
  of->m = d.rows, of->n = d.columns, of->k = ta ? a.rows : a.columns;
  of->factors = a.type, of->result = d.type, of->epilogue = product.epilogue;
  return (ta ? a.columns : a.rows) == of->m && (tb ? b.rows : b.columns) == of->n &&
         (tb ? b.columns : b.rows) == of->k && a.type == b.type;
}

Result cublasLtMatmulAlgoGetHeuristic(Handle, Handle product, Handle a, Handle b, Handle, Handle d, Handle preference, int,
                                      Choice *choice, int *count) {
  const Preference &own = *static_cast<Preference *>(preference);
  Algorithm of = {};
  if (!describe(*static_cast<Product *>(product), *static_cast<Layout *>(a), *static_cast<Layout *>(b),
                *static_cast<Layout *>(d), &of))
    return refuse("the matrices do not fit");
  int epilogue = of.epilogue;
  if (epilogue != PLAIN && epilogue != WITH_BIAS && epilogue != GELU && epilogue != GELU_WITH_BIAS && epilogue != GELU_GRADIENT)
    return refuse("an epilogue that the shim does not know");
  for (int i = 0; i < 4; i++) of.aligned[i] = own.aligned[i] > 128 ? 128 : own.aligned[i];
  of.workspace = own.workspace;
  *choice = Choice{};
  static_assert(sizeof of <= sizeof choice->algorithm, "an algorithm is opaque bytes");
  memcpy(choice->algorithm, &of, sizeof of);
  choice->workspace = of.workspace;
  return *count = 1, 0;
}

/// Defined by the libcuda in the same folder.
Result shim_give(Handle stream, const std::function<void()> *work);
int shim_has(const void *place, size_t size);

static size_t width(int type) { return type == F32 ? 4 : 2; }
/// Bytes of a matrix from its first element to its last.
static size_t bytes(const Layout &own) { return ((own.columns - 1) * own.stride + own.rows) * width(own.type); }

Result cublasLtMatmul(Handle, Handle product_, const float *alpha, const void *A, Handle a_, const void *B, Handle b_,
                      const float *beta, const void *C, Handle c_, void *D, Handle d_, const void *algorithm, void *workspace,
                      size_t workspace_bytes, Handle stream) {
  const Product product = *static_cast<Product *>(product_);
  const Layout a = *static_cast<Layout *>(a_), b = *static_cast<Layout *>(b_);
  const Layout c = *static_cast<Layout *>(c_), d = *static_cast<Layout *>(d_);
  bool ta = product.transpose_a, tb = product.transpose_b;
  size_t m = d.rows, n = d.columns, k = ta ? a.rows : a.columns;
  Algorithm own = {}, chosen;
  if (!describe(product, a, b, d, &own)) return refuse("the matrices do not fit");
  memcpy(&chosen, algorithm, sizeof chosen);
  if (chosen.epilogue != own.epilogue || chosen.m != own.m || chosen.n != own.n || chosen.k != own.k || chosen.factors != own.factors || chosen.result != own.result)
    return refuse("an algorithm of another product");
  const void *places[4] = {A, B, C, D};
  for (int i = 0; i < 4; i++)
    if (reinterpret_cast<uintptr_t>(places[i]) % chosen.aligned[i])
      return refuse("an operand that is less aligned than its algorithm needs");
  bool held = shim_has(A, bytes(a)) && shim_has(B, bytes(b)) && shim_has(D, bytes(d)) && (*beta == 0 || shim_has(C, bytes(c)));
  if (!held || (product.has_bias() && !shim_has(product.bias, m * width(d.type))))
    return refuse("an operand outside of the device's memory");
  if (product.has_side()) {
    if (product.side_stride < int64_t(m) || product.side_stride % 8 || reinterpret_cast<uintptr_t>(product.side) % 16)
      return refuse("a side matrix whose columns are no multiples of 8 elements, overlap, or are not aligned");
    if (d.type == F32) return refuse("a side matrix of FP32 elements");
    if (!shim_has(product.side, ((n - 1) * product.side_stride + m) * width(d.type)))
      return refuse("a side matrix outside of the device's memory");
  }
  if (workspace_bytes < chosen.workspace || !shim_has(workspace, workspace_bytes)) return refuse("too little workspace");
  record::line("product %zu %zu %zu %d %d %d %d\n", m, n, k, a.type, d.type, product.epilogue, *beta != 0);
  bool backwards = chosen.aligned[0] > 16 || chosen.aligned[1] > 16 || chosen.aligned[2] > 16 || chosen.aligned[3] > 16;
  std::function<void()> work = [=, alpha = *alpha, beta = *beta] {
    std::vector<float> left(m * k), right(n * k);
    for (size_t i = 0; i < m; i++)
      for (size_t q = 0; q < k; q++) left[i * k + q] = get(a.type, A, ta ? q + i * a.stride : i + q * a.stride);
    for (size_t j = 0; j < n; j++)
      for (size_t q = 0; q < k; q++) right[j * k + q] = get(b.type, B, tb ? j + q * b.stride : q + j * b.stride);
    for (size_t j = 0; j < n; j++) {
      for (size_t i = 0; i < m; i++) {
        float sum = 0;
        for (size_t q = 0; q < k; q++) sum += left[i * k + q] * right[j * k + q];
        if (backwards && k > 1) { // the first half after the second
          float halves[2] = {};
          for (size_t q = 0; q < k; q++) halves[q < k / 2] += left[i * k + q] * right[j * k + q];
          sum = halves[0] + halves[1];
        }
        sum *= alpha;
        if (beta != 0) sum += beta * get(c.type, C, i + j * c.stride);
        if (product.has_bias()) sum += get(d.type, product.bias, i);
        size_t beside = i + j * product.side_stride;
        if (product.epilogue == GELU_GRADIENT) {
          sum *= gelu(get(d.type, product.side, beside), true);
        } else if (product.has_side()) {
          put(d.type, product.side, beside, sum);
          sum = gelu(sum, false);
        }
        put(d.type, D, i + j * d.stride, sum);
      }
    }
  };
  return shim_give(stream, &work);
}
}
