// Python bindings of the segment trees. They forward addresses and names. Python owns the memory,
// and has checked types, devices and lengths. The kernels check all entries before they write any
// entry. They return a code, from which Python makes an error message.
#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "committed_column.h"
#include "ledger.h"
#include "power.h"
#include "tree.h"

namespace replaykit {

namespace {

// For up to this many entries, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 64;

using Indices = std::vector<std::int64_t>;

Indices copied(std::uintptr_t index, std::int64_t n) {
  const auto* from = at<const std::int64_t>(index);
  return Indices(from, from + n);
}

bool has_avx512() {
#ifdef REPLAYKIT_AVX512
  return __builtin_cpu_supports("avx512f");  // this also checks the operating system
#else
  return false;
#endif
}

TreeKind kind_of(const std::string& name) {
  if (name == "sum") return TreeKind::kSum;
  if (name == "min") return TreeKind::kMin;
  if (name == "max") return TreeKind::kMax;
  refuse(nb::value_error, "expected sum, min or max, got ", name);
}

const TreeKernels& kernels_of(const std::string& kernel, TreeKind kind, bool doubles) {
#ifdef REPLAYKIT_AVX512
  if (kernel == "avx512" && has_avx512()) return avx512_kernels(kind, doubles);
#endif
  if (kernel == "portable") return portable_kernels(kind, doubles);
  refuse(nb::value_error, "expected a kernel that this processor runs, got ", kernel);
}

// A view of a tree. It does not own the memory. The caller keeps the memory alive.
class SegmentTree {
 public:
  SegmentTree(const std::string& kind, bool doubles, const std::string& kernel,
              std::uintptr_t leaves, std::uintptr_t nodes, std::int64_t capacity)
      : kernels_(kernels_of(kernel, kind_of(kind), doubles)) {
    if (capacity < 1) refuse(nb::value_error, "expected a capacity of at least 1, got ", capacity);
    if ((leaves | nodes) % 64 != 0) throw nb::value_error("expected memory aligned to 64 bytes");
    tree_ = {at<void>(leaves), at<void>(nodes), levels_of(capacity),
             doubles ? DBL_MAX / static_cast<double>(capacity) : FLT_MAX};
  }

  // The new leaves are n doubles or floats at an address, or `one` number if the address is 0. The
  // update copies the index, since other threads may write to it after the check.
  std::int64_t update(std::uintptr_t index, std::uintptr_t values, bool wide, double one,
                      std::int64_t n) {
    const Indices own = copied(index, n);
    return released<kReleaseAbove>(
        n, [&] { return kernels_.update(tree_, own.data(), source(values, wide, one), n); });
  }

  std::int64_t update_run(std::int64_t start, std::uintptr_t values, bool wide, double one,
                          std::int64_t n) {
    const std::int64_t capacity = tree_.levels.capacity;
    if (start < 0 || n < 0 || start > capacity || n > capacity - start) {
      throw nb::index_error("expected a run within the tree");
    }
    return released<kReleaseAbove>(
        n, [&] { return kernels_.update_run(tree_, start, source(values, wide, one), n); });
  }

  void rebuild() {
    released<kReleaseAbove>(tree_.levels.capacity, [&] { kernels_.rebuild(tree_); });
  }

  double root() const { return kernels_.root(tree_); }

  // Returns kTaken, or the position of the first invalid range.
  std::int64_t reduce(std::uintptr_t start, std::uintptr_t end, std::int64_t n,
                      std::uintptr_t out) const {
    const auto* from = at<const std::int64_t>(start);
    const auto* to = at<const std::int64_t>(end);
    for (std::int64_t i = 0; i < n; ++i) {
      if (from[i] < 0 || from[i] > to[i] || to[i] > tree_.levels.capacity) return i;
    }
    released<kReleaseAbove>(n, [&] { kernels_.reduce(tree_, from, to, n, at<double>(out)); });
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

  // Returns kTaken, kEmpty, or the position of the first invalid value. A value is invalid if it is
  // NaN, negative or, with `limited`, above the sum.
  std::int64_t find(std::uintptr_t x, std::int64_t n, bool limited, std::uintptr_t index,
                    std::uintptr_t weight) const {
    const double sum = root();
    if (!(sum > 0)) return n == 0 ? kTaken : kEmpty;
    const auto* from = at<const double>(x);
    const double limit = limited ? sum : std::numeric_limits<double>::infinity();
    return released<kReleaseAbove>(n, [&]() -> std::int64_t {
      for (std::int64_t i = 0; i < n; ++i) {
        if (!(from[i] >= 0 && from[i] <= limit)) return i;
      }
      kernels_.find(tree_, from, n, at<std::int64_t>(index), at<double>(weight));
      return kTaken;
    });
  }

  // Draws leaves by uniform numbers in [0, 1), and overwrites these numbers with the drawn weights.
  // With strata, draw b comes from the range [b, b+1) / n of the sum. If no weight is positive,
  // returns false and writes nothing.
  bool draw(std::uintptr_t uniform, std::int64_t n, std::uintptr_t index, bool strata) const {
    const double sum = root();
    if (!(sum > 0)) return n == 0;
    auto* u = at<double>(uniform);
    released<kReleaseAbove>(n, [&] {
      constexpr double kLast = 1.0 - DBL_EPSILON / 2;  // the largest number below 1
      for (std::int64_t b = 0; b < n; ++b) {
        const double v = strata ? (static_cast<double>(b) + u[b]) / static_cast<double>(n) : u[b];
        u[b] = (v < kLast ? v : kLast) * sum;
      }
      kernels_.find(tree_, u, n, at<std::int64_t>(index), u);
    });
    return true;
  }

  // Draws n leaves by 2 n uniform numbers in [0, 1), which it overwrites, and for each leaf a window
  // in a ring. Row i of `facts` has facts of leaf i: lane, time of the first row, a fact, and the
  // number of windows, at least 1. Writes to `out` the leaves and their facts, n numbers each, and to
  // `windows` the elements of the windows and the window of each. Returns false as `draw` does.
  bool draw_windows(nb::handle uniform, nb::handle facts, nb::handle out, nb::handle windows,
                    std::int64_t slots, std::int64_t lanes) const {
    const Array numbers(uniform, "uniform", Array::kDouble, 1, true);
    const Array table(facts, "facts", Array::kInt64, 2, true);
    const Array found(out, "out", Array::kInt64, 2, true);
    const Array rows(windows, "windows", Array::kInt64, 2, true);
    const std::int64_t n = found.size(1), columns = table.size(1), length = n ? rows.size(1) / n : 0;
    check_length("uniform", numbers.size(), 2 * n);
    check_length("facts", table.size(), tree_.levels.capacity);
    check_length("out", found.size(), columns + 1);
    check_length("windows", rows.size() * rows.size(1), 2 * n * length);
    if (columns < 4 || slots < 1) throw nb::value_error("expected at least 4 facts and a slot");
    std::int64_t *const index = found.out(), *element = rows.out(), *window = element + n * length;
    if (!draw(reinterpret_cast<std::uintptr_t>(numbers.doubles()), n,
              reinterpret_cast<std::uintptr_t>(index), false)) {
      return false;
    }
    for (std::int64_t i = 0; i < n; ++i) __builtin_prefetch(table.out() + index[i] * columns);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t* row = table.out() + index[i] * columns;
      for (std::int64_t c = 0; c < columns; ++c) index[(c + 1) * n + i] = row[c];
      const double part = numbers.doubles()[n + i] * static_cast<double>(row[3]);
      std::int64_t slot = (row[1] + std::min(static_cast<std::int64_t>(part), row[3] - 1)) % slots;
      for (std::int64_t step = 0; step < length; ++step) {
        *element++ = slot * lanes + row[0];
        *window++ = i;
        if (++slot == slots) slot = 0;
      }
    }
    return true;
  }

  // Adds 1 to counts at `places`, for each time that a place occurs. Then sets the leaves `index`
  // to mass * (1 + count) ** exponent, with the mass of the leaf.
  void count(nb::handle index, nb::handle places, nb::handle counts, nb::handle masses,
             double exponent) {
    const Array at(index, "index", Array::kInt64, 1), place(places, "places", Array::kInt64, 1);
    const Array drawn(counts, "counts", Array::kInt64, 1, true);
    const Array mass(masses, "masses", Array::kDouble, 1);
    const std::int64_t n = at.size();
    check_length("places", place.size(), n);
    check_length("masses", mass.size(), tree_.levels.capacity);
    for (std::int64_t i = 0; i < n; ++i) {
      if (at.numbers()[i] < 0 || at.numbers()[i] >= mass.size() || place.numbers()[i] < 0 ||
          place.numbers()[i] >= drawn.size()) {
        throw nb::index_error("expected leaves of the tree and places of counts");
      }
    }
    Indices own(static_cast<std::size_t>(n));
    std::vector<double> values(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) ++drawn.out()[place.numbers()[i]];
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto k = static_cast<std::int64_t>(i);
      own[i] = at.numbers()[k];
      values[i] = 1.0 + static_cast<double>(drawn.out()[place.numbers()[k]]);
    }
    power_all(values.data(), n, exponent);
    for (std::size_t i = 0; i < own.size(); ++i) values[i] *= mass.doubles()[own[i]];
    kernels_.update(tree_, own.data(), {Values::kDoubles, values.data(), 0.0}, n);
  }

  // Makes a whole prioritized draw. Calls `draw`, then writes the weights (v / smallest) ** -beta.
  // `smallest` is the root of `least` or, without that tree, the smallest weight in the batch. If
  // `generations` is not 0, also writes the generations of the slots.
  bool draw_weighted(std::uintptr_t uniform, std::int64_t n, std::uintptr_t index, bool strata,
                     nb::handle of_least, double beta, std::uintptr_t weights, bool doubles,
                     std::uintptr_t generations, std::int64_t next_position,
                     std::int64_t slots_in_ring) const {
    const Counters counters = {next_position, std::max<std::int64_t>(slots_in_ring, 1)};
    const SegmentTree* least = tree_or_null(of_least);
    if (!draw(uniform, n, index, strata)) return false;
    double* v = at<double>(uniform);
    const auto* slots = at<const std::int64_t>(index);
    double smallest = std::numeric_limits<double>::infinity();
    if (least != nullptr) {
      smallest = least->root();
    } else {
      for (std::int64_t i = 0; i < n; ++i) smallest = std::min(smallest, v[i]);
    }
    for (std::int64_t i = 0; i < n; ++i) v[i] /= smallest;
    power_all(v, n, -beta);
    for (std::int64_t i = 0; i < n; ++i) {
      if (doubles) at<double>(weights)[i] = v[i];
      else at<float>(weights)[i] = static_cast<float>(v[i]);
    }
    if (generations != 0) {
      for (std::int64_t i = 0; i < n; ++i) {
        at<std::int64_t>(generations)[i] = counters.generation(slots[i]);
      }
    }
    return true;
  }

  // Makes a whole priority update of a learner, in a sum tree over (p + eps) ** alpha. Returns the
  // largest priority. If the update is not plain (see largest_of_plain), a power is above `ceiling`
  // or `column` has no room, returns -1 and changes nothing. The caller then finds the reason.
  template <typename Number>
  double set_numbers(SegmentTree* least, SegmentTree* most, Column* column, Number* raw,
                     const std::int64_t* index, const Number* priority,
                     const std::int64_t* generation, std::int64_t n, std::int64_t limit,
                     const Counters& counters, double eps, double alpha, double ceiling) {
    if (limit > tree_.levels.capacity) return -1.0;
    if (column != nullptr && !column->fits(limit, n)) return -1.0;
    // The weights of drawn slots are in the cache; this prefetches the other arrays to be written.
    for (std::int64_t i = 0; i < n; ++i) {
      if (index[i] < 0 || index[i] >= limit) return -1.0;
      __builtin_prefetch(raw + index[i], 1, 2);
      if (least != nullptr) {
        __builtin_prefetch(static_cast<Number*>(least->tree_.leaves) + index[i], 1, 2);
      }
    }
    const double largest = largest_of_plain(index, n, limit, priority, generation, counters);
    if (largest < 0) return -1.0;
    std::vector<double> values(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) values[i] = static_cast<double>(priority[i]) + eps;
    power_all(values.data(), n, alpha);
    bool allowed = true;
    for (std::int64_t i = 0; i < n; ++i) allowed &= values[i] <= ceiling;
    if (!allowed) return -1.0;
    const Values of_sum = {Values::kDoubles, values.data(), 0.0};
    if (kernels_.update(tree_, index, of_sum, n) != kTaken) return -1.0;
    if (least != nullptr) {
      // Weights that the sum tree stores as 0 do not count for the minimum.
      for (std::int64_t i = 0; i < n; ++i) {
        if (static_cast<Number>(values[i]) < std::numeric_limits<Number>::min()) {
          values[i] = std::numeric_limits<double>::infinity();
        }
      }
      least->kernels_.update(least->tree_, index, of_sum, n);
    }
    if (most != nullptr) {
      const auto kind = sizeof(Number) == sizeof(double) ? Values::kDoubles : Values::kFloats;
      most->kernels_.update(most->tree_, index, {kind, priority, 0.0}, n);
    }
    for (std::int64_t i = 0; i < n; ++i) raw[index[i]] = priority[i];
    if (column != nullptr) {
      column->set({reinterpret_cast<const char*>(index), sizeof *index}, priority, n);
    }
    return largest;
  }

  // `column` is the committed column of the same priorities, which is set too, or 0.
  double set_priorities(nb::handle least, nb::handle most, nb::handle column, std::uintptr_t raw,
                        bool doubles, std::uintptr_t index, std::uintptr_t priority,
                        std::uintptr_t generation, std::int64_t n, std::int64_t limit,
                        std::int64_t next_position, std::int64_t slots, double eps, double alpha,
                        double ceiling) {
    Column* const kept = nb::isinstance<Column>(column) ? nb::cast<Column*>(column) : nullptr;
    const Counters counters = {next_position, std::max<std::int64_t>(slots, 1)};
    const Indices own = copied(index, n);
    SegmentTree *const low = tree_or_null(least), *const high = tree_or_null(most);
    const auto* then = at<const std::int64_t>(generation);
    const auto set = [&](auto* numbers) {
      const auto* given = at<std::remove_pointer_t<decltype(numbers)>>(priority);
      return set_numbers(low, high, kept, numbers, own.data(), given, then, n, limit, counters, eps,
                         alpha, ceiling);
    };
    return released<kReleaseAbove>(
        n, [&] { return doubles ? set(at<double>(raw)) : set(at<float>(raw)); });
  }

  static constexpr std::int64_t kEmpty = -2;

 private:
  static Values source(std::uintptr_t values, bool wide, double one) {
    const Values::Kind array = wide ? Values::kDoubles : Values::kFloats;
    return {values == 0 ? Values::kOne : array, at<void>(values), one};
  }

  // Returns another tree of the same capacity, or null for anything else, such as 0.
  SegmentTree* tree_or_null(nb::handle other) const {
    if (!nb::isinstance<SegmentTree>(other)) return nullptr;
    auto* tree = nb::cast<SegmentTree*>(other);
    if (tree->tree_.levels.capacity == tree_.levels.capacity) return tree;
    throw nb::value_error("expected trees of one capacity");
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
  }, "Return the names of the kernels for this processor, fastest first.");

  m.def("power",
        [](nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu> base, double exponent) {
          const auto n = static_cast<std::int64_t>(base.shape(0));
          double* x = base.data();
          released<kReleaseAbove>(n, [&] { power_all(x, n, exponent); });
        },
        nb::arg("base").noconvert(), nb::arg("exponent"), "Raise bases to the exponent, in place.");

  nb::class_<SegmentTree>(m, "SegmentTree", "A view of an 8-ary segment tree in memory.")
      .def(nb::init<const std::string&, bool, const std::string&, std::uintptr_t, std::uintptr_t,
                    std::int64_t>())
      .def("update", &SegmentTree::update)
      .def("update_run", &SegmentTree::update_run)
      .def("rebuild", &SegmentTree::rebuild)
      .def("root", &SegmentTree::root)
      .def("reduce", &SegmentTree::reduce)
      .def("reduce_one", &SegmentTree::reduce_one)
      .def("find", &SegmentTree::find)
      .def("draw", &SegmentTree::draw)
      .def("draw_windows", &SegmentTree::draw_windows)
      .def("count", &SegmentTree::count)
      .def("draw_weighted", &SegmentTree::draw_weighted)
      .def("set_priorities", &SegmentTree::set_priorities);
}

}  // namespace replaykit
