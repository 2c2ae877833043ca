// Checked arrays that Python passes to the core through the buffer protocol.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <sstream>

#include "numbers.h"

namespace replaykit {

namespace nb = nanobind;

// Throws an error of Python with a text of these parts.
template <typename... Parts>
[[noreturn]] void refuse(nb::builtin_exception (*error)(const char*), const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw error(text.str().c_str());
}

template <typename Pointed>
Pointed* at(std::uintptr_t address) {
  return reinterpret_cast<Pointed*>(address);
}

// An array of the caller. The object holds the buffer as long as it exists. The class calls the
// buffer protocol directly, which takes a tenth of a microsecond per array.
class Array {
 public:
  enum Kind { kInt64, kUint8, kBool, kDouble, kNumbers };

  Array(nb::handle array, const char* name, Kind kind, int dimensions, bool written = false) {
    int flags = PyBUF_FORMAT | (written ? PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS : PyBUF_STRIDES);
    if (kind != kInt64) flags |= PyBUF_C_CONTIGUOUS;
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      refuse(name, kind, dimensions);
    }
    const char* format = view_.format == nullptr ? "B" : view_.format;
    const bool one = format[0] != 0 && format[1] == 0;
    if (!one || !fits(*format, kind) || view_.ndim != dimensions) {
      PyBuffer_Release(&view_);
      refuse(name, kind, dimensions);
    }
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { PyBuffer_Release(&view_); }

  std::int64_t size(int dimension = 0) const { return view_.shape[dimension]; }
  Numbers numbers() const { return {static_cast<const char*>(view_.buf), view_.strides[0]}; }
  const std::uint8_t* bytes() const { return static_cast<const std::uint8_t*>(view_.buf); }
  const double* doubles() const { return static_cast<const double*>(view_.buf); }
  std::int64_t item() const { return view_.itemsize; }
  std::uint8_t* bytes_out() const { return static_cast<std::uint8_t*>(view_.buf); }
  std::int64_t* out() const { return static_cast<std::int64_t*>(view_.buf); }

 private:
  bool fits(char format, Kind kind) const {
    switch (kind) {
      case kInt64: return (format == 'l' || format == 'q') && view_.itemsize == 8;
      case kUint8: return format == 'B';
      case kBool: return format == '?';
      case kDouble: return format == 'd';
      case kNumbers: return format == 'f' || format == 'd';
    }
    return false;
  }

  [[noreturn]] static void refuse(const char* name, Kind kind, int dimensions) {
    const char* kinds[] = {"an int64", "a contiguous uint8", "a contiguous bool",
                           "a contiguous float64", "a contiguous float32 or float64"};
    replaykit::refuse(nb::type_error, "expected `", name, "` as ", kinds[kind], " array of ",
                      dimensions, " dimension(s)");
  }

  Py_buffer view_;
};

// Does the work, and releases the interpreter lock if the work has more than `most` steps. Up to
// this number, the work takes less time than releasing and taking the lock.
template <std::int64_t most, typename Work>
auto released(std::int64_t steps, const Work& work) {
  if (steps <= most) return work();
  nb::gil_scoped_release release;
  return work();
}

inline void check_length(const char* name, std::int64_t got, std::int64_t expected) {
  if (got == expected) return;
  refuse(nb::value_error, "expected ", expected, " entries in `", name, "`, got ", got);
}

}  // namespace replaykit
