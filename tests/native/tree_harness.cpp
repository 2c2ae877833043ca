// Drives the kernels of the segment trees alone, to be built with sanitizers: random programs
// against plain vectors, in memory that ends where the tree ends. Exits with 0 if all agree.
// `--break` combines a level that is one node too long, and must end the program.
#include "tree.h"  // first, so that it has to include what it uses
#include "harness.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

namespace {

using namespace replaykit;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Exactly as long as the tree says, on a line of 64 bytes: one entry too far is out of bounds.
template <class Number>
std::unique_ptr<Number[], Free> lines(std::int64_t count, Number value) {
  void* memory = nullptr;
  const std::size_t size = static_cast<std::size_t>(count) * sizeof(Number);
  REQUIRE(posix_memalign(&memory, 64, size) == 0);
  std::fill_n(static_cast<Number*>(memory), count, value);
  return std::unique_ptr<Number[], Free>(static_cast<Number*>(memory));
}

// The capacity, rounded up to a multiple of 8.
std::int64_t leaves_of(const TreeLevels& levels) { return levels.count[0] << kFanBits; }

// Inner entries of all levels, each rounded up to a multiple of 8.
std::int64_t entries_of(const TreeLevels& levels) {
  const int last = levels.depth - 1;
  return levels.offset[last] + (eighths(levels.count[last]) << kFanBits);
}

template <class Leaf, class Inner>
struct Held {
  Held(std::int64_t capacity, Leaf identity)
      : levels(levels_of(capacity)),
        leaves(lines<Leaf>(leaves_of(levels), identity)),
        nodes(lines<Inner>(entries_of(levels), identity)) {}

  Tree tree() {
    const double ceiling = sizeof(Leaf) == 4 ? FLT_MAX : DBL_MAX / double(levels.capacity);
    return {leaves.get(), nodes.get(), levels, ceiling};
  }

  TreeLevels levels;
  std::unique_ptr<Leaf[], Free> leaves;
  std::unique_ptr<Inner[], Free> nodes;
};

// A batch in buffers of exactly its size; integers, so that all sums are exact.
struct Batch {
  Batch(std::mt19937_64& random, std::int64_t capacity, std::size_t count, bool signs)
      : index(count), floats(count), doubles(count) {
    for (std::size_t i = 0; i < count; ++i) {
      index[i] = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(capacity));
      doubles[i] = random() % 3 == 0 ? 0.0 : double(random() % 1000) - (signs ? 500 : 0);
      floats[i] = float(doubles[i]);
    }
  }
  std::vector<std::int64_t> index;
  std::vector<float> floats;
  std::vector<double> doubles;
};

double combined(TreeKind kind, const std::vector<double>& leaves, std::size_t from,
                std::size_t to) {
  double out = kind == TreeKind::kSum ? 0.0 : kind == TreeKind::kMin ? kInfinity : -kInfinity;
  for (std::size_t i = from; i < to; ++i) {
    out = kind == TreeKind::kSum   ? out + leaves[i]
          : kind == TreeKind::kMin ? std::min(out, leaves[i])
                                   : std::max(out, leaves[i]);
  }
  return out;
}

template <class Held>
void require_reductions(const TreeKernels& kernels, TreeKind kind, Held& held,
                        const std::vector<double>& model, std::mt19937_64& random) {
  std::vector<std::int64_t> start, end;
  const std::size_t size = model.size();
  for (int i = 0; i < 20; ++i) {
    const std::size_t a = random() % (size + 1), b = random() % (size + 1);
    start.push_back(static_cast<std::int64_t>(std::min(a, b)));
    end.push_back(static_cast<std::int64_t>(std::max(a, b)));
  }
  start.push_back(0), end.push_back(static_cast<std::int64_t>(size));
  start.shrink_to_fit(), end.shrink_to_fit();
  std::vector<double> out(start.size());
  kernels.reduce(held.tree(), start.data(), end.data(), std::int64_t(out.size()), out.data());
  for (std::size_t i = 0; i < out.size(); ++i) {
    REQUIRE(out[i] == combined(kind, model, std::size_t(start[i]), std::size_t(end[i])));
  }
  REQUIRE(out.back() == kernels.root(held.tree()));
}

template <class Held>
void require_searches(const TreeKernels& kernels, Held& held, const std::vector<double>& model,
                      std::mt19937_64& random) {
  const double total = kernels.root(held.tree());
  if (!(total > 0)) return;
  std::vector<double> x;
  for (std::size_t i = random() % 300; i > 0; --i) {
    x.push_back(std::floor(total * std::uniform_real_distribution<double>(0, 1)(random)));
  }
  x.insert(x.end(), {0.0, total, kInfinity});
  x.shrink_to_fit();
  std::vector<std::int64_t> index(x.size());
  std::vector<double> weight(x.size());
  kernels.find(held.tree(), x.data(), std::int64_t(x.size()), index.data(), weight.data());
  std::size_t last = model.size();
  while (!(model[--last] > 0)) {
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    std::size_t expected = 0;
    double sum = model[0];
    while (sum <= x[i] && expected < last) sum += model[++expected];
    REQUIRE(index[i] == std::int64_t(expected));
    REQUIRE(weight[i] == model[expected] && weight[i] > 0);
  }
  kernels.find(held.tree(), x.data(), std::int64_t(x.size()), index.data(), x.data());  // in place
  REQUIRE(x == weight);
  kernels.find(held.tree(), x.data(), 0, nullptr, nullptr);
}

template <class Leaf, class Inner>
void programs(const TreeKernels& kernels, TreeKind kind, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const bool signs = kind != TreeKind::kSum;
  const double identity = combined(kind, {}, 0, 0);
  for (std::int64_t capacity : {1, 2, 7, 8, 9, 16, 63, 64, 65, 511, 512, 513, 700, 4097}) {
    Held<Leaf, Inner> held(capacity, Leaf(identity));
    std::vector<double> model(std::size_t(capacity), identity);
    const Tree tree = held.tree();
    kernels.rebuild(tree);
    REQUIRE(kernels.root(tree) == identity);
    for (int step = 0; step < 25; ++step) {
      Batch batch(random, capacity, random() % 300, signs);
      const auto n = std::int64_t(batch.index.size());
      const Values floats = {Values::kFloats, batch.floats.data(), 0};
      const Values doubles = {Values::kDoubles, batch.doubles.data(), 0};
      const Values one = {Values::kOne, nullptr, 7.0};
      const auto start = std::int64_t(random() % std::uint64_t(capacity));
      const std::int64_t run = std::min(n, capacity - start);
      switch (step % 4) {
        case 0:
          REQUIRE(kernels.update(tree, batch.index.data(), floats, n) == kTaken);
          break;
        case 1:
          REQUIRE(kernels.update(tree, batch.index.data(), doubles, n) == kTaken);
          break;
        case 2:
          REQUIRE(kernels.update_run(tree, start, step % 8 < 4 ? floats : doubles, run) == kTaken);
          break;
        default:
          REQUIRE(kernels.update_run(tree, start, one, run) == kTaken);
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const std::size_t at = std::size_t(i);
        if (step % 4 < 2) model[std::size_t(batch.index[at])] = batch.doubles[at];
        if (step % 4 == 2 && i < run) model[std::size_t(start + i)] = batch.doubles[at];
        if (step % 4 == 3 && i < run) model[std::size_t(start + i)] = 7.0;
      }
      for (std::size_t i = 0; i < model.size(); ++i) REQUIRE(held.leaves[i] == Leaf(model[i]));
      require_reductions(kernels, kind, held, model, random);
      if (kind == TreeKind::kSum) require_searches(kernels, held, model, random);
      // What is refused is named by its position and changes nothing.
      if (n > 0) {
        Inner* const nodes = held.nodes.get();
        const std::vector<Inner> before(nodes, nodes + entries_of(held.levels));
        const std::size_t at = random() % std::size_t(n);
        batch.doubles[at] = std::numeric_limits<double>::quiet_NaN();
        REQUIRE(kernels.update(tree, batch.index.data(), doubles, n) == 2 * std::int64_t(at) + 1);
        for (std::int64_t bad : {capacity, std::int64_t(-1), leaves_of(held.levels) + 64,
                                 std::numeric_limits<std::int64_t>::min(),
                                 std::numeric_limits<std::int64_t>::max()}) {
          batch.index[at] = bad;
          REQUIRE(kernels.update(tree, batch.index.data(), one, n) == 2 * std::int64_t(at));
        }
        REQUIRE(std::equal(before.begin(), before.end(), held.nodes.get()));
      }
    }
    kernels.rebuild(tree);
    require_reductions(kernels, kind, held, model, random);
  }
}

void all(const TreeKernels& (*kernels_of)(TreeKind, bool), std::uint64_t seed) {
  programs<float, double>(kernels_of(TreeKind::kSum, false), TreeKind::kSum, seed);
  programs<double, double>(kernels_of(TreeKind::kSum, true), TreeKind::kSum, seed + 1);
  for (const TreeKind kind : {TreeKind::kMin, TreeKind::kMax}) {
    programs<float, float>(kernels_of(kind, false), kind, seed + 2);
    programs<double, double>(kernels_of(kind, true), kind, seed + 3);
  }
}

void levels() {
  for (const std::int64_t capacity :
       {std::int64_t(1), (std::int64_t(1) << 31) + 1, std::int64_t(1) << 40,
        std::numeric_limits<std::int64_t>::max() - 7}) {
    const TreeLevels levels = levels_of(capacity);
    REQUIRE(leaves_of(levels) >= capacity && leaves_of(levels) - capacity < 8);
    REQUIRE(levels.depth <= kMaxLevels && levels.count[levels.depth - 1] <= 8);
  }
}

int read_past_the_end() {
  Held<float, double> held(64, 0.0F);
  Tree tree = held.tree();
  tree.levels.capacity = 72;
  portable_kernels(TreeKind::kSum, false).rebuild(tree);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) {
    if (std::strcmp(arguments[1], "--break") == 0) return read_past_the_end();
    std::fprintf(stderr, "unknown argument %s\n", arguments[1]);
    return 3;
  }
  levels();
  all(portable_kernels, 1);
#ifdef REPLAYKIT_AVX512
  if (__builtin_cpu_supports("avx512f")) all(avx512_kernels, 100);
#endif
  std::puts("all agree");
  return 0;
}
