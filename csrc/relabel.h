// New goals, and the rewards for them: rows of a batch that are told what was achieved elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

namespace replaykit {

// Rows of numbers that lie one after the other, `stride` bytes from row to row.
struct NumberRows {
  const char* base;
  std::int64_t stride;

  const char* at(std::int64_t row) const { return base + row * stride; }
};

// Leaves of a record need not be aligned.
template <typename Number>
double as_double(const char* numbers, std::int64_t at) {
  Number found;
  std::memcpy(&found, numbers + at * static_cast<std::int64_t>(sizeof(Number)), sizeof(Number));
  return static_cast<double>(found);
}

// Whether two goals are closer than `limit`. Sums in double, one number after the other: the
// counterpart in torch gives the same.
template <typename Number>
bool is_near(const char* a, const char* b, std::int64_t width, double limit) {
  double sum = 0;
  for (std::int64_t i = 0; i < width; ++i) {
    const double apart = as_double<Number>(a, i) - as_double<Number>(b, i);
    sum += apart * apart;
  }
  return sum < limit * limit;
}

// Writes goals [n, width] twice and rewards [n]: the new goal and 0 or -1 for what was achieved in
// rows that are chosen, what was there in all others.
template <typename Number>
void relabel(const std::uint8_t* chosen, std::int64_t n, std::int64_t width, double limit,
             NumberRows fresh, NumberRows achieved, const NumberRows old[2], NumberRows reward,
             Number* goals[2], Number* rewards) {
  const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(Number);
  for (std::int64_t row = 0; row < n; ++row) {
    const bool own = chosen[row] != 0;
    const char* goal = fresh.at(row);
    for (int k = 0; k < 2; ++k) {
      std::memcpy(goals[k] + row * width, own ? goal : old[k].at(row), bytes);
    }
    if (own) {
      rewards[row] = is_near<Number>(achieved.at(row), goal, width, limit) ? Number{0} : Number{-1};
    } else {
      std::memcpy(rewards + row, reward.at(row), sizeof(Number));
    }
  }
}

}  // namespace replaykit
