// Functions for a few changed elements of tables. They read the elements for parts that hold a
// copy, and log them for processes that follow later. `WatchedTable.changed` and `ElementLog` use
// them.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace replaykit {

// Writes the elements at rising positions below `length` as doubles. Returns false if the positions
// do not rise, or if any is not below `length`.
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

// Writes positions into a ring of `size` numbers, beginning at number `first`. Each position is
// combined with the bits that name its table.
inline void log_elements(std::int64_t* ring, std::int64_t size, std::int64_t first,
                         Numbers at, std::int64_t count, std::int64_t table) {
  std::int64_t place = first % size;
  for (std::int64_t i = 0; i < count; ++i) {
    ring[place] = at[i] | table;
    if (++place == size) place = 0;
  }
}

}  // namespace replaykit
