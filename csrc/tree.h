// Segment trees over memory that the caller owns: the face of the kernels. No Python, no torch, no
// state. Of one tree one call at a time; the caller sees to that.
#pragma once

#include <cstdint>

#include "tree_layout.h"

namespace replaykit {

// `nodes` holds the levels one after another as `TreeLevels` says. In a sum tree they are doubles,
// in a tree of minima or maxima they have the type of the leaves.
struct Tree {
  void* leaves;
  void* nodes;
  TreeLevels levels;
  double ceiling;  // the largest weight that a sum tree takes
};

// Where new leaves come from: an array of floats, one of doubles, or one number for all.
struct Values {
  enum Kind { kFloats, kDoubles, kOne } kind;
  const void* data;
  double one;
};

// What an update says: kTaken, or 2 * position + (0: the index is wrong, 1: the value is) of the
// first entry that was refused, and then nothing has been written.
constexpr std::int64_t kTaken = -1;

struct TreeKernels {
  // Leaves are written in order, so of equal indices the last wins. Then every touched node is
  // combined anew from its stored children, level by level: O(n log8 capacity). A level of at most
  // n entries is combined whole.
  std::int64_t (*update)(const Tree&, const std::int64_t* index, Values, std::int64_t n);
  // The leaves start .. start + n - 1, which exist. O(8n/7).
  std::int64_t (*update_run)(const Tree&, std::int64_t start, Values, std::int64_t n);
  void (*rebuild)(const Tree&);
  double (*root)(const Tree&);
  // out[i] = leaves start[i] .. end[i] - 1 combined; 0 <= start <= end <= capacity. O(log8) each.
  void (*reduce)(const Tree&, const std::int64_t* start, const std::int64_t* end, std::int64_t n,
                 double* out);
  // Sum trees only, with a positive sum. x[i] >= 0 (not NaN); from the sum on, the last positive
  // leaf. `weight` may be null, and may be `x`. O(log8 capacity) each, 128 at a time.
  void (*find)(const Tree&, const double* x, std::int64_t n, std::int64_t* index, double* weight);
};

enum class TreeKind { kSum, kMin, kMax };

const TreeKernels& portable_kernels(TreeKind kind, bool doubles);
#ifdef REPLAYKIT_AVX512
const TreeKernels& avx512_kernels(TreeKind kind, bool doubles);
#endif

}  // namespace replaykit
