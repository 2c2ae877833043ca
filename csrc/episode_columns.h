// Finds the boundaries of episodes in stored columns. replaykit/episodes/boundaries.py does the
// same in torch. The caller has checked the memory at every address.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "episodes.h"

namespace replaykit {

// A column of flags. The flag of a cell is at base + cell * stride. Cells are ordered by row, then
// by lane.
struct FlagColumn {
  enum Role : int { kTruncated = 0, kDone = 1, kTerminal = 2, kInit = 3 };
  const char* base;
  std::int64_t stride;
  std::int64_t values;  // per cell; the flag is set if any value is not zero
  int bytes;            // of a value: 1, 2, 4 or 8
  bool sign;            // true if the highest bit is a sign, which is ignored
  int role;             // columns are sorted by their roles
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
  bool has_ids() const { return !ids_.empty(); }
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
  static bool is_set(const char* at, const FlagColumn& column) {
    bool found = false;
    for (std::int64_t i = 0; i < column.values; ++i, at += sizeof(Word)) {
      Word word;
      std::memcpy(&word, at, sizeof(Word));
      found |= (column.sign ? static_cast<Word>(word << 1) : word) != 0;
    }
    return found;
  }

  template <typename Word>
  static void codes_of(const FlagColumn& column, std::int64_t cell, std::int64_t n,
                       std::uint8_t* out) {
    const char* at = column.base + cell * column.stride;
    const auto each = [&](auto say) {
      if (column.values == 1 && !column.sign) {
        for (std::int64_t i = 0; i < n; ++i, at += column.stride) {
          Word word;
          std::memcpy(&word, at, sizeof(Word));
          out[i] = say(word != 0, out[i]);
        }
      } else {
        for (std::int64_t i = 0; i < n; ++i, at += column.stride) {
          out[i] = say(is_set<Word>(at, column), out[i]);
        }
      }
    };
    using Code = std::uint8_t;
    switch (column.role) {
      case FlagColumn::kTruncated:
        each([](bool set, Code code) { return static_cast<Code>(set ? 2 : code); });
        break;
      case FlagColumn::kDone:
        each([](bool set, Code code) { return static_cast<Code>(set && code == 0 ? 1 : code); });
        break;
      case FlagColumn::kTerminal:
        each([](bool set, Code code) { return static_cast<Code>(set && code != 0 ? 1 : code); });
        break;
      default:
        each([](bool set, Code code) { return static_cast<Code>(set ? code : code | kNotInit); });
    }
  }

  std::vector<FlagColumn> flags_;
  std::vector<IdColumn> ids_;
  std::int64_t slots_, lanes_, id_bytes_ = 0;
};

// The ids in the newest row of every lane. The next row is compared with them.
class LastIds {
 public:
  bool known() const { return known_; }
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }
  void forget() { known_ = false; }
  void set(std::vector<std::uint8_t> bytes) {
    bytes_ = std::move(bytes);
    known_ = true;
  }

  // Appends rows [first, until) of the columns. If ids are known, they have the same size as in the
  // columns.
  void append(Episodes& episodes, const EpisodeColumns& columns, std::int64_t first,
              std::int64_t until) {
    if (first == until) return;
    const std::int64_t lanes = columns.lanes(), bytes = columns.id_bytes();
    const std::int64_t piece = std::min(until - first, episodes.piece());
    std::vector<std::uint8_t>& codes = codes_;
    codes.resize(static_cast<std::size_t>(piece * lanes));
    if (columns.has_ids()) bytes_.resize(static_cast<std::size_t>(bytes * lanes));
    episodes.reserve(until - first);
    if (columns.has_ids() && known_ && episodes.hi() > episodes.lo()) {
      for (std::int64_t at = 0; at < lanes; ++at) {
        if (!columns.same_ids(first * lanes + at, bytes_.data() + at * bytes)) {
          episodes.close_lane(at, kSwitched);
        }
      }
    }
    for (std::int64_t row = first; row < until; row += piece) {
      const std::int64_t rows = std::min(piece, until - row);
      // No row follows the last row yet.
      const std::int64_t followed = std::min(rows, until - 1 - row);
      columns.codes(row * lanes, rows * lanes, followed * lanes, codes.data());
      episodes.append_piece(codes.data(), rows);
    }
    if (columns.has_ids()) {
      for (std::int64_t at = 0; at < lanes; ++at) {
        columns.copy_ids((until - 1) * lanes + at, bytes_.data() + at * bytes);
      }
      known_ = true;
    }
  }

  // Does the same as `append` for streams that have cuts after n of the rows. No column shows a
  // cut. `after` has these rows in rising order. `ends` has a code for each lane of these rows, as
  // in `Episodes::close_each`.
  void append_ending(Episodes& episodes, const EpisodeColumns& columns, std::int64_t first,
                     std::int64_t until, Numbers after, const std::uint8_t* ends, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i, ends += columns.lanes()) {
      append(episodes, columns, first, after[i] + 1);
      first = after[i] + 1;
      if (episodes.close_each(ends)) forget();
    }
    append(episodes, columns, first, until);
  }

 private:
  bool known_ = false;
  std::vector<std::uint8_t> bytes_;
  std::vector<std::uint8_t> codes_;
};

}  // namespace replaykit
