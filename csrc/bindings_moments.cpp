// Python bindings of moments.
#include <nanobind/ndarray.h>

#include "bindings.h"
#include "moments.h"

namespace nb = nanobind;

namespace {

using Numbers = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// For up to this many numbers, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 4096;

template <typename T>
nb::tuple found_in(const Numbers& numbers) {
  const auto n = static_cast<std::int64_t>(numbers.size());
  const auto* data = static_cast<const T*>(numbers.data());
  replaykit::Moments<T> found;
  if (n > kReleaseAbove) {
    nb::gil_scoped_release release;
    found = replaykit::moments(data, n);
  } else {
    found = replaykit::moments(data, n);
  }
  return nb::make_tuple(found.count, found.least, found.largest, found.mean, found.squares);
}

}  // namespace

void replaykit::bind_moments(nb::module_& m) {
  m.attr("most_moments") = kMostMoments;
  m.def("moments",
        [](const Numbers& numbers) {
          if (static_cast<std::int64_t>(numbers.size()) > kMostMoments) {
            throw nb::value_error("expected at most 65536 numbers");
          }
          const nb::dlpack::dtype dtype = numbers.dtype();
          if (dtype == nb::dtype<float>()) return found_in<float>(numbers);
          if (dtype == nb::dtype<double>()) return found_in<double>(numbers);
          if (dtype == nb::dtype<std::uint8_t>()) return found_in<std::uint8_t>(numbers);
          if (dtype == nb::dtype<std::int8_t>()) return found_in<std::int8_t>(numbers);
          if (dtype == nb::dtype<std::int16_t>()) return found_in<std::int16_t>(numbers);
          if (dtype == nb::dtype<std::uint16_t>()) return found_in<std::uint16_t>(numbers);
          if (dtype == nb::dtype<std::int32_t>()) return found_in<std::int32_t>(numbers);
          if (dtype == nb::dtype<std::uint32_t>()) return found_in<std::uint32_t>(numbers);
          if (dtype == nb::dtype<std::int64_t>()) return found_in<std::int64_t>(numbers);
          if (dtype == nb::dtype<std::uint64_t>()) return found_in<std::uint64_t>(numbers);
          throw nb::type_error("expected integers, float32 or float64");
        },
        nb::arg("numbers").noconvert(),
        "Return count, extremes, mean and squared distances of at most most_moments numbers.");
}
