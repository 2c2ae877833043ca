// A plain binary sum tree that answers queries one after the other, as in many replay buffers. It
// is the baseline of the benchmark. Nothing in the package uses it.
#pragma once

#include <cstdint>
#include <vector>

namespace replaykit {

// The leaves are at [width, width + capacity), and the root is at 1. Node i is the parent of 2i and
// 2i + 1.
class BinaryTree {
 public:
  explicit BinaryTree(std::int64_t capacity) : capacity_(capacity) {
    while (width_ < capacity) width_ *= 2;
    nodes_.assign(static_cast<std::size_t>(2 * width_), 0.0);
  }

  std::int64_t capacity() const { return capacity_; }
  double total() const { return nodes_[1]; }

  void update(const std::int64_t* index, const float* value, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t at = width_ + index[i];
      nodes_[at] = value[i];
      while (at >>= 1) nodes_[at] = nodes_[2 * at] + nodes_[2 * at + 1];
    }
  }

  void find(const double* x, std::int64_t n, std::int64_t* index) const {
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t at = 1;
      double rest = x[i];
      while (at < width_) {
        at *= 2;
        if (rest >= nodes_[at] && nodes_[at + 1] > 0) rest -= nodes_[at++];
      }
      index[i] = at - width_;
    }
  }

 private:
  std::int64_t capacity_;
  std::int64_t width_ = 1;
  std::vector<double> nodes_;
};

}  // namespace replaykit
