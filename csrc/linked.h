// A variant of `Followed` for rows whose next row in the stream may be in any slot. It writes rows
// of any streams to any slots. The caller has checked the positions of rows, and everything that
// `Followed` requires.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "followed.h"

namespace replaykit {

// The order of a batch's rows in their streams. `followers` has the position of the next row in the
// stream for each row, or -1. The other members have one number for each stream with stored rows.
// `newest` has the slot of the stream's newest stored row. `first` has the position of the stream's
// first row in the batch. `expected` is not zero if that row must continue the newest stored row.
struct Batch {
  std::vector<std::int64_t> followers, newest, first, expected;
};

class Linked : public Followed {
 public:
  // `after` and `before` have, for each slot, the distances to the next and the previous row of the
  // stream, or 0 if there is no such row. A row without a next row has an entry.
  Linked(Followed rows, RowNumbers after, RowNumbers before)
      : Followed(std::move(rows)), before_(before) {
    links_ = after;
  }

  // Compares the rows of a batch with the rows before them. `addresses` has one address per leaf.
  // The object records for `write` the rows that need an entry. Returns whether any row continues
  // an episode, but differs from the following leaves of the row before.
  bool compare(const std::vector<const char*>& addresses, Batch batch, int threads) {
    compared_ = -1;
    batch_ = std::move(batch);
    const auto n = static_cast<std::int64_t>(batch_.followers.size());
    differs_.assign(static_cast<std::size_t>(n), 0);
    detail::parallel(n, 2 * pair_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      for (const Pair& pair : pairs_) {
        const std::int64_t bytes = leaves_[pair.next].bytes;
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t next = batch_.followers[static_cast<std::size_t>(i)];
          if (next >= 0 && std::memcmp(addresses[pair.next] + i * bytes,
                                       addresses[pair.root] + next * bytes,
                                       static_cast<std::size_t>(bytes)) != 0) {
            differs_[static_cast<std::size_t>(i)] = 1;
          }
        }
      }
    });
    bool wrong = false;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (differs_[at]) wrong = wrong || !ended(addresses, i, batch_.followers[at]);
    }
    newest_differ_.assign(batch_.newest.size(), 0);
    for (std::size_t k = 0; k < batch_.newest.size(); ++k) {
      const std::int64_t slot = batch_.newest[k], entry = map_.at(slot);
      check_entry(entry);
      for (const Pair& pair : pairs_) {
        const Field& own = leaves_[pair.next];
        if (std::memcmp(own.base + (entry - 1) * own.stride,
                        addresses[pair.root] + batch_.first[k] * own.bytes,
                        static_cast<std::size_t>(own.bytes)) != 0) {
          newest_differ_[k] = 1;
        }
      }
      if (newest_differ_[k] && batch_.expected[k]) {
        wrong = wrong || !stored_ended(slot, addresses, batch_.first[k]);
      }
    }
    compared_ = n;
    return wrong;
  }

  // Writes the rows of the last `compare` to distinct slots, after the newest rows of their
  // streams. Returns the number of missing entries. If it is not 0, nothing changes.
  std::int64_t write(const std::vector<std::int64_t>& slots,
                     const std::vector<const char*>& addresses, int threads) {
    const std::size_t n = slots.size();
    written_ = slots;
    std::sort(written_.begin(), written_.end());
    returned_.clear();
    beside_.clear();
    orphans_.clear();
    for (std::size_t i = 0; i < n; ++i) {
      if (map_.at(slots[i])) give_back(slots[i]);
      if (batch_.followers[i] < 0 || differs_[i]) beside_.push_back(static_cast<std::int64_t>(i));
      linked(after(slots[i]));
      // The previous row may stay although this slot is overwritten. So far, its following leaves
      // were read from this slot, so it gets a copy of them.
      const std::int64_t before = linked(slots[i] + before_.at(slots[i]));
      if (before != slots[i] && !map_.at(before) && !is_written(before)) {
        orphans_.push_back({before, slots[i]});
      }
    }
    for (std::size_t k = 0; k < batch_.newest.size(); ++k) {
      if (is_written(batch_.newest[k])) {
        batch_.newest[k] = -1;
      } else if (!newest_differ_[k]) {
        give_back(batch_.newest[k]);
      }
    }
    const auto back = static_cast<std::int64_t>(returned_.size());
    const auto needed = static_cast<std::int64_t>(beside_.size() + orphans_.size());
    if (const std::int64_t missing = check_free(back, needed)) return missing;
    // From here on, no check can fail.
    std::int64_t free = *entries_.free;
    for (const std::int64_t number : returned_) entries_.stack[free++] = number;
    for (const Orphan& orphan : orphans_) {
      const std::int64_t number = entries_.stack[--free];
      for (const Pair& pair : pairs_) {
        const Field &own = leaves_[pair.next], &root = leaves_[pair.root];
        detail::copy(own.base + number * own.stride, root.base + orphan.follower * root.stride,
                     own.bytes);
      }
      map_.put(orphan.row, number + 1);
    }
    stored_.scatter(slots.data(), static_cast<std::int64_t>(n), stored_sides(addresses), threads);
    for (const std::int64_t slot : slots) {
      const std::int64_t before = slot + before_.at(slot), next = after(slot);
      links_.put(before, 0);
      before_.put(next, 0);
      links_.put(slot, 0);
      before_.put(slot, 0);
      map_.put(slot, 0);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (batch_.followers[i] >= 0) {
        join(slots[i], slots[static_cast<std::size_t>(batch_.followers[i])]);
      }
    }
    for (std::size_t k = 0; k < batch_.newest.size(); ++k) {
      const std::int64_t slot = batch_.newest[k];
      if (slot < 0) continue;
      if (!newest_differ_[k]) map_.put(slot, 0);
      join(slot, slots[static_cast<std::size_t>(batch_.first[k])]);
    }
    for (const std::int64_t row : beside_) {
      const std::int64_t number = entries_.stack[--free];
      keep(number, addresses, row);
      map_.put(slots[static_cast<std::size_t>(row)], number + 1);
    }
    *entries_.free = free;
    compared_ = -1;
    return 0;
  }

 private:
  struct Orphan {
    std::int64_t row, follower;
  };

  std::int64_t linked(std::int64_t slot) const {
    if (slot < 0 || slot >= rows_) throw std::runtime_error("a link to a row that is not there");
    return slot;
  }

  bool is_written(std::int64_t slot) const {
    return std::binary_search(written_.begin(), written_.end(), slot);
  }

  void join(std::int64_t row, std::int64_t follower) const {
    links_.put(row, follower - row);
    before_.put(follower, row - follower);
  }

  RowNumbers before_;
  Batch batch_;
  std::vector<unsigned char> newest_differ_;
  std::vector<std::int64_t> written_;
  std::vector<Orphan> orphans_;
};

}  // namespace replaykit
