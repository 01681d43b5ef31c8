// Memory of the device and pinned memory of the host: every allocation stands between pages that nobody may touch, and
// its addresses are never used again, so that an access beyond it or after its end is a fault as on a device.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "record.h"

namespace memory {

constexpr size_t PAGE = 4096;
/// Allocations of a device begin at multiples of this, and so end up to this many bytes before the page that follows.
constexpr size_t ALIGNMENT = 256;
/// Content of what belongs to no allocation beside it.
constexpr unsigned char CANARY = 0xa5;

/// What fresh memory is filled with: 255, which is NaN in every type of activations, or the number in SHIM_FILL.
inline int fill() {
  static const int byte = getenv("SHIM_FILL") ? atoi(getenv("SHIM_FILL")) : 0xff;
  return byte;
}

struct Allocation {
  size_t size;
  unsigned char *pages; // between the two that nobody may touch
  size_t length;        // of these
};

/// Allocations by address. Its users hold the lock.
class Allocations {
  std::map<uintptr_t, Allocation> all;

public:
  std::mutex guard;

  /// Null where there is no memory.
  void *take(size_t size) {
    size_t room = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, length = (room + PAGE - 1) / PAGE * PAGE;
    void *whole = mmap(nullptr, length + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return nullptr;
    unsigned char *pages = static_cast<unsigned char *>(whole) + PAGE;
    if (mprotect(pages, length, PROT_READ | PROT_WRITE)) return nullptr;
    unsigned char *place = pages + length - room;
    memset(pages, CANARY, place - pages);
    if (!record::skips()) memset(place, fill(), size);
    memset(place + size, CANARY, room - size);
    all[reinterpret_cast<uintptr_t>(place)] = {size, pages, length};
    return place;
  }

  /// Gives the memory back and never the addresses; 0, 1 for an address that was not taken, 2 where somebody wrote
  /// beside it.
  int give(uintptr_t address, size_t *size) {
    auto found = all.find(address);
    if (found == all.end()) return 1;
    Allocation own = found->second;
    auto *place = reinterpret_cast<unsigned char *>(address);
    bool touched = false;
    for (unsigned char *at = own.pages; at < own.pages + own.length; at++) {
      if (at == place) at += own.size;
      if (at < own.pages + own.length) touched |= *at != CANARY;
    }
    *size = own.size;
    all.erase(found);
    madvise(own.pages, own.length, MADV_DONTNEED);
    mprotect(own.pages, own.length, PROT_NONE);
    return touched ? 2 : 0;
  }

  bool has(const void *from, size_t size) {
    std::lock_guard<std::mutex> lock(guard);
    uintptr_t address = reinterpret_cast<uintptr_t>(from);
    auto next = all.upper_bound(address);
    if (next == all.begin()) return false;
    auto own = std::prev(next);
    return address + size <= own->first + own->second.size;
  }
};

} // namespace memory
