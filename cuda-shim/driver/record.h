// What a program gives the device to do, line by line in the file that SHIM_RECORD names; and SHIM_SKIP, with which none
// of it is done.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace record {

/// Whether work is left out.
inline bool skips() {
  static const bool skip = getenv("SHIM_SKIP");
  return skip;
}

/// Appends a line, as printf writes it; does nothing without SHIM_RECORD.
inline void line(const char *format, ...) {
  static FILE *const file = getenv("SHIM_RECORD") ? fopen(getenv("SHIM_RECORD"), "a") : nullptr;
  if (!file) return;
  va_list values;
  va_start(values, format);
  vfprintf(file, format, values);
  va_end(values);
  fflush(file);
}

} // namespace record
