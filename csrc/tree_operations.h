// What the three trees differ in: which values they take, how eight children make a parent.
//
// Included by files compiled for different processors, hence the anonymous namespace: no function
// here may be shared between them (see tree_layout.h).
#pragma once

#include <cstdint>
#include <cstring>

namespace replaykit {
namespace {

template <class Number>
struct Limits;

template <>
struct Limits<float> {
  static constexpr float kSmallestNormal = 1.17549435082228750797e-38F;
  static constexpr float kInfinity = __builtin_huge_valf();
};

template <>
struct Limits<double> {
  static constexpr double kSmallestNormal = 2.22507385850720138309e-308;
  static constexpr double kInfinity = __builtin_huge_val();
};

// Below zero, -0.0 not counted. Looks at the bits, since a thread that takes subnormal numbers for
// zero would not see the sign of a negative one.
static inline bool is_negative(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits > 0x80000000U;
}

static inline bool is_negative(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits > 0x8000000000000000U;
}

// `Lanes` adds eight numbers: it is what the kernels for different processors bring.
template <class Lanes, class LeafType>
struct Sum {
  using Leaf = LeafType;
  using Inner = double;
  static constexpr double kIdentity = 0.0;

  // Looked at after the cast: 1e39 is a number as a double and infinite as a float.
  template <class Source>
  static bool admits(Source value, double ceiling) {
    return !is_negative(value) && static_cast<Leaf>(value) <= ceiling;  // false for NaN
  }

  // A subnormal weight is positive to one thread and zero to another (one that flushes them); to
  // neither may a node seem to be positive that has no child to enter.
  template <class Source>
  static Leaf stored(Source value) {
    const Leaf leaf = static_cast<Leaf>(value);
    return leaf < Limits<Leaf>::kSmallestNormal ? Leaf(0) : leaf;
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

  // + 0 makes -0.0 into 0.0: which of the two a minimum gives would depend on the order.
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
  static constexpr Leaf kIdentity = Limits<Leaf>::kInfinity;
  static Leaf both(Leaf a, Leaf b) { return b < a ? b : a; }
};

template <class Leaf>
struct Max : Extreme<Max<Leaf>, Leaf> {
  static constexpr Leaf kIdentity = -Limits<Leaf>::kInfinity;
  static Leaf both(Leaf a, Leaf b) { return a < b ? b : a; }
};

}  // namespace
}  // namespace replaykit
