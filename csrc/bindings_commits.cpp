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
#include "commits.h"

namespace nb = nanobind;
using replaykit::Array;
using replaykit::Commits;
using replaykit::Numbers;
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
             const Array of(cells, "cells", Array::kUint8, 2, true);
             const Array elements(at, "at", Array::kInt64, 1);
             const Array given(values, "values", Array::kNumbers, 1);
             check_length("cells", of.size(1), 8);
             check_length("values", given.size(), elements.size());
             auto* to = reinterpret_cast<double*>(of.bytes_out());
             const std::int64_t count = elements.size(), length = of.size();
             return released<kBytesKept>(16 * count, [&] {
               if (given.item() == 8) {
                 return (*self).put(table, to, length, elements.numbers(), given.doubles(), count);
               }
               const auto* singles = reinterpret_cast<const float*>(given.bytes());
               return (*self).put(table, to, length, elements.numbers(), singles, count);
             });
           },
           nb::arg("table"), nb::arg("cells"), nb::arg("at"), nb::arg("values"),
           "Journal elements of a table of doubles, then overwrite them. Without enough room, "
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

  m.def("log_elements",
        [](nb::handle ring, std::int64_t first, nb::handle at, std::int64_t table) {
          const Array numbers(ring, "ring", Array::kInt64, 1, true);
          const Array elements(at, "at", Array::kInt64, 1);
          const std::int64_t size = numbers.size(), count = elements.size();
          if (first < 0 || count > size) {
            throw nb::value_error("expected at most as many elements as there are numbers");
          }
          released<kBytesKept>(8 * count, [&, from = elements.numbers(), to = numbers.out()] {
            for (std::int64_t i = 0, place = count ? first % size : 0; i < count; ++i) {
              to[place] = from[i] | table;
              if (++place == size) place = 0;
            }
          });
        },
        nb::arg("ring"), nb::arg("first"), nb::arg("at"), nb::arg("table"),
        "Write positions with the bits of their table into a ring, beginning at number `first`.");

  m.def("mark_elements",
        [](nb::handle marks, nb::handle at, std::int64_t chunk, std::int64_t number) {
          const Array chunks(marks, "marks", Array::kInt64, 1, true);
          const Array elements(at, "at", Array::kInt64, 1);
          if (chunk < 1 || (chunk & (chunk - 1)) != 0) {
            throw nb::value_error("expected a power of two as size of a chunk");
          }
          const int shift = __builtin_ctzll(static_cast<unsigned long long>(chunk));
          const Numbers from = elements.numbers();
          for (std::int64_t i = 0; i < elements.size(); ++i) {
            const std::int64_t place = from[i] >> shift;
            if (place < 0 || place >= chunks.size()) throw nb::index_error("expected marked rows");
            chunks.out()[place] = number;
          }
        },
        nb::arg("marks"), nb::arg("at"), nb::arg("chunk"), nb::arg("number"),
        "Mark the chunks of rows, which are in any order, with a number.");
}
