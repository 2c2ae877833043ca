// Segment trees for any processor.
#include "tree_kernels.h"

namespace replaykit {
namespace {

struct Portable {
  // Adds halves, in the same way as kernels with wide registers add eight lanes. All kernels use
  // this order.
  template <class Child>
  static inline double sum(const Child* c) {
    double four[4], two[2];
    for (int i = 0; i < 4; ++i) four[i] = double(c[i]) + double(c[i + 4]);
    for (int i = 0; i < 2; ++i) two[i] = four[i] + four[i + 2];
    return two[0] + two[1];
  }

  // Returns the child to enter, and reduces x to the rest. The prefix sums p_j = c_0 + .. + c_j are
  // added in the order of a scan over eight lanes, in three steps. All kernels use this order, so
  // that they draw the same leaves.
  //
  // If no child is negative, the prefix sums do not fall. Each p_j is p_{j-1} or an earlier prefix
  // sum, plus a sum that is no smaller than the one in p_{j-1}. Rounding keeps this order. Also,
  // c_j = 0 makes p_j = p_{j-1} exactly, for j <= 6. So the number of p_0 .. p_6 that are <= x is
  // the largest j with e_j = p_{j-1} <= x. If it is less than 7, then p_j > x >= p_{j-1}, hence c_j
  // > 0. Only child 7 can be zero.
  template <class Child>
  static inline std::int64_t enter(const Child* c, double& x) {
    const double c2 = c[2], c4 = c[4], c45 = c4 + double(c[5]);
    double before[kFan];  // e_j
    before[0] = 0.0;
    before[1] = c[0];
    before[2] = before[1] + double(c[1]);
    before[3] = before[2] + c2;
    before[4] = before[2] + (c2 + double(c[3]));
    before[5] = before[4] + c4;
    before[6] = before[4] + c45;
    before[7] = before[4] + (c45 + double(c[6]));
    std::int64_t j = 0;
    for (int i = 1; i < kFan; ++i) j += before[i] <= x;
    while (!(c[j] > 0) && j > 0) --j;
    x -= before[j];
    return j;
  }
};

}  // namespace

const TreeKernels& portable_kernels(TreeKind kind, bool doubles) {
  return doubles ? tables_of<Portable, double>(kind) : tables_of<Portable, float>(kind);
}

}  // namespace replaykit
