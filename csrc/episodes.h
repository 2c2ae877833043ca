// Boundaries of episodes among the rows of a ring, with one stream per lane. The results equal
// those of replaykit/episodes/ring.py, which defines links, codes and heads. No Python, no torch,
// no global state. Unless a comment says otherwise, the caller has checked all arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>
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

class Episodes {
 public:
  // The number of episodes per sum. The log drops its oldest entries in whole groups of this size.
  static constexpr std::int64_t kGroup = 16;

  // The episodes of one stream. Ended episodes are logged in time order as `last * 4 + head`. Each
  // episode begins right after the previous one. Entry 0 is the end of all rows before the start.
  struct Lane {
    explicit Lane(std::int64_t slots) : log(slots + 2 * kGroup + 2) {}

    std::int64_t open = -1;        // begin of the open episode, or -1
    std::int64_t head_begin = -1;  // begin of the oldest row's episode if before lo, or -1
    std::int64_t head_last = 0;    // last row of that episode, if it has ended
    std::int64_t first = 1;        // entry of the oldest ended episode with a stored row
    std::uint8_t open_head = kReset, next_head = kReset;
    NumberedRing log;

    std::int64_t last(std::int64_t entry) const { return log[entry] >> 2; }
    Head head(std::int64_t entry) const { return static_cast<Head>(log[entry] & 3); }
    bool headless_ended() const { return head_begin >= 0 && head_begin != open; }
  };

  // `begin` and `head` have the same meaning as in RingEpisodes. If they are null, every lane
  // starts with a reset.
  Episodes(std::int64_t slots, std::int64_t lanes, std::int64_t start, const std::int64_t* begin,
           const std::int64_t* head)
      : slots_(slots), lo_(start), hi_(start), turn_(start - start % slots) {
    lanes_.reserve(static_cast<std::size_t>(lanes));
    for (std::int64_t at = 0; at < lanes; ++at) {
      lanes_.emplace_back(slots);
      Lane& lane = lanes_.back();
      if (begin != nullptr) lane.open = lane.head_begin = begin[at];
      if (head != nullptr) lane.next_head = static_cast<std::uint8_t>(head[at]);
      lane.head_last = start - 1;
      lane.log.reserve(1);
      lane.log.push((start - 1) * 4);
    }
  }

  std::int64_t slots() const { return slots_; }
  std::int64_t lanes() const { return static_cast<std::int64_t>(lanes_.size()); }
  std::int64_t lo() const { return lo_; }
  std::int64_t hi() const { return hi_; }
  std::int64_t version() const { return version_; }
  // Returns how many episodes have ended so far.
  std::int64_t ended() const { return ended_; }
  const Lane& lane(std::int64_t at) const { return lanes_[static_cast<std::size_t>(at)]; }
  bool is_open(const Lane& lane) const { return lane.open >= 0 && hi_ > lo_; }

  std::int64_t bytes() const {
    std::int64_t sum = links_.bytes() + 16 * static_cast<std::int64_t>(severed_.size());
    for (const Lane& lane : lanes_) sum += lane.log.bytes();
    return sum;
  }

  // -- writing ------------------------------------------------------------------------------------

  // Returns the maximum number of rows for one call of `append_piece`.
  std::int64_t piece() const {
    return std::min(slots_, std::max<std::int64_t>(1, kPiece / lanes()));
  }

  // Makes room for the links of n rows.
  void reserve(std::int64_t n) {
    const std::int64_t at = hi_ % slots_;
    const std::int64_t places = n >= slots_ - at ? slots_ : at + n;
    links_.reserve(places * lanes(), slots_ * lanes());
  }

  // Appends n rows with codes [n, lanes]. Cost: O(n * lanes).
  void append(const std::uint8_t* codes, std::int64_t n) {
    if (n == 0) return;
    reserve(n);
    for (std::int64_t done = 0; done < n;) {
      const std::int64_t rows = std::min(n - done, piece());
      append_piece(codes + done * lanes(), rows);
      done += rows;
    }
  }

  // Appends up to `piece()` rows. The caller has reserved room for their links.
  void append_piece(const std::uint8_t* codes, std::int64_t n) {
    const std::int64_t width = lanes();
    evict(hi_ + n - slots_);
    for (std::int64_t at = 0; at < width; ++at) {
      std::int64_t ends = 0;
      for (std::int64_t row = 0; row < n; ++row) ends += (codes[row * width + at] & kCodeBits) != 0;
      lanes_[static_cast<std::size_t>(at)].log.reserve(ends);
    }
    for (std::int64_t row = 0; row < n; ++row, codes += width) {
      const std::int64_t time = hi_ + row;
      std::int64_t* links = row_of(time);
      for (std::int64_t at = 0; at < width; ++at) {
        Lane& lane = lanes_[static_cast<std::size_t>(at)];
        const std::int64_t end = codes[at] & kCodeBits;
        if (lane.open < 0) {
          lane.open = time;
          lane.open_head = codes[at] & kNotInit ? std::uint8_t{kCut} : lane.next_head;
          links[at] = (time << kLinkShift) | (lane.open_head << kHeadShift) | end;
        } else {
          links[at] = lane.open * (1 << kLinkShift) | end;
        }
        if (end != 0) end_episode(lane, at, time, end);
      }
    }
    hi_ += n;
    ++version_;
  }

  // Ends the open episodes of the chosen lanes at their newest rows. Cost: O(lanes).
  void close(const std::uint8_t* chosen, std::int64_t code) {
    close_where([&](std::int64_t at) { return chosen[at] != 0; }, code);
  }

  // Does the same as `close` with a code for each lane: kSevered, kRestored, or 0 to leave the
  // episode open. Returns whether no code is 0.
  bool close_each(const std::uint8_t* codes) {
    for (const std::uint8_t code : {kSevered, kRestored}) {
      if (std::find(codes, codes + lanes(), code) == codes + lanes()) continue;
      close_where([&](std::int64_t at) { return codes[at] == code; }, code);
    }
    return std::find(codes, codes + lanes(), 0) == codes + lanes();
  }

  // Does the same as `close` for one lane, without an entry in `severed`. At least one row must be
  // stored.
  void close_lane(std::int64_t at, std::int64_t code) {
    Lane& lane = lanes_[static_cast<std::size_t>(at)];
    if (lane.open < 0) return;
    lane.log.reserve(1);
    row_of(hi_ - 1)[at] |= code;
    end_episode(lane, at, hi_ - 1, code);
    ++version_;
  }

  // Returns the time and lane of each stored row that a cut separates from the next row.
  const std::deque<std::pair<std::int64_t, std::int64_t>>& severed() {
    forget_severed();
    return severed_;
  }

  // -- rows ---------------------------------------------------------------------------------------

  // Writes the time and lane of the rows at n elements. Returns the position of the first element
  // that is outside the ring, or n.
  std::int64_t place(Numbers element, std::int64_t n, std::int64_t* time,
                     std::int64_t* lane) const {
    const std::int64_t newest = hi_ - 1;
    const auto width = static_cast<std::int64_t>(lanes_.size());
    const std::int64_t seam = newest % slots_;  // -1 without rows, when no row is stored
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t slot = width == 1 ? element[i] : element[i] / width;
      if (element[i] < 0 || slot >= slots_) return i;
      // Prefetches the links, which a lookup reads next. A slot that was never in use has no link,
      // but a prefetch is only a hint.
      const auto links = reinterpret_cast<std::uintptr_t>(links_.data());
      const auto own = links + 8 * static_cast<std::uintptr_t>(element[i]);
      __builtin_prefetch(reinterpret_cast<const char*>(own));
      const std::int64_t back = seam - slot;
      time[i] = newest - (back < 0 ? back + slots_ : back);
      lane[i] = width == 1 ? 0 : element[i] % width;
    }
    return n;
  }

  // Writes the results of `RingEpisodes.lookup` for n rows. Returns the position of the first row
  // that is not stored, or n.
  std::int64_t lookup(Numbers time, Numbers lane, std::int64_t n, std::int64_t* begin,
                      std::int64_t* last, std::int64_t* code, std::int64_t* head) const {
    // Each row needs three dependent reads. The reads of different rows overlap.
    std::int64_t own[kBatch], at[kBatch];
    for (std::int64_t from = 0; from < n; from += kBatch) {
      const std::int64_t m = std::min(kBatch, n - from);
      for (std::int64_t i = 0; i < m; ++i) {
        own[i] = time[from + i];
        at[i] = lane[from + i];
        if (!is_stored(own[i], at[i])) return from + i;
        __builtin_prefetch(row_of(own[i]) + at[i]);
      }
      for (std::int64_t i = 0; i < m; ++i) {
        own[i] = std::min(own[i], row_of(own[i])[at[i]] >> kLinkShift);
        begin[from + i] = own[i];
        if (own[i] >= lo_) __builtin_prefetch(row_of(own[i]) + at[i]);
      }
      for (std::int64_t i = 0; i < m; ++i) {
        const Lane& of = lanes_[static_cast<std::size_t>(at[i])];
        std::int64_t end = of.head_last, kind = kEvicted;
        if (own[i] >= lo_) {
          const std::int64_t link = row_of(own[i])[at[i]];
          end = link >> kLinkShift;
          kind = (link >> kHeadShift) & 3;
        }
        if (own[i] == of.open) end = hi_ - 1;
        head[from + i] = kind;
        last[from + i] = own[i] = end;
        __builtin_prefetch(row_of(end) + at[i]);
      }
      for (std::int64_t i = 0; i < m; ++i) code[from + i] = row_of(own[i])[at[i]] & kCodeBits;
    }
    return n;
  }

  // Writes the codes of n rows. Returns the position of the first row that is not stored, or n.
  std::int64_t codes(Numbers time, Numbers lane, std::int64_t n, std::int64_t* code) const {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t own = time[i], at = lane[i];
      if (!is_stored(own, at)) return i;
      code[i] = row_of(own)[at] & kCodeBits;
    }
    return n;
  }

  // -- all episodes -------------------------------------------------------------------------------

  std::int64_t count() const {
    std::int64_t sum = 0;
    for (const Lane& lane : lanes_) sum += lane.log.end() - lane.first + is_open(lane);
    return sum;
  }

  // Calls use(lane, begin, last, head) for every stored episode, lane by lane and in time order.
  template <typename Use>
  void each(const Use& use) const {
    for (std::int64_t at = 0; at < lanes(); ++at) {
      const Lane& lane = this->lane(at);
      for (std::int64_t entry = lane.first; entry < lane.log.end(); ++entry) {
        if (entry == lane.first && lane.headless_ended()) {
          use(at, lane.head_begin, lane.last(entry), kEvicted);
        } else {
          use(at, lane.last(entry - 1) + 1, lane.last(entry), lane.head(entry));
        }
      }
      if (is_open(lane)) {
        use(at, lane.open, hi_ - 1, lane.open < lo_ ? kEvicted : static_cast<Head>(lane.open_head));
      }
    }
  }

  // Writes the six columns of `RingEpisodes.table`, with `count()` entries each. Cost: O(episodes).
  void table(std::int64_t* out) const {
    const std::int64_t n = count();
    std::int64_t i = 0;
    each([&](std::int64_t at, std::int64_t begin, std::int64_t last, Head head) {
      const std::int64_t code = row_of(last)[at] & kCodeBits;
      const std::int64_t row[] = {at, begin, std::max(begin, lo_), last, code, head};
      for (std::int64_t column = 0; column < 6; ++column) out[column * n + i] = row[column];
      ++i;
    });
  }

  // Returns the number of stored rows of the longest episode. Cost: O(episodes).
  std::int64_t longest() const {
    std::int64_t most = 0;
    each([&](std::int64_t, std::int64_t begin, std::int64_t last, Head) {
      most = std::max(most, last + 1 - std::max(begin, lo_));
    });
    return most;
  }

 private:
  // The number of cells that one piece appends. Their codes fit into the first level of the cache.
  static constexpr std::int64_t kPiece = 8192;
  static constexpr std::int64_t kBatch = 128;

  bool is_stored(std::int64_t time, std::int64_t at) const {
    return time >= lo_ && time < hi_ && at >= 0 && at < lanes();
  }

  // Returns the slot of a time in [lo_, lo_ + slots_) without a division.
  std::int64_t place(std::int64_t time) const {
    const std::int64_t at = time - turn_;
    return at < slots_ ? at : at - slots_;
  }
  std::int64_t* row_of(std::int64_t time) { return links_.data() + place(time) * lanes(); }
  const std::int64_t* row_of(std::int64_t time) const {
    return links_.data() + place(time) * lanes();
  }

  template <typename Chosen>
  void close_where(const Chosen& chosen, std::int64_t code) {
    if (hi_ == lo_) return;
    const std::int64_t time = hi_ - 1;
    const bool severs = code == kSevered || code == kRestored;
    forget_severed();
    const bool again = !severed_.empty() && severed_.back().first == time;
    const auto marked = [&](const auto& place) {
      const auto of_row = std::find_if(severed_.rbegin(), severed_.rend(),
                                       [&](const auto& one) { return one.first < time; });
      return std::find(severed_.rbegin(), of_row, place) != of_row;
    };
    for (std::int64_t at = 0; at < lanes(); ++at) {
      if (!chosen(at)) continue;
      const std::pair<std::int64_t, std::int64_t> place{time, at};
      if (severs && !(again && marked(place))) severed_.push_back(place);
      close_lane(at, code);
    }
    ++version_;
  }

  void end_episode(Lane& lane, std::int64_t at, std::int64_t time, std::int64_t code) {
    if (lane.open >= lo_) {
      std::int64_t& link = row_of(lane.open)[at];
      link = (time << kLinkShift) | (link & ((1 << kLinkShift) - 1));
    } else {
      lane.head_last = time;
    }
    lane.log.push(time * 4 + lane.open_head);
    lane.open = -1;
    lane.next_head = code == kSevered ? kCut : kReset;
    ++ended_;
  }

  // Drops the rows before `lo`. If an episode continues after `lo`, the lane keeps its begin and
  // last row, since the link of the episode's first row is dropped. Cost: O(lanes + dropped
  // episodes).
  void evict(std::int64_t lo) {
    if (lo <= lo_) return;
    for (std::int64_t at = 0; at < lanes(); ++at) {
      Lane& lane = lanes_[static_cast<std::size_t>(at)];
      std::int64_t begin = lane.open, last = lane.head_last;  // `last` is unused if it is open
      if (lo < hi_) {
        begin = std::min(lo, row_of(lo)[at] >> kLinkShift);
        if (begin >= lo_) last = row_of(begin)[at] >> kLinkShift;
      }
      lane.head_begin = begin < lo ? begin : -1;
      lane.head_last = last;
      while (lane.first < lane.log.end() && lane.last(lane.first) < lo) ++lane.first;
      // The log keeps the whole group of the first entry, and the entry before that group.
      lane.log.drop_until(lane.first / kGroup * kGroup - 1);
    }
    lo_ = lo;
    turn_ = lo - lo % slots_;
  }

  void forget_severed() {
    const auto gone = std::find_if(severed_.begin(), severed_.end(),
                                   [&](const auto& one) { return one.first >= lo_; });
    severed_.erase(severed_.begin(), gone);
  }

  std::int64_t slots_, lo_, hi_;
  std::int64_t turn_;  // the last multiple of slots_ that is not above lo_
  std::int64_t version_ = 0, ended_ = 0;
  std::vector<Lane> lanes_;
  Links links_;
  std::deque<std::pair<std::int64_t, std::int64_t>> severed_;  // by time
};

}  // namespace replaykit
