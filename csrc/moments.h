// The minimum, the maximum, the mean, and the sum of squared distances from the mean of an array.
//
// The results have the same bits on every processor, and in tests/native/reference.py, which
// takes the same steps in NumPy. Number i is added as float64 to lane i % 16, in order. All 16
// lanes start at zero. Then the upper half of the lanes is added to the lower half until one lane
// is left. Numbers of one byte are added as integers, which is exact.
#pragma once

#include <cstdint>

namespace replaykit {

template <typename T>
struct Moments {
  std::int64_t count;  // of numbers, not counting NaNs
  T least, largest;    // of the numbers except NaN, without negative zeros; arbitrary if count is 0
  double mean, squares;
};

// The maximum count of numbers. So many numbers stay in the cache between the two passes. The sum
// of the squares of so many one-byte numbers fits into a 32-bit integer.
constexpr std::int64_t kMostMoments = 1 << 16;

// The types of numbers that have moments.
#define REPLAYKIT_NUMBERS(X)                                                                \
  X(float) X(double) X(std::int8_t) X(std::uint8_t) X(std::int16_t) X(std::uint16_t)        \
  X(std::int32_t) X(std::uint32_t) X(std::int64_t) X(std::uint64_t)

// Requires 0 <= n <= kMostMoments.
#define REPLAYKIT_DECLARE(T) Moments<T> moments(const T* x, std::int64_t n);
REPLAYKIT_NUMBERS(REPLAYKIT_DECLARE)
#undef REPLAYKIT_DECLARE

}  // namespace replaykit
