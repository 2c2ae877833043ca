// Python bindings of commits of a few rows. The object keeps its arrays alive as long as it exists.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "commits.h"

namespace nb = nanobind;
using replaykit::Array;
using replaykit::Commits;
using replaykit::check_length;
using replaykit::Numbers;
using replaykit::released;

namespace {

// For up to this many bytes, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kBytesKept = 1 << 15;
constexpr int kTableBits = 48;  // the bits of a logged element below those of its table

class HeldCommits {
 public:
  HeldCommits(nb::handle journal, nb::handle even, nb::handle odd, const nb::list& rows)
      : commits(bytes(journal, "journal"), bytes(even, "even"), bytes(odd, "odd"), all(rows)) {}

  HeldCommits(const HeldCommits&) = delete;

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

  std::vector<std::unique_ptr<Array>> arrays_;  // before `commits`, which points into them

 public:
  Commits commits;
};

// A ring in which processes log the elements of tables that they change. `count` numbers were
// logged, of which `committed` belong to committed states.
struct ElementLog {
  explicit ElementLog(nb::handle ring) : ring(ring, "ring", Array::kInt64, 1, true) {}

  // A process that dies before its commit may have overwritten the other half.
  bool has_room(std::int64_t more) const { return count + more - committed <= ring.size() / 2; }

  void append(std::int64_t table, Numbers at, std::int64_t more) {
    if (count < 0 || more > ring.size()) {
      throw nb::value_error("expected at most as many elements as there are numbers");
    }
    const std::int64_t size = ring.size();
    for (std::int64_t i = 0, place = count % size; i < more; ++i) {
      ring.out()[place] = at[i] | table << kTableBits;
      if (++place == size) place = 0;
    }
    count += more;
  }

  Array ring;
  std::int64_t count = 0, committed = 0;
};

// A table of doubles. If processes share it, changed elements are logged, and their chunks of
// `1 << bits` elements are marked with the first number of `clock`.
class Column {
 public:
  Column(nb::object commits, std::int64_t table, nb::handle cells, nb::object log, nb::handle marks,
         int bits, nb::handle clock)
      : held_{std::move(commits), std::move(log)}, commits_(nb::cast<HeldCommits&>(held_[0]).commits),
        table_(table), bits_(bits), cells_(cells, "cells", Array::kUint8, 2, true) {
    check_length("cells", cells_.size(1), 8);
    length_ = cells_.size();
    if (held_[1].is_none()) return;
    log_ = nb::cast<ElementLog*>(held_[1]);
    marks_.emplace(marks, "marks", Array::kInt64, 1, true);
    clock_.emplace(clock, "clock", Array::kInt64, 1);
    if (bits < 0 || bits > 32 || clock_->size() < 1) throw nb::value_error("expected few bits");
    length_ = std::min(length_, marks_->size() << bits);
  }

  bool set(nb::handle at, nb::handle values) {
    const Array elements(at, "at", Array::kInt64, 1);
    const Array given(values, "values", Array::kNumbers, 1);
    const Numbers from = elements.numbers();
    const std::int64_t count = elements.size();
    check_length("values", given.size(), count);
    if (log_ != nullptr && !log_->has_room(count)) return false;
    auto* to = reinterpret_cast<double*>(cells_.bytes_out());
    const bool done = released<kBytesKept>(16 * count, [&] {
      if (given.item() == 8) {
        return commits_.put(table_, to, length_, from, given.doubles(), count);
      }
      const auto* singles = reinterpret_cast<const float*>(given.bytes());
      return commits_.put(table_, to, length_, from, singles, count);
    });
    if (!done || log_ == nullptr) return done;
    log_->append(table_, from, count);
    const std::int64_t mark = clock_->numbers()[0];
    for (std::int64_t i = 0; i < count; ++i) marks_->out()[from[i] >> bits_] = mark;
    return true;
  }

 private:
  nb::object held_[2];
  Commits& commits_;
  ElementLog* log_ = nullptr;
  std::int64_t table_, length_;
  int bits_;
  Array cells_;
  std::optional<Array> marks_, clock_;
};

}  // namespace

void replaykit::bind_commits(nb::module_& m) {
  nb::class_<HeldCommits>(m, "Commits",
                          "A journal of overwritten bytes, and the numbers that commit a write.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, const nb::list&>(), nb::arg("journal"),
           nb::arg("even"), nb::arg("odd"), nb::arg("rows"))
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
           nb::arg("first"), nb::arg("until"),
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
           nb::arg("numbers"), nb::arg("more"),
           "Make `numbers`, followed by `more`, the latest state; return the number of the state. "
           "Without enough room, change nothing and return 0.");

  nb::class_<ElementLog>(m, "ElementLog", "A ring of changed elements, with their tables.")
      .def(nb::init<nb::handle>(), nb::arg("ring"))
      .def_rw("count", &ElementLog::count)
      .def_rw("committed", &ElementLog::committed)
      .def("has_room", &ElementLog::has_room, nb::arg("more"))
      .def("append",
           [](ElementLog& self, std::int64_t table, nb::handle at) {
             const Array elements(at, "at", Array::kInt64, 1);
             self.append(table, elements.numbers(), elements.size());
           },
           nb::arg("table"), nb::arg("at"), "Log elements of a table.");

  const auto none = [](const char* name) { return nb::arg(name).none() = nb::none(); };
  nb::class_<Column>(m, "Column", "A table of doubles, which processes may share.")
      .def(nb::init<nb::object, std::int64_t, nb::handle, nb::object, nb::handle, int, nb::handle>(),
           nb::arg("commits"), nb::arg("table"), nb::arg("cells"), none("log"), none("marks"),
           nb::arg("bits") = 0, none("clock"))
      .def("set", &Column::set, nb::arg("at"), nb::arg("values"),
           "Journal elements, then overwrite, log and mark them. Without enough room, change "
           "nothing and return False.");
}
