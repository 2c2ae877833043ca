// Python bindings of marks of windows. The caller has checked the addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "marks.h"

namespace nb = nanobind;
using replaykit::FlagOfRows;
using replaykit::OwnFlag;
using replaykit::released;

namespace {

// For up to this many rows, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 4096;

std::vector<FlagOfRows> as_flags(const std::vector<std::int64_t>& flags) {
  if (flags.size() % 3 != 0) {
    throw nb::value_error("expected address, stride and meaning of every flag");
  }
  std::vector<FlagOfRows> own;
  own.reserve(flags.size() / 3);
  for (std::size_t i = 0; i < flags.size(); i += 3) {
    if (flags[i + 2] < 0 || flags[i + 2] > 2) throw nb::value_error("expected meanings of 0, 1 or 2");
    own.push_back({reinterpret_cast<const std::uint8_t*>(flags[i]), flags[i + 1],
                   static_cast<int>(flags[i + 2])});
  }
  return own;
}

OwnFlag as_own(const std::vector<std::int64_t>& places, std::size_t flag) {
  return {reinterpret_cast<std::uint8_t*>(places[3 * flag]), places[3 * flag + 1],
          places[3 * flag + 2] != 0};
}

}  // namespace

void replaykit::bind_marks(nb::module_& m) {
  m.def("mark_windows",
        [](const std::vector<std::int64_t>& flags, std::uintptr_t window, std::int64_t n,
           std::uintptr_t out) {
          if (n < 0) throw nb::value_error("expected a number of rows");
          const std::vector<FlagOfRows> own = as_flags(flags);
          const auto* numbers = reinterpret_cast<const std::int64_t*>(window);
          auto* done = reinterpret_cast<std::uint8_t*>(out);
          released<kReleaseAbove>(
              n, [&] { mark_windows(own, numbers, n, done, done + n, done + 2 * n); });
        },
        nb::arg("flags"), nb::arg("window"), nb::arg("n"), nb::arg("out"),
        "Write the columns done, truncated and terminated of n rows. `flags` has the address, "
        "stride and meaning of each flag.");

  m.def("mark_own",
        [](const std::vector<std::int64_t>& places, const std::vector<std::int64_t>& more,
           std::uintptr_t window, std::int64_t n) {
          if (n < 0 || places.size() != 9) {
            throw nb::value_error("expected address, stride and whether it is known of three flags");
          }
          const std::vector<FlagOfRows> others = as_flags(more);
          const auto* numbers = reinterpret_cast<const std::int64_t*>(window);
          const OwnFlag done = as_own(places, 0), truncated = as_own(places, 1);
          const OwnFlag terminated = as_own(places, 2);
          released<kReleaseAbove>(
              n, [&] { mark_own(done, truncated, terminated, others, numbers, n); });
        },
        nb::arg("places"), nb::arg("more"), nb::arg("window"), nb::arg("n"),
        "Mark the ends of windows in the columns done, truncated and terminated of a batch.");
}
