// Relabels rows of a batch. They get goals that were achieved at later steps, and new rewards.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace replaykit {

// Copies bytes. If `bytes` is 0, the addresses may be null.
inline void copy_bytes(char* to, const char* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

// Rows of contiguous numbers. Rows begin `stride` bytes apart.
struct NumberRows {
  const char* base;
  std::int64_t stride;

  const char* at(std::int64_t row) const { return base + row * stride; }
};

// The same as `NumberRows`, but writable.
struct OwnRows {
  char* base;
  std::int64_t stride;

  char* at(std::int64_t row) const { return base + row * stride; }
};

// One leaf of the rows of a ring. The row of time t is in slot t % slots.
struct RingRows {
  const char* base;
  std::int64_t stride;
  std::int64_t bytes;
  std::int64_t slots;

  // Returns the address of a row. Times of stored rows are less than two rounds apart, so only the
  // first call needs a division.
  const char* at(std::int64_t time, std::int64_t& round) const {
    std::int64_t slot = time - round;
    if (slot < 0) {
      slot += slots;
    } else if (slot >= slots) {
      slot -= slots;
    }
    if (slot < 0 || slot >= slots) {
      slot = time % slots;
      round = time - slot;
    }
    return base + slot * stride;
  }
};

// Chooses rows with probability p. For each of n rows, draws a time from low .. last, both
// included, and copies the goal achieved at that time to `goals`. `goals` has n * rows.bytes bytes.
// Returns the first row whose draw is not in [0, 1), or whose times violate 0 <= low <= last. The
// goals are incomplete then. Returns n if there is no such row.
inline std::int64_t later_goals(const double* chances, const double* draws, std::int64_t n, double p,
                                Numbers low, Numbers last, RingRows rows, std::uint8_t* chosen,
                                char* goals) {
  constexpr std::int64_t kBlock = 256;
  const char* from[kBlock];
  std::int64_t round = 0;
  const auto bytes = static_cast<std::size_t>(rows.bytes);
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t end = std::min(n, begin + kBlock);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = low[i], further = last[i] - first;
      if (first < 0 || further < 0 || !(draws[i] >= 0 && draws[i] < 1)) return i;
      chosen[i] = chances[i] < p ? 1 : 0;
      const auto step = static_cast<std::int64_t>(draws[i] * static_cast<double>(further + 1));
      const char* row = rows.at(first + std::min(step, further), round);
      __builtin_prefetch(row, 0, 2);
      if (bytes) __builtin_prefetch(row + bytes - 1, 0, 2);
      from[i - begin] = row;
    }
    for (std::int64_t i = begin; i < end; ++i) {
      copy_bytes(goals + i * rows.bytes, from[i - begin], bytes);
    }
  }
  return n;
}

// Reads a number, which may be unaligned, since leaves of a record may be.
template <typename Number>
double as_double(const char* numbers, std::int64_t at) {
  Number found;
  std::memcpy(&found, numbers + at * static_cast<std::int64_t>(sizeof(Number)), sizeof(Number));
  return static_cast<double>(found);
}

// Returns whether two goals are closer than `limit`. The squares are added in double precision and
// in order, so that the counterpart in torch gives the same result.
template <typename Number>
bool is_near(const char* a, const char* b, std::int64_t width, double limit) {
  double sum = 0;
  for (std::int64_t i = 0; i < width; ++i) {
    const double apart = as_double<Number>(a, i) - as_double<Number>(b, i);
    sum += apart * apart;
  }
  return sum < limit * limit;
}

// Writes new goals, next goals and rewards in the chosen rows. The reward is 0 if the row achieved
// its new goal, else -1.
template <typename Number>
void relabel(const std::uint8_t* chosen, std::int64_t n, std::int64_t width, double limit,
             NumberRows fresh, NumberRows achieved, const OwnRows goals[2], OwnRows rewards) {
  const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(Number);
  for (std::int64_t row = 0; row < n; ++row) {
    if (!chosen[row]) continue;
    const char* goal = fresh.at(row);
    const bool near = is_near<Number>(achieved.at(row), goal, width, limit);
    const Number reward = near ? Number{0} : Number{-1};
    for (int k = 0; k < 2; ++k) copy_bytes(goals[k].at(row), goal, bytes);
    std::memcpy(rewards.at(row), &reward, sizeof reward);
  }
}

}  // namespace replaykit
