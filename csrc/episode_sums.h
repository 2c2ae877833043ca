// Sums of the windows that a counting rule finds in all episodes, and a search for the episode of a
// given window. The sums follow the changes of an `Episodes` object. After a write, an update for a
// known rule costs O(new episodes + lanes). A search costs O(log episodes). No Python, no global
// state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "count_law.h"
#include "episodes.h"
#include "numbered_ring.h"

namespace replaykit {

// Stores one sum per group of episodes. This needs only half a byte per episode, so that the search
// stays in the cache. Inside a group, a search counts the windows of each episode again. Open
// episodes and episodes without their heads are counted again after every write, since their counts
// change.
class EpisodeSums {
 public:
  explicit EpisodeSums(const CountLaw& law) : law_(law) {}

  const CountLaw& law() const { return law_; }
  std::int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }

  // Returns the approximate number of steps that the next `refresh` needs.
  std::int64_t behind(const Episodes& of) const {
    return of.version() == version_ ? 0 : of.ended() - ended_ + of.lanes();
  }

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const LaneSums& lane : lanes_) sum += lane.sums.bytes();
    return sum;
  }

  void refresh(const Episodes& of) {
    if (of.version() == version_ && static_cast<std::int64_t>(ends_.size()) == of.lanes()) return;
    std::int64_t sum = 0;
    while (static_cast<std::int64_t>(lanes_.size()) < of.records()) lanes_.emplace_back(of.slots());
    ends_.clear();
    for (std::int64_t rank = 0; rank < of.lanes(); ++rank) {
      const Episodes::Lane& lane = of.lane(of.record(rank));
      LaneSums& own = lanes_[static_cast<std::size_t>(of.record(rank))];
      if (own.born != lane.born) own = LaneSums(of.slots(), lane.born);
      refresh(own, lane);
      sum += own.headless + own.regular + own.open;
      ends_.push_back(sum);
    }
    version_ = of.version();
    ended_ = of.ended();
    front_ = missing_in_front(of);
  }

  void totals(std::int64_t* out) const {
    std::int64_t before = 0;
    for (std::int64_t end : ends_) {
      *out++ = end - before;
      before = end;
    }
  }

  // Writes lane, base, rows, count and rest of n windows, given by number, as five columns. Returns
  // the position of the first number that is not in [0, total()), or n. The sums must be up to
  // date.
  std::int64_t find(const Episodes& of, Numbers number, std::int64_t n, std::int64_t* out) const {
    std::int64_t* const columns[] = {out, out + n, out + 2 * n, out + 3 * n, out + 4 * n};
    Search searches[kBatch];
    for (std::int64_t from = 0; from < n; from += kBatch) {
      const std::int64_t m = std::min(kBatch, n - from);
      std::int64_t open = 0;  // searches that continue in a log
      for (std::int64_t i = 0; i < m; ++i) {
        const std::int64_t given = number[from + i];
        if (given < 0 || given >= total()) return from + i;
        if (start(of, given, from + i, columns, searches[open])) ++open;
      }
      // All searches advance together, so that their cache misses overlap.
      for (bool more = true; more;) {
        more = false;
        for (std::int64_t i = 0; i < open; ++i) more |= narrow(searches[i]);
      }
      for (std::int64_t i = 0; i < open; ++i) {
        Search& search = searches[i];
        search.entry = (search.number + (search.base - search.first)) * Episodes::kGroup;
        const NumberedRing<>& log = of.lane(of.record(search.lane)).log;
        __builtin_prefetch(log.address(std::max(log.begin(), search.entry - 1)));
        __builtin_prefetch(log.address(search.entry));
        __builtin_prefetch(log.address(std::min(log.end() - 1, search.entry + 8)));
        __builtin_prefetch(log.address(std::min(log.end() - 1, search.entry + 15)));
      }
      for (std::int64_t i = 0; i < open; ++i) finish(of, searches[i], columns);
    }
    return n;
  }

  // Writes the elements of single rows, given by number. Returns the position of the first number
  // that is not in [0, total()), or n.
  std::int64_t pick(const Episodes& of, Numbers number, std::int64_t n, std::int64_t* out) const {
    if (front_ >= 0) {
      const std::int64_t slots = of.slots(), first = (of.lane(0).lo + front_) % slots;
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t given = number[i];
        if (given < 0 || given >= total()) return i;
        out[i] = first + given < slots ? first + given : first + given - slots;
      }
      return n;
    }
    return slices(of, number, n, 1, out, nullptr);
  }

  // Writes the elements of windows of `length` rows, given by number, one window after another. For
  // each element, writes the position of its window among the numbers, unless `window` is null.
  // Returns the position of
  // the first number that is out of range or has a shorter window, or n.
  std::int64_t slices(const Episodes& of, Numbers number, std::int64_t n, std::int64_t length,
                      std::int64_t* element, std::int64_t* window) const {
    std::vector<std::int64_t> all(static_cast<std::size_t>(5 * n));
    const std::int64_t found = find(of, number, n, all.data());
    for (std::int64_t i = 0; i < found; ++i) {
      const std::int64_t at = of.record(all[i]), base = all[n + i], rows = all[2 * n + i];
      const std::int64_t rest = all[4 * n + i];
      if (length > rows - rest) return i;
      for (std::int64_t time = base + rest; time < base + rest + length; ++time) {
        *element++ = of.cell(time, at);
        if (window != nullptr) *window++ = i;
      }
    }
    return found;
  }

 private:
  static constexpr std::int64_t kBatch = 16;

  // For a rule of single rows and a single lane, returns the number of stored rows before the first
  // counted row. Returns -1 for other rules or lanes, or if the counted rows are not contiguous.
  // They are contiguous if only the oldest and the newest rows do not count.
  std::int64_t missing_in_front(const Episodes& of) const {
    if (of.pooled() || lanes_.size() != 1 || !law_.single()) return -1;
    const LaneSums& own = lanes_.front();
    const Episodes::Lane& lane = of.lane(0);
    std::int64_t headless = 0, open = 0;
    if (lane.headless_ended()) headless = lane.last(lane.first) + 1 - lane.lo;
    if (lane.is_open()) open = lane.hi - std::max(lane.lo, lane.open);
    const std::int64_t regular = lane.hi - lane.lo - headless - open;
    if (own.regular != regular) return -1;
    const std::int64_t skipped = own.open ? law_.skipped(lane.open_at_reset()) : 0;
    if (skipped == 0) return headless - own.headless;
    return headless + regular == 0 ? skipped : -1;
  }

  struct LaneSums {
    explicit LaneSums(std::int64_t slots, std::int64_t lane = 0)
        : sums(slots / Episodes::kGroup + 4), born(lane) {}

    NumberedRing<> sums;         // the sum of all entries before each group
    std::int64_t born;           // of the lane
    std::int64_t upto = 0;       // end of the summed entries
    std::int64_t total = 0;      // their sum
    std::int64_t from = -1;      // the first entry that counts
    std::int64_t before = 0;     // sum of the entries before it
    std::int64_t headless = 0, regular = 0, open = 0;
  };

  struct Search {
    const std::int64_t* first;
    const std::int64_t* base;
    std::int64_t length, number, target, lane, position, entry;
  };

  std::int64_t mass(const Episodes::Lane& lane, std::int64_t entry) const {
    if (entry == 0) return 0;
    return law_.mass(lane.last(entry) - lane.last(entry - 1), lane.head(entry) == kReset, false);
  }

  void refresh(LaneSums& own, const Episodes::Lane& lane) {
    constexpr std::int64_t group = Episodes::kGroup;
    const std::int64_t from = lane.first + lane.headless_ended(), until = lane.log.end();
    const std::int64_t start = from / group * group;
    if (own.upto < start) {  // entries were dropped before they were added
      own.sums.restart(start / group);
      own.upto = start;
      own.total = 0;
      own.from = -1;
    } else {
      own.sums.drop_until(start / group);
    }
    for (; own.upto < until; ++own.upto) {
      if (own.upto % group == 0) own.sums.push(own.total);
      own.total += mass(lane, own.upto);
    }
    if (own.from != from) {
      own.from = from;
      own.before = own.total;
      if (from < until) {
        own.before = own.sums[start / group];
        for (std::int64_t entry = start; entry < from; ++entry) own.before += mass(lane, entry);
      }
    }
    own.regular = own.total - own.before;
    own.headless = own.open = 0;
    if (lane.headless_ended()) {
      own.headless = law_.mass(lane.last(lane.first) + 1 - lane.lo, false, false);
    }
    if (lane.is_open()) {
      own.open = law_.mass(lane.hi - std::max(lane.lo, lane.open), lane.open_at_reset(), true);
    }
  }

  // Writes the results for a number, or returns true if the number requires a search in the log.
  bool start(const Episodes& of, std::int64_t given, std::int64_t position,
             std::int64_t* const* columns, Search& search) const {
    std::size_t at = 0;
    if (ends_.size() > 1) {
      at = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), given) -
                                    ends_.begin());
      if (at > 0) given -= ends_[at - 1];
    }
    const auto lane_number = static_cast<std::int64_t>(at);
    const Episodes::Lane& lane = of.lane(of.record(lane_number));
    const LaneSums& own = lanes_[static_cast<std::size_t>(of.record(lane_number))];
    if (given < own.headless) {
      const std::int64_t stored = lane.last(lane.first) + 1 - lane.lo;
      write(columns, position, lane_number, lane.lo, stored, false, false, given);
      return false;
    }
    given -= own.headless;
    if (given >= own.regular) {
      const std::int64_t first = std::max(lane.lo, lane.open);
      write(columns, position, lane_number, first, lane.hi - first, lane.open_at_reset(), true,
            given - own.regular);
      return false;
    }
    const std::int64_t target = given + own.before;
    const NumberedRing<>::Stretch stretch =
        own.sums.stretch(own.from / Episodes::kGroup, own.sums.end(), target);
    search = {stretch.base,   stretch.base, stretch.length, stretch.number,
              target,         lane_number,  position,       0};
    return true;
  }

  // Takes one step towards the last sum that is not above the target. Returns false at the end.
  static bool narrow(Search& search) {
    const std::int64_t half = search.length >> 1;
    search.base += search.base[half] <= search.target ? half : 0;
    search.length -= half;
    return search.length > 1;
  }

  void finish(const Episodes& of, const Search& search, std::int64_t* const* columns) const {
    const Episodes::Lane& lane = of.lane(of.record(search.lane));
    std::int64_t rest = search.target - *search.base, entry = search.entry;
    if (entry > 0 && lane.log.in_one_piece(entry - 1, Episodes::kGroup + 1)) {
      // As below, with fewer steps.
      const std::int64_t* log = lane.log.address(entry - 1);
      for (std::int64_t begin = *log >> 2;; ++entry) {
        const std::int64_t end = *++log >> 2;
        const std::int64_t own = law_.mass(end - begin, (*log & 3) == kReset, false);
        if (rest < own) {
          write(columns, search.position, search.lane, begin + 1, end - begin, (*log & 3) == kReset,
                false, rest);
          return;
        }
        rest -= own;
        begin = end;
      }
    }
    for (;; ++entry) {
      const std::int64_t own = mass(lane, entry);
      if (rest < own) break;
      rest -= own;
    }
    const std::int64_t first = lane.last(entry - 1) + 1;
    write(columns, search.position, search.lane, first, lane.last(entry) + 1 - first,
          lane.head(entry) == kReset, false, rest);
  }

  void write(std::int64_t* const* columns, std::int64_t position, std::int64_t lane,
             std::int64_t first, std::int64_t stored, bool reset, bool open,
             std::int64_t rest) const {
    columns[0][position] = lane;
    columns[1][position] = first + law_.skipped(reset);
    columns[2][position] = law_.usable(stored, reset, open);
    columns[3][position] = law_.windows(stored, reset, open);
    columns[4][position] = rest;
  }

  CountLaw law_;
  std::vector<LaneSums> lanes_;
  std::vector<std::int64_t> ends_;  // the end of each lane's numbers
  std::int64_t version_ = -1, ended_ = 0;
  std::int64_t front_ = -1;  // see `missing_in_front`
};

// The sums of the rules in use, the last used rule first. A new rule replaces the last one.
class EpisodeLaws {
 public:
  EpisodeSums& of(const CountLaw& law) {
    auto found = std::find_if(laws_.begin(), laws_.end(),
                              [&](const auto& one) { return one->law().key() == law.key(); });
    if (found == laws_.end()) {
      if (laws_.size() == kMost) laws_.pop_back();
      found = laws_.insert(laws_.end(), std::make_unique<EpisodeSums>(law));
    }
    std::rotate(laws_.begin(), found, found + 1);
    return *laws_.front();
  }

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const auto& one : laws_) sum += one->bytes();
    return sum;
  }

 private:
  static constexpr std::size_t kMost = 8;
  std::vector<std::unique_ptr<EpisodeSums>> laws_;
};

}  // namespace replaykit
