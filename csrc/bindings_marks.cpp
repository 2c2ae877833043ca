// Python bindings of marks of windows. The caller has checked the addresses.
#include <nanobind/stl/vector.h>

#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "marks.h"

namespace replaykit {

namespace {

// For up to this many rows, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 4096;

std::vector<FlagOfRows> as_flags(const std::vector<std::int64_t>& flags) {
  if (flags.size() % 3 != 0) {
    throw nb::value_error("expected address, stride and meaning of every flag");
  }
  std::vector<FlagOfRows> own;
  for (std::size_t i = 0; i < flags.size(); i += 3) {
    if (flags[i + 2] < 0 || flags[i + 2] > 2) throw nb::value_error("expected meanings of 0, 1 or 2");
    own.push_back({reinterpret_cast<const std::uint8_t*>(flags[i]), flags[i + 1],
                   static_cast<int>(flags[i + 2])});
  }
  return own;
}

}  // namespace

void bind_marks(nb::module_& m) {
  m.def("mark_windows",
        [](const std::vector<std::int64_t>& flags, std::uintptr_t window, std::int64_t n,
           const std::vector<std::int64_t>& marks) {
          if (n < 0 || marks.size() != 6) {
            throw nb::value_error("expected a number of rows, and address and stride of three marks");
          }
          const std::vector<FlagOfRows> own = as_flags(flags);
          const auto* numbers = reinterpret_cast<const std::int64_t*>(window);
          const auto mark = [&](std::size_t at) {
            return MarkOfRows{reinterpret_cast<std::uint8_t*>(marks[at]), marks[at + 1]};
          };
          released<kReleaseAbove>(
              n, [&] { mark_windows(own, numbers, n, mark(0), mark(2), mark(4)); });
        },
        "Write the columns done, truncated and terminated of n rows. `flags` has the address, "
        "stride and meaning of each flag, and `marks` address and stride of each column.");
}

}  // namespace replaykit
