// A min-heap over the ranks of the rows in a bounded storage that keeps only the rows with the
// largest ranks. It finds the slot of the next row. No Python, no torch, no global state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace replaykit {

// The root is the next row to displace. It has the smallest rank. Among equal ranks it is the
// youngest row, so that older rows stay. `age` counts accepted rows. Ages are unique, so the order
// is total.
class RankHeap {
 public:
  struct Entry {
    double rank;
    std::int64_t age;
    std::int64_t slot;
  };

  explicit RankHeap(std::int64_t capacity) : capacity_(capacity) {}

  std::int64_t size() const { return static_cast<std::int64_t>(heap_.size()); }
  std::int64_t capacity() const { return capacity_; }
  const std::vector<Entry>& entries() const { return heap_; }

  // Offers n ranks in order, with the same result as one by one. slots[i] becomes the slot of row
  // i, or -1 if the row was not accepted. If two rows get the same slot, it appears twice. Ranks
  // must not be NaN. Cost: O(log capacity) per accepted row, O(1) per refused row.
  void offer(const double* ranks, std::int64_t n, std::int64_t* slots) {
    for (std::int64_t i = 0; i < n; ++i) {
      if (size() < capacity_) {
        const std::int64_t slot = size();
        heap_.push_back({ranks[i], next_age_++, slot});
        std::push_heap(heap_.begin(), heap_.end(), displaced_later);
        slots[i] = slot;
      } else if (ranks[i] > heap_.front().rank) {
        std::pop_heap(heap_.begin(), heap_.end(), displaced_later);
        Entry& last = heap_.back();
        slots[i] = last.slot;
        last.rank = ranks[i];
        last.age = next_age_++;
        std::push_heap(heap_.begin(), heap_.end(), displaced_later);
      } else {
        slots[i] = -1;
      }
    }
  }

  // Replaces all entries. Each slot in 0..n-1 must occur once, and n <= capacity.
  void assign(std::vector<Entry> entries, std::int64_t next_age) {
    heap_ = std::move(entries);
    std::make_heap(heap_.begin(), heap_.end(), displaced_later);
    next_age_ = next_age;
  }

 private:
  // std::*_heap keep the largest entry at the front, so "less" means "displaced later".
  static bool displaced_later(const Entry& a, const Entry& b) {
    return a.rank > b.rank || (a.rank == b.rank && a.age < b.age);
  }

  std::int64_t capacity_;
  std::int64_t next_age_ = 0;
  std::vector<Entry> heap_;
};

}  // namespace replaykit
