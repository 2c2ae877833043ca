// Python bindings of commits of a few rows.
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "bindings.h"
#include "committed_column.h"

namespace replaykit {

namespace {

// For up to this many bytes, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kBytesKept = 1 << 15;

}  // namespace

void bind_commits(nb::module_& m) {
  nb::class_<HeldCommits>(m, "Commits",
                          "A journal of overwritten bytes, and the numbers that commit a write.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, const nb::list&>())
      .def("journaled",
           [](const HeldCommits& self) {
             const std::int64_t next = self.commits.latest() + 1;
             return nb::make_tuple(next, self.commits.used(next));
           },
           "Return the number of the next state, and the number of bytes journaled for it.")
      .def("journal",
           [](HeldCommits& self, std::int64_t first, std::int64_t until) {
             return released<kBytesKept>(self.commits.size(first, until),
                                         [&] { return self.commits.journal(first, until); });
           },
           "Journal the present rows. Without enough room, change nothing and return False.")
      .def("commit",
           [](HeldCommits& self, nb::handle numbers, const std::vector<std::int64_t>& more) {
             const Array values(numbers, "numbers", Array::kInt64, 1);
             if (values.size() > 1 && values.numbers().stride != 8) {
               throw nb::value_error("expected contiguous numbers");
             }
             const auto* first = reinterpret_cast<const std::int64_t*>(values.bytes());
             const auto count = static_cast<std::int64_t>(more.size());
             return self.commits.commit(first, values.size(), more.data(), count);
           },
           "Make `numbers`, followed by `more`, the latest state; return the number of the state. "
           "Without enough room, change nothing and return 0.");

  nb::class_<ElementLog>(m, "ElementLog", "A ring of changed elements, with their tables.")
      .def(nb::init<nb::handle>())
      .def_rw("count", &ElementLog::count)
      .def_rw("committed", &ElementLog::committed)
      .def("has_room", &ElementLog::has_room)
      .def("append",
           [](ElementLog& self, std::int64_t table, nb::handle at) {
             const Array elements(at, "at", Array::kInt64, 1);
             self.append(table, elements.numbers(), elements.size());
           },
           "Log elements of a table.");

  const auto none = [](const char* name) { return nb::arg(name).none() = nb::none(); };
  nb::class_<Column>(m, "Column", "A table of doubles, which processes may share.")
      .def(nb::init<nb::object, std::int64_t, nb::handle, nb::object, nb::handle, int, nb::handle>(),
           nb::arg("commits"), nb::arg("table"), nb::arg("cells"), none("log"), none("marks"),
           nb::arg("bits") = 0, none("clock"))
      .def("set",
           [](Column& self, nb::handle at, nb::handle values) {
             const Array elements(at, "at", Array::kInt64, 1);
             const Array given(values, "values", Array::kNumbers, 1);
             const Numbers from = elements.numbers();
             const std::int64_t n = elements.size();
             check_length("values", given.size(), n);
             return released<kBytesKept>(16 * n, [&] {
               if (given.item() == 8) return self.set(from, given.doubles(), n);
               return self.set(from, reinterpret_cast<const float*>(given.bytes()), n);
             });
           },
           "Journal elements, then overwrite, log and mark them. Without enough room, change "
           "nothing and return False.");
}

}  // namespace replaykit
