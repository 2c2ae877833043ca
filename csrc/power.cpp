// This file is compiled with -fno-trapping-math, so that compilers turn the conditional expressions
// into selections instead of branches. The option changes no result.
#include "power.h"

#include <algorithm>
#include <cstring>

// The compiler makes one copy for each vector width. A copy is chosen when the module is loaded.
// All copies give the same bits, since each step is rounded separately, in the same order.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define REPLAYKIT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define REPLAYKIT_CLONES
#endif

namespace replaykit {

namespace {

constexpr double kSqrtHalf = 0.70710678118654757;
constexpr double kInvLn2 = 1.4426950408889634;
constexpr double kLn2 = 0.69314718055994529;
constexpr double kSplit = 134217729.0;           // 2^27 + 1
constexpr double kRound = 6755399441055744.0;    // 1.5 * 2^52: adding it rounds to an integer
constexpr double kMostExponent = 2000.0;         // beyond all exponents of doubles, up and down

inline double two_to(std::int64_t k) {
  const std::int64_t bits = (k + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns the value of a polynomial at x, with the highest coefficient first.
template <typename... Rest>
inline double polynomial(double x, double sum, Rest... rest) {
  ((sum = sum * x + rest), ...);
  return sum;
}

// Requires a finite x > 0. y equals `upper` + `lower`.
inline double power(double x, double y, double upper, double lower) {
  const bool tiny = x < 2.2250738585072014e-308;
  x = tiny ? x * 18014398509481984.0 : x;  // 2^54
  std::int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  double e = static_cast<double>(static_cast<std::int32_t>(bits >> 52) - 1022);
  e = tiny ? e - 54.0 : e;
  bits = (bits & 0x000fffffffffffff) | 0x3fe0000000000000;
  double m;
  std::memcpy(&m, &bits, sizeof m);
  const bool low = m < kSqrtHalf;
  m = low ? m * 2.0 : m;
  e = low ? e - 1.0 : e;

  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  const double q = polynomial(z, 1.0 / 23.0, 1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0,
                              1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0);
  const double log2m = (s + s * (q * z)) * 2.0 * kInvLn2;

  const double rest = lower * e + y * log2m;
  double k = upper * e + rest;
  k = std::min(std::max(k, -kMostExponent), kMostExponent);
  k = (k + kRound) - kRound;
  double r = (upper * e - k) + rest;
  r = std::min(std::max(r, -0.75), 0.75);

  const double t = r * kLn2;
  const double p = polynomial(  // 1 / 14!, 1 / 13!, ...
      t, 1.0 / 87178291200.0, 1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0,
      1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0,
      1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0);

  const auto whole = static_cast<std::int32_t>(k);
  const std::int32_t half = whole >> 1;
  return p * two_to(half) * two_to(whole - half);
}

}  // namespace

REPLAYKIT_CLONES
void power_all(double* x, std::int64_t n, double y) {
  if (y == 1.0) return;
  if (y == 0.0) {
    for (std::int64_t i = 0; i < n; ++i) x[i] = x[i] > 0.0 ? 1.0 : 0.0;
    return;
  }
  y = std::min(std::max(y, -1e280), 1e280);  // room for the split
  const double c = kSplit * y;
  const double upper = c - (c - y), lower = y - upper;
  for (std::int64_t i = 0; i < n; ++i) {
    const double found = power(x[i] > 0.0 ? x[i] : 1.0, y, upper, lower);
    x[i] = x[i] > 0.0 ? found : 0.0;
  }
}

}  // namespace replaykit
