// The Python face of the segment trees: addresses and names, no algorithm. Python owns the memory
// and has checked types, devices and lengths; what it does not look at, entry by entry, is checked
// here before anything is written, and comes back as a code that Python makes a sentence of.
#include "bindings_tree.h"

#include <cfloat>
#include <cstdint>
#include <limits>
#include <string>

#include "binary_tree.h"
#include "tree.h"

namespace nb = nanobind;

namespace replaykit {
namespace {

// Below this many entries the work is shorter than handing the interpreter lock over and back.
constexpr std::int64_t kReleaseAbove = 64;

template <class Work>
auto unlocked(std::int64_t entries, Work work) {
  if (entries <= kReleaseAbove) return work();
  nb::gil_scoped_release release;
  return work();
}

template <class Pointed>
Pointed* at(std::uintptr_t address) {
  return reinterpret_cast<Pointed*>(address);
}

bool has_avx512() {
#ifdef REPLAYKIT_AVX512
  return __builtin_cpu_supports("avx512f");  // asks the operating system too
#else
  return false;
#endif
}

TreeKind kind_of(const std::string& name) {
  if (name == "sum") return TreeKind::kSum;
  if (name == "min") return TreeKind::kMin;
  if (name == "max") return TreeKind::kMax;
  throw nb::value_error(("expected sum, min or max, got " + name).c_str());
}

const TreeKernels& kernels_of(const std::string& kernel, TreeKind kind, bool doubles) {
#ifdef REPLAYKIT_AVX512
  if (kernel == "avx512" && has_avx512()) return avx512_kernels(kind, doubles);
#endif
  if (kernel == "portable") return portable_kernels(kind, doubles);
  throw nb::value_error(("expected a kernel that this processor runs, got " + kernel).c_str());
}

// A view: it holds no memory, and its caller keeps the memory alive.
class SegmentTree {
 public:
  SegmentTree(const std::string& kind, bool doubles, const std::string& kernel,
              std::uintptr_t leaves, std::uintptr_t nodes, std::int64_t capacity)
      : kernels_(kernels_of(kernel, kind_of(kind), doubles)) {
    if (capacity < 1) {
      throw nb::value_error(("expected a capacity of at least 1, got " +
                             std::to_string(capacity)).c_str());
    }
    if (leaves % 64 != 0 || nodes % 64 != 0) {
      throw nb::value_error("expected memory aligned to 64 bytes");
    }
    tree_ = {at<void>(leaves), at<void>(nodes), levels_of(capacity),
             doubles ? DBL_MAX / static_cast<double>(capacity) : FLT_MAX};
  }

  std::int64_t update(std::uintptr_t index, std::uintptr_t values, bool wide, std::int64_t n) {
    const Values from = {wide ? Values::kDoubles : Values::kFloats, at<void>(values), 0.0};
    return unlocked(n, [&] { return kernels_.update(tree_, at<std::int64_t>(index), from, n); });
  }

  std::int64_t update_to(std::uintptr_t index, double value, std::int64_t n) {
    const Values from = {Values::kOne, nullptr, value};
    return unlocked(n, [&] { return kernels_.update(tree_, at<std::int64_t>(index), from, n); });
  }

  std::int64_t update_run(std::int64_t start, std::uintptr_t values, bool wide, std::int64_t n) {
    check_run(start, n);
    const Values from = {wide ? Values::kDoubles : Values::kFloats, at<void>(values), 0.0};
    return unlocked(n, [&] { return kernels_.update_run(tree_, start, from, n); });
  }

  std::int64_t update_run_to(std::int64_t start, double value, std::int64_t n) {
    check_run(start, n);
    const Values from = {Values::kOne, nullptr, value};
    return unlocked(n, [&] { return kernels_.update_run(tree_, start, from, n); });
  }

  void rebuild() {
    unlocked(tree_.levels.capacity, [&] { kernels_.rebuild(tree_); });
  }

  double root() const { return kernels_.root(tree_); }

  // kTaken, or the position of the first range that is none.
  std::int64_t reduce(std::uintptr_t start, std::uintptr_t end, std::int64_t n,
                      std::uintptr_t out) const {
    const auto* from = at<const std::int64_t>(start);
    const auto* to = at<const std::int64_t>(end);
    for (std::int64_t i = 0; i < n; ++i) {
      if (from[i] < 0 || from[i] > to[i] || to[i] > tree_.levels.capacity) return i;
    }
    unlocked(n, [&] { kernels_.reduce(tree_, from, to, n, at<double>(out)); });
    return kTaken;
  }

  double reduce_one(std::int64_t start, std::int64_t end) const {
    if (start < 0 || start > end || end > tree_.levels.capacity) {
      throw nb::index_error("expected a range within the tree");
    }
    double out;
    kernels_.reduce(tree_, &start, &end, 1, &out);
    return out;
  }

  // kTaken, kEmpty, or the position of the first value that is NaN, negative or, if limited, above the sum.
  std::int64_t find(std::uintptr_t x, std::int64_t n, bool limited, std::uintptr_t index,
                    std::uintptr_t weight) const {
    const double sum = root();
    if (!(sum > 0)) return n == 0 ? kTaken : kEmpty;
    const auto* from = at<const double>(x);
    const double limit = limited ? sum : std::numeric_limits<double>::infinity();
    return unlocked(n, [&]() -> std::int64_t {
      for (std::int64_t i = 0; i < n; ++i) {
        if (!(from[i] >= 0 && from[i] <= limit)) return i;
      }
      kernels_.find(tree_, from, n, at<std::int64_t>(index), at<double>(weight));
      return kTaken;
    });
  }

  // Uniform numbers in [0, 1) become weights in place; with strata the b-th lies in [b, b+1) / n.
  // False without a positive weight, and then nothing is written.
  bool draw(std::uintptr_t uniform, std::int64_t n, std::uintptr_t index, bool strata) const {
    const double sum = root();
    if (!(sum > 0)) return n == 0;
    auto* u = at<double>(uniform);
    unlocked(n, [&] {
      constexpr double kLast = 1.0 - DBL_EPSILON / 2;  // the largest number below 1
      for (std::int64_t b = 0; b < n; ++b) {
        const double v = strata ? (static_cast<double>(b) + u[b]) / static_cast<double>(n) : u[b];
        u[b] = (v < kLast ? v : kLast) * sum;
      }
      kernels_.find(tree_, u, n, at<std::int64_t>(index), u);
    });
    return true;
  }

  static constexpr std::int64_t kEmpty = -2;

 private:
  void check_run(std::int64_t start, std::int64_t n) const {
    const std::int64_t capacity = tree_.levels.capacity;
    if (start < 0 || n < 0 || start > capacity || n > capacity - start) {
      throw nb::index_error("expected a run within the tree");
    }
  }

  const TreeKernels& kernels_;
  Tree tree_;
};

}  // namespace

void bind_trees(nb::module_& m) {
  m.def("tree_kernels", [] {
    nb::list names;
    if (has_avx512()) names.append("avx512");
    names.append("portable");
    return names;
  }, "Names of the kernels that this processor runs, the fastest first.");

  m.def("tree_levels", [](std::int64_t capacity) {
    const TreeLevels levels = levels_of(capacity);
    nb::list counts, offsets;
    for (int l = 0; l < levels.depth; ++l) {
      counts.append(levels.count[l]);
      offsets.append(levels.offset[l]);
    }
    return nb::make_tuple(levels.leaves, levels.entries, counts, offsets);
  }, "Leaves with padding, entries of all levels, and count and offset of each level.");

  nb::class_<SegmentTree>(m, "SegmentTree", "A view of an 8-ary segment tree in memory of others.")
      .def(nb::init<const std::string&, bool, const std::string&, std::uintptr_t, std::uintptr_t,
                    std::int64_t>(),
           nb::arg("kind"), nb::arg("doubles"), nb::arg("kernel"), nb::arg("leaves"),
           nb::arg("nodes"), nb::arg("capacity"))
      .def("update", &SegmentTree::update)
      .def("update_to", &SegmentTree::update_to)
      .def("update_run", &SegmentTree::update_run)
      .def("update_run_to", &SegmentTree::update_run_to)
      .def("rebuild", &SegmentTree::rebuild)
      .def("root", &SegmentTree::root)
      .def("reduce", &SegmentTree::reduce)
      .def("reduce_one", &SegmentTree::reduce_one)
      .def("find", &SegmentTree::find)
      .def("draw", &SegmentTree::draw);

  nb::class_<BinaryTree>(m, "BinaryTree",
                         "A binary sum tree walked one by one: the yardstick of the benchmark.")
      .def(nb::init<std::int64_t>(), nb::arg("capacity"))
      .def_prop_ro("capacity", &BinaryTree::capacity)
      .def("total", &BinaryTree::total)
      .def("update",
           [](BinaryTree& self, std::uintptr_t index, std::uintptr_t value, std::int64_t n) {
             unlocked(n, [&] { self.update(at<std::int64_t>(index), at<float>(value), n); });
           },
           "From addresses of int64 and float32; indices are not checked.")
      .def("find",
           [](const BinaryTree& self, std::uintptr_t x, std::int64_t n, std::uintptr_t index) {
             unlocked(n, [&] { self.find(at<double>(x), n, at<std::int64_t>(index)); });
           },
           "From the address of float64 to that of int64.");
}

}  // namespace replaykit
