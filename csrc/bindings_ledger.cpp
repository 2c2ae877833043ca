// Python bindings of generations and of checks of priorities.
#include "arrays.h"
#include "bindings.h"
#include "ledger.h"

namespace replaykit {

void bind_ledger(nb::module_& m) {
  m.def("generations",
        [](std::uintptr_t index, std::int64_t n, std::int64_t next_position, std::int64_t slots,
           std::uintptr_t out) {
          if (next_position < 0 || slots < 1) throw nb::value_error("expected counters of a ledger");
          const Counters counters = {next_position, slots};
          for (std::int64_t i = 0; i < n; ++i) {
            at<std::int64_t>(out)[i] = counters.generation(at<const std::int64_t>(index)[i]);
          }
        },
        "Write the generation of each slot, or -1 if it was never written.");

  m.def("any_next",
        [](std::uintptr_t index, std::int64_t n, std::int64_t cursor, std::int64_t count,
           std::int64_t slots) {
          if (cursor < 0 || cursor >= slots || count < 0 || count > slots) {
            throw nb::value_error("expected a part of a ring");
          }
          return any_next(at<const std::int64_t>(index), n, cursor, count, slots);
        },
        "Return whether any slot is among the next `count` slots to be written.");

  m.def("place_run",
        [](std::uintptr_t positions, std::uintptr_t generations, std::int64_t entries,
           std::int64_t first, std::int64_t n, std::int64_t row_id) {
          if (first < 0 || n < 0 || first > entries - n) {
            throw nb::value_error("expected slots of the tables");
          }
          for (std::int64_t i = first; i < first + n; ++i) {
            at<std::int64_t>(positions)[i] = row_id++;
            ++at<std::int64_t>(generations)[i];
          }
        },
        "Set the row ids of n slots, and add 1 to their generations.");

  m.def("all_plain",
        [](std::uintptr_t priority, std::int64_t n, bool doubles) {
          return doubles ? all_plain(at<const double>(priority), n)
                         : all_plain(at<const float>(priority), n);
        },
        "Return whether all priorities are finite and not negative.");
}

}  // namespace replaykit
