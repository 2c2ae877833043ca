// The operations of the three kinds of trees. They check new values and combine eight children.
//
// Files that are compiled for different processors include this header. They must not share any of
// its functions, so everything is in an anonymous namespace (see tree_layout.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace replaykit {
namespace {

// Constants, since functions of the standard library have linkage.
template <class Number>
constexpr Number kSmallestNormal = std::numeric_limits<Number>::min();
template <class Number>
constexpr Number kInfinity = std::numeric_limits<Number>::infinity();

// Returns whether a number is below zero; -0.0 is not. The function tests the bits, since
// comparisons ignore the sign of a subnormal number in threads that flush such numbers to zero.
template <class Number>
static inline bool is_negative(Number value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits > std::uint64_t{1} << (8 * sizeof value - 1);
}

// `Lanes` adds eight numbers. The kernels for each processor define it.
template <class Lanes, class LeafType>
struct Sum {
  using Leaf = LeafType;
  using Inner = double;
  static constexpr double kIdentity = 0.0;

  // Compares after the cast, since 1e39 is finite as a double and infinite as a float.
  template <class Source>
  static bool admits(Source value, double ceiling) {
    return !is_negative(value) && static_cast<Leaf>(value) <= ceiling;  // false for NaN
  }

  // A subnormal weight is positive in one thread, and zero in another thread that flushes
  // subnormals. In neither thread may a node be positive without a child to enter.
  template <class Source>
  static Leaf stored(Source value) {
    const Leaf leaf = static_cast<Leaf>(value);
    return leaf < kSmallestNormal<Leaf> ? Leaf(0) : leaf;
  }

  template <class Child>
  static double combine(const Child* child) {
    return Lanes::sum(child);
  }
  static double both(double a, double b) { return a + b; }
};

template <class Self, class LeafType>
struct Extreme {
  using Leaf = LeafType;
  using Inner = LeafType;

  template <class Source>
  static bool admits(Source value, double) {
    return value == value;
  }

  // Adding 0 turns -0.0 into 0.0. Otherwise the sign of a minimum of zeros would depend on their
  // order.
  template <class Source>
  static Leaf stored(Source value) {
    return static_cast<Leaf>(value) + Leaf(0);
  }

  static Leaf combine(const Leaf* child) {
    Leaf four[4], two[2];
    for (int i = 0; i < 4; ++i) four[i] = Self::both(child[i], child[i + 4]);
    for (int i = 0; i < 2; ++i) two[i] = Self::both(four[i], four[i + 2]);
    return Self::both(two[0], two[1]);
  }
};

template <class Leaf>
struct Min : Extreme<Min<Leaf>, Leaf> {
  static constexpr Leaf kIdentity = kInfinity<Leaf>;
  static Leaf both(Leaf a, Leaf b) { return b < a ? b : a; }
};

template <class Leaf>
struct Max : Extreme<Max<Leaf>, Leaf> {
  static constexpr Leaf kIdentity = -kInfinity<Leaf>;
  static Leaf both(Leaf a, Leaf b) { return a < b ? b : a; }
};

}  // namespace
}  // namespace replaykit
