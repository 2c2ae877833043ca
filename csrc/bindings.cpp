// Python bindings of the compiled core. They define names and check arguments.
#include <nanobind/ndarray.h>

#include <cmath>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "rank_heap.h"

namespace nb = nanobind;
using namespace replaykit;

namespace {

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IndicesOut = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DoublesOut = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// For up to this many rows, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 256;

void check_ranks(const double* ranks, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (std::isnan(ranks[i])) {
      refuse(nb::value_error, "expected a rank that is a number, got NaN at position ", i);
    }
  }
}

}  // namespace

NB_MODULE(_core, m) {
  // Buffers may live until their process ends. This is not a leak, so users get no warning.
  nb::set_leak_warnings(false);
  m.doc() = "Compiled core of replaykit.";
  m.attr("__version__") = REPLAYKIT_VERSION;
  bind_trees(m);
  bind_checksums(m);
  bind_moments(m);

  nb::class_<RankHeap>(m, "RankHeap",
                       "A heap that finds the slot of the next row; the largest ranks stay.")
      .def("__init__",
           [](RankHeap* self, std::int64_t capacity) {
             if (capacity < 1) {
               refuse(nb::value_error, "expected a capacity of at least 1, got ", capacity);
             }
             new (self) RankHeap(capacity);
           })
      .def("__len__", &RankHeap::size)
      .def_prop_ro("capacity", &RankHeap::capacity)
      .def("offer",
           [](RankHeap& self, Doubles ranks, IndicesOut slots) {
             const auto n = static_cast<std::int64_t>(ranks.shape(0));
             check_length("slots", static_cast<std::int64_t>(slots.size()), n);
             const double* in = ranks.data();
             std::int64_t* out = slots.data();
             check_ranks(in, n);
             released<kReleaseAbove>(n, [&] { self.offer(in, n, out); });
           },
           nb::arg("ranks").noconvert(), nb::arg("slots").noconvert(),
           "Offer the ranks in order; write the slot of each row, or -1, into `slots`.")
      .def("export",
           [](const RankHeap& self, DoublesOut ranks, IndicesOut ages) {
             check_length("ranks", static_cast<std::int64_t>(ranks.size()), self.size());
             check_length("ages", static_cast<std::int64_t>(ages.size()), self.size());
             for (const RankHeap::Entry& e : self.entries()) {
               ranks.data()[e.slot] = e.rank;
               ages.data()[e.slot] = e.age;
             }
           },
           nb::arg("ranks").noconvert(), nb::arg("ages").noconvert(),
           "Write the rank and age of the row in each slot.")
      .def("assign",
           [](RankHeap& self, Doubles ranks, Indices ages, std::int64_t next_age) {
             const auto n = static_cast<std::int64_t>(ranks.shape(0));
             check_length("ages", static_cast<std::int64_t>(ages.size()), n);
             if (n > self.capacity()) {
               refuse(nb::value_error, "expected at most ", self.capacity(), " records, got ", n);
             }
             check_ranks(ranks.data(), n);
             std::vector<RankHeap::Entry> entries;
             entries.reserve(static_cast<std::size_t>(n));
             for (std::int64_t i = 0; i < n; ++i) {
               const std::int64_t age = ages.data()[i];
               if (age < 0 || age >= next_age) {
                 refuse(nb::value_error, "expected ages in [0, ", next_age, "), got ", age,
                        " at position ", i);
               }
               entries.push_back({ranks.data()[i], age, i});
             }
             self.assign(std::move(entries), next_age);
           },
           nb::arg("ranks").noconvert(), nb::arg("ages").noconvert(), nb::arg("next_age"),
           "Replace all rows; the row in slot i has ranks[i] and ages[i].");

  bind_ahead(m);
  bind_commits(m);
  bind_episodes(m);
  bind_observations(m);
  bind_interrupts(m);
  bind_ledger(m);
  bind_marks(m);
  bind_matching(m);
  bind_relabel(m);
  bind_rows(m);
  bind_reads(m);
}
