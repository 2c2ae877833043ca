// A plain binary sum tree that answers queries one after the other, as in many replay buffers. It
// is the baseline of the work `trees`, which compiles it. The functions check nothing.
#include <cstdint>
#include <vector>

namespace {

// The leaves are at [width, 2 * width), and the root is at 1. Node i is the parent of 2i and 2i + 1.
struct BinaryTree {
  std::int64_t width = 1;
  std::vector<double> nodes;
};

}  // namespace

extern "C" {

void* tree_new(std::int64_t leaves) {
  auto* tree = new BinaryTree;
  while (tree->width < leaves) tree->width *= 2;
  tree->nodes.assign(static_cast<std::size_t>(2 * tree->width), 0.0);
  return tree;
}

void tree_delete(void* tree) { delete static_cast<BinaryTree*>(tree); }

double tree_total(const void* tree) { return static_cast<const BinaryTree*>(tree)->nodes[1]; }

void tree_update(void* tree, const std::int64_t* index, const float* value, std::int64_t n) {
  const std::int64_t width = static_cast<BinaryTree*>(tree)->width;
  double* nodes = static_cast<BinaryTree*>(tree)->nodes.data();
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t at = width + index[i];
    nodes[at] = value[i];
    while (at >>= 1) nodes[at] = nodes[2 * at] + nodes[2 * at + 1];
  }
}

void tree_find(const void* tree, const double* x, std::int64_t n, std::int64_t* index) {
  const std::int64_t width = static_cast<const BinaryTree*>(tree)->width;
  const double* nodes = static_cast<const BinaryTree*>(tree)->nodes.data();
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t at = 1;
    double rest = x[i];
    while (at < width) {
      at *= 2;
      if (rest >= nodes[at] && nodes[at + 1] > 0) rest -= nodes[at++];
    }
    index[i] = at - width;
  }
}
}
