// Numbers that come in order and leave in order. No Python, no global state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace replaykit {

// Entries begin() .. end()-1 of an endless row of numbers, in a circular array that grows: it
// doubles, but not beyond `most` entries while no more are held at the same time.
class NumberedRing {
 public:
  explicit NumberedRing(std::int64_t most) : most_(most) {}

  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return end_; }
  std::int64_t size() const { return end_ - begin_; }
  std::int64_t bytes() const { return 8 * capacity(); }

  // begin() <= number < end().
  std::int64_t operator[](std::int64_t number) const { return data_[place(number)]; }
  const std::int64_t* address(std::int64_t number) const { return &data_[place(number)]; }

  // Whether the entries from `number` on lie in one piece, `count` places at least.
  bool in_one_piece(std::int64_t number, std::int64_t count) const {
    return static_cast<std::int64_t>(place(number)) + count <= capacity();
  }

  // Makes room for `more` entries, all at once. Cost: O(1) an entry, spread over the growth.
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

  // There is room.
  void push(std::int64_t value) { data_[place(end_++)] = value; }

  void drop_until(std::int64_t number) {
    number = std::min(number, end_);
    if (number <= begin_) return;
    first_ = static_cast<std::int64_t>(place(number));
    begin_ = number;
  }

  // Drops all; the next entry has that number.
  void restart(std::int64_t number) {
    begin_ = end_ = number;
    first_ = 0;
  }

  // The last of the entries from..until-1, which rise, that is not above x; the first one is not.
  // Narrows to one of two stretches of memory: found is start + the place in it.
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

  // Of entries up to end(), that one included.
  std::size_t place(std::int64_t number) const {
    const std::int64_t at = first_ + (number - begin_);
    return static_cast<std::size_t>(at < capacity() ? at : at - capacity());
  }

  std::vector<std::int64_t> data_;
  std::int64_t most_;
  std::int64_t begin_ = 0, end_ = 0;
  std::int64_t first_ = 0;  // where begin() lies
};

}  // namespace replaykit
