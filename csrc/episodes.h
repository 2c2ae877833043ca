// Boundaries of episodes among the rows of streams. replaykit/episodes/boundaries.py defines
// codes and heads. No Python, no torch, no global state. Unless a comment says otherwise, the
// caller has checked all arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "numbered_ring.h"
#include "numbers.h"
#include "pages.h"

namespace replaykit {

constexpr int kLinkShift = 5;
constexpr int kHeadShift = 3;
constexpr std::int64_t kCodeBits = 7;
constexpr std::uint8_t kNotInit = 0x20;
constexpr std::uint8_t kSwitched = 3, kSevered = 4, kRestored = 5;
enum Head : std::uint8_t { kReset = 1, kCut = 2, kEvicted = 3 };

// The links of rows, 8 bytes per row. The memory grows with the number of rows in use. Memory
// beyond these rows is never touched, so the system provides no pages for it.
class Links {
 public:
  Links() = default;
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  ~Links() { std::free(data_); }

  std::int64_t* data() { return data_; }
  const std::int64_t* data() const { return data_; }
  std::int64_t bytes() const { return 8 * used_; }

  // Makes room for `need` links, but never for more than `most`. On Linux, realloc does not copy
  // large blocks.
  void reserve(std::int64_t need, std::int64_t most) {
    if (need > capacity_) {
      const std::int64_t grown = std::min(most, std::max({need, 2 * capacity_, kFirst}));
      void* data = std::realloc(data_, static_cast<std::size_t>(grown) * 8);
      if (data == nullptr) throw std::bad_alloc();
      data_ = static_cast<std::int64_t*>(data);
      capacity_ = grown;
      ask_for_large_pages(static_cast<char*>(data), grown * 8);
    }
    used_ = std::max(used_, need);
  }

 private:
  static constexpr std::int64_t kFirst = 512;
  std::int64_t* data_ = nullptr;
  std::int64_t capacity_ = 0, used_ = 0;
};

// The episodes of streams, which are the lanes. The time of a row is its number in its stream. Rows
// have links, which lie at their cells. The link of an episode's first row has the time of the
// newest row of the episode, and every other link has the time of the first row.
//
// Only `cell` and `place` know where rows lie. In a ring, lanes have the same times, and row and
// lane give the cell. In a pool, each lane lists the slots of its rows. The rows of a pool come one
// by one, and lanes come and go. Their order is given by `renumber`. All other functions that take
// a lane take the record of the lane, which stays the same.
class Episodes {
 public:
  // The number of episodes per sum. The log drops its oldest entries in whole groups of this size.
  static constexpr std::int64_t kGroup = 16;
  static constexpr std::int64_t kNone = INT64_MIN;

  // The episodes of one stream. Ended episodes are logged in time order as `last * 4 + head`. Each
  // episode begins right after the previous one. Entry 0 is the end of all rows before the start.
  struct Lane {
    // The lane begins `gone` rows after the begin of an episode.
    Lane(std::int64_t most, std::int64_t start, std::int64_t gone, std::int64_t head)
        : lo(start), hi(start), head_last(start - 1), next_head(static_cast<std::uint8_t>(head)),
          log(most + 2 * kGroup + 2), slots(most), firsts(most) {
      if (gone > 0) open = head_begin = start - gone;
      log.push((start - 1) * 4);
      slots.restart(start);
      firsts.restart(1);
    }

    std::int64_t lo, hi;              // rows with lo <= time < hi are stored
    std::int64_t open = kNone;        // begin of the open episode
    std::int64_t head_begin = kNone;  // begin of the oldest row's episode if before lo
    std::int64_t head_last;           // last row of that episode, if it has ended
    std::int64_t first = 1;           // entry of the oldest ended episode with a stored row
    std::int64_t born = 0;            // differs if the record was used again
    std::uint8_t open_head = kReset, next_head;
    bool late = false;                // true if `late_` has the lane
    NumberedRing<> log;
    std::vector<std::int64_t> severed;  // times of rows that a cut separates from the next row

    // Only a pool uses these.
    NumberedRing<std::uint32_t> slots;  // of stored rows, numbered by time
    NumberedRing<> firsts;              // row ids of episodes' first rows, numbered as in the log
    std::int64_t newest = kNone;        // the highest row id
    std::int64_t segment = 0;

    std::int64_t last(std::int64_t entry) const { return log[entry] >> 2; }
    Head head(std::int64_t entry) const { return static_cast<Head>(log[entry] & 3); }
    bool headless_ended() const { return head_begin != kNone && head_begin != open; }
    bool is_open() const { return open != kNone && hi > lo; }
    bool open_at_reset() const { return open >= lo && open_head == kReset; }
  };

  // Makes a ring of `lanes` lanes, or a pool if there are none. `gone` and `head` have one number
  // for each lane; see `Lane`.
  Episodes(std::int64_t slots, std::int64_t lanes, std::int64_t start, Numbers gone, Numbers head)
      : slots_(slots), width_(lanes), turn_(start - start % slots) {
    lanes_.reserve(static_cast<std::size_t>(lanes));
    for (std::int64_t at = 0; at < lanes; ++at) {
      lanes_.emplace_back(slots, start, gone[at], head[at]);
      order_.push_back(at);
    }
    rank_ = order_;
  }

  bool pooled() const { return width_ == 0; }
  std::int64_t slots() const { return slots_; }
  std::int64_t lanes() const { return static_cast<std::int64_t>(order_.size()); }
  std::int64_t records() const { return static_cast<std::int64_t>(lanes_.size()); }
  // The bounds of the rows in a ring.
  std::int64_t lo() const { return pooled() ? 0 : lanes_.front().lo; }
  std::int64_t hi() const { return pooled() ? 0 : lanes_.front().hi; }
  std::int64_t version() const { return version_; }
  // Returns how many episodes have ended so far.
  std::int64_t ended() const { return ended_; }
  const Lane& lane(std::int64_t at) const { return lanes_[static_cast<std::size_t>(at)]; }
  // Returns the record of a lane by its number.
  std::int64_t record(std::int64_t rank) const { return order_[static_cast<std::size_t>(rank)]; }

  std::int64_t bytes() const {
    std::int64_t sum = links_.bytes() + 8 * static_cast<std::int64_t>(places_.size());
    for (const Lane& lane : lanes_) {
      sum += lane.log.bytes() + 8 * static_cast<std::int64_t>(lane.severed.size());
      if (pooled()) sum += lane.slots.bytes() + lane.firsts.bytes() + std::int64_t{sizeof(Lane)};
    }
    return sum;
  }

  // Returns the cell of a stored row, without a division.
  std::int64_t cell(std::int64_t time, std::int64_t at) const {
    if (pooled()) return lane(at).slots[time];
    const std::int64_t place = time - turn_;
    return (place < slots_ ? place : place - slots_) * width_ + at;
  }

  // -- writing a ring -----------------------------------------------------------------------------

  // Returns the maximum number of rows for one call of `append_piece`.
  std::int64_t piece() const {
    return std::min(slots_, std::max<std::int64_t>(1, kPiece / std::max<std::int64_t>(1, width_)));
  }

  // Makes room for the links of n rows.
  void reserve(std::int64_t n) {
    const std::int64_t at = hi() % slots_;
    const std::int64_t places = n >= slots_ - at ? slots_ : at + n;
    links_.reserve(places * width_, slots_ * width_);
  }

  // Appends up to `piece()` rows with codes [n, lanes]. The caller has reserved room for their
  // links. Cost: O(n * lanes).
  void append_piece(const std::uint8_t* codes, std::int64_t n) {
    const std::int64_t hi = this->hi(), lo = hi + n - slots_;
    if (lo > this->lo()) {
      for (std::int64_t at = 0; at < width_; ++at) evict(at, lo);
      turn_ = lo - lo % slots_;
    }
    for (std::int64_t row = 0; row < n; ++row, codes += width_) {
      const std::int64_t first = cell(hi + row, 0);
      for (std::int64_t at = 0; at < width_; ++at) add(at, hi + row, first + at, codes[at]);
    }
    for (Lane& lane : lanes_) lane.hi += n;
    ++version_;
  }

  // -- writing a pool -----------------------------------------------------------------------------

  // Starts the lane of a stream without rows, and returns its record. If the first row continues
  // an episode, `gone` rows of this episode are not stored, and `first_row` is the id of the first.
  std::int64_t start(std::int64_t gone, std::int64_t head, std::int64_t first_row) {
    if (free_.empty()) {
      free_.push_back(records());
      lanes_.emplace_back(slots_, 0, 0, head);
    }
    const std::int64_t at = free_.back();
    free_.pop_back();
    start_again(at, 0, gone, head);
    if (gone > 0) lanes_[static_cast<std::size_t>(at)].firsts.push(first_row);
    return at;
  }

  // Sets the order of lanes, as records, after lanes were started or dropped.
  void renumber(Numbers order, std::int64_t n) {
    order_.resize(static_cast<std::size_t>(n));
    rank_.resize(lanes_.size());
    for (std::int64_t rank = 0; rank < n; ++rank) {
      order_[static_cast<std::size_t>(rank)] = order[rank];
      rank_[static_cast<std::size_t>(order[rank])] = rank;
    }
  }

  // Prepares a lane for a row of a segment. A change of segment cuts the stream. If all rows of the
  // stream are lost, it begins again.
  void enter(std::int64_t at, std::int64_t segment) {
    const std::int64_t hi = lane(at).hi;
    if (lane(at).newest != kNone && lane(at).lo == hi) start_again(at, hi, 0, kReset);
    if (lane(at).segment != segment) close_lane(at, kSevered);
    lanes_[static_cast<std::size_t>(at)].segment = segment;
  }

  // Appends a row to a lane. A row that was in the slot must be the oldest row of its lane.
  void append_row(std::int64_t at, std::int64_t slot, std::int64_t id, std::uint8_t code) {
    reserve_places(slot + 1);
    if (const std::int64_t before = places_[static_cast<std::size_t>(slot)].lane; before != kFree) {
      evict(before, lane(before).lo + 1);
      if (before != at && lane(before).lo == lane(before).hi) emptied_.push_back(before);
    }
    append_run(at, slot, id, &code, 1);
  }

  // Appends n rows to a lane, in slots without a row from `slot` on, with ids from `id` on.
  void append_run(std::int64_t at, std::int64_t slot, std::int64_t id, const std::uint8_t* codes,
                  std::int64_t n) {
    Lane& own = lanes_[static_cast<std::size_t>(at)];
    reserve_places(slot + n);
    own.slots.reserve(n);
    Place* const places = places_.data() + slot;
    const bool first = own.lo == own.hi;
    for (std::int64_t i = 0; i < n; ++i, ++own.hi) {
      own.slots.push(slot + i);
      if (own.open == kNone) own.firsts.push(id + i);
      add(at, own.hi, slot + i, codes[i]);
      places[i] = {static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(own.hi)};
    }
    own.newest = std::max(own.newest, id + n - 1);
    if (first) note_begin(at);
    ++version_;
  }

  // Writes the slots of `count` of the oldest rows of a lane, of at least as many.
  std::int64_t* oldest(std::int64_t at, std::int64_t count, std::int64_t* slot) const {
    const Lane& own = lane(at);
    for (std::int64_t time = own.lo; time < own.lo + count; ++time) *slot++ = own.slots[time];
    return slot;
  }

  // Returns the first slot if the n rows of the lanes, one after another, lie in consecutive slots;
  // otherwise -1.
  std::int64_t run_of(const std::vector<std::int64_t>& lanes, std::int64_t n) const {
    std::int64_t first = -1, found = 0;
    for (const std::int64_t at : lanes) {
      for (std::int64_t time = lane(at).lo; time < lane(at).hi; ++time, ++found) {
        if (found == 0) first = lane(at).slots[time];
        if (lane(at).slots[time] != first + found) return -1;
      }
    }
    return found == n ? first : -1;
  }

  // Drops `count` of the oldest rows of a lane, of at least as many.
  void drop_oldest(std::int64_t at, std::int64_t count) {
    const Lane& own = lane(at);
    const std::int64_t lo = own.lo + count;
    for (std::int64_t time = own.lo; time < lo; ++time) {
      places_[static_cast<std::size_t>(own.slots[time])].lane = kFree;
    }
    evict(at, lo);
    if (own.lo == own.hi) emptied_.push_back(at);
    ++version_;
  }

  // Moves n rows of a pool to slots without a row. Returns the position of the first pair of slots
  // that do not fit, or n. The rows before that pair have moved.
  std::int64_t relocate(Numbers source, Numbers target, std::int64_t n) {
    const auto cells = static_cast<std::int64_t>(places_.size());
    for (std::int64_t i = 0; i < n; ++i) {
      if (source[i] < 0 || source[i] >= cells || target[i] < 0 || target[i] >= cells) return i;
      Place& from = places_[static_cast<std::size_t>(source[i])];
      Place& to = places_[static_cast<std::size_t>(target[i])];
      if (from.lane == kFree || to.lane != kFree) return i;
      Lane& own = lanes_[from.lane];
      const std::int64_t last = own.hi - 1;
      own.slots.set(last - static_cast<std::uint32_t>(last - from.time), target[i]);
      links_.data()[target[i]] = links_.data()[source[i]];
      to = from;
      from.lane = kFree;
    }
    ++version_;
    return n;
  }

  // Returns the lanes that have lost all their rows, and drops them.
  std::vector<std::int64_t> drop_empty() {
    std::vector<std::int64_t> found;
    for (const std::int64_t at : emptied_) {
      if (lane(at).lo < lane(at).hi || lane(at).newest == kNone) continue;
      found.push_back(at);
      start_again(at, 0, 0, kReset);
    }
    free_.insert(free_.end(), found.begin(), found.end());
    emptied_.clear();
    return found;
  }

  // Returns the slots of the oldest rows of a pool's lanes that are not resets. Cost: O(such rows),
  // apart from lanes that had such a row since the last call.
  std::vector<std::int64_t> late_begins() {
    std::vector<std::int64_t> lanes, slots;
    for (const std::int64_t at : late_) {
      Lane& own = lanes_[static_cast<std::size_t>(at)];
      own.late = begins_late(at);
      if (!own.late) continue;
      lanes.push_back(at);
      slots.push_back(own.slots[own.lo]);
    }
    late_ = std::move(lanes);
    return slots;
  }

  // -- ends without a row -------------------------------------------------------------------------

  // Ends the open episode of a lane at its newest row. The codes kSevered and kRestored also cut
  // the stream there.
  void close_lane(std::int64_t at, std::int64_t code) {
    Lane& lane = lanes_[static_cast<std::size_t>(at)];
    if (lane.hi == lane.lo) return;
    const std::int64_t time = lane.hi - 1;
    std::vector<std::int64_t>& cuts = lane.severed;
    if (code >= kSevered && (cuts.empty() || cuts.back() != time)) {
      cuts.erase(cuts.begin(), std::lower_bound(cuts.begin(), cuts.end(), lane.lo));
      cuts.push_back(time);
    }
    if (lane.open != kNone) {
      links_.data()[cell(time, at)] |= code;
      end_episode(at, time, code);
    }
    ++version_;
  }

  // -- rows ---------------------------------------------------------------------------------------

  // Writes the time and lane of the rows at n elements. Returns the position of the first element
  // that has no row, or n. In a ring, elements without a row get a time that is not stored.
  std::int64_t place(Numbers element, std::int64_t n, std::int64_t* time) const {
    std::int64_t* const lane = time + n;
    const auto cells = pooled() ? static_cast<std::int64_t>(places_.size()) : slots_ * width_;
    const auto links = reinterpret_cast<std::uintptr_t>(links_.data());
    const std::int64_t newest = hi() - 1;
    const std::int64_t seam = newest % slots_;  // -1 without rows, when no row is stored
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t own = element[i];
      if (own < 0 || own >= cells) return i;
      // Prefetches the links, which a lookup reads next. A slot that was never in use has no link,
      // but a prefetch is only a hint.
      const auto link = links + 8 * static_cast<std::uintptr_t>(own);
      __builtin_prefetch(reinterpret_cast<const char*>(link));
      if (pooled()) {
        const Place place = places_[static_cast<std::size_t>(own)];
        if (place.lane == kFree || static_cast<std::size_t>(place.lane) >= rank_.size()) return i;
        const std::int64_t last = this->lane(place.lane).hi - 1;
        time[i] = last - static_cast<std::uint32_t>(last - place.time);
        lane[i] = rank_[place.lane];
      } else {
        const std::int64_t back = seam - (width_ == 1 ? own : own / width_);
        time[i] = newest - (back < 0 ? back + slots_ : back);
        lane[i] = width_ == 1 ? 0 : own % width_;
      }
    }
    return n;
  }

  // Writes the results of `place` and `lookup` for n elements.
  std::int64_t around(Numbers element, std::int64_t n, std::int64_t* out) const {
    const std::int64_t wrong = place(element, n, out);
    if (wrong != n) return wrong;
    const Numbers time{reinterpret_cast<const char*>(out), 8};
    const Numbers lane{reinterpret_cast<const char*>(out + n), 8};
    return lookup(time, lane, n, out + 2 * n);
  }

  // Writes begin, last, code of the last row, and head of the episodes of n rows. Returns the
  // position of the first row that is not stored, or n.
  std::int64_t lookup(Numbers time, Numbers lane, std::int64_t n, std::int64_t* begin) const {
    std::int64_t *const last = begin + n, *const code = last + n, *const head = code + n;
    // Each row needs three dependent reads. The reads of different rows overlap.
    std::int64_t own[kBatch], at[kBatch];
    const std::int64_t* links = links_.data();
    for (std::int64_t from = 0; from < n; from += kBatch) {
      const std::int64_t m = std::min(kBatch, n - from);
      for (std::int64_t i = 0; i < m; ++i) {
        if (!is_stored(time[from + i], lane[from + i])) return from + i;
        own[i] = time[from + i];
        at[i] = record(lane[from + i]);
        __builtin_prefetch(links + cell(own[i], at[i]));
      }
      for (std::int64_t i = 0; i < m; ++i) {
        own[i] = std::min(own[i], links[cell(own[i], at[i])] >> kLinkShift);
        begin[from + i] = own[i];
        if (own[i] >= this->lane(at[i]).lo) __builtin_prefetch(links + cell(own[i], at[i]));
      }
      for (std::int64_t i = 0; i < m; ++i) {
        const Lane& of = this->lane(at[i]);
        std::int64_t end = of.head_last, kind = kEvicted;
        if (own[i] >= of.lo) {
          const std::int64_t link = links[cell(own[i], at[i])];
          end = link >> kLinkShift;
          kind = (link >> kHeadShift) & 3;
        }
        if (own[i] == of.open) end = of.hi - 1;
        head[from + i] = kind;
        last[from + i] = own[i] = end;
        __builtin_prefetch(links + cell(end, at[i]));
      }
      for (std::int64_t i = 0; i < m; ++i) code[from + i] = links[cell(own[i], at[i])] & kCodeBits;
    }
    return n;
  }

  // Writes five columns for n rows: their cells and codes, the first and last times of the unbroken
  // parts of the streams around them, and `first_row`. Returns the position of the first row that
  // is not stored, or n.
  std::int64_t rows(Numbers time, Numbers lane, std::int64_t n, std::int64_t* out) const {
    for (std::int64_t i = 0; i < n; ++i, ++out) {
      if (!is_stored(time[i], lane[i])) return i;
      const std::int64_t at = record(lane[i]);
      const Lane& of = this->lane(at);
      const auto after = std::lower_bound(of.severed.begin(), of.severed.end(), time[i]);
      out[0] = cell(time[i], at);
      out[n] = code(time[i], at);
      out[2 * n] = after == of.severed.begin() ? of.lo : std::max(of.lo, *(after - 1) + 1);
      out[3 * n] = after == of.severed.end() ? of.hi - 1 : *after;
      out[4 * n] = first_row(time[i], at);
    }
    return n;
  }

  // Returns the code of a stored row.
  std::int64_t code(std::int64_t time, std::int64_t at) const {
    return links_.data()[cell(time, at)] & kCodeBits;
  }

  // Returns the row id of the first row of a stored row's episode in a pool; -1 in a ring.
  std::int64_t first_row(std::int64_t time, std::int64_t at) const {
    if (!pooled()) return -1;
    std::int64_t entry = lane(at).first, more = lane(at).log.end() - entry;
    while (more > 0) {
      const std::int64_t half = more / 2;
      const bool before = lane(at).last(entry + half) < time;
      entry += before ? half + 1 : 0;
      more = before ? more - half - 1 : half;
    }
    return lane(at).firsts[entry];
  }

  // -- all episodes -------------------------------------------------------------------------------

  std::int64_t count() const {
    std::int64_t sum = 0;
    for (const std::int64_t at : order_) {
      sum += lane(at).log.end() - lane(at).first + lane(at).is_open();
    }
    return sum;
  }

  // Writes lane, begin, first, last, code and head of all episodes, lane by lane and in time order,
  // with `count()` entries each. Cost: O(episodes).
  void table(std::int64_t* out) const {
    const std::int64_t n = count();
    for (std::int64_t rank = 0; rank < lanes(); ++rank) {
      const std::int64_t at = record(rank);
      const Lane& lane = this->lane(at);
      const auto write = [&](std::int64_t begin, std::int64_t last, std::int64_t head) {
        const std::int64_t first = std::max(begin, lane.lo);
        const std::int64_t kind = begin < lane.lo ? std::int64_t{kEvicted} : head;
        const std::int64_t row[] = {rank, begin, first, last, code(last, at), kind};
        for (std::int64_t column = 0; column < 6; ++column) out[column * n] = row[column];
        ++out;
      };
      for (std::int64_t entry = lane.first; entry < lane.log.end(); ++entry) {
        const bool headless = entry == lane.first && lane.headless_ended();
        write(headless ? lane.head_begin : lane.last(entry - 1) + 1, lane.last(entry),
              lane.head(entry));
      }
      if (lane.is_open()) write(lane.open, lane.hi - 1, lane.open_head);
    }
  }

 private:
  // The number of cells that one piece appends. Their codes fit into the first level of the cache.
  static constexpr std::int64_t kPiece = 8192;
  static constexpr std::int64_t kBatch = 128;
  static constexpr std::uint32_t kFree = UINT32_MAX;

  // The lane and the low bits of the time of the row in a slot of a pool.
  struct Place {
    std::uint32_t lane, time;
  };

  void reserve_places(std::int64_t slots) {
    if (slots <= static_cast<std::int64_t>(places_.size())) return;
    links_.reserve(slots, slots_);
    places_.resize(static_cast<std::size_t>(slots), {kFree, 0});
  }

  bool is_stored(std::int64_t time, std::int64_t rank) const {
    if (rank < 0 || rank >= lanes()) return false;
    const Lane& of = lane(record(rank));
    return time >= of.lo && time < of.hi;
  }

  // Makes a record a lane without rows. The time of its next row is `start`.
  void start_again(std::int64_t at, std::int64_t start, std::int64_t gone, std::int64_t head) {
    Lane& lane = lanes_[static_cast<std::size_t>(at)];
    const bool late = lane.late;
    lane = Lane(slots_, start, gone, head);
    lane.late = late;
    lane.born = ++born_;
    ++version_;
  }

  // Returns whether the oldest row of a lane is not the reset of an episode.
  bool begins_late(std::int64_t at) const {
    const Lane& of = lane(at);
    if (of.lo == of.hi || of.head_begin != kNone) return of.lo < of.hi;
    return ((links_.data()[cell(of.lo, at)] >> kHeadShift) & 3) != kReset;
  }

  // Lists a lane of a pool whose oldest row has changed in `late_`.
  void note_begin(std::int64_t at) {
    Lane& own = lanes_[static_cast<std::size_t>(at)];
    if (own.late || !begins_late(at)) return;
    own.late = true;
    late_.push_back(at);
  }

  // Adds the row at `time` with its link.
  void add(std::int64_t at, std::int64_t time, std::int64_t cell, std::uint8_t code) {
    Lane& lane = lanes_[static_cast<std::size_t>(at)];
    const std::int64_t end = code & kCodeBits;
    std::int64_t& link = links_.data()[cell];
    if (lane.open == kNone) {
      lane.open = time;
      lane.open_head = code & kNotInit ? std::uint8_t{kCut} : lane.next_head;
      link = time * (1 << kLinkShift) | (lane.open_head << kHeadShift) | end;
    } else {
      link = lane.open * (1 << kLinkShift) | end;
    }
    if (end != 0) end_episode(at, time, end);
  }

  void end_episode(std::int64_t at, std::int64_t time, std::int64_t code) {
    Lane& lane = lanes_[static_cast<std::size_t>(at)];
    if (lane.open >= lane.lo) {
      std::int64_t& link = links_.data()[cell(lane.open, at)];
      link = time * (1 << kLinkShift) | (link & ((1 << kLinkShift) - 1));
    } else {
      lane.head_last = time;
    }
    lane.log.push(time * 4 + lane.open_head);
    lane.open = kNone;
    lane.next_head = code == kSevered ? kCut : kReset;
    ++ended_;
  }

  // Drops the rows of a lane before `lo`. If an episode continues after `lo`, the lane keeps its
  // begin and last row, since the link of the episode's first row is dropped. Cost: O(dropped
  // episodes).
  void evict(std::int64_t at, std::int64_t lo) {
    Lane& lane = lanes_[static_cast<std::size_t>(at)];
    const std::int64_t* links = links_.data();
    std::int64_t begin = lane.open, last = lane.head_last;  // `last` is unused if it is open
    if (lo < lane.hi) {
      begin = std::min(lo, links[cell(lo, at)] >> kLinkShift);
      if (begin >= lane.lo) last = links[cell(begin, at)] >> kLinkShift;
    }
    lane.head_begin = begin < lo ? begin : kNone;
    lane.head_last = last;
    while (lane.first < lane.log.end() && lane.last(lane.first) < lo) ++lane.first;
    // The log keeps the whole group of the first entry, and the entry before that group.
    lane.log.drop_until(lane.first / kGroup * kGroup - 1);
    lane.lo = lo;
    if (!pooled()) return;
    lane.slots.drop_until(lo);
    lane.firsts.drop_until(lane.first);
    note_begin(at);
  }

  std::int64_t slots_, width_;
  std::int64_t turn_;  // the last multiple of slots_ that is not above the oldest row of a ring
  std::int64_t version_ = 0, ended_ = 0, born_ = 0;
  std::vector<Lane> lanes_;
  std::vector<std::int64_t> order_, rank_, free_, emptied_;
  std::vector<std::int64_t> late_;  // the lanes with a late begin, and others that had one before
  std::vector<Place> places_;
  Links links_;
};

}  // namespace replaykit
