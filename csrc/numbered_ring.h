// A queue of numbers with random access. No Python, no global state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace replaykit {

// The entries begin() .. end()-1 of an endless sequence of numbers, stored in a circular array. The
// size of the array doubles when necessary. It exceeds `most` only if more entries are in use at
// once. It halves when less than a quarter of it is in use.
template <typename Number = std::int64_t>
class NumberedRing {
 public:
  explicit NumberedRing(std::int64_t most) : most_(most) {}

  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return end_; }
  std::int64_t size() const { return end_ - begin_; }
  std::int64_t bytes() const { return sizeof(Number) * capacity(); }

  // Requires begin() <= number < end().
  Number operator[](std::int64_t number) const { return data_[place(number)]; }
  const Number* address(std::int64_t number) const { return &data_[place(number)]; }
  void set(std::int64_t number, std::int64_t value) {
    data_[place(number)] = static_cast<Number>(value);
  }

  // Returns whether `count` entries, beginning at `number`, are contiguous in memory.
  bool in_one_piece(std::int64_t number, std::int64_t count) const {
    return static_cast<std::int64_t>(place(number)) + count <= capacity();
  }

  // Makes room for `more` further entries. Amortized cost: O(1) per entry.
  void reserve(std::int64_t more) {
    const std::int64_t need = size() + more;
    if (need <= capacity()) return;
    lay_out(std::max(need, std::min(most_, std::max(2 * capacity(), kFirst))));
  }

  void push(std::int64_t value) {
    reserve(1);
    data_[place(end_++)] = static_cast<Number>(value);
  }

  void drop_until(std::int64_t number) {
    number = std::min(number, end_);
    if (number <= begin_) return;
    first_ = static_cast<std::int64_t>(place(number));
    begin_ = number;
    if (capacity() > kLeast && size() < capacity() / 4) lay_out(capacity() / 2);
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
    const Number* base;
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
  static constexpr std::int64_t kFirst = 8, kLeast = 1024;

  void lay_out(std::int64_t capacity) {
    std::vector<Number> data(static_cast<std::size_t>(capacity));
    for (std::int64_t number = begin_; number < end_; ++number) {
      data[static_cast<std::size_t>(number - begin_)] = (*this)[number];
    }
    data_.swap(data);
    first_ = 0;
  }

  std::int64_t capacity() const { return static_cast<std::int64_t>(data_.size()); }

  // Requires begin() <= number <= end().
  std::size_t place(std::int64_t number) const {
    const std::int64_t at = first_ + (number - begin_);
    return static_cast<std::size_t>(at < capacity() ? at : at - capacity());
  }

  std::vector<Number> data_;
  std::int64_t most_;
  std::int64_t begin_ = 0, end_ = 0;
  std::int64_t first_ = 0;  // the place of begin()
};

}  // namespace replaykit
