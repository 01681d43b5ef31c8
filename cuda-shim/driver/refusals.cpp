// Makes every call that the driver of the shim has to refuse, each in a process of its own, and fails where one is not
// refused: `refusals`. Linked with the two libraries beside it.
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

typedef int Result;
typedef void *Handle;
typedef unsigned long long Address;

extern "C" {
Result cuInit(unsigned);
Result cuDevicePrimaryCtxRetain(Handle *, int);
Result cuCtxSetCurrent(Handle);
Result cuCtxCreate_v4(Handle *, void *, unsigned, int);
Result cuStreamCreate(Handle *, unsigned);
Result cuStreamSynchronize(Handle);
Result cuStreamBeginCapture_v2(Handle, int);
Result cuStreamEndCapture(Handle, Handle *);
Result cuMemAlloc_v2(Address *, size_t);
Result cuMemFree_v2(Address);
Result cuMemHostAlloc(void **, size_t, unsigned);
Result cuMemsetD8Async(Address, unsigned char, size_t, Handle);
Result cuMemcpyHtoDAsync_v2(Address, const void *, size_t, Handle);
Result cuMemcpyDtoHAsync_v2(void *, Address, size_t, Handle);
Result cuMemcpyAsync(Address, Address, size_t, Handle);
Result cuModuleLoadData(Handle *, const void *);
Result cuModuleGetFunction(Handle *, Handle, const char *);
Result cuFuncSetAttribute(Handle, int, int);
Result cuLaunchKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
Result cublasLtMatrixLayoutCreate(Handle *, int, uint64_t, uint64_t, int64_t);
Result cublasLtMatmulDescCreate(Handle *, int, int);
Result cublasLtMatmulDescSetAttribute(Handle, int, const void *, size_t);
Result cublasLtMatmulPreferenceCreate(Handle *);
Result cublasLtMatmulPreferenceSetAttribute(Handle, int, const void *, size_t);
Result cublasLtMatmulAlgoGetHeuristic(Handle, Handle, Handle, Handle, Handle, Handle, Handle, int, void *, int *);
Result cublasLtMatmul(Handle, Handle, const float *, const void *, Handle, const void *, Handle, const float *,
                      const void *, Handle, void *, Handle, const void *, void *, size_t, Handle);
}

static Handle context, kernels, copies;
static Address memory;
constexpr size_t BYTES = 1024;

static void must(Result result) {
  if (result) fprintf(stderr, "a call that is right was refused with %d\n", result), _exit(3);
}
static void prepare() {
  must(cuInit(0)), must(cuDevicePrimaryCtxRetain(&context, 0)), must(cuCtxSetCurrent(context));
  must(cuStreamCreate(&kernels, 0)), must(cuStreamCreate(&copies, 0));
  must(cuMemAlloc_v2(&memory, BYTES));
}

/// Launches a kernel of selftest.cu and waits.
static Result launch(const char *name, unsigned threads, unsigned shared, void **arguments, unsigned y = 1) {
  Handle module, function;
  must(cuModuleLoadData(&module, "stand-in")), must(cuModuleGetFunction(&function, module, name));
  Result started = cuLaunchKernel(function, 1, y, 1, threads, 1, 1, shared, kernels, arguments, nullptr);
  return started ? started : cuStreamSynchronize(kernels);
}
static Result reverse(Address numbers, unsigned threads = 128, unsigned shared = 0, unsigned y = 1) {
  void *arguments[] = {&numbers};
  return launch("reverse_right", threads, shared, arguments, y);
}
static Result wide_load(Address from) {
  void *arguments[] = {&from, &memory};
  return launch("wide_load", 32, 0, arguments);
}

/// Whether a capture that makes `call` is spoiled.
template <class Call> static Result captured(const Call &call) {
  Handle graph;
  must(cuStreamBeginCapture_v2(kernels, 1));
  Result now = call(), end = cuStreamEndCapture(kernels, &graph);
  return now && end ? now : 0;
}

/// An epilogue, and the side matrix that it reads or writes: the elements between its columns, and the bytes before it.
struct Side {
  int epilogue;
  int64_t stride;
  size_t off;
};

/// A product of 16 x 16 matrices whose algorithm was chosen for `chosen` bytes of alignment, and whose A is `off` bytes
/// after the start of the memory.
static Result product(uint32_t chosen, size_t off, size_t workspace_bytes = 256, uint64_t n = 16, Side side = {}) {
  Handle layout, other, description, preference;
  Address all, workspace;
  must(cuMemAlloc_v2(&all, 1 << 16)), must(cuMemAlloc_v2(&workspace, 256));
  must(cuMemsetD8Async(all, 0, 1 << 16, kernels));
  must(cublasLtMatrixLayoutCreate(&layout, 2, 16, 16, 16)), must(cublasLtMatrixLayoutCreate(&other, 2, 16, n, 16));
  must(cublasLtMatmulDescCreate(&description, 68, 0)), must(cublasLtMatmulPreferenceCreate(&preference));
  if (side.epilogue) {
    Address place = all + (1 << 13) + side.off;
    must(cublasLtMatmulDescSetAttribute(description, 7, &side.epilogue, sizeof side.epilogue));
    must(cublasLtMatmulDescSetAttribute(description, 11, &place, sizeof place));
    must(cublasLtMatmulDescSetAttribute(description, 12, &side.stride, sizeof side.stride));
  }
  for (int operand = 5; operand < 9; operand++)
    must(cublasLtMatmulPreferenceSetAttribute(preference, operand, &chosen, sizeof chosen));
  uint64_t most = 256;
  must(cublasLtMatmulPreferenceSetAttribute(preference, 1, &most, sizeof most));
  char choice[96];
  int count;
  must(cublasLtMatmulAlgoGetHeuristic(nullptr, description, layout, layout, layout, layout, preference, 1, choice, &count));
  float one = 1, zero = 0;
  auto at = [&](size_t place) { return reinterpret_cast<char *>(all) + place; };
  Result started = cublasLtMatmul(nullptr, description, &one, at(off), layout, at(1 << 14), other, &zero, at(1 << 15),
                                  other, at(1 << 15), other, choice, reinterpret_cast<void *>(workspace), workspace_bytes,
                                  kernels);
  return started ? started : cuStreamSynchronize(kernels);
}

struct Case {
  const char *what;
  bool refused;
  Result (*call)();
};

static char pageable[BYTES];
static Result freed_load() {
  Address other;
  must(cuMemAlloc_v2(&other, BYTES)), must(wide_load(other)), must(cuMemFree_v2(other));
  return wide_load(other);
}
static Result written_beside() {
  Address other;
  must(cuMemAlloc_v2(&other, 100)); // 156 bytes of its last 256 are nobody's
  reinterpret_cast<char *>(other)[100] = 0;
  return cuMemFree_v2(other);
}
static Result after_a_fault() {
  return wide_load(memory + BYTES) ? cuMemsetD8Async(memory, 0, 4, kernels) : 0;
}
static Result without_context() {
  Result found = 0;
  std::thread([&] { found = cuMemsetD8Async(memory, 0, 4, kernels); }).join();
  return found;
}
static Result allowed_shared() {
  Handle module, function;
  must(cuModuleLoadData(&module, "stand-in")), must(cuModuleGetFunction(&function, module, "reverse_right"));
  must(cuFuncSetAttribute(function, 8, 60 << 10));
  return reverse(memory, 128, 60 << 10);
}
static Result too_much_shared() {
  Handle function;
  must(cuModuleGetFunction(&function, nullptr, "reverse_right"));
  return cuFuncSetAttribute(function, 8, 228 << 10);
}
static Result pinned_copy() {
  void *page;
  must(cuMemHostAlloc(&page, BYTES, 0));
  must(cuMemcpyAsync(memory, reinterpret_cast<Address>(page), BYTES, copies));
  return cuMemcpyHtoDAsync_v2(memory, page, BYTES, copies);
}

static const Case CASES[] = {
    {"a right launch", false, [] { return reverse(memory); }},
    {"a kernel that reads beyond an allocation", true, [] { return wide_load(memory + BYTES); }},
    {"a kernel that reads before one", true, [] { return wide_load(memory - 8192); }},
    {"a kernel that reads what was freed", true, freed_load},
    {"bytes written beside an allocation", true, written_beside},
    {"a misaligned vector", true, [] { return wide_load(memory + 4); }},
    {"any call after a fault", true, after_a_fault},
    {"a block of 2048 threads", true, [] { return reverse(memory, 2048); }},
    {"a grid of 65536 blocks in y", true, [] { return reverse(memory, 128, 0, 65536); }},
    {"shared memory that was not asked for", true, [] { return reverse(memory, 128, 60 << 10); }},
    {"shared memory that was", false, allowed_shared},
    {"more shared memory than there is", true, too_much_shared},
    {"a memset that leaves an allocation", true, [] { return cuMemsetD8Async(memory, 0, BYTES + 1, kernels); }},
    {"a copy that leaves one", true, [] { return cuMemcpyHtoDAsync_v2(memory + 1, pageable, BYTES, kernels); }},
    {"a copy from pages of the host in the kernels' stream", false,
     [] { return cuMemcpyHtoDAsync_v2(memory, pageable, BYTES, kernels); }},
    {"the same beside it", true, [] { return cuMemcpyHtoDAsync_v2(memory, pageable, BYTES, copies); }},
    {"a copy to such pages beside it", true, [] { return cuMemcpyDtoHAsync_v2(pageable, memory, BYTES, copies); }},
    {"a copy between addresses of which one is of no allocation", true,
     [] { return cuMemcpyAsync(memory, reinterpret_cast<Address>(pageable), BYTES, copies); }},
    {"a copy from pinned pages", false, pinned_copy},
    {"a kernel on a stream for copies", true,
     [] {
       Handle function;
       must(cuModuleGetFunction(&function, nullptr, "reverse_right"));
       void *arguments[] = {&memory};
       return cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, copies, arguments, nullptr);
     }},
    {"a second context", true, [] { return cuCtxCreate_v4(&context, nullptr, 0, 0); }},
    {"a context that is none", true, [] { return cuCtxSetCurrent(&context); }},
    {"a thread without the context", true, without_context},
    {"an allocation in a capture", true, [] { return captured([] { return cuMemAlloc_v2(&memory, 1); }); }},
    {"waiting in a capture", true, [] { return captured([] { return cuStreamSynchronize(copies); }); }},
    {"loading code in a capture", true,
     [] { return captured([] { Handle module; return cuModuleLoadData(&module, "stand-in"); }); }},
    {"an image that no compiler wrote", true,
     [] { Handle module; return cuModuleLoadData(&module, "// a kernel's source"); }},
    {"a copy from pages of the host in a capture", true,
     [] { return captured([] { return cuMemcpyHtoDAsync_v2(memory, pageable, 4, kernels); }); }},
    {"a memset in a capture", false, [] { return captured([] { return cuMemsetD8Async(memory, 0, 4, kernels); }); }},
    {"a right product", false, [] { return product(16, 16); }},
    {"an operand less aligned than its algorithm", true, [] { return product(16, 8); }},
    {"an operand outside of the memory", true, [] { return product(16, size_t(1) << 20); }},
    {"too little workspace", true, [] { return product(16, 0, 255); }},
    {"an algorithm of another product", true, [] { return product(16, 0, 256, 8); }},
    {"a product with GELU", false, [] { return product(16, 0, 256, 16, {160, 24, 16}); }},
    {"a product with GELU's derivative", false, [] { return product(16, 0, 256, 16, {192, 16, 0}); }},
    {"columns of its side matrix that overlap", true, [] { return product(16, 0, 256, 16, {160, 8, 0}); }},
    {"columns of it at no multiple of 8 elements", true, [] { return product(16, 0, 256, 16, {160, 20, 0}); }},
    {"a side matrix off 16 bytes", true, [] { return product(16, 0, 256, 16, {192, 16, 8}); }},
    {"a side matrix outside of the memory", true,
     [] { return product(16, 0, 256, 16, {192, 16, size_t(1) << 20}); }},
};

int main() {
  int wrong = 0;
  for (const Case &one : CASES) {
    if (pid_t child = fork()) {
      int status = 0;
      waitpid(child, &status, 0);
      bool refused = WIFEXITED(status) && WEXITSTATUS(status) == 1;
      bool done = WIFEXITED(status) && WEXITSTATUS(status) == 0;
      if (one.refused ? refused : done) continue;
      printf("%s: %s\n", one.what, refused ? "refused" : done ? "not refused" : "ended the process");
      wrong = 1;
    } else {
      if (!freopen("/dev/null", "w", stderr)) return 3;
      prepare();
      _exit(one.call() ? 1 : 0);
    }
  }
  if (!wrong) printf("%zu calls are refused or taken as a device does\n", sizeof CASES / sizeof *CASES);
  return wrong;
}
