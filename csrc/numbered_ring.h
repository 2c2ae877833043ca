// A queue of numbers with random access. No Python, no global state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace replaykit {

// The entries begin() .. end()-1 of an endless sequence of numbers, stored in a circular array that
// grows. The size of the array doubles when necessary. It exceeds `most` only if more entries are
// in use at once.
class NumberedRing {
 public:
  explicit NumberedRing(std::int64_t most) : most_(most) {}

  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return end_; }
  std::int64_t size() const { return end_ - begin_; }
  std::int64_t bytes() const { return 8 * capacity(); }

  // Requires begin() <= number < end().
  std::int64_t operator[](std::int64_t number) const { return data_[place(number)]; }
  const std::int64_t* address(std::int64_t number) const { return &data_[place(number)]; }

  // Returns whether `count` entries, beginning at `number`, are contiguous in memory.
  bool in_one_piece(std::int64_t number, std::int64_t count) const {
    return static_cast<std::int64_t>(place(number)) + count <= capacity();
  }

  // Makes room for `more` further entries. Amortized cost: O(1) per entry.
  void reserve(std::int64_t more) {
    const std::int64_t need = size() + more;
    if (need <= capacity()) return;
    const std::int64_t grown = std::max(need, std::min(most_, std::max(2 * capacity(), kFirst)));
    std::vector<std::int64_t> data(static_cast<std::size_t>(grown));
    for (std::int64_t number = begin_; number < end_; ++number) {
      data[static_cast<std::size_t>(number - begin_)] = (*this)[number];
    }
    data_.swap(data);
    first_ = 0;
  }

  // Appends an entry. The caller has reserved room for it.
  void push(std::int64_t value) { data_[place(end_++)] = value; }

  void drop_until(std::int64_t number) {
    number = std::min(number, end_);
    if (number <= begin_) return;
    first_ = static_cast<std::int64_t>(place(number));
    begin_ = number;
  }

  // Drops all entries. The next entry has the given number.
  void restart(std::int64_t number) {
    begin_ = end_ = number;
    first_ = 0;
  }

  // Begins a search for the last entry in from .. until-1 that is not above x. The result is the
  // one of two contiguous stretches of memory that has this entry. The entries must rise, and the
  // first entry must not be above x.
  struct Stretch {
    const std::int64_t* base;
    std::int64_t length;
    std::int64_t number;  // of base[0]
  };
  Stretch stretch(std::int64_t from, std::int64_t until, std::int64_t x) const {
    const auto at = static_cast<std::int64_t>(place(from));
    const std::int64_t wrapped = from + (capacity() - at);  // the entry at the array's start
    if (wrapped < until && data_[0] <= x) return {&data_[0], until - wrapped, wrapped};
    return {&data_[static_cast<std::size_t>(at)], std::min(until, wrapped) - from, from};
  }

 private:
  static constexpr std::int64_t kFirst = 8;

  std::int64_t capacity() const { return static_cast<std::int64_t>(data_.size()); }

  // Requires begin() <= number <= end().
  std::size_t place(std::int64_t number) const {
    const std::int64_t at = first_ + (number - begin_);
    return static_cast<std::size_t>(at < capacity() ? at : at - capacity());
  }

  std::vector<std::int64_t> data_;
  std::int64_t most_;
  std::int64_t begin_ = 0, end_ = 0;
  std::int64_t first_ = 0;  // the place of begin()
};

}  // namespace replaykit
