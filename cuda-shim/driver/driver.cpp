// A libcuda for machines without a GPU: device memory is host memory, and a launch runs the kernel that the shim
// has compiled, before it returns. As much of the driver as this program calls.
//
// It shows wrong arguments, names, grids and sizes of launches, and the whole way of a training step. It shows
// nothing about timing, streams, tensor-core hardware or the real driver.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

typedef int Result; // 0: success
typedef void *Handle;
typedef unsigned long long Address;
constexpr Result INVALID = 1, NO_MEMORY = 2, NOT_FOUND = 500, LAUNCH_FAILED = 719;

/// What the device is said to have.
constexpr size_t MEMORY = size_t(6) << 30;
/// Largest grid in y and z.
constexpr unsigned MOST_BLOCKS = 65535;

static char objects[4]; // context, stream, event, module
static thread_local Handle current;
static std::mutex guard;
static std::map<Address, size_t> held;
static size_t used;

extern "C" {
Result cuInit(unsigned) { return 0; }
Result cuDeviceGetCount(int *count) { return *count = 1, 0; }
Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1; // compute capability 9.0
  return 0;
}
Result cuDeviceGetName(char *name, int size, int) { return snprintf(name, size, "shim"), 0; }
Result cuDevicePrimaryCtxRetain(Handle *context, int) { return *context = objects, 0; }
Result cuDevicePrimaryCtxRelease_v2(int) { return 0; }
Result cuCtxGetCurrent(Handle *context) { return *context = current, 0; }
Result cuCtxSetCurrent(Handle context) { return current = context, 0; }
Result cuCtxSynchronize() { return 0; }

Result cuStreamCreate(Handle *stream, unsigned) { return *stream = objects + 1, 0; }
Result cuStreamCreateWithPriority(Handle *stream, unsigned, int) { return *stream = objects + 1, 0; }
Result cuStreamSynchronize(Handle) { return 0; }
Result cuStreamDestroy_v2(Handle) { return 0; }
Result cuStreamWaitEvent(Handle, Handle, unsigned) { return 0; }
Result cuEventCreate(Handle *event, unsigned) { return *event = objects + 2, 0; }
Result cuEventRecord(Handle, Handle) { return 0; }
Result cuEventSynchronize(Handle) { return 0; }
Result cuEventDestroy_v2(Handle) { return 0; }

/// Filled with NaN: what reads memory before it is written shows.
Result cuMemAlloc_v2(Address *address, size_t size) {
  std::lock_guard<std::mutex> lock(guard);
  void *memory = nullptr;
  if (used + size > MEMORY || posix_memalign(&memory, 256, size)) return NO_MEMORY;
  memset(memory, 0xff, size);
  *address = reinterpret_cast<Address>(memory);
  held[*address] = size, used += size;
  return 0;
}
Result cuMemFree_v2(Address address) {
  std::lock_guard<std::mutex> lock(guard);
  auto found = held.find(address);
  if (found == held.end()) return INVALID;
  used -= found->second;
  held.erase(found);
  free(reinterpret_cast<void *>(address));
  return 0;
}
Result cuMemGetInfo_v2(size_t *free, size_t *total) { return *total = MEMORY, *free = MEMORY - used, 0; }
Result cuMemHostAlloc(void **memory, size_t size, unsigned) {
  return posix_memalign(memory, 4096, size) ? NO_MEMORY : 0;
}
Result cuMemFreeHost(void *memory) { return free(memory), 0; }
Result cuMemsetD8Async(Address to, unsigned char value, size_t size, Handle) {
  return memset(reinterpret_cast<void *>(to), value, size), 0;
}
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, Handle) {
  return memcpy(reinterpret_cast<void *>(to), from, size), 0;
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, Handle) {
  return memcpy(to, reinterpret_cast<void *>(from), size), 0;
}

Result cuModuleLoadData(Handle *module, const void *) { return *module = objects + 3, 0; }

/// A kernel is known by its name alone: that of its launcher in this library.
Result cuModuleGetFunction(Handle *function, Handle, const char *name) {
  Dl_info own;
  dladdr(reinterpret_cast<void *>(cuInit), &own);
  Handle library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = dlsym(library, (std::string(name) + "_launch").c_str());
  if (!*function) fprintf(stderr, "shim: there is no kernel %s\n", name);
  return *function ? 0 : NOT_FOUND;
}

Result cuLaunchKernel(Handle function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                      unsigned threads_z, unsigned shared, Handle, void **arguments, void **) {
  typedef int (*Launcher)(const unsigned *, const unsigned *, size_t, uint64_t, void **);
  static uint64_t seed;
  unsigned grid[3] = {x, y, z}, block[3] = {threads, threads_y, threads_z};
  if (!x || !y || !z || y > MOST_BLOCKS || z > MOST_BLOCKS) return INVALID;
  int status = reinterpret_cast<Launcher>(function)(grid, block, shared, ++seed, arguments);
  if (status == 0) return 0;
  Dl_info kernel;
  dladdr(function, &kernel);
  fprintf(stderr, "shim: %s ended with %d\n", kernel.dli_sname, status);
  return LAUNCH_FAILED;
}

Result cuGetErrorName(Result, const char **name) { return *name = "SHIM_ERROR", 0; }
Result cuGetErrorString(Result error, const char **text) {
  *text = error == NO_MEMORY ? "out of memory" : error == NOT_FOUND ? "not found" : "failed";
  return 0;
}
}
