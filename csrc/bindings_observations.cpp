// Python bindings of rows that refer to observations. Python has checked addresses and sizes. The
// bindings and the class check positions.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "observations.h"
#include "row_arguments.h"

namespace replaykit {

namespace {

// For up to this many bytes, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kBytesKept = 64 << 10;

void check(bool fits, const char* expected) {
  if (!fits) throw nb::value_error(expected);
}

std::vector<std::size_t> as_places(const List& numbers, const List& follows) {
  std::vector<std::size_t> places;
  for (const std::int64_t place : numbers) {
    check(place >= 0 && place < static_cast<std::int64_t>(follows.size()) &&
              follows[static_cast<std::size_t>(place)] < 0,
          "expected places of leaves that every row has");
    places.push_back(static_cast<std::size_t>(place));
  }
  return places;
}

Observations::Addresses as_addresses(const Observations& self, const List& addresses) {
  if (addresses.size() != self.width()) {
    refuse(nb::value_error, "expected an address for each of ", self.width(), " leaves, got ",
           addresses.size());
  }
  Observations::Addresses rows;
  rows.reserve(addresses.size());
  for (const std::int64_t address : addresses) rows.push_back(as_address(address));
  return rows;
}

template <typename Number>
std::vector<Number> copied(std::int64_t address, std::int64_t n) {
  if (!address) return {};
  const auto* given = reinterpret_cast<const Number*>(address);
  return std::vector<Number>(given, given + n);
}

// Returns the number of missing entries, and the least and greatest entry of rows that are written.
std::tuple<std::int64_t, std::int64_t, std::int64_t> plan(Observations& self, List slots,
                                                          std::int64_t keep) {
  const auto n = static_cast<std::int64_t>(slots.size());
  check(n >= 1 && n == self.compared(), "expected the rows that were compared last");
  const std::int64_t missing = self.plan(std::move(slots), copied<std::uint8_t>(keep, n));
  const auto [least, most] = self.span();
  return {missing, least, most};
}

int compare(Observations& self, const List& addresses, int threads) {
  if (addresses.empty()) return 0;
  const Observations::Addresses rows = as_addresses(self, addresses);
  return released<kBytesKept>(2 * self.compared() * self.pair_bytes(),
                              [&] { return self.compare(rows, threads); });
}

}  // namespace

void bind_observations(nb::module_& m) {
  nb::class_<Observations>(m, "Observations", "Rows that refer to entries of a table.")
      .def("__init__",
           [](Observations* self, const List& sizes, const List& follows, const List& ends,
              const List& ids, std::int64_t rows, std::int64_t lanes) {
             const auto width = static_cast<std::int64_t>(sizes.size());
             check(sizes.size() == follows.size(), "expected as many sizes and places as leaves");
             check(rows >= 1 && rows < INT32_MAX && lanes >= 1 && lanes <= rows,
                   "expected 1 <= lanes <= rows < 2**31 - 1");
             for (std::size_t leaf = 0; leaf < sizes.size(); ++leaf) {
               check(sizes[leaf] >= 0, "expected sizes of at least 0");
               const std::int64_t root = follows[leaf];
               check(root < width, "expected leaves to follow others of their size");
               check(root < 0 || (follows[static_cast<std::size_t>(root)] < 0 &&
                                  sizes[static_cast<std::size_t>(root)] == sizes[leaf]),
                     "expected leaves to follow others of their size");
             }
             new (self) Observations(sizes, follows, as_places(ends, follows),
                                     as_places(ids, follows), rows, lanes);
           })
      .def("point",
           [](Observations& self, const List& bases, const List& strides, std::int64_t references,
              std::int64_t overflow) {
             check(bases.size() == self.width() && strides.size() == self.width() && references,
                   "expected a base and a stride for each leaf, and references");
             check(overflow >= 0, "expected at least 0 overflow entries");
             self.point(bases, strides, reinterpret_cast<std::int32_t*>(references), overflow);
           },
           "Set the memory of the leaves and of the references, and the number of overflow entries.")
      .def("derive",
           [](Observations& self, std::int64_t stored) {
             check(stored >= 0 && stored <= self.rows(), "expected at most as many rows as there are");
             self.derive(stored);
           }, "Find the entries in use. Raise ValueError if references contradict each other.")
      .def("share", &Observations::share, "Keep a copy of references, from the next derive on.")
      .def("follow",
           [](Observations& self, std::int64_t rows, std::int64_t n, std::int64_t stored) {
             check(stored >= 0 && stored <= self.rows(), "expected at most as many rows as there are");
             self.follow(checked_index(rows, n, self.rows()), stored);
           }, "Follow other processes, which have changed the references of distinct rows.")
      .def("clear", &Observations::clear, "Remove all references.")
      .def("alone", &Observations::alone, "Return the number of next observations of no other row.")
      .def("gather",
           [](const Observations& self, std::int64_t index, std::int64_t n, int kind,
              const List& to, const List& strides, int threads) {
             const std::size_t pairs = self.pairs(), kinds = kind == 2 ? 2 : 1;
             check(kind >= 0 && kind <= 2, "expected a kind of 0, 1 or 2");
             const auto width = static_cast<std::int64_t>(kinds * pairs);
             const std::vector<Side> sides = as_sides(width, to, strides);
             const List at = checked_index(index, n, self.rows());
             released<kBytesKept>(n * self.pair_bytes(), [&] {
               self.gather(at.data(), n, kind & 1, sides.data(), threads);
               if (kinds == 2) self.gather(at.data(), n, 1, sides.data() + pairs, threads);
             });
           }, "Copy observations, next observations for kind 1, or both for kind 2.")
      .def("compare",
           [](Observations& self, std::int64_t before, std::int64_t after, std::int64_t n,
              const List& addresses, int threads) {
             check(n >= 1, "expected at least one row");
             List earlier = copied<std::int64_t>(before, n);
             for (const std::int64_t at : earlier) check(at < n, "expected places of rows of the batch");
             self.begin(std::move(earlier), copied<std::int64_t>(after, n));
             return compare(self, addresses, threads);
           }, "Begin a write of n rows, with the rows before and after each. Return 0 if all fit.")
      .def("compare_run",
           [](Observations& self, std::int64_t n, std::int64_t newest, const List& addresses,
              int threads) {
             check(n >= 1 && newest >= -1 && newest < self.rows(),
                   "expected at least one row, and a stored row");
             self.begin_run(n, newest);
             return compare(self, addresses, threads);
           }, "Begin a write of n rows after the stored row newest. Return 0 if all fit.")
      .def("set_shares",
           [](Observations& self, std::int64_t before, std::int64_t after) {
             self.set_shares(reinterpret_cast<const std::uint8_t*>(before),
                             reinterpret_cast<const std::uint8_t*>(after));
           }, "Set the result of a comparison.")
      .def("plan",
           [](Observations& self, std::int64_t slots, std::int64_t n, std::int64_t keep) {
             return plan(self, checked_index(slots, n, self.rows()), keep);
           },
           "Plan references of rows at distinct slots.")
      .def("plan_run",
           [](Observations& self, std::int64_t first, std::int64_t n) {
             check(n <= self.rows() && first >= 0 && first < self.rows(), "expected stored rows");
             List slots(static_cast<std::size_t>(n));
             for (std::int64_t i = 0; i < n; ++i) {
               const std::int64_t slot = first + i;
               slots[static_cast<std::size_t>(i)] = slot < self.rows() ? slot : slot - self.rows();
             }
             return plan(self, std::move(slots), 0);
           }, "Plan as ``plan`` does, for consecutive slots of the ring.")
      .def("planned", &Observations::planned, "Return the number of entries that the plan writes; -1 without a plan.")
      .def("fresh",
           [](const Observations& self, std::int64_t entries, std::int64_t sources) {
             self.fresh(reinterpret_cast<std::int64_t*>(entries),
                        reinterpret_cast<std::int64_t*>(sources));
           }, "Write the entries of the plan and their sources.")
      .def("write",
           [](Observations& self, const List& addresses, int threads) {
             const Observations::Addresses rows = as_addresses(self, addresses);
             check(self.planned() >= 0, "expected a plan");
             released<kBytesKept>(self.compared() * self.row_bytes(), [&] { self.write(rows, threads); });
           }, "Write the planned rows.")
      .def("commit", &Observations::commit, "Set the planned references.")
      .def("forget", &Observations::forget, "Drop the batch, and undo its plan.");
}

}  // namespace replaykit
