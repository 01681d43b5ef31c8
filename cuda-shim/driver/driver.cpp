// A libcuda for machines without a GPU: device memory is host memory, and a launch runs the kernel that the shim
// has compiled, before it returns. It has the functions of the driver that this program calls.
//
// The first stream, which runs kernels, does its work at once. The others do nothing before something waits for them,
// so that data read without waiting are missing. With SHIM_LATE it is the other way round, so that data copied without
// waiting are not computed yet.
//
// It refuses what a device refuses: accesses beyond an allocation or after its end and misaligned vectors (a fault, after
// which every call fails), more shared memory than was asked for, grids and blocks that are too large, calls of a thread
// without the context, a second context, copies beside the kernels from pages that are not pinned, and everything that a
// capture forbids. refusals.cpp tries each.
//
// SHIM_MEMORY is how many bytes the device has, SHIM_FILL the byte that fresh memory is filled with. SHIM_NO_RECORDING
// refuses to record; SHIM_DRIVER (12040), SHIM_CAPABILITY (75) and SHIM_NO_IMAGE make an old driver, an old device and one
// that loads no kernel; SHIM_FAIL names a kernel whose launch ends in a fault. SHIM_RECORD names a file that gets a line for
// each launch, product, clearing and copy, in order (those of a graph when it is recorded, not when it is launched). With
// SHIM_SKIP no work is done and no memory of the device is touched, so that steps of large models can be recorded; what
// comes back is zeros.
//
// It shows wrong arguments, names, grids and sizes of launches, missing waits between copies and kernels, work that
// a recorded graph lacks, and errors anywhere in a training step. It shows nothing about timing, tensor cores or the
// real driver.
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "record.h"

typedef int Result; // 0: success
typedef void *Handle;
typedef unsigned long long Address;
constexpr Result INVALID = 1, NO_MEMORY = 2, INVALID_IMAGE = 200, NO_CONTEXT = 201, NOT_FOUND = 500,
                 ILLEGAL_ADDRESS = 700, MISALIGNED = 716, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801,
                 CAPTURE_FORBIDS = 900, CAPTURE_SPOILED = 901;

/// What the device is said to have: 6 GiB, or the bytes in SHIM_MEMORY.
static size_t total_memory() {
  const char *bytes = getenv("SHIM_MEMORY");
  static const size_t size = bytes ? strtoull(bytes, nullptr, 10) : size_t(6) << 30;
  return size;
}
static int number(const char *variable, int otherwise) {
  const char *text = getenv(variable);
  return text ? atoi(text) : otherwise;
}
/// Largest grid in x, and in y and z; largest block.
constexpr unsigned MOST_BLOCKS_X = 0x7fffffff, MOST_BLOCKS = 65535, MOST_THREADS = 1024;
/// Shared memory of a block without asking, and the most that it can be allowed, in bytes.
constexpr unsigned SHARED = 48 << 10, MOST_SHARED = 227 << 10;

static char objects[2]; // context, module
static thread_local Handle current;
static memory::Allocations held, pinned;
static size_t used;

typedef std::function<void()> Work;
/// The work that a stream was given and has not done; `done` counts the work it has done.
struct Stream {
  std::deque<Work> waiting;
  size_t done;
  bool at_once;
  /// Destination of work that is recorded instead of done.
  std::vector<Work> *recording;
};
/// A position in the work of a stream; without a stream there is nothing to wait for.
struct Event {
  Stream *stream;
  size_t count;
};
static std::recursive_mutex order;
static std::vector<Stream *> streams;

/// The fault that ended the context: every call fails from then on.
static Result broken;
/// What runs now, and where a fault in it goes on.
static thread_local const char *doing = "";
static thread_local sigjmp_buf *shelter;
static struct sigaction others[NSIG];

static void on_fault(int signal, siginfo_t *, void *) {
  if (shelter) siglongjmp(*shelter, signal);
  sigaction(signal, &others[signal], nullptr); // not ours: once more, for whoever was there before
}
static void watch_for_faults() {
  struct sigaction own = {};
  own.sa_sigaction = on_fault;
  own.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int signal : {SIGSEGV, SIGBUS, SIGILL}) sigaction(signal, &own, &others[signal]);
}
static void perform(const Work &work) {
  if (broken) return;
  sigjmp_buf own, *before = shelter;
  if (int signal = sigsetjmp(own, 1)) {
    // Vectors that are not aligned are trapped by an invalid instruction.
    broken = signal == SIGILL ? MISALIGNED : ILLEGAL_ADDRESS;
    fprintf(stderr, "shim: %s: %s\n", doing, signal == SIGILL ? "a misaligned address" : "an illegal address");
  } else {
    shelter = &own;
    work();
  }
  shelter = before;
}
static void run(Stream &stream, size_t count) {
  while (stream.done < count && !stream.waiting.empty()) {
    auto work = stream.waiting.front();
    stream.waiting.pop_front();
    stream.done++;
    perform(work);
  }
}
static void run_all() {
  std::lock_guard<std::recursive_mutex> lock(order);
  for (Stream *stream : streams) run(*stream, SIZE_MAX);
}
static void wait_for(const Event &event) {
  std::lock_guard<std::recursive_mutex> lock(order);
  if (event.stream) run(*event.stream, event.count);
}
static Result give(Handle handle, Work work) {
  Stream &stream = *static_cast<Stream *>(handle);
  if (record::skips()) work = [] {};
  if (stream.recording) return stream.recording->push_back(work), 0;
  if (broken) return broken;
  std::lock_guard<std::recursive_mutex> lock(order);
  stream.waiting.push_back(work);
  if (stream.at_once) run(stream, SIZE_MAX);
  return 0;
}
static Result new_stream(Handle *handle) {
  static const bool late = getenv("SHIM_LATE");
  std::lock_guard<std::recursive_mutex> lock(order);
  streams.push_back(new Stream{{}, 0, streams.empty() != late, nullptr});
  return *handle = streams.back(), 0;
}
static Result refuse(Result result, const char *why) { return fprintf(stderr, "shim: %s\n", why), result; }
/// Whether this thread records, and whether it did what spoils a recording: it must not allocate, wait, load or copy from
/// pages that are not pinned then.
static thread_local bool records, spoiled;
/// What a call that takes the context answers before anything else: 0 where nothing is wrong.
static Result wrong(bool in_capture) {
  if (!current) return refuse(NO_CONTEXT, "a thread that has no context");
  if (records && !in_capture) return spoiled = true, refuse(CAPTURE_FORBIDS, "a call that a capture forbids");
  return broken;
}
constexpr bool IN_CAPTURE = true, NEVER_IN_CAPTURE = false;
static bool is_pinned(const void *place, size_t size) { return pinned.has(place, size); }
/// A device reaches its own memory, and pinned pages at the host's addresses.
static bool is_reached(Address place, size_t size) {
  return held.has(reinterpret_cast<void *>(place), size) || is_pinned(reinterpret_cast<void *>(place), size);
}
static Result no_memory_there() { return refuse(INVALID, "a copy that leaves the memory of the device"); }
/// A copy beside the kernels' stream from pages that are not pinned would wait for it.
static bool is_beside(Handle stream) { return stream != streams.front() && !static_cast<Stream *>(stream)->recording; }

extern "C" {
Result cuInit(unsigned) {
  static const bool watching = (watch_for_faults(), true);
  return watching ? 0 : INVALID;
}
Result cuDriverGetVersion(int *version) { return *version = number("SHIM_DRIVER", 13000), 0; }
Result cuDeviceGetCount(int *count) { return *count = 1, 0; }
Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? 0 : INVALID; }
Result cuDeviceGetAttribute(int *value, int attribute, int) {
  int capability = number("SHIM_CAPABILITY", 90);
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : attribute == 97 ? MOST_SHARED : 1;
  return 0;
}
Result cuDeviceGetName(char *name, int size, int) { return snprintf(name, size, "shim"), 0; }
Result cuDevicePrimaryCtxRetain(Handle *context, int) { return *context = objects, 0; }
Result cuDevicePrimaryCtxRelease_v2(int) { return 0; }
Result cuCtxCreate_v4(Handle *, void *, unsigned, int) { return refuse(NOT_SUPPORTED, "a second context"); }
Result cuCtxGetCurrent(Handle *context) { return *context = current, 0; }
Result cuCtxSetCurrent(Handle context) {
  if (context && context != objects) return refuse(NO_CONTEXT, "a context that is none");
  return current = context, 0;
}
Result cuCtxSynchronize() {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  return run_all(), broken;
}

Result cuStreamCreate(Handle *stream, unsigned) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  return new_stream(stream);
}
Result cuStreamCreateWithPriority(Handle *stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
Result cuStreamSynchronize(Handle stream) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  return wait_for({static_cast<Stream *>(stream), SIZE_MAX}), broken;
}
Result cuStreamDestroy_v2(Handle stream) { return cuStreamSynchronize(stream); }
Result cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
  if (Result no = wrong(IN_CAPTURE)) return no;
  Event now = *static_cast<Event *>(event);
  return give(stream, [now] { wait_for(now); });
}
Result cuStreamBeginCapture_v2(Handle stream, int) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  Stream &own = *static_cast<Stream *>(stream);
  if (own.recording || getenv("SHIM_NO_RECORDING")) return INVALID;
  return own.recording = new std::vector<Work>, records = true, spoiled = false, 0;
}
Result cuStreamEndCapture(Handle stream, Handle *graph) {
  Stream &own = *static_cast<Stream *>(stream);
  records = false;
  *graph = std::exchange(own.recording, nullptr);
  if (spoiled) return delete static_cast<std::vector<Work> *>(*graph), *graph = nullptr, CAPTURE_SPOILED;
  return *graph ? 0 : INVALID;
}
Result cuGraphInstantiateWithFlags(Handle *whole, Handle graph, unsigned long long) {
  return *whole = new std::vector<Work>(*static_cast<std::vector<Work> *>(graph)), 0;
}
Result cuGraphLaunch(Handle whole, Handle stream) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  for (const Work &work : *static_cast<std::vector<Work> *>(whole)) give(stream, work);
  return 0;
}
Result cuGraphDestroy(Handle graph) { return delete static_cast<std::vector<Work> *>(graph), 0; }
Result cuGraphExecDestroy(Handle whole) { return run_all(), delete static_cast<std::vector<Work> *>(whole), 0; }
Result cuEventCreate(Handle *event, unsigned) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  return *event = new Event{}, 0;
}
Result cuEventRecord(Handle event, Handle handle) {
  if (static_cast<Stream *>(handle)->recording) return INVALID; // events are left out of recordings here
  if (Result no = wrong(IN_CAPTURE)) return no;
  std::lock_guard<std::recursive_mutex> lock(order);
  Stream *stream = static_cast<Stream *>(handle);
  return *static_cast<Event *>(event) = {stream, stream->done + stream->waiting.size()}, 0;
}
Result cuEventSynchronize(Handle event) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  return wait_for(*static_cast<Event *>(event)), broken;
}
Result cuEventDestroy_v2(Handle event) { return delete static_cast<Event *>(event), 0; }

Result cuMemAlloc_v2(Address *address, size_t size) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  if (size == 0) return INVALID;
  std::lock_guard<std::mutex> lock(held.guard);
  if (used + size > total_memory()) return NO_MEMORY;
  void *place = held.take(size);
  if (!place) return NO_MEMORY;
  *address = reinterpret_cast<Address>(place);
  used += size;
  return 0;
}
Result cuMemFree_v2(Address address) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  run_all();
  std::lock_guard<std::mutex> lock(held.guard);
  size_t size = 0;
  int status = held.give(address, &size);
  used -= size;
  if (status == 2) return broken = refuse(ILLEGAL_ADDRESS, "somebody wrote beside an allocation");
  return status == 0 ? 0 : INVALID;
}
Result cuMemGetInfo_v2(size_t *free, size_t *total) {
  if (Result no = wrong(IN_CAPTURE)) return no;
  return *total = total_memory(), *free = total_memory() - used, 0;
}
Result cuMemHostAlloc(void **place, size_t size, unsigned) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  std::lock_guard<std::mutex> lock(pinned.guard);
  return *place = pinned.take(size), *place ? 0 : NO_MEMORY;
}
Result cuMemFreeHost(void *place) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  run_all();
  std::lock_guard<std::mutex> lock(pinned.guard);
  size_t size;
  int status = pinned.give(reinterpret_cast<uintptr_t>(place), &size);
  if (status == 2) return broken = refuse(ILLEGAL_ADDRESS, "somebody wrote beside pinned memory");
  return status == 0 ? 0 : INVALID;
}
Result cuMemsetD8Async(Address to, unsigned char value, size_t size, Handle stream) {
  if (Result no = wrong(IN_CAPTURE)) return no;
  if (!is_reached(to, size)) return no_memory_there();
  record::line("clear %zu\n", size);
  return give(stream, [=] { doing = "a memset", memset(reinterpret_cast<void *>(to), value, size); });
}
/// As the driver: copies from pages that are not pinned take a copy of them, and copies to such pages wait.
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, Handle stream) {
  bool straight = is_pinned(from, size);
  if (Result no = wrong(straight)) return no;
  if (!is_reached(to, size)) return no_memory_there();
  record::line("upload %zu\n", size);
  if (straight) return give(stream, [=] { doing = "a copy", memcpy(reinterpret_cast<void *>(to), from, size); });
  if (is_beside(stream)) return refuse(INVALID, "a copy beside the kernels from pages that are not pinned");
  std::vector<char> copy(static_cast<const char *>(from), static_cast<const char *>(from) + size);
  return give(stream, [=] { doing = "a copy", memcpy(reinterpret_cast<void *>(to), copy.data(), size); });
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, Handle stream) {
  bool straight = is_pinned(to, size);
  if (Result no = wrong(straight)) return no;
  if (!is_reached(from, size)) return no_memory_there();
  if (!straight && is_beside(stream)) return refuse(INVALID, "a copy beside the kernels to pages that are not pinned");
  record::line("download %zu\n", size);
  if (record::skips()) return memset(to, 0, size), broken;
  give(stream, [=] { doing = "a copy", memcpy(to, reinterpret_cast<void *>(from), size); });
  return straight ? broken : cuStreamSynchronize(stream);
}
Result cuMemcpyAsync(Address to, Address from, size_t size, Handle stream) {
  if (Result no = wrong(IN_CAPTURE)) return no;
  for (Address place : {to, from})
    if (!is_reached(place, size)) return no_memory_there();
  record::line("copy %zu\n", size);
  return give(stream, [=] { doing = "a copy", memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), size); });
}

/// Takes what the CUDA compiler and its stand-in write, by the first bytes, and uses nothing of it.
Result cuModuleLoadData(Handle *module, const void *image) {
  if (Result no = wrong(NEVER_IN_CAPTURE)) return no;
  uint32_t first;
  memcpy(&first, image, sizeof first);
  bool known = first == 0xba55ed50 || memcmp(image, "stand-in", 9) == 0 || memcmp(image, "\177ELF", 4) == 0;
  return !known || getenv("SHIM_NO_IMAGE") ? INVALID_IMAGE : (*module = objects + 1, 0);
}

static Handle own_library() {
  Dl_info own;
  dladdr(reinterpret_cast<void *>(cuInit), &own);
  static Handle library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return library;
}

/// Finds a kernel by the name of its launcher in this library.
Result cuModuleGetFunction(Handle *function, Handle, const char *name) {
  *function = dlsym(own_library(), (std::string(name) + "_launch").c_str());
  if (!*function) fprintf(stderr, "shim: there is no kernel %s\n", name);
  return *function ? 0 : NOT_FOUND;
}

static std::mutex allowances;
static std::map<Handle, unsigned> allowed;
/// Attribute 8: most dynamic shared memory of a block.
Result cuFuncSetAttribute(Handle function, int attribute, int value) {
  if (attribute != 8 || value < 0 || unsigned(value) > MOST_SHARED) return INVALID;
  std::lock_guard<std::mutex> lock(allowances);
  return allowed[function] = value, 0;
}
static unsigned most_shared(Handle function) {
  std::lock_guard<std::mutex> lock(allowances);
  return std::max(SHARED, allowed[function]);
}

Result cuLaunchKernel(Handle function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                      unsigned threads_z, unsigned shared, Handle stream, void **arguments, void **) {
  if (Result no = wrong(IN_CAPTURE)) return no;
  if (is_beside(stream)) return refuse(INVALID, "a kernel on a stream for copies");
  if (!x || !y || !z || x > MOST_BLOCKS_X || y > MOST_BLOCKS || z > MOST_BLOCKS) return refuse(INVALID, "a grid of that size");
  unsigned long long block = 1ull * threads * threads_y * threads_z;
  if (block == 0 || block > MOST_THREADS) return refuse(INVALID, "a block of that size");
  if (shared > most_shared(function)) return refuse(INVALID, "more shared memory than the kernel was allowed");
  Dl_info kernel;
  dladdr(function, &kernel);
  std::string name = kernel.dli_sname;
  name.resize(name.rfind("_launch"));
  auto sizes = reinterpret_cast<const size_t *(*)()>(dlsym(own_library(), (name + "_sizes").c_str()));
  std::vector<std::vector<char>> values;
  for (const size_t *size = sizes(); *size; size++) {
    const char *value = static_cast<const char *>(arguments[values.size()]);
    values.emplace_back(value, value + *size);
  }
  record::line("launch %s %u %u %u %u\n", name.c_str(), x, y, z, threads);
  return give(stream, [=]() mutable {
    typedef int (*Launcher)(const unsigned *, const unsigned *, size_t, uint64_t, void **);
    static uint64_t seed;
    unsigned grid[3] = {x, y, z}, block[3] = {threads, threads_y, threads_z};
    doing = name.c_str();
    const char *fails = getenv("SHIM_FAIL");
    if (fails && name == fails) return void(broken = LAUNCH_FAILED);
    std::vector<void *> places;
    for (auto &value : values) places.push_back(value.data());
    int status = reinterpret_cast<Launcher>(function)(grid, block, shared, ++seed, places.data());
    if (status == 0) return;
    fprintf(stderr, "shim: %s ended with %d\n", name.c_str(), status);
    broken = LAUNCH_FAILED;
  });
}

/// For the library of products.
Result shim_give(Handle stream, const Work *work) {
  if (Result no = wrong(IN_CAPTURE)) return no;
  Work own = *work;
  return give(stream, [own] { doing = "a product", own(); });
}
int shim_has(const void *place, size_t size) { return held.has(place, size); }

Result cuGetErrorName(Result error, const char **name) {
  *name = error == INVALID_IMAGE     ? "CUDA_ERROR_INVALID_IMAGE"
          : error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : error == MISALIGNED      ? "CUDA_ERROR_MISALIGNED_ADDRESS"
          : error == LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
                                     : "SHIM_ERROR";
  return 0;
}
Result cuGetErrorString(Result error, const char **text) {
  *text = error == NO_MEMORY         ? "out of memory"
          : error == NOT_FOUND       ? "not found"
          : error == INVALID_IMAGE   ? "device kernel image is invalid"
          : error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
          : error == MISALIGNED      ? "misaligned address"
                                     : "failed";
  return 0;
}
}
