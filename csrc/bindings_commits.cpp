// Python bindings of commits of a few rows. The object keeps its arrays alive as long as it exists.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "changed_elements.h"
#include "commits.h"

namespace nb = nanobind;
using replaykit::Array;
using replaykit::Commits;
using replaykit::released;

namespace {

// For up to this many bytes, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kBytesKept = 1 << 15;

class HeldCommits {
 public:
  HeldCommits(nb::handle journal, nb::handle even, nb::handle odd, const nb::list& rows)
      : commits_(bytes(journal, "journal"), bytes(even, "even"), bytes(odd, "odd"), all(rows)) {}

  HeldCommits(const HeldCommits&) = delete;
  HeldCommits& operator=(const HeldCommits&) = delete;

  Commits& operator*() { return commits_; }
  const Commits& operator*() const { return commits_; }

 private:
  const Array& held(nb::handle array, const char* name, int dimensions, bool written) {
    arrays_.push_back(
        std::make_unique<Array>(array, name, Array::kUint8, dimensions, written));
    return *arrays_.back();
  }

  Commits::Bytes bytes(nb::handle array, const char* name) {
    const Array& of = held(array, name, 1, true);
    auto* base = const_cast<std::uint8_t*>(of.bytes());
    if (reinterpret_cast<std::uintptr_t>(base) % 8 != 0) {
      throw nb::value_error("expected bytes at a multiple of 8");
    }
    return {base, of.size()};
  }

  std::vector<Commits::Rows> all(const nb::list& rows) {
    std::vector<Commits::Rows> found;
    for (nb::handle one : rows) {
      const auto [number, array] = nb::cast<std::pair<std::int64_t, nb::object>>(one);
      const Array& of = held(array, "rows", 2, false);
      found.push_back({number, of.bytes(), of.size(0), of.size(1)});
    }
    return found;
  }

  std::vector<std::unique_ptr<Array>> arrays_;  // before `commits_`, which points into them
  Commits commits_;
};

}  // namespace

void replaykit::bind_commits(nb::module_& m) {
  nb::class_<HeldCommits>(m, "Commits",
                          "A journal of overwritten bytes, and the numbers that commit a write.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, const nb::list&>(), nb::arg("journal"),
           nb::arg("even"), nb::arg("odd"), nb::arg("rows"))
      .def("journaled",
           [](const HeldCommits& self) {
             const std::int64_t next = (*self).latest() + 1;
             return nb::make_tuple(next, (*self).used(next));
           },
           "Return the number of the next state, and the number of bytes journaled for it.")
      .def("journal",
           [](HeldCommits& self, std::int64_t first, std::int64_t until) {
             Commits& commits = *self;
             return released<kBytesKept>(commits.size(first, until),
                                         [&] { return commits.journal(first, until); });
           },
           nb::arg("first"), nb::arg("until"),
           "Journal the present rows. Without enough room, change nothing and return False.")
      .def("put",
           [](HeldCommits& self, std::int64_t table, nb::handle cells, nb::handle at,
              nb::handle values) {
             const Array of(cells, "cells", Array::kInt64, 1, true);
             const Array elements(at, "at", Array::kInt64, 1);
             const Array given(values, "values", Array::kInt64, 1);
             check_length("values", given.size(), elements.size());
             const std::int64_t count = elements.size();
             return released<kBytesKept>(16 * count, [&] {
               return (*self).put(table, of.out(), of.size(), elements.numbers(), given.numbers(),
                                  count);
             });
           },
           nb::arg("table"), nb::arg("cells"), nb::arg("at"), nb::arg("values"),
           "Journal elements of a table as int64, then overwrite them. Without enough room, "
           "change nothing and return False.")
      .def("commit",
           [](HeldCommits& self, nb::handle numbers, const std::vector<std::int64_t>& more) {
             const Array values(numbers, "numbers", Array::kInt64, 1);
             if (values.size() > 1 && values.numbers().stride != 8) {
               throw nb::value_error("expected contiguous numbers");
             }
             return (*self).commit(reinterpret_cast<const std::int64_t*>(values.bytes()),
                                   values.size(), more.data(),
                                   static_cast<std::int64_t>(more.size()));
           },
           nb::arg("numbers"), nb::arg("more"),
           "Make `numbers`, followed by `more`, the latest state; return the number of the state. "
           "Without enough room, change nothing and return 0.");

  m.def("take_rising",
        [](nb::handle at, nb::handle elements, nb::handle out) {
          const Array index(at, "at", Array::kInt64, 1);
          const Array numbers(elements, "elements", Array::kNumbers, 1);
          const Array found(out, "out", Array::kDouble, 1, true);
          check_length("out", found.size(), index.size());
          auto* to = reinterpret_cast<double*>(found.bytes_out());
          const std::int64_t count = index.size(), length = numbers.size();
          return released<kBytesKept>(16 * count, [&] {
            if (numbers.item() == 8) {
              return take_rising(index.numbers(), count, numbers.doubles(), length, to);
            }
            const auto* singles = reinterpret_cast<const float*>(numbers.bytes());
            return take_rising(index.numbers(), count, singles, length, to);
          });
        },
        nb::arg("at"), nb::arg("elements"), nb::arg("out"),
        "Write float32 or float64 elements at rising positions as doubles. Return False if the "
        "positions do not rise, or if any is out of range.");

  m.def("log_elements",
        [](nb::handle ring, std::int64_t first, nb::handle at, std::int64_t table) {
          const Array numbers(ring, "ring", Array::kInt64, 1, true);
          const Array elements(at, "at", Array::kInt64, 1);
          if (first < 0 || elements.size() > numbers.size()) {
            throw nb::value_error("expected at most as many elements as there are numbers");
          }
          if (elements.size() == 0) return;
          released<kBytesKept>(8 * elements.size(), [&] {
            log_elements(numbers.out(), numbers.size(), first, elements.numbers(), elements.size(),
                         table);
          });
        },
        nb::arg("ring"), nb::arg("first"), nb::arg("at"), nb::arg("table"),
        "Write positions with the bits of their table into a ring, beginning at number `first`.");
}
