// Checks of arguments that name rows. Python has checked addresses and sizes. These functions check
// positions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arrays.h"
#include "rows.h"

namespace replaykit {

using List = std::vector<std::int64_t>;

inline char* as_address(std::int64_t number) { return reinterpret_cast<char*>(number); }

inline std::vector<Side> as_sides(std::int64_t width, const List& addresses, const List& strides) {
  const auto count = static_cast<std::size_t>(width);
  if (addresses.size() != count || strides.size() != count) {
    refuse(nb::value_error, "expected an address and a stride for each of ", width, " fields, got ",
           addresses.size(), " and ", strides.size());
  }
  std::vector<Side> sides;
  sides.reserve(count);
  for (std::size_t f = 0; f < count; ++f) sides.push_back({as_address(addresses[f]), strides[f]});
  return sides;
}

inline std::vector<Field> as_fields(const List& bases, const List& strides, const List& sizes) {
  if (bases.size() != strides.size() || bases.size() != sizes.size()) {
    throw nb::value_error("expected as many strides and sizes as fields");
  }
  std::vector<Field> fields;
  fields.reserve(bases.size());
  for (std::size_t f = 0; f < bases.size(); ++f) {
    if (sizes[f] < 0) throw nb::value_error("expected sizes of at least 0");
    fields.push_back({as_address(bases[f]), strides[f], sizes[f]});
  }
  return fields;
}

inline void check_positions(const List& index, std::int64_t limit) {
  const auto n = static_cast<std::int64_t>(index.size());
  const std::int64_t wrong = Table::first_outside(index.data(), n, limit);
  if (wrong == n) return;
  refuse(nb::index_error, "expected rows in [0, ", limit, "), got ",
         index[static_cast<std::size_t>(wrong)]);
}

// Returns a checked copy of the index. A copy is necessary because other threads may write to the
// caller's index meanwhile.
inline List checked_index(std::int64_t address, std::int64_t n, std::int64_t limit) {
  if (n < 0) throw nb::value_error("expected a number of rows of at least 0");
  const auto* given = reinterpret_cast<const std::int64_t*>(address);
  List index(given, given + n);
  check_positions(index, limit);
  return index;
}

inline std::int64_t checked_limit(const Table& table, std::int64_t limit) {
  if (limit >= 0 && limit <= table.rows()) return limit;
  refuse(nb::value_error, "expected at most ", table.rows(), " rows, got ", limit);
}

}  // namespace replaykit
