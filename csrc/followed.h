// Reads and writes of rows whose next observations are not stored twice. Some leaves (the following
// leaves) are read from the next row or from an overflow entry. Rows are written at the cursor. The
// caller has checked the memory at every address, and that the source of a write does not overlap
// the table. This class checks the positions of rows and entries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "rows.h"

namespace replaykit {

// One number of 4 or 8 bytes for each row.
struct RowNumbers {
  char* base;
  bool wide;

  std::int64_t at(std::int64_t row) const {
    return wide ? reinterpret_cast<const std::int64_t*>(base)[row]
                : reinterpret_cast<const std::int32_t*>(base)[row];
  }
  void put(std::int64_t row, std::int64_t entry) const {
    if (wide) {
      reinterpret_cast<std::int64_t*>(base)[row] = entry;
    } else {
      reinterpret_cast<std::int32_t*>(base)[row] = static_cast<std::int32_t>(entry);
    }
  }
  // The function is always inlined, since GCC drops calls of functions that only prefetch.
  __attribute__((always_inline)) void prefetch(std::int64_t row) const {
    __builtin_prefetch(base + row * (wide ? 8 : 4), 0, 2);
  }
};

// The overflow entries. The first `*free` numbers in `stack` are the numbers of free entries.
struct Entries {
  std::int64_t count;
  std::int64_t* stack;
  std::int64_t* free;
};

class Followed {
 public:
  // `leaves` has the memory of each leaf of the rows. If `follows` of a leaf is >= 0, it names the
  // leaf of the next row that has the same value. The memory of such a leaf holds the entries.
  // `ends` names leaves that end an episode if any byte is not zero. `ids` names leaves that end an
  // episode when they change. The next row is `step` slots further in the ring, or at the distance
  // in `links` if given. `map` has 1 + the entry of each row, or 0 for a row without an entry.
  Followed(std::vector<Field> leaves, const std::vector<std::int64_t>& follows,
           std::vector<std::size_t> ends, std::vector<std::size_t> ids, std::int64_t rows,
           std::int64_t step, RowNumbers map, Entries entries, RowNumbers links = {nullptr, false})
      : leaves_(std::move(leaves)), ends_(std::move(ends)), ids_(std::move(ids)), rows_(rows),
        step_(step), map_(map), links_(links), entries_(entries), stored_(stored(leaves_, follows), rows) {
    for (std::size_t leaf = 0; leaf < leaves_.size(); ++leaf) {
      if (follows[leaf] < 0) {
        places_.push_back(leaf);
      } else if (leaves_[leaf].bytes) {
        pairs_.push_back({leaf, static_cast<std::size_t>(follows[leaf])});
      }
      if (follows[leaf] >= 0) {
        followers_.push_back(leaf);
        pair_bytes_ += leaves_[leaf].bytes;
      }
    }
  }

  std::int64_t rows() const { return rows_; }
  bool in_order() const { return step_ == 1 && !links_.base; }
  std::int64_t row_bytes() const { return stored_.row_bytes(); }
  std::int64_t pair_bytes() const { return pair_bytes_; }
  std::size_t width() const { return leaves_.size(); }
  std::size_t followers() const { return followers_.size(); }
  std::int64_t compared() const { return compared_; }

  // -- reading ------------------------------------------------------------------------------------

  // Copies the following leaves of the rows `index`. The k-th of these leaves is copied to
  // sides[k]. The caller has checked the positions.
  void gather(const std::int64_t* index, std::int64_t n, const std::vector<Side>& sides,
              int threads) const {
    constexpr std::int64_t ahead = 64;
    std::vector<std::int64_t> from(static_cast<std::size_t>(n));  // a row, or (-1 - entry)
    for (std::int64_t i = 0; i < std::min(n, ahead); ++i) prefetch(index[i]);
    for (std::int64_t i = 0; i < n; ++i) {
      if (i + ahead < n) prefetch(index[i + ahead]);
      const std::int64_t entry = map_.at(index[i]);
      if (entry) check_entry(entry);
      from[static_cast<std::size_t>(i)] = entry ? -entry : after(index[i]);
    }
    detail::parallel(n, pair_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      std::size_t pair = 0;
      for (std::size_t k = 0; k < followers_.size(); ++k) {
        if (!leaves_[followers_[k]].bytes) continue;
        gather_pair(pairs_[pair++], from.data(), begin, end, sides[k]);
      }
    });
  }

  // -- writing ------------------------------------------------------------------------------------

  // Compares each of n consecutive rows with the row before it. `addresses` has one address per
  // leaf. The first row is compared with the row at slot `newest`, which has an entry. The object
  // records for `write` the rows that need an entry. Returns whether any row continues an episode,
  // but differs from the following leaves of the row before. `severed` means that no row continues
  // the newest row.
  bool compare(const std::vector<const char*>& addresses, std::int64_t n, std::int64_t newest,
               bool severed, int threads) {
    compared_ = -1;
    const std::int64_t entry = map_.at(newest);
    check_entry(entry);
    differs_.assign(static_cast<std::size_t>(n), 0);
    detail::parallel(n - 1, 2 * pair_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      for (const Pair& pair : pairs_) {
        const std::int64_t bytes = leaves_[pair.next].bytes;
        const char* next = addresses[pair.next] + begin * bytes;
        const char* root = addresses[pair.root] + (begin + 1) * bytes;
        for (std::int64_t i = begin; i < end; ++i, next += bytes, root += bytes) {
          if (std::memcmp(next, root, static_cast<std::size_t>(bytes)) != 0) {
            differs_[static_cast<std::size_t>(i)] = 1;
          }
        }
      }
    });
    bool wrong = false;
    beside_.clear();
    for (std::int64_t i = 0; i + 1 < n; ++i) {
      if (!differs_[static_cast<std::size_t>(i)]) continue;
      beside_.push_back(i);
      wrong = wrong || !ended(addresses, i, i + 1);
    }
    beside_.push_back(n - 1);
    newest_differs_ = false;
    for (const Pair& pair : pairs_) {
      const Field& field = leaves_[pair.next];
      const char* held = field.base + (entry - 1) * field.stride;
      newest_differs_ =
          newest_differs_ ||
          std::memcmp(held, addresses[pair.root], static_cast<std::size_t>(field.bytes)) != 0;
    }
    if (newest_differs_ && !severed) wrong = wrong || !stored_ended(newest, addresses, 0);
    compared_ = n;
    return wrong;
  }

  // Writes the rows of the last `compare` to the slots first, first + 1, ... after the newest row,
  // wrapping around. There are fewer rows than slots. Afterwards the last row has an entry. Each
  // row whose following leaves differ from the next row also has one. Returns the number of missing
  // entries. If it is not 0, nothing changes.
  std::int64_t write(std::int64_t first, const std::vector<const char*>& addresses, int threads) {
    const std::int64_t n = compared_, newest = (first ? first : rows_) - 1;
    returned_.clear();
    if (!newest_differs_) give_back(newest);
    for (std::int64_t i = 0, slot = first; i < n; ++i) {
      if (map_.at(slot)) give_back(slot);
      if (++slot == rows_) slot = 0;
    }
    const auto back = static_cast<std::int64_t>(returned_.size());
    const auto needed = static_cast<std::int64_t>(beside_.size());
    std::int64_t free = *entries_.free;
    if (const std::int64_t missing = check_free(back, needed)) return missing;
    // From here on, no check can fail.
    stored_.scatter_ring(first, n, stored_sides(addresses), threads);
    if (!newest_differs_) map_.put(newest, 0);
    for (std::int64_t i = 0, slot = first; i < n; ++i) {
      if (map_.at(slot)) map_.put(slot, 0);
      if (++slot == rows_) slot = 0;
    }
    for (const std::int64_t number : returned_) entries_.stack[free++] = number;
    for (const std::int64_t row : beside_) {
      const std::int64_t number = entries_.stack[--free];
      keep(number, addresses, row);
      map_.put((first + row) % rows_, number + 1);
    }
    *entries_.free = free;
    compared_ = -1;
    return 0;
  }

 protected:
  struct Pair {
    std::size_t next, root;
  };

  static std::vector<Field> stored(const std::vector<Field>& leaves,
                                   const std::vector<std::int64_t>& follows) {
    std::vector<Field> found;
    for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
      if (follows[leaf] < 0) found.push_back(leaves[leaf]);
    }
    return found;
  }

  void prefetch(std::int64_t row) const {
    map_.prefetch(row);
    if (links_.base) links_.prefetch(row);
  }

  std::int64_t after(std::int64_t row) const {
    if (links_.base) {
      const std::int64_t found = row + links_.at(row);
      if (found < 0 || found >= rows_) throw std::runtime_error("a link to a row that is not there");
      return found;
    }
    return row + step_ < rows_ ? row + step_ : row + step_ - rows_;
  }

  void check_entry(std::int64_t entry) const {
    if (entry < 1 || entry > entries_.count) {
      throw std::runtime_error("an entry beside that is not there");
    }
  }

  void give_back(std::int64_t slot) {
    const std::int64_t entry = map_.at(slot);
    check_entry(entry);
    returned_.push_back(entry - 1);
  }

  // Returns how many entries are missing if `back` entries are released and `needed` entries are
  // taken. Throws if the stack of free entries is corrupt.
  std::int64_t check_free(std::int64_t back, std::int64_t needed) const {
    const std::int64_t free = *entries_.free;
    if (free < 0 || free + back > entries_.count) {
      throw std::runtime_error("more entries are free than there are");
    }
    if (free + back < needed) return needed - back - free;
    for (std::int64_t i = std::max(std::int64_t{0}, free - needed); i < free; ++i) {
      check_entry(entries_.stack[i] + 1);
    }
    return 0;
  }

  std::vector<Side> stored_sides(const std::vector<const char*>& addresses) const {
    std::vector<Side> sides;
    sides.reserve(places_.size());
    for (const std::size_t leaf : places_) {
      sides.push_back({const_cast<char*>(addresses[leaf]), leaves_[leaf].bytes});
    }
    return sides;
  }

  // Copies the following leaves of a row of the batch into an entry.
  void keep(std::int64_t number, const std::vector<const char*>& addresses, std::int64_t row) const {
    for (const Pair& pair : pairs_) {
      const Field& field = leaves_[pair.next];
      detail::copy(field.base + number * field.stride, addresses[pair.next] + row * field.bytes,
                   field.bytes);
    }
  }

  void gather_pair(const Pair& pair, const std::int64_t* from, std::int64_t begin, std::int64_t end,
                   const Side& side) const {
    const Field& root = leaves_[pair.root];
    const Field& own = leaves_[pair.next];
    const auto address = [&](std::int64_t i) -> const char* {
      return from[i] >= 0 ? root.base + from[i] * root.stride
                          : own.base - (from[i] + 1) * own.stride;
    };
    const std::int64_t ahead =
        detail::kAheadBytes / std::clamp(own.bytes, detail::kLine, detail::kPrefetchBytes);
    for (std::int64_t i = begin; i < std::min(end, begin + ahead); ++i) {
      detail::prefetch(address(i), own.bytes);
    }
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + ahead < end) detail::prefetch(address(i + ahead), own.bytes);
      detail::copy(side.address + i * side.stride, address(i), own.bytes);
    }
  }

  static bool any_set(const char* bytes, std::int64_t count) {
    return std::any_of(bytes, bytes + count, [](char byte) { return byte != 0; });
  }

  // Returns whether an episode ends between two rows of the batch.
  bool ended(const std::vector<const char*>& addresses, std::int64_t row, std::int64_t next) const {
    for (const std::size_t leaf : ends_) {
      const std::int64_t bytes = leaves_[leaf].bytes;
      if (any_set(addresses[leaf] + row * bytes, bytes)) return true;
    }
    return std::any_of(ids_.begin(), ids_.end(), [&](std::size_t leaf) {
      const std::int64_t bytes = leaves_[leaf].bytes;
      const char* at = addresses[leaf] + row * bytes;
      const char* then = addresses[leaf] + next * bytes;
      return bytes && std::memcmp(at, then, static_cast<std::size_t>(bytes)) != 0;
    });
  }

  // Returns whether an episode ends between a stored row and a row of the batch.
  bool stored_ended(std::int64_t slot, const std::vector<const char*>& addresses,
                    std::int64_t next) const {
    for (const std::size_t leaf : ends_) {
      const Field& field = leaves_[leaf];
      if (any_set(field.base + slot * field.stride, field.bytes)) return true;
    }
    return std::any_of(ids_.begin(), ids_.end(), [&](std::size_t leaf) {
      const Field& field = leaves_[leaf];
      const char* then = addresses[leaf] + next * field.bytes;
      return field.bytes && std::memcmp(field.base + slot * field.stride, then,
                                        static_cast<std::size_t>(field.bytes)) != 0;
    });
  }

  std::vector<Field> leaves_;
  std::vector<std::size_t> ends_, ids_, places_, followers_;
  std::vector<Pair> pairs_;
  std::int64_t rows_, step_, pair_bytes_ = 0;
  RowNumbers map_, links_;
  Entries entries_;
  Table stored_;
  // The results of `compare`.
  std::int64_t compared_ = -1;
  bool newest_differs_ = false;
  std::vector<unsigned char> differs_;
  std::vector<std::int64_t> beside_, returned_;
};

}  // namespace replaykit
