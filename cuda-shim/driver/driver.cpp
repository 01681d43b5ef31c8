// A libcuda for machines without a GPU: device memory is host memory, and a launch runs the kernel that the shim
// has compiled, before it returns. It has the functions of the driver that this program calls.
//
// The first stream, which runs kernels, does its work at once. The others do nothing before something waits for them,
// so that data read without waiting are missing. With SHIM_LATE it is the other way round, so that data copied without
// waiting are not computed yet.
//
// SHIM_NO_RECORDING refuses to record graphs. SHIM_MEMORY is the device's memory in bytes.
//
// It shows wrong arguments, names, grids and sizes of launches, missing waits between copies and kernels, work that
// a recorded graph lacks, and errors anywhere in a training step. It shows nothing about timing, tensor cores or the
// real driver.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

typedef int Result; // 0: success
typedef void *Handle;
typedef unsigned long long Address;
constexpr Result INVALID = 1, NO_MEMORY = 2, NOT_FOUND = 500, LAUNCH_FAILED = 719;

/// Memory of the device in bytes: SHIM_MEMORY, or 6 GiB.
static size_t memory() {
  const char *bytes = getenv("SHIM_MEMORY");
  static const size_t size = bytes ? strtoull(bytes, nullptr, 10) : size_t(6) << 30;
  return size;
}
/// Largest grid in y and z.
constexpr unsigned MOST_BLOCKS = 65535;

static char objects[2]; // context, module
static thread_local Handle current;
static std::mutex guard;
static std::map<Address, size_t> held;
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

static void run(Stream &stream, size_t count) {
  while (stream.done < count && !stream.waiting.empty()) {
    auto work = stream.waiting.front();
    stream.waiting.pop_front();
    stream.done++;
    work();
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
  if (stream.recording) return stream.recording->push_back(work), 0;
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
/// Whether this thread records; while it does, it must not allocate, wait, load, or copy from pages that are not pinned.
static thread_local bool records;
/// The error of a kernel that failed, reported by the next wait.
static Result broken;
static Result told() { return std::exchange(broken, 0); }
static std::map<const char *, size_t> pinned;
static bool is_pinned(const void *place) {
  std::lock_guard<std::mutex> lock(guard);
  auto next = pinned.upper_bound(static_cast<const char *>(place));
  return next != pinned.begin() && static_cast<const char *>(place) < std::prev(next)->first + std::prev(next)->second;
}

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
Result cuCtxSynchronize() { return records ? INVALID : (run_all(), told()); }

Result cuStreamCreate(Handle *stream, unsigned) { return new_stream(stream); }
Result cuStreamCreateWithPriority(Handle *stream, unsigned, int) { return new_stream(stream); }
Result cuStreamSynchronize(Handle stream) {
  if (records) return INVALID;
  return wait_for({static_cast<Stream *>(stream), SIZE_MAX}), told();
}
Result cuStreamDestroy_v2(Handle stream) { return cuStreamSynchronize(stream); }
Result cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
  Event now = *static_cast<Event *>(event);
  return give(stream, [now] { wait_for(now); });
}
Result cuStreamBeginCapture_v2(Handle stream, int) {
  Stream &own = *static_cast<Stream *>(stream);
  if (own.recording || getenv("SHIM_NO_RECORDING")) return INVALID;
  return own.recording = new std::vector<Work>, records = true, 0;
}
Result cuStreamEndCapture(Handle stream, Handle *graph) {
  Stream &own = *static_cast<Stream *>(stream);
  records = false;
  return *graph = std::exchange(own.recording, nullptr), *graph ? 0 : INVALID;
}
Result cuGraphInstantiateWithFlags(Handle *whole, Handle graph, unsigned long long) {
  return *whole = new std::vector<Work>(*static_cast<std::vector<Work> *>(graph)), 0;
}
Result cuGraphLaunch(Handle whole, Handle stream) {
  for (const Work &work : *static_cast<std::vector<Work> *>(whole)) give(stream, work);
  return 0;
}
Result cuGraphDestroy(Handle graph) { return delete static_cast<std::vector<Work> *>(graph), 0; }
Result cuGraphExecDestroy(Handle whole) { return run_all(), delete static_cast<std::vector<Work> *>(whole), 0; }
Result cuEventCreate(Handle *event, unsigned) { return *event = new Event{}, 0; }
Result cuEventRecord(Handle event, Handle handle) {
  if (static_cast<Stream *>(handle)->recording) return INVALID; // recorded graphs here have no events
  std::lock_guard<std::recursive_mutex> lock(order);
  Stream *stream = static_cast<Stream *>(handle);
  return *static_cast<Event *>(event) = {stream, stream->done + stream->waiting.size()}, 0;
}
Result cuEventSynchronize(Handle event) { return records ? INVALID : (wait_for(*static_cast<Event *>(event)), 0); }
Result cuEventDestroy_v2(Handle event) { return delete static_cast<Event *>(event), 0; }

/// Fills the memory with NaN, so that reading it before it is written shows.
Result cuMemAlloc_v2(Address *address, size_t size) {
  std::lock_guard<std::mutex> lock(guard);
  void *place = nullptr;
  if (size == 0 || records) return INVALID;
  if (used + size > memory() || posix_memalign(&place, 256, size)) return NO_MEMORY;
  memset(place, 0xff, size);
  *address = reinterpret_cast<Address>(place);
  held[*address] = size, used += size;
  return 0;
}
Result cuMemFree_v2(Address address) {
  if (records) return INVALID;
  run_all();
  std::lock_guard<std::mutex> lock(guard);
  auto found = held.find(address);
  if (found == held.end()) return INVALID;
  used -= found->second;
  held.erase(found);
  free(reinterpret_cast<void *>(address));
  return 0;
}
Result cuMemGetInfo_v2(size_t *free, size_t *total) { return *total = memory(), *free = memory() - used, 0; }
Result cuMemHostAlloc(void **place, size_t size, unsigned) {
  if (records) return INVALID;
  if (posix_memalign(place, 4096, size)) return NO_MEMORY;
  memset(*place, 0xff, size);
  std::lock_guard<std::mutex> lock(guard);
  return pinned[static_cast<char *>(*place)] = size, 0;
}
Result cuMemFreeHost(void *place) {
  run_all();
  std::lock_guard<std::mutex> lock(guard);
  return pinned.erase(static_cast<char *>(place)), free(place), 0;
}
Result cuMemsetD8Async(Address to, unsigned char value, size_t size, Handle stream) {
  return give(stream, [=] { memset(reinterpret_cast<void *>(to), value, size); });
}
/// As the driver: copies from pages that are not pinned take a copy of them, and copies to such pages wait.
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, Handle stream) {
  if (is_pinned(from)) return give(stream, [=] { memcpy(reinterpret_cast<void *>(to), from, size); });
  if (records) return INVALID;
  std::vector<char> copy(static_cast<const char *>(from), static_cast<const char *>(from) + size);
  return give(stream, [=] { memcpy(reinterpret_cast<void *>(to), copy.data(), size); });
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, Handle stream) {
  if (records && !is_pinned(to)) return INVALID;
  give(stream, [=] { memcpy(to, reinterpret_cast<void *>(from), size); });
  return is_pinned(to) ? 0 : cuStreamSynchronize(stream);
}
Result cuMemcpyAsync(Address to, Address from, size_t size, Handle stream) {
  return give(stream, [=] { memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), size); });
}

Result cuModuleLoadData(Handle *module, const void *) { return records ? INVALID : (*module = objects + 1, 0); }

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

Result cuLaunchKernel(Handle function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                      unsigned threads_z, unsigned shared, Handle stream, void **arguments, void **) {
  if (stream != streams.front() && !static_cast<Stream *>(stream)->recording) return INVALID;
  if (!x || !y || !z || y > MOST_BLOCKS || z > MOST_BLOCKS) return INVALID;
  Dl_info kernel;
  dladdr(function, &kernel);
  std::string name = kernel.dli_sname;
  name.replace(name.rfind("_launch"), std::string::npos, "_sizes");
  auto sizes = reinterpret_cast<const size_t *(*)()>(dlsym(own_library(), name.c_str()));
  std::vector<std::vector<char>> values;
  for (const size_t *size = sizes(); *size; size++) {
    const char *value = static_cast<const char *>(arguments[values.size()]);
    values.emplace_back(value, value + *size);
  }
  return give(stream, [=]() mutable {
    typedef int (*Launcher)(const unsigned *, const unsigned *, size_t, uint64_t, void **);
    static uint64_t seed;
    unsigned grid[3] = {x, y, z}, block[3] = {threads, threads_y, threads_z};
    std::vector<void *> places;
    for (auto &value : values) places.push_back(value.data());
    int status = reinterpret_cast<Launcher>(function)(grid, block, shared, ++seed, places.data());
    if (status == 0) return;
    fprintf(stderr, "shim: %s ended with %d\n", name.c_str(), status);
    broken = LAUNCH_FAILED;
  });
}

/// Gives work to a stream; for the library of products.
Result shim_give(Handle stream, const Work *work) { return give(stream, *work); }

Result cuGetErrorName(Result, const char **name) { return *name = "SHIM_ERROR", 0; }
Result cuGetErrorString(Result error, const char **text) {
  *text = error == NO_MEMORY ? "out of memory" : error == NOT_FOUND ? "not found" : "failed";
  return 0;
}
}
