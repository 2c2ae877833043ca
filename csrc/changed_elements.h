// Elements of tables that have changed: taken for who keeps them elsewhere too, and logged for who
// comes later. What `FollowedTable.changed` and `ChangeLog.note` do of few elements.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace replaykit {

// Writes the elements at rising positions below `length` as doubles; false where they do not rise,
// or one is beyond it.
template <typename Number>
bool take_rising(Numbers at, std::int64_t count, const Number* elements,
                 std::int64_t length, double* out) {
  std::int64_t before = -1;
  for (std::int64_t i = 0; i < count; ++i) {
    if (at[i] <= before || at[i] >= length) return false;
    before = at[i];
    out[i] = static_cast<double>(elements[before]);
  }
  return true;
}

// Writes elements into a ring of `size` numbers, from number `first` on, with those of their table.
inline void log_elements(std::int64_t* ring, std::int64_t size, std::int64_t first,
                         Numbers at, std::int64_t count, std::int64_t table) {
  std::int64_t place = first % size;
  for (std::int64_t i = 0; i < count; ++i) {
    ring[place] = at[i] | table;
    if (++place == size) place = 0;
  }
}

}  // namespace replaykit
