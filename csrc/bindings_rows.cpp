// Python bindings of gather and scatter. Python has checked addresses and sizes. The bindings check
// positions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "row_arguments.h"
#include "rows.h"

namespace nb = nanobind;
using replaykit::Array;
using replaykit::as_address;
using replaykit::as_sides;
using replaykit::check_length;
using replaykit::check_positions;
using replaykit::checked_index;
using replaykit::checked_limit;
using replaykit::Field;
using replaykit::List;
using replaykit::Side;
using replaykit::Table;

namespace {

// For up to this many rows and bytes, the copy takes less time than releasing and taking the
// interpreter lock.
constexpr std::int64_t kRowsKept = 64;
constexpr std::int64_t kBytesKept = 64 << 10;

template <typename Work>
auto unlocked(const Table& table, std::int64_t n, const Work& work) {
  if (n <= kRowsKept && n * table.row_bytes() <= kBytesKept) return work();
  nb::gil_scoped_release release;
  return work();
}

}  // namespace

void replaykit::bind_rows(nb::module_& m) {
  m.def("ask_for_large_pages",
        [](std::int64_t address, std::int64_t bytes) {
          replaykit::ask_for_large_pages(as_address(address), bytes);
        },
        nb::arg("address"), nb::arg("bytes"),
        "Ask the kernel for large pages for fresh memory. The kernel may ignore this.");
  m.def("join_pages",
        [](std::int64_t address, std::int64_t bytes) {
          if (bytes < 0) throw nb::value_error("expected a number of bytes of at least 0");
          char* start = as_address(address);
          nb::gil_scoped_release release;
          replaykit::join_pages(start, bytes);
        },
        nb::arg("address"), nb::arg("bytes"),
        "Ask the kernel to join pages of a file in memory into large pages, if it can.");
  m.def("join_rows",
        [](std::int64_t left, std::int64_t left_stride, std::int64_t left_bytes,
           std::int64_t right, std::int64_t right_stride, std::int64_t right_bytes,
           std::int64_t n, std::int64_t to) {
          if (left_bytes < 0 || right_bytes < 0 || n < 0) {
            throw nb::value_error("expected bytes and a number of rows of at least 0");
          }
          const auto work = [&] {
            replaykit::join({as_address(left), left_stride}, left_bytes,
                            {as_address(right), right_stride}, right_bytes, n, as_address(to));
          };
          if (n * (left_bytes + right_bytes) <= kBytesKept) return work();
          nb::gil_scoped_release release;
          work();
        },
        nb::arg("left"), nb::arg("left_stride"), nb::arg("left_bytes"), nb::arg("right"),
        nb::arg("right_stride"), nb::arg("right_bytes"), nb::arg("n"), nb::arg("to"),
        "Concatenate the rows of two sources row by row.");

  nb::class_<Table>(m, "Table", "Fields of the rows of a table, at fixed addresses.")
      .def("__init__",
           [](Table* self, const List& bases, const List& strides, const List& sizes,
              std::int64_t rows) {
             if (bases.size() != strides.size() || bases.size() != sizes.size() || rows < 0) {
               throw nb::value_error("expected as many strides and sizes as fields, and rows >= 0");
             }
             std::vector<Field> fields;
             fields.reserve(bases.size());
             for (std::size_t f = 0; f < bases.size(); ++f) {
               if (sizes[f] < 0) throw nb::value_error("expected sizes of at least 0");
               fields.push_back({as_address(bases[f]), strides[f], sizes[f]});
             }
             new (self) Table(std::move(fields), rows);
           },
           nb::arg("bases"), nb::arg("strides"), nb::arg("sizes"), nb::arg("rows"))
      .def("gather",
           [](const Table& self, std::int64_t index, std::int64_t n, std::int64_t limit,
              const List& to, const List& strides, int threads, bool mapped, bool cold) {
             const std::vector<Side> sides = as_sides(self, to, strides);
             const List at = checked_index(index, n, checked_limit(self, limit));
             if (mapped) {
               nb::gil_scoped_release release;  // a page may have to be read from disk
               return self.gather_mapped(at.data(), n, sides, threads, cold);
             }
             unlocked(self, n, [&] { self.gather(at.data(), n, sides, threads); });
             return false;
           },
           nb::arg("index"), nb::arg("n"), nb::arg("limit"), nb::arg("to"), nb::arg("strides"),
           nb::arg("threads"), nb::arg("mapped") = false, nb::arg("cold") = false,
           "Copy rows out, of mapped files with hints to the kernel. Return whether anything was "
           "read from disk. Raise IndexError if a row is outside [0, limit).")
      .def("frames",
           [](const Table& self, nb::handle element, nb::handle time, nb::handle begin,
              std::int64_t lowest, std::int64_t lanes, std::int64_t count, bool zero,
              const List& to, const List& strides, int threads) {
             if (lanes < 1 || count < 1) {
               throw nb::value_error("expected lanes and count of at least 1");
             }
             const std::vector<Side> sides = as_sides(self, to, strides, count);
             const Array elements(element, "element", Array::kInt64, 1);
             const Array times(time, "time", Array::kInt64, 1);
             const Array begins(begin, "begin", Array::kInt64, 1);
             const std::int64_t n = elements.size();
             check_length("time", times.size(), n);
             check_length("begin", begins.size(), n);
             List at(static_cast<std::size_t>(n)), reach(static_cast<std::size_t>(n));
             for (std::size_t i = 0; i < at.size(); ++i) {
               const auto row = static_cast<std::int64_t>(i);
               at[i] = elements.numbers()[row];
               reach[i] = times.numbers()[row] - std::max(begins.numbers()[row], lowest);
             }
             check_positions(at, self.rows());
             check_positions(reach, self.rows() / lanes);
             unlocked(self, n, [&] {
               self.frames(at.data(), reach.data(), n, lanes, count, zero, sides, threads);
             });
           },
           nb::arg("element"), nb::arg("time"), nb::arg("begin"), nb::arg("lowest"),
           nb::arg("lanes"), nb::arg("count"), nb::arg("zero"), nb::arg("to"), nb::arg("strides"),
           nb::arg("threads"), "Copy rows out, each with the rows before it in its lane.")
      .def("scatter",
           [](const Table& self, std::int64_t slots, std::int64_t n, const List& from,
              const List& strides, int threads) {
             const std::vector<Side> sides = as_sides(self, from, strides);
             const List at = checked_index(slots, n, self.rows());
             unlocked(self, n, [&] { self.scatter(at.data(), n, sides, threads); });
           },
           nb::arg("slots"), nb::arg("n"), nb::arg("from_"), nb::arg("strides"),
           nb::arg("threads"), "Copy rows in. If a slot occurs twice, its last row stays.")
      .def("scatter_ring",
           [](const Table& self, std::int64_t first, std::int64_t n, std::int64_t skipped,
              const List& from, int threads) {
             List strides;
             for (const Field& field : self.fields()) strides.push_back(field.bytes);
             std::vector<Side> sides = as_sides(self, from, strides);
             if (first < 0 || first >= self.rows() || n < 0 || n > self.rows() || skipped < 0) {
               throw nb::index_error(("expected at most " + std::to_string(self.rows()) +
                                      " rows from one of as many slots on, got " +
                                      std::to_string(n) + " from slot " +
                                      std::to_string(first)).c_str());
             }
             for (Side& side : sides) side.address += skipped * side.stride;
             if (self.overlaps(sides, n)) return false;
             unlocked(self, n, [&] { self.scatter_ring(first, n, sides, threads); });
             return true;
           },
           nb::arg("first"), nb::arg("n"), nb::arg("skipped"), nb::arg("from_"), nb::arg("threads"),
           "Copy contiguous rows into consecutive slots, wrapping around. The first `skipped` rows "
           "at each address are left out. Return False if a row may lie in the table.");
}
