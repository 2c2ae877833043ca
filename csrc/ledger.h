// Generations of slots, computed from the counters of a ledger. They are valid only if all rows are
// written at the cursor of the ledger. replaykit/storages/ledger.py does the same in torch.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace replaykit {

struct Counters {
  std::int64_t next_position;  // the row id of the next row
  std::int64_t slots;          // at least 1

  // Returns the generation of the slot, starting at 0, or -1 if the slot was never written or does
  // not exist.
  std::int64_t generation(std::int64_t slot) const {
    if (slot < 0 || slot >= slots) return -1;
    const std::int64_t behind = next_position - 1 - slot;
    return behind < 0 ? -1 : behind / slots;
  }
};

// Returns the largest of n priorities if the update is plain, otherwise -1. An update is plain if
// all priorities are finite and not negative, and each belongs to a stored row that was not
// replaced since the draw. Without generations, any stored row is accepted. The caller handles the
// entries of other updates, which are rare, one by one.
template <typename Number>
double largest_of_plain(const std::int64_t* index, std::int64_t n, std::int64_t limit,
                        const Number* priority, const std::int64_t* generation,
                        const Counters& counters) {
  Number most = 0;
  bool plain = true;
  for (std::int64_t i = 0; i < n; ++i) {
    plain &= index[i] >= 0 && index[i] < limit;
    plain &= priority[i] >= 0;  // false for NaN
    most = priority[i] > most ? priority[i] : most;
  }
  if (generation != nullptr) {
    for (std::int64_t i = 0; plain && i < n; ++i) {
      plain = counters.generation(index[i]) == generation[i];
    }
  }
  return plain && std::isfinite(most) ? static_cast<double>(most) : -1.0;
}

// Returns whether any of n slots is among the next `count` slots that are written in the ring,
// beginning at `cursor`. 0 <= cursor < slots and 0 <= count <= slots.
inline bool any_next(const std::int64_t* index, std::int64_t n, std::int64_t cursor,
                     std::int64_t count, std::int64_t slots) {
  bool found = false;
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t ahead = index[i] - cursor;
    ahead += ahead < 0 ? slots : 0;
    found |= ahead < count;
  }
  return found;
}

// Returns whether all n priorities are finite and not negative.
template <typename Number>
bool all_plain(const Number* priority, std::int64_t n) {
  bool plain = true;
  for (std::int64_t i = 0; i < n; ++i) {
    plain &= priority[i] >= 0 && priority[i] <= std::numeric_limits<Number>::max();
  }
  return plain;
}

}  // namespace replaykit
