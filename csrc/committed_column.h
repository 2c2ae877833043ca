// Commits over arrays of Python, and the tables of doubles that they journal. The objects keep their
// arrays alive as long as they exist.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.h"
#include "commits.h"

namespace replaykit {

class HeldCommits {
 public:
  HeldCommits(nb::handle journal, nb::handle even, nb::handle odd, const nb::list& rows)
      : commits(bytes(journal, "journal"), bytes(even, "even"), bytes(odd, "odd"), all(rows)) {}

  HeldCommits(const HeldCommits&) = delete;

 private:
  const Array& held(nb::handle array, const char* name, int dimensions, bool written) {
    arrays_.push_back(std::make_unique<Array>(array, name, Array::kUint8, dimensions, written));
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

constexpr int kTableBits = 48;  // the bits of a logged element below those of its table

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
    std::int64_t* const numbers = ring.out();
    for (std::int64_t i = 0, place = count % size; i < more; ++i) {
      numbers[place] = at[i] | table << kTableBits;
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

  // Returns whether n elements below `limit` can be set.
  bool fits(std::int64_t limit, std::int64_t n) const {
    return limit <= length_ && commits_.room() >= n && (log_ == nullptr || log_->has_room(n));
  }

  // Journals elements, then overwrites, logs and marks them. Without enough room, changes nothing
  // and returns false. Needs no interpreter lock.
  template <typename Number>
  bool set(Numbers at, const Number* values, std::int64_t n) {
    if (log_ != nullptr && !log_->has_room(n)) return false;
    auto* to = reinterpret_cast<double*>(cells_.bytes_out());
    if (!commits_.put(table_, to, length_, at, values, n)) return false;
    if (log_ == nullptr) return true;
    log_->append(table_, at, n);
    const std::int64_t mark = clock_->numbers()[0];
    std::int64_t* const marks = marks_->out();
    for (std::int64_t i = 0; i < n; ++i) marks[at[i] >> bits_] = mark;
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

}  // namespace replaykit
