// The interface of the kernels for segment trees. The caller owns the memory of the trees. No
// Python, no torch, no state. The caller makes no concurrent calls for the same tree.
#pragma once

#include <cstdint>

#include "tree_layout.h"

namespace replaykit {

// `nodes` has the nodes of all levels, at the offsets in `TreeLevels`. In a sum tree, nodes are
// doubles. In a tree of minima or maxima, they have the type of the leaves.
struct Tree {
  void* leaves;
  void* nodes;
  TreeLevels levels;
  double ceiling;  // the largest weight that a sum tree accepts
};

// The source of new leaves: an array of floats, an array of doubles, or one number for all leaves.
struct Values {
  enum Kind { kFloats, kDoubles, kOne } kind;
  const void* data;
  double one;
};

// The result of an update that wrote all entries. Otherwise the result is 2 * (position of the
// first refused entry), plus 1 if its value is wrong rather than its index. Nothing has been
// written then.
constexpr std::int64_t kTaken = -1;

struct TreeKernels {
  // Writes leaves in order, so that the last value of an index wins. Then recomputes every touched
  // node from its children, level by level. Cost: O(n log8 capacity). A level of at most n entries
  // is recomputed as a whole.
  std::int64_t (*update)(const Tree&, const std::int64_t* index, Values, std::int64_t n);
  // Updates the leaves start .. start + n - 1, which must exist. Cost: O(8n/7).
  std::int64_t (*update_run)(const Tree&, std::int64_t start, Values, std::int64_t n);
  void (*rebuild)(const Tree&);
  double (*root)(const Tree&);
  // Combines the leaves start[i] .. end[i] - 1 into out[i]. Requires 0 <= start <= end <= capacity.
  // Cost: O(log8 capacity) per range.
  void (*reduce)(const Tree&, const std::int64_t* start, const std::int64_t* end, std::int64_t n,
                 double* out);
  // Finds the leaf in which the running sum passes x[i]. Only for sum trees with a positive sum.
  // Requires x[i] >= 0. If x[i] is not below the sum, the result is the last positive leaf.
  // `weight` may be null, and may be `x`. Cost: O(log8 capacity) per search, with 128 searches in
  // parallel.
  void (*find)(const Tree&, const double* x, std::int64_t n, std::int64_t* index, double* weight);
};

enum class TreeKind { kSum, kMin, kMax };

const TreeKernels& portable_kernels(TreeKind kind, bool doubles);
#ifdef REPLAYKIT_AVX512
const TreeKernels& avx512_kernels(TreeKind kind, bool doubles);
#endif

}  // namespace replaykit
