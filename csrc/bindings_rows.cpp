// Python bindings of gather and scatter. Python has checked addresses and sizes. The bindings check
// positions.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings.h"
#include "row_arguments.h"

namespace replaykit {

namespace {

// For up to this many bytes, the copy takes less time than releasing and taking the interpreter lock.
// The copy of a row takes as long as that of some bytes.
constexpr std::int64_t kBytesKept = 64 << 10, kBytesARow = 1024;

template <typename Work>
void unlocked(const Table& table, std::int64_t n, const Work& work) {
  released<kBytesKept>(n * std::max(table.row_bytes(), kBytesARow), work);
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("ask_for_large_pages",
        [](std::int64_t address, std::int64_t bytes) {
          ask_for_large_pages(as_address(address), bytes);
        },
        "Ask the kernel for large pages for fresh memory. The kernel may ignore this.");
  m.def("has_openmp", [] { return openmp() != nullptr; },
        "Return whether large copies use the threads of torch's OpenMP.");
  m.def("join_pages",
        [](std::int64_t address, std::int64_t bytes) {
          if (bytes < 0) throw nb::value_error("expected a number of bytes of at least 0");
          char* start = as_address(address);
          nb::gil_scoped_release release;
          join_pages(start, bytes);
        },
        "Ask the kernel to join pages of a file in memory into large pages, if it can.");
  m.def("join_rows",
        [](std::int64_t left, std::int64_t left_stride, std::int64_t left_bytes,
           std::int64_t right, std::int64_t right_stride, std::int64_t right_bytes,
           std::int64_t n, std::int64_t to) {
          if (left_bytes < 0 || right_bytes < 0 || n < 0) {
            throw nb::value_error("expected bytes and a number of rows of at least 0");
          }
          const auto work = [&] {
            join({as_address(left), left_stride}, left_bytes, {as_address(right), right_stride},
                 right_bytes, n, as_address(to));
          };
          released<kBytesKept>(n * (left_bytes + right_bytes), work);
        },
        "Concatenate the rows of two sources row by row.");

  nb::class_<Table>(m, "Table", "Fields of the rows of a table, at fixed addresses.")
      .def("__init__",
           [](Table* self, const List& bases, const List& strides, const List& sizes,
              std::int64_t rows) {
             if (rows < 0) throw nb::value_error("expected rows >= 0");
             new (self) Table(as_fields(bases, strides, sizes), rows);
           })
      .def("gather",
           [](const Table& self, std::int64_t index, std::int64_t n, std::int64_t limit,
              const List& to, const List& strides, int threads, bool mapped, bool cold) {
             const std::vector<Side> sides = as_sides(self.width(), to, strides);
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
             const std::vector<Side> sides = as_sides(self.width() * count, to, strides);
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
           "Copy rows out, each with the rows before it in its lane.")
      .def("scatter",
           [](const Table& self, std::int64_t slots, std::int64_t n, const List& from,
              const List& strides, int threads) {
             const std::vector<Side> sides = as_sides(self.width(), from, strides);
             const List at = checked_index(slots, n, self.rows());
             unlocked(self, n, [&] { self.scatter(at.data(), n, sides, threads); });
           },
           "Copy rows in. If a slot occurs twice, its last row stays.")
      .def("scatter_ring",
           [](const Table& self, std::int64_t first, std::int64_t n, std::int64_t skipped,
              const List& from, int threads) {
             List strides;
             for (const Field& field : self.fields()) strides.push_back(field.bytes);
             std::vector<Side> sides = as_sides(self.width(), from, strides);
             if (first < 0 || first >= self.rows() || n < 0 || n > self.rows() || skipped < 0) {
               refuse(nb::index_error, "expected at most ", self.rows(),
                      " rows from one of as many slots on, got ", n, " from slot ", first);
             }
             for (Side& side : sides) side.address += skipped * side.stride;
             if (self.overlaps(sides, n)) return false;
             unlocked(self, n, [&] { self.scatter_ring(first, n, sides, threads); });
             return true;
           },
           "Copy contiguous rows into consecutive slots, wrapping around. The first `skipped` rows "
           "at each address are left out. Return False if a row may lie in the table.");
}

}  // namespace replaykit
