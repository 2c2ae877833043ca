// Smallest, largest, mean and sum of squared distances from the mean, of a run of numbers in memory.
//
// The same bits on every processor, and in replaykit/native/fallback.py, which does the same steps in
// NumPy: numbers are added up in 16 lanes, number i in lane i % 16, each from zero and from front to
// back as float64; then the upper half of the lanes is added to the lower one until one is left.
// Numbers of one byte are added up as integers, which is exact.
#pragma once

#include <cstdint>

namespace replaykit {

template <typename T>
struct Moments {
  std::int64_t count;  // of numbers, without NaNs
  T least, largest;    // without NaNs, zeros without a sign; arbitrary where there are no numbers
  double mean, squares;
};

// As many at once as stay in a cache between two looks, and as integers of 32 bits hold the squares
// of, of one byte each.
constexpr std::int64_t kMostMoments = 1 << 16;

// n of them, from 0 to kMostMoments.
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
