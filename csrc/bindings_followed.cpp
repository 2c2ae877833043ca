// Python bindings of rows whose next observations are not stored twice. Python has checked
// addresses and sizes. The bindings and the classes check positions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "followed.h"
#include "linked.h"

namespace nb = nanobind;
using replaykit::Batch;
using replaykit::Field;
using replaykit::Followed;
using replaykit::Linked;
using replaykit::Side;
using replaykit::Table;

namespace {

using Numbers = std::vector<std::int64_t>;

// For up to this many bytes, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kBytesKept = 64 << 10;

char* as_address(std::int64_t number) { return reinterpret_cast<char*>(number); }

std::vector<std::size_t> as_places(const Numbers& numbers, const Numbers& follows) {
  std::vector<std::size_t> places;
  for (const std::int64_t place : numbers) {
    if (place < 0 || place >= static_cast<std::int64_t>(follows.size()) ||
        follows[static_cast<std::size_t>(place)] >= 0) {
      throw nb::value_error("expected places of leaves that every row has");
    }
    places.push_back(static_cast<std::size_t>(place));
  }
  return places;
}

std::vector<const char*> as_addresses(const Followed& self, const Numbers& addresses) {
  if (addresses.size() != self.width()) {
    throw nb::value_error(("expected an address for each of " + std::to_string(self.width()) +
                           " leaves, got " + std::to_string(addresses.size())).c_str());
  }
  std::vector<const char*> rows;
  rows.reserve(addresses.size());
  for (const std::int64_t address : addresses) rows.push_back(as_address(address));
  return rows;
}

std::vector<const char*> as_rows(const Followed& self, const Numbers& addresses) {
  if (!self.in_order()) throw nb::value_error("expected rows without lanes, one after the other");
  return as_addresses(self, addresses);
}

Numbers as_numbers(std::int64_t address, std::int64_t n) {
  const auto* given = reinterpret_cast<const std::int64_t*>(address);
  return Numbers(given, given + n);
}

void check_places(const Numbers& places, std::int64_t least, std::size_t limit) {
  for (const std::int64_t place : places) {
    if (place < least || place >= static_cast<std::int64_t>(limit)) {
      throw nb::index_error("expected places of rows of the batch");
    }
  }
}

void check_slot(const Followed& self, std::int64_t slot) {
  if (slot < 0 || slot >= self.rows()) {
    throw nb::index_error(("expected a slot in [0, " + std::to_string(self.rows()) + "), got " +
                           std::to_string(slot)).c_str());
  }
}

// Returns the rows after checking that the arguments match each other.
Followed as_followed(const Numbers& bases, const Numbers& strides, const Numbers& sizes,
                     const Numbers& follows, const Numbers& ends, const Numbers& ids,
                     std::int64_t rows, std::int64_t step, std::int64_t map, bool wide,
                     std::int64_t entries, std::int64_t stack, std::int64_t free) {
  const std::size_t width = bases.size();
  if (strides.size() != width || sizes.size() != width || follows.size() != width) {
    throw nb::value_error("expected as many strides, sizes and places as leaves");
  }
  if (rows < 1 || step < 1 || step > rows || entries < 0) {
    throw nb::value_error("expected 1 <= step <= rows, and entries >= 0");
  }
  std::vector<Field> leaves;
  for (std::size_t leaf = 0; leaf < width; ++leaf) {
    if (sizes[leaf] < 0) throw nb::value_error("expected sizes of at least 0");
    leaves.push_back({as_address(bases[leaf]), strides[leaf], sizes[leaf]});
  }
  for (std::size_t leaf = 0; leaf < width; ++leaf) {
    const std::int64_t root = follows[leaf];
    if (root < 0) continue;
    if (root >= static_cast<std::int64_t>(width) ||
        follows[static_cast<std::size_t>(root)] >= 0 ||
        sizes[static_cast<std::size_t>(root)] != sizes[leaf]) {
      throw nb::value_error("expected leaves to follow others of their size");
    }
  }
  return Followed(std::move(leaves), follows, as_places(ends, follows), as_places(ids, follows), rows,
                  step, {as_address(map), wide},
                  {entries, reinterpret_cast<std::int64_t*>(stack),
                   reinterpret_cast<std::int64_t*>(free)});
}

template <typename Work>
auto unlocked(std::int64_t bytes, const Work& work) {
  if (bytes <= kBytesKept) return work();
  nb::gil_scoped_release release;
  return work();
}

}  // namespace

void replaykit::bind_followed(nb::module_& m) {
  nb::class_<Followed>(m, "Followed",
                       "Rows that share leaves with the next row, or have an overflow entry.")
      .def("__init__",
           [](Followed* self, const Numbers& bases, const Numbers& strides, const Numbers& sizes,
              const Numbers& follows, const Numbers& ends, const Numbers& ids, std::int64_t rows,
              std::int64_t step, std::int64_t map, bool wide, std::int64_t entries,
              std::int64_t stack, std::int64_t free) {
             new (self) Followed(as_followed(bases, strides, sizes, follows, ends, ids, rows, step,
                                             map, wide, entries, stack, free));
           },
           nb::arg("bases"), nb::arg("strides"), nb::arg("sizes"), nb::arg("follows"),
           nb::arg("ends"), nb::arg("ids"), nb::arg("rows"), nb::arg("step"), nb::arg("map"),
           nb::arg("wide"), nb::arg("entries"), nb::arg("stack"), nb::arg("free"))
      .def("gather",
           [](const Followed& self, std::int64_t index, std::int64_t n, const Numbers& to,
              const Numbers& strides, int threads) {
             if (to.size() != self.followers() || strides.size() != to.size() || n < 0) {
               throw nb::value_error("expected rows, and an address and a stride for each leaf");
             }
             std::vector<Side> sides;
             for (std::size_t k = 0; k < to.size(); ++k) {
               sides.push_back({as_address(to[k]), strides[k]});
             }
             // A copy, since other threads may write to the caller's index after the check.
             const auto* given = reinterpret_cast<const std::int64_t*>(index);
             const Numbers at(given, given + n);
             const std::int64_t wrong = Table::first_outside(at.data(), n, self.rows());
             if (wrong != n) check_slot(self, at[static_cast<std::size_t>(wrong)]);
             unlocked(n * self.pair_bytes(),
                      [&] { self.gather(at.data(), n, sides, threads); });
           },
           nb::arg("index"), nb::arg("n"), nb::arg("to"), nb::arg("strides"), nb::arg("threads"),
           "Copy the following leaves of rows. Raise IndexError if a row is not stored.")
      .def("compare",
           [](Followed& self, const Numbers& addresses, std::int64_t n, std::int64_t newest,
              bool severed, int threads) {
             const std::vector<const char*> rows = as_rows(self, addresses);
             check_slot(self, newest);
             if (n < 1 || n >= self.rows()) {
               throw nb::value_error("expected at least one row, and fewer than slots");
             }
             return unlocked(2 * n * self.pair_bytes(), [&] {
               return self.compare(rows, n, newest, severed, threads);
             });
           },
           nb::arg("addresses"), nb::arg("n"), nb::arg("newest"), nb::arg("severed"),
           nb::arg("threads"),
           "Compare rows with those before them. Return whether one continues an episode with other bits.")
      .def("write",
           [](Followed& self, std::int64_t first, std::int64_t n, const Numbers& addresses,
              int threads) {
             const std::vector<const char*> rows = as_rows(self, addresses);
             check_slot(self, first);
             if (n < 1 || n != self.compared()) {
               throw nb::value_error("expected the rows that were compared last");
             }
             return unlocked(n * self.row_bytes(),
                             [&] { return self.write(first, rows, threads); });
           },
           nb::arg("first"), nb::arg("n"), nb::arg("addresses"), nb::arg("threads"),
           "Writes the rows compared last; returns how many entries are missing, else 0.");

  nb::class_<Linked, Followed>(
      m, "Linked", "Rows that share leaves with the next row of their stream.")
      .def("__init__",
           [](Linked* self, const Numbers& bases, const Numbers& strides, const Numbers& sizes,
              const Numbers& follows, const Numbers& ends, const Numbers& ids, std::int64_t rows,
              std::int64_t step, std::int64_t map, bool wide, std::int64_t entries,
              std::int64_t stack, std::int64_t free, std::int64_t after, std::int64_t before) {
             if (step != 1) throw nb::value_error("expected rows without lanes");
             new (self) Linked(as_followed(bases, strides, sizes, follows, ends, ids, rows, step, map,
                                           wide, entries, stack, free),
                               {as_address(after), wide}, {as_address(before), wide});
           },
           nb::arg("bases"), nb::arg("strides"), nb::arg("sizes"), nb::arg("follows"),
           nb::arg("ends"), nb::arg("ids"), nb::arg("rows"), nb::arg("step"), nb::arg("map"),
           nb::arg("wide"), nb::arg("entries"), nb::arg("stack"), nb::arg("free"), nb::arg("after"),
           nb::arg("before"))
      .def("compare_linked",
           [](Linked& self, const Numbers& addresses, std::int64_t n, std::int64_t followers,
              std::int64_t m, std::int64_t newest, std::int64_t first, std::int64_t expected,
              int threads) {
             const std::vector<const char*> rows = as_addresses(self, addresses);
             if (n < 1 || n > self.rows() || m < 0 || m > n) {
               throw nb::value_error("expected at least one row, no more than slots, and streams");
             }
             Batch batch{as_numbers(followers, n), as_numbers(newest, m), as_numbers(first, m),
                         as_numbers(expected, m)};
             check_places(batch.followers, -1, batch.followers.size());
             check_places(batch.first, 0, batch.followers.size());
             for (const std::int64_t slot : batch.newest) check_slot(self, slot);
             return unlocked(2 * n * self.pair_bytes(), [&] {
               return self.compare(rows, std::move(batch), threads);
             });
           },
           nb::arg("addresses"), nb::arg("n"), nb::arg("followers"), nb::arg("m"),
           nb::arg("newest"), nb::arg("first"), nb::arg("expected"), nb::arg("threads"),
           "Compare rows with those before them. Return whether one continues an episode with other bits.")
      .def("write_linked",
           [](Linked& self, std::int64_t slots, std::int64_t n, const Numbers& addresses,
              int threads) {
             const std::vector<const char*> rows = as_addresses(self, addresses);
             if (n < 1 || n != self.compared()) {
               throw nb::value_error("expected the rows that were compared last");
             }
             const Numbers at = as_numbers(slots, n);
             for (const std::int64_t slot : at) check_slot(self, slot);
             return unlocked(n * self.row_bytes(), [&] { return self.write(at, rows, threads); });
           },
           nb::arg("slots"), nb::arg("n"), nb::arg("addresses"), nb::arg("threads"),
           "Writes the rows compared last; returns how many entries are missing, else 0.");
}
