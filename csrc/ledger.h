// What follows from a ledger's counters, while records are only written at its cursor: see
// replaykit/storages/ledger.py, which has the same in torch.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace replaykit {

struct Counters {
  std::int64_t next_position;  // of the next record
  std::int64_t slots;          // at least 1

  // How often the slot was written, from 0; -1 where it never was or there is no such slot.
  std::int64_t generation(std::int64_t slot) const {
    if (slot < 0 || slot >= slots) return -1;
    const std::int64_t behind = next_position - 1 - slot;
    return behind < 0 ? -1 : behind / slots;
  }
};

// Whether each of n updates is one of a stored record that is still the one it was sampled as, with
// a priority that is finite and not negative; then the largest of them, else -1 (nothing more is
// said: such updates are rare, and gone through again one by one). No generations: any will do.
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

// Whether any of n slots is among the next `count` that are written, from `cursor` on round the ring;
// 0 <= cursor < slots, 0 <= count <= slots.
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

// Whether all of n priorities are finite and not negative.
template <typename Number>
bool all_plain(const Number* priority, std::int64_t n) {
  bool plain = true;
  for (std::int64_t i = 0; i < n; ++i) {
    plain &= priority[i] >= 0 && priority[i] <= std::numeric_limits<Number>::max();
  }
  return plain;
}

}  // namespace replaykit
