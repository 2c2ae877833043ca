// Finds the boundaries of episodes in columns. The caller has checked the memory at every address.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "episodes.h"

namespace replaykit {

// A column of flags. The flag of a cell is at base + cell * stride. Cells are ordered by row, then
// by lane.
struct FlagColumn {
  enum Role : int { kTruncated = 0, kDone = 1, kTerminal = 2, kInit = 3, kCode = 4 };
  const char* base;
  std::int64_t stride;
  std::int64_t values;  // per cell; the flag is set if any value is not zero
  int bytes;            // of a value: 1, 2, 4 or 8
  bool sign;            // true if the highest bit is a sign, which is ignored
  int role;             // columns are sorted by their roles; a column of codes is the only one
};

struct IdColumn {
  const char* base;
  std::int64_t stride;
  std::int64_t bytes;
};

class EpisodeColumns {
 public:
  EpisodeColumns(std::vector<FlagColumn> flags, std::vector<IdColumn> ids, std::int64_t slots,
                 std::int64_t lanes)
      : flags_(std::move(flags)), ids_(std::move(ids)), slots_(slots), lanes_(lanes) {
    for (const IdColumn& column : ids_) id_bytes_ += column.bytes;
  }

  std::int64_t slots() const { return slots_; }
  std::int64_t lanes() const { return lanes_; }
  std::int64_t id_bytes() const { return id_bytes_; }

  // Writes the codes of n cells. For the first `followed` cells, the columns also contain the next
  // row. So the codes of these cells include ends by a change of id. The function reads a few rows
  // of all columns, then the next few rows, since the columns of a row are often adjacent in
  // memory.
  void codes(std::int64_t cell, std::int64_t n, std::int64_t followed, std::uint8_t* out) const {
    for (std::int64_t done = 0; done < n; done += kCells) {
      const std::int64_t m = std::min(kCells, n - done);
      flags(cell + done, m, out + done);
      switches(cell + done, std::min(m, followed - done), out + done);
    }
  }

  // Returns whether a cell has the given ids, concatenated in the order of the columns.
  bool same_ids(std::int64_t cell, const std::uint8_t* ids) const {
    for (const IdColumn& column : ids_) {
      if (differ(column.base + cell * column.stride, ids, column.bytes)) return false;
      ids += column.bytes;
    }
    return true;
  }

  void copy_ids(std::int64_t cell, std::uint8_t* ids) const {
    for (const IdColumn& column : ids_) {
      if (column.bytes == 0) continue;
      std::memcpy(ids, column.base + cell * column.stride, static_cast<std::size_t>(column.bytes));
      ids += column.bytes;
    }
  }

 private:
  static constexpr std::int64_t kCells = 64;

  void flags(std::int64_t cell, std::int64_t n, std::uint8_t* out) const {
    std::memset(out, 0, static_cast<std::size_t>(n));
    for (const FlagColumn& column : flags_) {
      if (column.role == FlagColumn::kCode) {
        std::memcpy(out, column.base + cell, static_cast<std::size_t>(n));
        continue;
      }
      switch (column.bytes) {
        case 1: codes_of<std::uint8_t>(column, cell, n, out); break;
        case 2: codes_of<std::uint16_t>(column, cell, n, out); break;
        case 4: codes_of<std::uint32_t>(column, cell, n, out); break;
        default: codes_of<std::uint64_t>(column, cell, n, out);
      }
    }
  }

  // Marks an end at each open cell whose ids differ from the ids in the next row.
  void switches(std::int64_t cell, std::int64_t n, std::uint8_t* codes) const {
    for (const IdColumn& column : ids_) {
      const std::int64_t next = column.stride * lanes_;
      const char* at = column.base + cell * column.stride;
      for (std::int64_t i = 0; i < n; ++i, at += column.stride) {
        if (differ(at, at + next, column.bytes) && !(codes[i] & kCodeBits)) codes[i] |= kSwitched;
      }
    }
  }

  static bool differ(const void* one, const void* other, std::int64_t bytes) {
    if (bytes == 8) return std::memcmp(one, other, 8) != 0;  // two loads
    if (bytes == 4) return std::memcmp(one, other, 4) != 0;
    return bytes > 0 && std::memcmp(one, other, static_cast<std::size_t>(bytes)) != 0;
  }

  template <typename Word>
  static Word load(const char* at) {
    Word word;
    std::memcpy(&word, at, sizeof(Word));
    return word;
  }

  template <typename Word>
  static bool is_set(const char* at, const FlagColumn& column) {
    bool found = false;
    for (std::int64_t i = 0; i < column.values; ++i, at += sizeof(Word)) {
      const Word word = load<Word>(at);
      found |= (column.sign ? static_cast<Word>(word << 1) : word) != 0;
    }
    return found;
  }

  template <typename Word>
  static void codes_of(const FlagColumn& column, std::int64_t cell, std::int64_t n,
                       std::uint8_t* out) {
    const char* at = column.base + cell * column.stride;
    const bool plain = column.values == 1 && !column.sign;
    const auto each = [&](auto code) {
      for (std::int64_t i = 0; i < n; ++i, at += column.stride) {
        out[i] = static_cast<std::uint8_t>(
            code(plain ? load<Word>(at) != 0 : is_set<Word>(at, column), out[i]));
      }
    };
    switch (column.role) {
      case FlagColumn::kTruncated: return each([](bool set, int old) { return set ? 2 : old; });
      case FlagColumn::kDone: return each([](bool set, int old) { return set && !old ? 1 : old; });
      case FlagColumn::kTerminal:
        return each([](bool set, int old) { return set && old ? 1 : old; });
      default: return each([](bool set, int old) { return set ? old : old | kNotInit; });
    }
  }

  std::vector<FlagColumn> flags_;
  std::vector<IdColumn> ids_;
  std::int64_t slots_, lanes_, id_bytes_ = 0;
};

// The rows that a batch has for streams of a pool.
struct StreamRows {
  std::int64_t n;
  Numbers records, slots, row_ids;
  const Numbers* segments;    // or null, if no stream is cut
  const std::uint8_t* stops;  // or null; the code of a cut after a row, or 0
};

// Appends rows to episodes, with their ids. It keeps the ids in the newest row of every lane. The
// first row of a lane that comes next is compared with them if an episode is open.
class EpisodeWriter {
 public:
  // Appends rows [first, until) of the columns to a ring.
  void append(Episodes& episodes, const EpisodeColumns& columns, std::int64_t first,
              std::int64_t until) {
    if (first >= until) return;
    const std::int64_t lanes = columns.lanes();
    const std::int64_t piece = std::min(until - first, episodes.piece());
    codes_.resize(static_cast<std::size_t>(piece * lanes));
    keep_ids(columns, lanes);
    episodes.reserve(until - first);
    for (std::int64_t at = 0; at < lanes; ++at) compare(episodes, columns, first * lanes + at, at);
    for (std::int64_t row = first; row < until; row += piece) {
      const std::int64_t rows = std::min(piece, until - row);
      // No row follows the last row yet.
      const std::int64_t followed = std::min(rows, until - 1 - row);
      columns.codes(row * lanes, rows * lanes, followed * lanes, codes_.data());
      episodes.append_piece(codes_.data(), rows);
    }
    for (std::int64_t at = 0; at < lanes; ++at) {
      columns.copy_ids((until - 1) * lanes + at, ids_.data() + at * bytes_);
    }
  }

  // Does the same as `append` for streams that have cuts after n of the rows. No column shows a
  // cut. `after` has these rows in rising order. `ends` has a code for each lane of these rows,
  // kSevered, kRestored, or 0 to leave the episode open.
  void append_ending(Episodes& episodes, const EpisodeColumns& columns, std::int64_t first,
                     std::int64_t until, Numbers after, const std::uint8_t* ends, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      append(episodes, columns, first, after[i] + 1);
      first = after[i] + 1;
      for (std::int64_t at = 0; at < columns.lanes(); ++at, ++ends) {
        if (*ends != 0) episodes.close_lane(at, *ends);
      }
    }
    append(episodes, columns, first, until);
  }

  // Appends the rows of the columns from `first` on to a pool. Returns the lanes that are dropped.
  std::vector<std::int64_t> append_streams(Episodes& episodes, const EpisodeColumns& columns,
                                           std::int64_t first, const StreamRows& rows) {
    codes_.resize(static_cast<std::size_t>(rows.n));
    columns.codes(first, rows.n, 0, codes_.data());
    keep_ids(columns, episodes.records());
    for (std::int64_t i = 0; i < rows.n; ++i) {
      const std::int64_t at = rows.records[i];
      episodes.enter(at, rows.segments ? (*rows.segments)[i] : episodes.lane(at).segment);
      compare(episodes, columns, first + i, at);
      episodes.append_row(at, rows.slots[i], rows.row_ids[i], codes_[static_cast<std::size_t>(i)]);
      columns.copy_ids(first + i, ids_.data() + at * bytes_);
      if (rows.stops && rows.stops[i] != 0) episodes.close_lane(at, rows.stops[i]);
    }
    return episodes.drop_empty();
  }

  // Drops all rows of `gone`, and appends n rows in slots from `slot` on as a new stream, with row
  // ids from `row_id` on. Returns the record of the stream.
  std::int64_t replace_run(Episodes& episodes, const EpisodeColumns& columns, std::int64_t first,
                           std::int64_t n, const std::vector<std::int64_t>& gone,
                           std::int64_t slot, std::int64_t row_id, std::int64_t head) {
    codes_.resize(static_cast<std::size_t>(n));
    columns.codes(first, n, n - 1, codes_.data());
    keep_ids(columns, episodes.records() + 1);
    for (const std::int64_t at : gone) {
      episodes.drop_oldest(at, episodes.lane(at).hi - episodes.lane(at).lo);
    }
    episodes.drop_empty();
    const std::int64_t record = episodes.start(0, head, 0);
    episodes.append_run(record, slot, row_id, codes_.data(), n);
    columns.copy_ids(first + n - 1, ids_.data() + record * bytes_);
    return record;
  }

 private:
  void keep_ids(const EpisodeColumns& columns, std::int64_t lanes) {
    bytes_ = columns.id_bytes();
    ids_.resize(static_cast<std::size_t>(bytes_ * lanes));
  }

  // Ends the open episode of a lane if the next row has other ids.
  void compare(Episodes& episodes, const EpisodeColumns& columns, std::int64_t cell,
               std::int64_t at) const {
    const Episodes::Lane& lane = episodes.lane(at);
    if (bytes_ == 0 || lane.open == Episodes::kNone || lane.hi == lane.lo) return;
    if (!columns.same_ids(cell, ids_.data() + at * bytes_)) episodes.close_lane(at, kSwitched);
  }

  std::int64_t bytes_ = 0;  // of the ids of a lane
  std::vector<std::uint8_t> ids_;
  std::vector<std::uint8_t> codes_;
};

// Returns the key of n rows if they have the same, and a flag only at the last row. All columns are
// contiguous. The first of them has the keys, of 8 bytes. `sizes` are the bytes of a row.
inline std::optional<std::int64_t> whole_episode(const std::vector<std::uintptr_t>& columns,
                          const std::vector<std::int64_t>& sizes, std::int64_t n) {
  bool ended = false;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const char* const base = reinterpret_cast<const char*>(columns[i]);
    const char* const last = base + (n - 1) * sizes[i];
    const auto is_set = [](char byte) { return byte != 0; };
    if (i > 0 ? std::any_of(base, last, is_set)
              : std::memcmp(base, base + sizes[i], static_cast<std::size_t>(last - base)) != 0) {
      return std::nullopt;
    }
    ended |= i > 0 && std::any_of(last, last + sizes[i], is_set);
  }
  return ended ? std::optional(*reinterpret_cast<const std::int64_t*>(columns[0])) : std::nullopt;
}

}  // namespace replaykit
