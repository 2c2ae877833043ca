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

// Requires 0 <= n <= kMostMoments.
Moments<float> moments(const float* x, std::int64_t n);
Moments<double> moments(const double* x, std::int64_t n);
Moments<std::int8_t> moments(const std::int8_t* x, std::int64_t n);
Moments<std::uint8_t> moments(const std::uint8_t* x, std::int64_t n);
Moments<std::int16_t> moments(const std::int16_t* x, std::int64_t n);
Moments<std::uint16_t> moments(const std::uint16_t* x, std::int64_t n);
Moments<std::int32_t> moments(const std::int32_t* x, std::int64_t n);
Moments<std::uint32_t> moments(const std::uint32_t* x, std::int64_t n);
Moments<std::int64_t> moments(const std::int64_t* x, std::int64_t n);
Moments<std::uint64_t> moments(const std::uint64_t* x, std::int64_t n);

}  // namespace replaykit
