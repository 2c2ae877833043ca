// Python bindings of sums over several steps. Python has checked addresses and sizes. The class
// checks positions.
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "row_arguments.h"
#include "steps_ahead.h"

namespace replaykit {

namespace {

// For up to this many rows, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kRowsKept = 64;

}  // namespace

void bind_ahead(nb::module_& m) {
  nb::class_<StepsAhead>(m, "StepsAhead", "Sums of rewards, and fields of the last step.")
      .def("__init__",
           [](StepsAhead* self, std::int64_t reward, std::int64_t stride, bool wide,
              std::int64_t flag, std::int64_t flag_stride, const List& bases, const List& strides,
              const List& sizes, std::int64_t rows, std::int64_t lanes, double gamma, const std::vector<double>& discounts) {
             if (rows < 0 || lanes < 1 || rows % lanes != 0 || discounts.empty()) {
               throw nb::value_error("expected rows of at least one lane, and a discount");
             }
             new (self) StepsAhead({as_address(reward), stride, wide ? 8 : 4},
                                   {as_address(flag), flag_stride, 1},
                                   as_fields(bases, strides, sizes), rows, lanes, gamma, discounts);
           })
      .def("run",
           [](const StepsAhead& self, nb::handle element, nb::handle time, nb::handle last,
              nb::handle ends, std::int64_t sums, std::int64_t discounts, std::int64_t used,
              std::int64_t open, const List& to, const List& strides) {
             const Array elements(element, "element", Array::kInt64, 1);
             const Array times(time, "time", Array::kInt64, 1);
             const Array lasts(last, "last", Array::kInt64, 1);
             const Array out(ends, "ends", Array::kInt64, 1, true);
             const std::int64_t n = elements.size();
             check_length("time", times.size(), n);
             check_length("last", lasts.size(), n);
             check_length("ends", out.size(), n);
             if (self.has_flag() && open == 0) throw nb::value_error("expected memory for `open`");
             const std::vector<Side> sides = as_sides(self.width(), to, strides);
             const StepsAhead::Answers answers = {
                 as_address(sums), as_address(discounts),
                 reinterpret_cast<std::int64_t*>(as_address(used)), out.out(),
                 reinterpret_cast<bool*>(as_address(open))};
             const std::int64_t wrong = released<kRowsKept>(n, [&] {
               return self.run(elements.numbers(), times.numbers(), lasts.numbers(), n, answers,
                               sides);
             });
             if (wrong == n) return;
             refuse(nb::index_error, "expected stored rows, up to all of their episodes, got row ",
                    elements.numbers()[wrong], " at time ", times.numbers()[wrong],
                    " of an episode up to ", lasts.numbers()[wrong]);
           },
           "Write sums, discounts, step counts and last times; copy fields of the last step.");
}

}  // namespace replaykit
