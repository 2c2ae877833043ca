// This file is compiled with -fno-trapping-math, so that compilers turn the conditional expressions
// into selections instead of branches. The option changes no result.
#include "moments.h"

#include <limits>
#include <type_traits>

// The compiler makes one copy for each vector width. A copy is chosen when the module is loaded.
// All copies give the same bits, since each step is rounded separately, in the same order.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define REPLAYKIT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#define REPLAYKIT_INLINE __attribute__((always_inline)) inline
#else
#define REPLAYKIT_CLONES
#define REPLAYKIT_INLINE inline
#endif

namespace replaykit {

namespace {

constexpr int kLanes = 16;

REPLAYKIT_INLINE double joined(double* lanes) {
  for (int half = kLanes / 2; half; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

template <typename T>
REPLAYKIT_INLINE Moments<T> of_numbers(const T* x, std::int64_t n) {
  constexpr bool kHasNan = std::is_floating_point<T>::value;
  const T none_below = kHasNan ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::min();
  const T none_above = kHasNan ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
  T low[kLanes], high[kLanes];
  double sums[kLanes] = {};
  std::int32_t good[kLanes] = {};
  for (T& value : low) value = none_above;
  for (T& value : high) value = none_below;
  const auto look = [&](int l, T value) {
    // NaN is neither less nor greater than anything.
    const bool is_number = value == value;
    low[l] = value < low[l] ? value : low[l];
    high[l] = value > high[l] ? value : high[l];
    sums[l] += is_number ? static_cast<double>(value) : 0.0;
    good[l] += is_number;
  };
  const std::int64_t whole = n - n % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) look(l, x[i + l]);
  }
  for (std::int64_t i = whole; i < n; ++i) look(static_cast<int>(i - whole), x[i]);

  Moments<T> found{0, none_above, none_below, 0.0, 0.0};
  for (int l = 0; l < kLanes; ++l) {
    found.count += good[l];
    found.least = low[l] < found.least ? low[l] : found.least;
    found.largest = high[l] > found.largest ? high[l] : found.largest;
  }
  if (!found.count) return found;
  // Turns -0.0 into 0.0, since the order of the comparisons determines which of the two is found.
  found.least += T(0);
  found.largest += T(0);
  const double mean = joined(sums) / static_cast<double>(found.count);
  for (int l = 0; l < kLanes; ++l) sums[l] = 0.0;
  const auto add = [&](int l, T value) {
    const double apart = static_cast<double>(value) - mean;
    sums[l] += value == value ? apart * apart : 0.0;
  };
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) add(l, x[i + l]);
  }
  for (std::int64_t i = whole; i < n; ++i) add(static_cast<int>(i - whole), x[i]);
  found.mean = mean;
  found.squares = joined(sums);
  return found;
}

// Wide is a 32-bit integer that holds the sum of kMostMoments numbers.
template <typename T, typename Wide>
REPLAYKIT_INLINE Moments<T> of_bytes(const T* x, std::int64_t n) {
  T low = std::numeric_limits<T>::max(), high = std::numeric_limits<T>::min();
  Wide total = 0;
  std::uint32_t squares = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const T value = x[i];
    low = value < low ? value : low;
    high = value > high ? value : high;
    total += value;
    squares += static_cast<std::uint32_t>(static_cast<std::int32_t>(value) * value);
  }
  if (!n) return {0, low, high, 0.0, 0.0};
  const auto sum = static_cast<std::int64_t>(total);
  const std::int64_t apart = static_cast<std::int64_t>(squares) * n - sum * sum;
  const auto count = static_cast<double>(n);
  return {n, low, high, static_cast<double>(sum) / count, static_cast<double>(apart) / count};
}

template <typename T>
REPLAYKIT_INLINE Moments<T> moments_of(const T* x, std::int64_t n) {
  using Wide = std::conditional_t<std::is_signed<T>::value, std::int32_t, std::uint32_t>;
  if constexpr (sizeof(T) == 1) return of_bytes<T, Wide>(x, n);
  else return of_numbers(x, n);
}

}  // namespace

#define REPLAYKIT_DEFINE(T) \
  REPLAYKIT_CLONES Moments<T> moments(const T* x, std::int64_t n) { return moments_of(x, n); }
REPLAYKIT_NUMBERS(REPLAYKIT_DEFINE)

}  // namespace replaykit
