// Checks of arguments that name rows. Python has checked addresses and sizes. These functions check
// positions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "rows.h"

namespace replaykit {

using List = std::vector<std::int64_t>;

inline char* as_address(std::int64_t number) { return reinterpret_cast<char*>(number); }

inline std::vector<Side> as_sides(const Table& table, const List& addresses, const List& strides,
                           std::int64_t count = 1) {
  const auto width = static_cast<std::size_t>(table.width() * count);
  if (addresses.size() != width || strides.size() != width) {
    throw nanobind::value_error(("expected an address and a stride for each of " + std::to_string(width) +
                           " fields, got " + std::to_string(addresses.size()) + " and " +
                           std::to_string(strides.size())).c_str());
  }
  std::vector<Side> sides;
  sides.reserve(width);
  for (std::size_t f = 0; f < width; ++f) sides.push_back({as_address(addresses[f]), strides[f]});
  return sides;
}

inline void check_positions(const List& index, std::int64_t limit) {
  const auto n = static_cast<std::int64_t>(index.size());
  const std::int64_t wrong = Table::first_outside(index.data(), n, limit);
  if (wrong != n) {
    throw nanobind::index_error(("expected rows in [0, " + std::to_string(limit) + "), got " +
                           std::to_string(index[static_cast<std::size_t>(wrong)])).c_str());
  }
}

// Returns a checked copy of the index. A copy is necessary because other threads may write to the
// caller's index meanwhile.
inline List checked_index(std::int64_t address, std::int64_t n, std::int64_t limit) {
  if (n < 0) throw nanobind::value_error("expected a number of rows of at least 0");
  const auto* given = reinterpret_cast<const std::int64_t*>(address);
  List index(given, given + n);
  check_positions(index, limit);
  return index;
}

inline std::int64_t checked_limit(const Table& table, std::int64_t limit) {
  if (limit < 0 || limit > table.rows()) {
    throw nanobind::value_error(("expected at most " + std::to_string(table.rows()) + " rows, got " +
                           std::to_string(limit)).c_str());
  }
  return limit;
}

}  // namespace replaykit
