// The Python face of marks of windows: addresses that the caller has checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.h"
#include "marks.h"

namespace nb = nanobind;
using replaykit::FlagOfRows;

namespace {

// Up to so many rows the work is shorter than handing the interpreter lock over and back.
constexpr std::int64_t kReleaseAbove = 4096;

}  // namespace

void replaykit::bind_marks(nb::module_& m) {
  m.def("mark_windows",
        [](const std::vector<std::int64_t>& flags, std::uintptr_t window, std::int64_t n,
           std::uintptr_t out) {
          if (flags.size() % 3 != 0 || n < 0) {
            throw nb::value_error("expected address, stride and meaning of every flag, and rows");
          }
          std::vector<FlagOfRows> own;
          own.reserve(flags.size() / 3);
          for (std::size_t i = 0; i < flags.size(); i += 3) {
            if (flags[i + 2] < 0 || flags[i + 2] > 2) {
              throw nb::value_error("expected meanings of 0, 1 or 2");
            }
            own.push_back({reinterpret_cast<const std::uint8_t*>(flags[i]), flags[i + 1],
                           static_cast<int>(flags[i + 2])});
          }
          const auto* numbers = reinterpret_cast<const std::int64_t*>(window);
          auto* done = reinterpret_cast<std::uint8_t*>(out);
          const auto run = [&] { mark_windows(own, numbers, n, done, done + n, done + 2 * n); };
          if (n <= kReleaseAbove) return run();
          nb::gil_scoped_release release;
          run();
        },
        nb::arg("flags"), nb::arg("window"), nb::arg("n"), nb::arg("out"),
        "Writes done, truncated and terminated of n rows, one after the other; flags are given as "
        "address, stride and meaning, one after the other.");
}
