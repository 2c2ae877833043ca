// Drives csrc/rank_heap.h alone, to be built with sanitizers: random batches against a sorted
// vector, with restores in between. Exits with 0 if all agree. `--break` reads past the end of the
// heap's entries, and `--overflow` past the largest integer: both must end the program, or the
// sanitizers are not on.
#include "rank_heap.h"  // first, so that it has to include what it uses
#include "harness.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace {

using replaykit::RankHeap;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The records kept, in the order in which they are displaced: smallest rank first, among equals
// the youngest.
class Model {
 public:
  explicit Model(std::int64_t capacity) : capacity_(capacity) {}

  std::int64_t offer(double rank) {
    std::int64_t slot = static_cast<std::int64_t>(kept_.size());
    if (slot == capacity_) {
      // Written so that a NaN is refused, as every comparison with it is false.
      if (!(rank > kept_.front().rank)) return -1;
      slot = kept_.front().slot;
      kept_.erase(kept_.begin());
    }
    const RankHeap::Entry entry{rank, next_age_++, slot};
    kept_.insert(std::upper_bound(kept_.begin(), kept_.end(), entry, sooner), entry);
    return slot;
  }

  const std::vector<RankHeap::Entry>& kept() const { return kept_; }

  static bool sooner(const RankHeap::Entry& a, const RankHeap::Entry& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.age > b.age;
  }

 private:
  std::int64_t capacity_;
  std::int64_t next_age_ = 0;
  std::vector<RankHeap::Entry> kept_;
};

// Buffers of exactly the batch's size, so that one step too far is out of bounds.
std::vector<std::int64_t> offer(RankHeap& heap, const std::vector<double>& ranks) {
  std::vector<double> in(ranks);
  in.shrink_to_fit();
  std::vector<std::int64_t> slots(ranks.size(), 99);
  heap.offer(in.data(), static_cast<std::int64_t>(in.size()), slots.data());
  return slots;
}

void require_same(const RankHeap& heap, const Model& model) {
  REQUIRE(heap.size() == static_cast<std::int64_t>(model.kept().size()));
  std::vector<RankHeap::Entry> entries = heap.entries();
  // The root is what goes next; the model's order is total, so the rest needs no care.
  if (!entries.empty()) REQUIRE(entries.front().slot == model.kept().front().slot);
  std::sort(entries.begin(), entries.end(), Model::sooner);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    REQUIRE(entries[i].rank == model.kept()[i].rank);
    REQUIRE(entries[i].age == model.kept()[i].age);
    REQUIRE(entries[i].slot == model.kept()[i].slot);
  }
}

// What the bindings do when a state is loaded: entries in the order of their slots.
RankHeap restored(const RankHeap& heap) {
  std::vector<RankHeap::Entry> entries = heap.entries();
  std::sort(entries.begin(), entries.end(),
            [](const RankHeap::Entry& a, const RankHeap::Entry& b) { return a.slot < b.slot; });
  std::int64_t next_age = 0;
  for (const RankHeap::Entry& entry : entries) next_age = std::max(next_age, entry.age + 1);
  RankHeap other(heap.capacity());
  other.assign(std::move(entries), next_age);
  return other;
}

double some_rank(std::mt19937_64& random) {
  static constexpr double kSpecial[] = {0.0,
                                        -0.0,
                                        kInfinity,
                                        -kInfinity,
                                        std::numeric_limits<double>::max(),
                                        std::numeric_limits<double>::lowest(),
                                        std::numeric_limits<double>::denorm_min()};
  switch (random() % 4) {
    case 0:
      return kSpecial[random() % (sizeof kSpecial / sizeof kSpecial[0])];
    case 1:
      return std::uniform_real_distribution<double>(-1e9, 1e9)(random);
    default:
      return static_cast<double>(random() % 7) - 3.0;  // ties are common
  }
}

void random_batches() {
  std::mt19937_64 random(1);
  for (int round = 0; round < 400; ++round) {
    // Every fourth heap has a single slot.
    const std::int64_t capacity = round % 4 == 0 ? 1 : 1 + static_cast<std::int64_t>(random() % 60);
    RankHeap heap(capacity);
    Model model(capacity);
    for (int batch = 0; batch < 30; ++batch) {
      // Every fifth batch is empty, the first among them; others may be larger than the capacity.
      std::vector<double> ranks(batch % 5 == 0 ? 0 : random() % 90);
      for (double& rank : ranks) rank = some_rank(random);
      const std::vector<std::int64_t> slots = offer(heap, ranks);
      for (std::size_t i = 0; i < ranks.size(); ++i) REQUIRE(slots[i] == model.offer(ranks[i]));
      require_same(heap, model);
      if (random() % 3 == 0) {
        heap = restored(heap);
        require_same(heap, model);
      }
    }
  }
}

// The bindings refuse NaN. Should one get past them, the order is not one any more and so what is
// kept is open, but memory and slots must stay sound.
void ranks_that_are_no_numbers() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  {
    RankHeap heap(2);
    Model model(2);
    const std::vector<double> ranks = {1.0, 2.0, nan, 3.0, nan};
    const std::vector<std::int64_t> slots = offer(heap, ranks);
    for (std::size_t i = 0; i < ranks.size(); ++i) REQUIRE(slots[i] == model.offer(ranks[i]));
    require_same(heap, model);  // a full heap refuses it
  }
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    const std::int64_t capacity = 1 + static_cast<std::int64_t>(random() % 20);
    RankHeap heap(capacity);
    for (int batch = 0; batch < 20; ++batch) {
      std::vector<double> ranks(random() % 30);
      for (double& rank : ranks) rank = random() % 3 == 0 ? nan : some_rank(random);
      for (const std::int64_t slot : offer(heap, ranks)) REQUIRE(slot >= -1 && slot < capacity);
      if (random() % 3 == 0) heap = restored(heap);
      std::vector<int> seen(static_cast<std::size_t>(heap.size()), 0);
      for (const RankHeap::Entry& entry : heap.entries()) {
        REQUIRE(entry.slot >= 0 && entry.slot < heap.size());
        REQUIRE(seen[static_cast<std::size_t>(entry.slot)]++ == 0);
      }
    }
  }
}

void empty_states() {
  RankHeap heap(3);
  heap.offer(nullptr, 0, nullptr);  // an array without entries may have no address
  REQUIRE(heap.size() == 0 && heap.capacity() == 3);
  heap.assign({}, 7);
  REQUIRE(heap.size() == 0);
  const std::vector<std::int64_t> expected = {0, 1, 2, -1, 0};
  REQUIRE(offer(heap, {1.0, 2.0, 3.0, 1.0, 4.0}) == expected);
  std::int64_t newest = 0;
  for (const RankHeap::Entry& entry : heap.entries()) newest = std::max(newest, entry.age);
  REQUIRE(newest == 10);
}

// Position and summand are read at run time and a result is stored, so that no compiler can
// know or drop them.
int read_past_the_end(std::size_t ahead) {
  RankHeap heap(4);
  offer(heap, {1.0, 2.0, 3.0, 4.0});
  const RankHeap::Entry* entries = heap.entries().data();
  volatile std::int64_t seen = entries[heap.entries().capacity() + ahead].slot;
  static_cast<void>(seen);
  return 0;
}

int add_past_the_largest(std::int64_t summand) {
  RankHeap heap(4);
  heap.assign({}, std::numeric_limits<std::int64_t>::max());
  offer(heap, std::vector<double>(static_cast<std::size_t>(summand), 1.0));
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) {
    volatile int one = 1;
    if (std::strcmp(arguments[1], "--break") == 0) {
      return read_past_the_end(static_cast<std::size_t>(one - 1));
    }
    if (std::strcmp(arguments[1], "--overflow") == 0) return add_past_the_largest(one);
    std::fprintf(stderr, "unknown argument %s\n", arguments[1]);
    return 3;
  }
  empty_states();
  random_batches();
  ranks_that_are_no_numbers();
  std::puts("all agree");
  return 0;
}
