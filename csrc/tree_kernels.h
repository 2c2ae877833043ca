// The kernels, as templates over an operation (tree_operations.h). The walk over the levels is the
// same for all processors. A separate file for each processor defines the arithmetic inside a node.
//
// Files that are compiled for different processors include this header. So everything is in an
// anonymous namespace, and no function of the standard library is used (see tree_layout.h).
#pragma once

#include <cstdint>

#include "tree.h"
#include "tree_operations.h"

namespace replaykit {
namespace {

// The number of queries that run in parallel. A descent is a chain of dependent loads. 128 parallel
// descents hide the latency of memory, and more do not help.
constexpr std::int64_t kWave = 128;

struct One {
  double value;
  double operator[](std::int64_t) const { return value; }
};

template <class Op>
struct Kernels {
  using Leaf = typename Op::Leaf;
  using Inner = typename Op::Inner;

  static Leaf* leaves(const Tree& tree) { return static_cast<Leaf*>(tree.leaves); }
  static Inner* level(const Tree& tree, int l) {
    return static_cast<Inner*>(tree.nodes) + tree.levels.offset[l];
  }

  // -- writing ----------------------------------------------------------------------------------

  template <class Child>
  static void combine_run(const Child* children, Inner* parents, std::int64_t first,
                          std::int64_t last) {
    for (std::int64_t e = first; e <= last; ++e) parents[e] = Op::combine(children + kFan * e);
  }

  // The same parent may be combined twice. This has the same result, and is cheaper than sorting
  // the indices.
  template <class Child>
  static void combine_touched(const Child* children, Inner* parents, std::int64_t count,
                              Inner* above, const std::int64_t* index, std::int64_t n, int shift) {
    if (count <= n) return combine_run(children, parents, 0, count - 1);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t e = index[i] >> shift;
      __builtin_prefetch(above + (e >> kFanBits), 1);
      parents[e] = Op::combine(children + kFan * e);
    }
  }

  // Combines all nodes over the leaves first .. last, level by level.
  static void refresh_run(const Tree& tree, std::int64_t first, std::int64_t last) {
    combine_run(leaves(tree), level(tree, 0), first >>= kFanBits, last >>= kFanBits);
    for (int l = 1; l < tree.levels.depth; ++l) {
      combine_run(level(tree, l - 1), level(tree, l), first >>= kFanBits, last >>= kFanBits);
    }
  }

  template <class Source>
  static std::int64_t write(const Tree& tree, const std::int64_t* index, Source value,
                            std::int64_t n) {
    Leaf* leaf = leaves(tree);
    const auto capacity = static_cast<std::uint64_t>(tree.levels.capacity);
    for (std::int64_t i = 0; i < n; ++i) {
      if (static_cast<std::uint64_t>(index[i]) >= capacity) return 2 * i;
      if (!Op::admits(value[i], tree.ceiling)) return 2 * i + 1;
      __builtin_prefetch(leaf + index[i], 1);
    }
    Inner* parents = level(tree, 0);
    for (std::int64_t i = 0; i < n; ++i) {
      leaf[index[i]] = Op::stored(value[i]);
      __builtin_prefetch(parents + (index[i] >> kFanBits), 1);
    }
    const TreeLevels& levels = tree.levels;
    for (int l = 0; l < levels.depth; ++l) {
      Inner* above = level(tree, l + 1 < levels.depth ? l + 1 : l);
      const int shift = kFanBits * (l + 1);
      if (l == 0) {
        combine_touched(leaf, parents, levels.count[0], above, index, n, shift);
      } else {
        combine_touched(level(tree, l - 1), level(tree, l), levels.count[l], above, index, n,
                        shift);
      }
    }
    return kTaken;
  }

  template <class Source>
  static std::int64_t write_run(const Tree& tree, std::int64_t start, Source value,
                                std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      if (!Op::admits(value[i], tree.ceiling)) return 2 * i + 1;
    }
    Leaf* leaf = leaves(tree) + start;
    for (std::int64_t i = 0; i < n; ++i) leaf[i] = Op::stored(value[i]);
    if (n > 0) refresh_run(tree, start, start + n - 1);
    return kTaken;
  }

  template <class Write>
  static std::int64_t from_source(Values values, const Write& write_from) {
    switch (values.kind) {
      case Values::kFloats: return write_from(static_cast<const float*>(values.data));
      case Values::kDoubles: return write_from(static_cast<const double*>(values.data));
      default: return write_from(One{values.one});
    }
  }

  static std::int64_t update(const Tree& tree, const std::int64_t* index, Values values,
                             std::int64_t n) {
    return from_source(values, [&](auto source) { return write(tree, index, source, n); });
  }

  static std::int64_t update_run(const Tree& tree, std::int64_t start, Values values,
                                 std::int64_t n) {
    return from_source(values, [&](auto source) { return write_run(tree, start, source, n); });
  }

  static void rebuild(const Tree& tree) { refresh_run(tree, 0, tree.levels.capacity - 1); }

  // -- reading ----------------------------------------------------------------------------------

  static double root(const Tree& tree) { return Op::combine(level(tree, tree.levels.depth - 1)); }

  // Combines the children first .. last - 1 of one node. The identity replaces the other children,
  // so that the order of additions is always the same.
  template <class Child>
  static double part(const Child* child, std::int64_t first, std::int64_t last) {
    alignas(64) Child kept[kFan];  // a node is loaded as one cache line
    for (int i = 0; i < kFan; ++i) {
      kept[i] = i >= first && i < last ? child[i] : static_cast<Child>(Op::kIdentity);
    }
    return Op::combine(kept);
  }

  // Combines the entries of [start, end) that do not fill whole nodes of this level, and goes up
  // one level. Returns true when no entry is left. If a range extends to the last entry of the
  // level, it includes the identities after that entry. So the whole range gives the same bits as
  // the root.
  template <class Child>
  static bool climb(const Child* children, std::int64_t count, std::int64_t& start,
                    std::int64_t& end, double& sum) {
    if (end == count) end = eighths(count) << kFanBits;
    const std::int64_t left = start >> kFanBits, right = end >> kFanBits;
    if (left == right || count <= kFan) {
      const std::int64_t base = left << kFanBits;
      if (start < end) sum = Op::both(sum, part(children + base, start - base, end - base));
      return true;
    }
    if ((start & 7) != 0) sum = Op::both(sum, part(children + kFan * left, start & 7, kFan));
    if ((end & 7) != 0) sum = Op::both(sum, part(children + kFan * right, 0, end & 7));
    start = eighths(start);
    end = right;
    return false;
  }

  static double reduce_one(const Tree& tree, std::int64_t start, std::int64_t end) {
    double sum = Op::kIdentity;
    if (start == end) return sum;
    if (climb(leaves(tree), tree.levels.capacity, start, end, sum)) return sum;
    for (int l = 0; !climb(level(tree, l), tree.levels.count[l], start, end, sum); ++l) {
    }
    return sum;
  }

  static void reduce(const Tree& tree, const std::int64_t* start, const std::int64_t* end,
                     std::int64_t n, double* out) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = reduce_one(tree, start[i], end[i]);
  }
};

// Descends to the leaf with S_i <= x < S_{i+1}, where S_i is the sum of the leaves before i. In a
// node with children c_0 .. c_7, it enters the largest j with c_j > 0 and e_j <= x, where e_j is
// the sum of the children before j. It continues with x - e_j. `Lanes::enter` does this for one
// node.
//
// A descent never ends in a leaf of weight zero. Every entered node has a sum > 0, and no child is
// negative, so the node has a positive child. The first positive child has e_j = 0 exactly. Since x
// >= 0, there is a child to enter, and x - e_j >= 0.
template <class Lanes, class Leaf>
struct Descent {
  template <class Child, class Next>
  static inline void visit(const Child* children, const Next* next, std::int64_t* at, double* x,
                           std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      at[i] = kFan * at[i] + Lanes::enter(children + kFan * at[i], x[i]);
      if (next != nullptr) __builtin_prefetch(next + kFan * at[i]);
    }
  }

  static void find(const Tree& tree, const double* x, std::int64_t n, std::int64_t* index,
                   double* weight) {
    using Walk = Kernels<Sum<Lanes, Leaf>>;
    const int top = tree.levels.depth - 1;
    const Leaf* leaf = Walk::leaves(tree);
    const double* const none = nullptr;
    const double sum = Walk::root(tree);
    double rest[kWave];
    for (std::int64_t begin = 0; begin < n; begin += kWave) {
      const std::int64_t wave = n - begin < kWave ? n - begin : kWave;
      std::int64_t* at = index + begin;
      for (std::int64_t i = 0; i < wave; ++i) {
        // The sum and the e_j are added in different orders, so they may differ by rounding.
        // Therefore any x that is not below the sum becomes infinite. An infinite x enters the last
        // positive child of every node.
        rest[i] = x[begin + i] >= sum ? kInfinity<double> : x[begin + i];
        at[i] = 0;
      }
      for (int l = top; l > 0; --l) {
        visit(Walk::level(tree, l), Walk::level(tree, l - 1), at, rest, wave);
      }
      visit(Walk::level(tree, 0), leaf, at, rest, wave);
      visit(leaf, none, at, rest, wave);
      if (weight != nullptr) {
        for (std::int64_t i = 0; i < wave; ++i) weight[begin + i] = leaf[at[i]];
      }
    }
  }
};

template <class Op>
constexpr TreeKernels kernels_of(decltype(TreeKernels::find) find = nullptr) {
  using K = Kernels<Op>;
  return {K::update, K::update_run, K::rebuild, K::root, K::reduce, find};
}

// Returns the kernels of one kind of tree for the processor of the including file.
template <class Lanes, class Leaf>
const TreeKernels& tables_of(TreeKind kind) {
  static constexpr TreeKernels sum = kernels_of<Sum<Lanes, Leaf>>(Descent<Lanes, Leaf>::find);
  static constexpr TreeKernels min = kernels_of<Min<Leaf>>();
  static constexpr TreeKernels max = kernels_of<Max<Leaf>>();
  return kind == TreeKind::kSum ? sum : kind == TreeKind::kMin ? min : max;
}

}  // namespace
}  // namespace replaykit
