// Python bindings of moments.
#include <nanobind/ndarray.h>

#include "arrays.h"
#include "bindings.h"
#include "moments.h"

namespace replaykit {

namespace {

using AnyNumbers = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// For up to this many numbers, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 4096;

template <typename T>
nb::tuple found_in(const AnyNumbers& numbers) {
  const auto n = static_cast<std::int64_t>(numbers.size());
  const auto* data = static_cast<const T*>(numbers.data());
  const Moments<T> found = released<kReleaseAbove>(n, [&] { return moments(data, n); });
  return nb::make_tuple(found.count, found.least, found.largest, found.mean, found.squares);
}

}  // namespace

void bind_moments(nb::module_& m) {
  m.attr("most_moments") = kMostMoments;
  m.def("moments",
        [](const AnyNumbers& numbers) {
          if (static_cast<std::int64_t>(numbers.size()) > kMostMoments) {
            throw nb::value_error("expected at most 65536 numbers");
          }
          const nb::dlpack::dtype dtype = numbers.dtype();
#define REPLAYKIT_FIND(T) \
  if (dtype == nb::dtype<T>()) return found_in<T>(numbers);
          REPLAYKIT_NUMBERS(REPLAYKIT_FIND)
          throw nb::type_error("expected integers, float32 or float64");
        },
        nb::arg("numbers").noconvert(),
        "Return count, extremes, mean and squared distances of at most most_moments numbers.");
}

}  // namespace replaykit
