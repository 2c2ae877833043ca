// Rows whose observations are in a separate table. Each row refers to two entries of the table:
// its observation and its next observation. The table has an entry for each row, in the columns of
// the root leaves, and overflow entries in memory that grows. The caller has checked the memory at
// every address, and that the source of a write does not overlap the table. This class checks the
// positions of rows and entries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "rows.h"

namespace replaykit {

class Observations {
 public:
  using List = std::vector<std::int64_t>;
  using Addresses = std::vector<const char*>;

  // An entry is a number >= 0 in the columns of the root leaves, or -1 - k for overflow entry k. A
  // reference is entry + 1 or, for an overflow entry, the entry itself. The reference 0 is the
  // entry of the row itself, and the next reference 0 is the entry `lanes` rows further.
  static constexpr int kObservation = 0, kNext = 1;
  // The references to an entry: at most one of each kind.
  static constexpr std::uint8_t kOf[2] = {1, 2};
  // Bits of `keep`: the row keeps its present reference of this kind.
  static constexpr std::uint8_t kKeep[2] = {1, 2};

  // `sizes` has the bytes of each leaf. If `follows` of a leaf is >= 0, the leaf is a next
  // observation, and `follows` is the leaf at the root. `ends` names leaves that end an episode if
  // any byte is not zero. `ids` names leaves that end an episode when they change.
  Observations(List sizes, const List& follows, std::vector<std::size_t> ends,
               std::vector<std::size_t> ids, std::int64_t rows, std::int64_t lanes)
      : sizes_(std::move(sizes)), ends_(std::move(ends)), ids_(std::move(ids)), rows_(rows),
        lanes_(lanes), stored_({}, rows) {
    std::vector<bool> paired(sizes_.size(), false);
    for (std::size_t leaf = 0; leaf < sizes_.size(); ++leaf) {
      if (follows[leaf] < 0) continue;
      const auto root = static_cast<std::size_t>(follows[leaf]);
      pairs_.push_back({leaf, root});
      paired[leaf] = paired[root] = true;
      pair_bytes_ += sizes_[leaf];
    }
    for (std::size_t leaf = 0; leaf < sizes_.size(); ++leaf) {
      if (!paired[leaf]) places_.push_back(leaf);
    }
  }

  std::int64_t rows() const { return rows_; }
  std::size_t width() const { return sizes_.size(); }
  std::size_t pairs() const { return pairs_.size(); }
  std::int64_t pair_bytes() const { return pair_bytes_; }
  std::int64_t row_bytes() const { return stored_.row_bytes() + 2 * pair_bytes_; }
  std::int64_t compared() const { return static_cast<std::int64_t>(before_.size()); }
  std::int64_t planned() const { return planned_ ? static_cast<std::int64_t>(fresh_.size()) : -1; }
  // The number of rows whose next observation is not the observation of a row.
  std::int64_t alone() const { return alone_; }

  // Sets the memory of each leaf, of the references, two for each row, and the number of overflow
  // entries.
  void point(const List& bases, const List& strides, std::int32_t* references,
             std::int64_t overflow) {
    leaves_.clear();
    for (std::size_t leaf = 0; leaf < sizes_.size(); ++leaf) {
      leaves_.push_back({reinterpret_cast<char*>(bases[leaf]), strides[leaf], sizes_[leaf]});
    }
    std::vector<Field> stored;
    for (const std::size_t leaf : places_) stored.push_back(leaves_[leaf]);
    stored_ = Table(std::move(stored), rows_);
    references_ = references;
    const std::int64_t known = overflow_;
    overflow_ = overflow;
    held_[1].resize(static_cast<std::size_t>(overflow), 0);
    for (std::int64_t k = overflow; k-- > known;) free_[1].push_back(-1 - k);
  }

  // -- the entries in use -------------------------------------------------------------------------

  // Finds the entries in use from the references of the first `stored` rows. After a removal of
  // rows, these may refer to entries behind the stored rows.
  void derive(std::int64_t stored) {
    clear();
    std::int64_t stop = stored;
    for (std::int64_t row = 0; row < stored; ++row) {
      for (const int kind : {kObservation, kNext}) stop = std::max(stop, entry(row, kind) + 1);
    }
    make_available(stop);
    for (std::int64_t row = 0; row < stored; ++row) {
      for (const int kind : {kObservation, kNext}) {
        const std::int64_t at = entry(row, kind);
        if (held(at) & kOf[kind]) {
          throw std::invalid_argument("expected an entry for each reference, got an entry of two rows");
        }
        hold(at, kind);
      }
    }
    written_ = stored;
    add_free();
    if (shared_) known_references_.assign(references_, references_ + 2 * stored);
  }

  // Keeps a copy of the references from the next `derive` on, so that `follow` can be called.
  void share() { shared_ = true; }

  // Finds the entries in use after another process has changed the references of distinct rows.
  // `derive` must follow if this throws.
  void follow(const List& rows, std::int64_t stored) {
    forget();
    std::int64_t stop = stored;
    for (const std::int64_t row : rows) {
      if (row >= stored) outside(stored, row);
      for (const int kind : {kObservation, kNext}) stop = std::max(stop, entry(row, kind) + 1);
    }
    make_available(stop);
    for (const std::int64_t row : rows) {
      if (row >= written_) continue;
      const std::int32_t* old = &known_references_[static_cast<std::size_t>(2 * row)];
      for (const int kind : {kObservation, kNext}) release(entry_of(old[kind], row, kind), kind);
    }
    written_ = std::max(written_, stored);
    known_references_.resize(static_cast<std::size_t>(2 * written_));
    for (const std::int64_t row : rows) {
      for (const int kind : {kObservation, kNext}) {
        const std::int64_t at = entry(row, kind);
        if (held(at) & kOf[kind]) outside(available_, at);
        hold(at, kind);
      }
      std::copy_n(references_ + 2 * row, 2, &known_references_[static_cast<std::size_t>(2 * row)]);
    }
    for (List& free : free_) {
      free.erase(std::remove_if(free.begin(), free.end(),
                                [this](std::int64_t at) { return held(at) != 0; }),
                 free.end());
    }
  }

  // Removes all references. The entries of the rows become available when rows are written.
  void clear() {
    forget();
    held_[0].clear();
    known_references_.clear();
    held_[1].assign(static_cast<std::size_t>(overflow_), 0);
    available_ = written_ = alone_ = 0;
    add_free();
  }

  // -- reading ------------------------------------------------------------------------------------

  // Copies the observations (`kind` 0) or next observations (`kind` 1) of the rows `index`. The
  // k-th pair is copied to sides[k]. The caller has checked the positions.
  void gather(const std::int64_t* index, std::int64_t n, int kind, const Side* sides,
              int threads) const {
    constexpr std::int64_t ahead = 64;
    List from(static_cast<std::size_t>(n));
    for (std::int64_t i = -ahead; i < n; ++i) {
      if (i + ahead < n) {
        detail::prefetch_line(reinterpret_cast<const char*>(references_ + 2 * index[i + ahead]));
      }
      if (i >= 0) from[static_cast<std::size_t>(i)] = entry(index[i], kind);
    }
    detail::parallel(n, pair_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::size_t k = 0; k < pairs_.size(); ++k) {
        detail::copy_ahead(begin, end, sizes_[pairs_[k].next], sides[k], [&](std::int64_t i) {
          return address(pairs_[k], from[static_cast<std::size_t>(i)]);
        });
      }
    });
  }

  // -- writing ------------------------------------------------------------------------------------

  // Begins a write of n rows. before[i] is the position in the batch of the row before row i in its
  // stream, or -2 - the stored row, or -1. after[i] is the stored row after row i, or -1; `after`
  // may be empty.
  void begin(List before, List after) {
    forget();
    before_ = std::move(before);
    after_ = std::move(after);
    shares_[0].assign(before_.size(), 0);
    shares_[1].assign(after_.size(), 0);
  }

  // Begins a write of n rows, each `lanes` after the row before it. The stored rows before the
  // first ones begin at `newest`; -1 if there are none.
  void begin_run(std::int64_t n, std::int64_t newest) {
    List before(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      before[static_cast<std::size_t>(i)] = i >= lanes_ ? i - lanes_ : newest < 0 ? -1 : -2 - newest - i;
    }
    begin(std::move(before), {});
  }

  // Compares the rows with the rows before and after them. `addresses` has one address per leaf.
  // Returns 0 if each row that continues an episode has the next observation of the row before. Else
  // bit 0 is set if that row is in the batch, and bit 1 if it is stored.
  int compare(const Addresses& addresses, int threads) {
    const auto n = compared();
    const std::int64_t none = rows_;
    List from(before_.size(), none), to(after_.size(), none);
    for (std::size_t i = 0; i < before_.size(); ++i) {
      if (is_known(-2 - before_[i])) from[i] = entry(-2 - before_[i], kNext);
      if (!after_.empty() && is_known(after_[i])) to[i] = entry(after_[i], kObservation);
    }
    detail::parallel(n, 2 * pair_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (before_[at] >= 0 || from[at] != none) {
          shares_[0][at] = std::all_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) {
            const std::int64_t bytes = sizes_[pair.next];
            const char* next = before_[at] >= 0 ? addresses[pair.next] + before_[at] * bytes
                                                : address(pair, from[at]);
            return equal(next, addresses[pair.root] + i * bytes, bytes);
          });
        }
        if (!to.empty() && to[at] != none) {
          shares_[1][at] = std::all_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) {
            const std::int64_t bytes = sizes_[pair.next];
            return equal(address(pair, to[at]), addresses[pair.next] + i * bytes, bytes);
          });
        }
      }
    });
    int wrong = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (shares_[0][at] || (before_[at] < 0 && from[at] == none)) continue;
      if (!ended(before_[at], addresses, i)) wrong |= before_[at] >= 0 ? 1 : 2;
    }
    return wrong;
  }

  // Sets the result of a comparison that the caller has made: whether each row has the observation
  // of the row before, and whether it leads to the row after it.
  void set_shares(const std::uint8_t* before, const std::uint8_t* after) {
    std::copy_n(before, before_.size(), shares_[0].begin());
    std::copy_n(after, after_.size(), shares_[1].begin());
  }

  // Plans the references of the compared rows, which go to distinct slots. keep[i] has the bits of
  // references that row i keeps; it may be empty. Returns the number of missing overflow entries;
  // if it is not 0, nothing changes. Otherwise `commit` or `forget` must follow.
  std::int64_t plan(List slots, std::vector<std::uint8_t> keep) {
    const std::size_t n = slots.size();
    slots_ = std::move(slots);
    keep_ = std::move(keep);
    keep_.resize(n, 0);
    fresh_.clear();
    made_.assign(2 * n, kNone);
    used_.clear();
    for (const int side : {0, 1}) tops_[side] = free_[side].size();
    known_ = available_;
    planned_ = true;
    stop_ = written_;
    for (const std::int64_t slot : slots_) stop_ = std::max(stop_, (slot / lanes_ + 1) * lanes_);
    make_available(stop_);
    // Last first, so that rows get entries in the order in which entries were released.
    for (std::size_t i = n; i-- > 0;) {
      for (const int kind : {kNext, kObservation}) {
        if (!keeps(i, kind) && slots_[i] < written_) release(entry(slots_[i], kind), kind);
      }
    }
    // Stored entries are shared before any released entry is used again.
    for (std::size_t i = 0; i < n; ++i) {
      for (const int kind : {kObservation, kNext}) {
        const std::size_t side = kind == kObservation ? 0 : 1;
        const std::int64_t other = kind == kObservation ? -2 - before_[i]
                                   : after_.empty()     ? -1
                                                        : after_[i];
        if (keeps(i, kind)) {
          made(i, kind) = entry(slots_[i], kind);
        } else if (is_known(other) && shares_[side][i]) {
          const std::int64_t at = entry(other, 1 - kind);
          if (held(at) != kOf[1 - kind]) continue;
          hold(at, kind);
          made(i, kind) = at;
        }
      }
    }
    std::int64_t missing = 0;
    const auto fresh = [&](std::size_t i, int kind) {
      List& free = free_[free_[0].empty()];
      if (free.empty()) {
        ++missing;
        return;
      }
      const std::int64_t at = free.back();
      free.pop_back();
      used_.push_back(at);
      hold(at, kind);
      made(i, kind) = at;
      fresh_.push_back({at, static_cast<std::int64_t>(2 * i) + kind});
    };
    for (std::size_t i = 0; i < n; ++i) {
      if (made(i, kNext) == kNone) fresh(i, kNext);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (made(i, kObservation) != kNone) continue;
      const std::int64_t before = before_[i];
      const std::int64_t at =
          before >= 0 && shares_[0][i] ? made(static_cast<std::size_t>(before), kNext) : kNone;
      if (at == kNone || held(at) != kOf[kNext]) {
        fresh(i, kObservation);
      } else {
        hold(at, kObservation);
        made(i, kObservation) = at;
      }
    }
    if (missing) undo();
    return missing;
  }

  // Writes the planned entries, and for each the number 2 * row of the batch + kind.
  void fresh(std::int64_t* entries, std::int64_t* sources) const {
    for (const Fresh& part : fresh_) {
      *entries++ = part.entry;
      *sources++ = part.source;
    }
  }

  // Writes the planned rows, and completes the plan. `addresses` has one address per leaf.
  void write(const Addresses& addresses, int threads) {
    std::vector<Side> sides;
    for (const std::size_t leaf : places_) {
      sides.push_back({const_cast<char*>(addresses[leaf]), sizes_[leaf]});
    }
    stored_.scatter(slots_.data(), static_cast<std::int64_t>(slots_.size()), sides, threads);
    detail::parallel(planned(), pair_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      for (const Pair& pair : pairs_) {
        const std::int64_t bytes = sizes_[pair.next];
        for (std::int64_t k = begin; k < end; ++k) {
          const Fresh& part = fresh_[static_cast<std::size_t>(k)];
          const char* source = addresses[part.source & 1 ? pair.next : pair.root];
          detail::copy(address(pair, part.entry), source + (part.source >> 1) * bytes, bytes);
        }
      }
    });
    commit();
  }

  // Sets the planned references, after the caller has written the rows.
  void commit() {
    if (!planned_) return;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      for (const int kind : {kObservation, kNext}) {
        const std::int64_t at = made(i, kind);
        references_[2 * slots_[i] + kind] = static_cast<std::int32_t>(at >= 0 ? at + 1 : at);
      }
    }
    written_ = stop_;
    if (shared_) {
      known_references_.resize(static_cast<std::size_t>(2 * written_));
      for (const std::int64_t slot : slots_) {
        std::copy_n(references_ + 2 * slot, 2, &known_references_[static_cast<std::size_t>(2 * slot)]);
      }
    }
    used_.clear();
    planned_ = false;
    forget();
  }

  // Drops the batch, and undoes its plan.
  void forget() {
    before_.clear();
    after_.clear();
    undo();
  }

  // Returns the least and the greatest entry of rows that the plan writes; -1 if there is none.
  std::pair<std::int64_t, std::int64_t> span() const {
    std::int64_t least = rows_, most = -1;
    for (const Fresh& part : fresh_) {
      if (part.entry < 0) continue;
      least = std::min(least, part.entry);
      most = std::max(most, part.entry);
    }
    return {least, most};
  }

 private:
  void undo() {
    if (!planned_) return;
    planned_ = false;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      for (const int kind : {kObservation, kNext}) {
        const std::int64_t at = made(i, kind);
        if (!keeps(i, kind) && at != kNone) set_held(at, held(at) & ~kOf[kind]);
      }
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      for (const int kind : {kObservation, kNext}) {
        if (!keeps(i, kind) && slots_[i] < written_) hold(entry(slots_[i], kind), kind);
      }
    }
    for (; !used_.empty(); used_.pop_back()) free_[used_.back() < 0].push_back(used_.back());
    for (const int side : {0, 1}) free_[side].resize(tops_[side]);
    available_ = known_;
    held_[0].resize(static_cast<std::size_t>(known_));
  }

  struct Pair {
    std::size_t next, root;
  };
  // An entry that gets a value, and 2 * the row of the batch + the kind of the reference.
  struct Fresh {
    std::int64_t entry, source;
  };

  static constexpr std::int64_t kNone = INT64_MIN;

  [[noreturn]] static void outside(std::int64_t limit, std::int64_t at) {
    throw std::invalid_argument("expected references to " + std::to_string(limit) +
                                " entries, got one to entry " + std::to_string(at < 0 ? -1 - at : at));
  }

  // Returns the entry that a row refers to.
  std::int64_t entry(std::int64_t row, int kind) const {
    return entry_of(references_[2 * row + kind], row, kind);
  }

  std::int64_t entry_of(std::int64_t reference, std::int64_t row, int kind) const {
    if (reference < 0) {
      if (-1 - reference >= overflow_) outside(overflow_, reference);
      return reference;
    }
    const std::int64_t at = reference ? reference - 1 : kind == kNext ? row + lanes_ : row;
    if (at >= rows_) outside(rows_, at);
    return at;
  }

  std::uint8_t held(std::int64_t at) const {
    return at >= 0 ? held_[0][static_cast<std::size_t>(at)]
                   : held_[1][static_cast<std::size_t>(-1 - at)];
  }

  void set_held(std::int64_t at, int value) {
    std::uint8_t& cell = at >= 0 ? held_[0][static_cast<std::size_t>(at)]
                                 : held_[1][static_cast<std::size_t>(-1 - at)];
    alone_ += (value == kOf[kNext]) - (cell == kOf[kNext]);
    cell = static_cast<std::uint8_t>(value);
  }

  void hold(std::int64_t at, int kind) { set_held(at, held(at) | kOf[kind]); }

  void release(std::int64_t at, int kind) {
    set_held(at, held(at) & ~kOf[kind]);
    if (!held(at)) free_[at < 0].push_back(at);
  }

  // Makes the entries of the first `stop` rows available.
  void make_available(std::int64_t stop) {
    if (stop <= available_) return;
    held_[0].resize(static_cast<std::size_t>(stop), 0);
    for (std::int64_t at = stop; at-- > available_;) free_[0].push_back(at);
    available_ = stop;
  }

  void add_free() {
    for (List& free : free_) free.clear();
    for (std::int64_t at = available_; at-- > -overflow_;) {
      if (!held(at)) free_[at < 0].push_back(at);
    }
    std::reverse(free_[1].begin(), free_[1].end());
  }

  // The entry that row i of the batch will refer to.
  std::int64_t& made(std::size_t i, int kind) { return made_[2 * i + static_cast<std::size_t>(kind)]; }

  bool keeps(std::size_t i, int kind) const { return (keep_[i] & kKeep[kind]) != 0; }

  bool is_known(std::int64_t row) const { return row >= 0 && row < written_; }

  char* address(const Pair& pair, std::int64_t at) const {
    const Field &root = leaves_[pair.root], &own = leaves_[pair.next];
    return at >= 0 ? root.base + at * root.stride : own.base + (-1 - at) * own.stride;
  }

  static bool equal(const char* a, const char* b, std::int64_t bytes) {
    return !bytes || std::memcmp(a, b, static_cast<std::size_t>(bytes)) == 0;
  }

  // Returns whether an episode ends between a row of the batch and the row before it. `before` is
  // as in `begin`.
  bool ended(std::int64_t before, const Addresses& addresses, std::int64_t row) const {
    const auto earlier = [&](std::size_t leaf) -> const char* {
      return before >= 0 ? addresses[leaf] + before * sizes_[leaf]
                         : leaves_[leaf].base + (-2 - before) * leaves_[leaf].stride;
    };
    for (const std::size_t leaf : ends_) {
      const char* bytes = earlier(leaf);
      if (std::any_of(bytes, bytes + sizes_[leaf], [](char byte) { return byte != 0; })) return true;
    }
    return std::any_of(ids_.begin(), ids_.end(), [&](std::size_t leaf) {
      return !equal(earlier(leaf), addresses[leaf] + row * sizes_[leaf], sizes_[leaf]);
    });
  }

  List sizes_;
  std::vector<std::size_t> ends_, ids_, places_;
  std::vector<Pair> pairs_;
  std::int64_t rows_, lanes_, pair_bytes_ = 0;
  std::vector<Field> leaves_;
  Table stored_;
  std::int32_t* references_ = nullptr;
  // The references to each entry of a row, below `available_`, and to each overflow entry.
  std::vector<std::uint8_t> held_[2];
  // The free entries of rows, which are taken first, and the free overflow entries.
  List free_[2];
  std::int64_t overflow_ = 0, available_ = 0, alone_ = 0;
  // The number of first rows with references, now and after the plan. The entries of more rows
  // may be available.
  std::int64_t written_ = 0, stop_ = 0;
  // The batch, the result of `compare`, and the plan.
  List before_, after_, slots_, made_, used_;
  std::vector<std::uint8_t> shares_[2], keep_;
  std::vector<Fresh> fresh_;
  bool planned_ = false, shared_ = false;
  // The references that this process has followed; empty unless processes share them.
  std::vector<std::int32_t> known_references_;
  std::size_t tops_[2] = {0, 0};
  std::int64_t known_ = 0;
};

}  // namespace replaykit
