// Python bindings of sums over several steps. Python has checked addresses and sizes. The class
// checks positions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "steps_ahead.h"

namespace nb = nanobind;
using replaykit::Array;
using replaykit::check_length;
using replaykit::Field;
using replaykit::Side;
using replaykit::StepsAhead;

namespace {

using List = std::vector<std::int64_t>;

// For up to this many rows, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kRowsKept = 64;

char* as_address(std::int64_t number) { return reinterpret_cast<char*>(number); }

}  // namespace

void replaykit::bind_ahead(nb::module_& m) {
  nb::class_<StepsAhead>(m, "StepsAhead", "Sums of rewards, and fields of the last step.")
      .def("__init__",
           [](StepsAhead* self, std::int64_t reward, std::int64_t stride, bool wide,
              std::int64_t flag, std::int64_t flag_stride, const List& bases, const List& strides,
              const List& sizes, std::int64_t rows, std::int64_t lanes, double gamma, const std::vector<double>& discounts) {
             if (bases.size() != strides.size() || bases.size() != sizes.size()) {
               throw nb::value_error("expected as many strides and sizes as fields");
             }
             if (rows < 0 || lanes < 1 || rows % lanes != 0 || discounts.empty()) {
               throw nb::value_error("expected rows of at least one lane, and a discount");
             }
             std::vector<Field> fields;
             for (std::size_t f = 0; f < bases.size(); ++f) {
               if (sizes[f] < 0) throw nb::value_error("expected sizes of at least 0");
               fields.push_back({as_address(bases[f]), strides[f], sizes[f]});
             }
             new (self) StepsAhead({as_address(reward), stride, wide ? 8 : 4},
                                   {as_address(flag), flag_stride, 1}, std::move(fields), rows,
                                   lanes, gamma, discounts);
           },
           nb::arg("reward"), nb::arg("stride"), nb::arg("wide"), nb::arg("flag"),
           nb::arg("flag_stride"), nb::arg("bases"), nb::arg("strides"), nb::arg("sizes"),
           nb::arg("rows"), nb::arg("lanes"), nb::arg("gamma"), nb::arg("discounts"))
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
             check_length("to", static_cast<std::int64_t>(to.size()), self.width());
             check_length("strides", static_cast<std::int64_t>(strides.size()), self.width());
             if (self.has_flag() && open == 0) throw nb::value_error("expected memory for `open`");
             std::vector<Side> sides;
             sides.reserve(to.size());
             for (std::size_t f = 0; f < to.size(); ++f) {
               sides.push_back({as_address(to[f]), strides[f]});
             }
             const StepsAhead::Answers answers = {
                 as_address(sums), as_address(discounts),
                 reinterpret_cast<std::int64_t*>(as_address(used)), out.out(),
                 reinterpret_cast<bool*>(as_address(open))};
             const auto work = [&] {
               return self.run(elements.numbers(), times.numbers(), lasts.numbers(), n, answers,
                               sides);
             };
             const std::int64_t wrong = replaykit::released<kRowsKept>(n, work);
             if (wrong != n) {
               throw nb::index_error(("expected stored rows, and in their episodes at most all of "
                                      "them, got row " +
                                      std::to_string(elements.numbers()[wrong]) + " at time " +
                                      std::to_string(times.numbers()[wrong]) +
                                      " of an episode up to " +
                                      std::to_string(lasts.numbers()[wrong])).c_str());
             }
           },
           nb::arg("element"), nb::arg("time"), nb::arg("last"), nb::arg("ends"), nb::arg("sums"),
           nb::arg("discounts"), nb::arg("used"), nb::arg("open"), nb::arg("to"), nb::arg("strides"),
           "Write sums, discounts, step counts and last times; copy fields of the last step.");
}
