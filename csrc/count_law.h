// How many windows an episode has: replaykit/episodes/episode_laws.py, which says what the numbers mean.
#pragma once

#include <algorithm>
#include <cstdint>

namespace replaykit {

// What is counted: windows; episodes that have one; their stored rows.
enum Counted : int { kWindows = 0, kEpisodes = 1, kRows = 2 };

struct CountLaw {
  std::int64_t least, add, below, past, open_future;
  bool closed, intact;
  int kind;

  bool operator==(const CountLaw& other) const {
    return least == other.least && add == other.add && below == other.below &&
           past == other.past && open_future == other.open_future && closed == other.closed &&
           intact == other.intact && kind == other.kind;
  }

  // Whether all rows that windows may use are windows, each by itself.
  bool single() const { return kind == kWindows && least <= 1 && add == 0; }

  std::int64_t skipped(bool reset) const { return reset ? 0 : past; }

  // Rows of `stored` ones that windows may use.
  std::int64_t usable(std::int64_t stored, bool reset, bool open) const {
    return stored - skipped(reset) - (open ? open_future : 0);
  }

  std::int64_t windows(std::int64_t stored, bool reset, bool open) const {
    if ((closed && open) || (intact && !reset)) return 0;
    const std::int64_t rows = usable(stored, reset, open);
    if (rows < 1) return 0;
    return rows >= least ? std::max<std::int64_t>(0, rows + add) : below;
  }

  // What sums are made of.
  std::int64_t mass(std::int64_t stored, bool reset, bool open) const {
    const std::int64_t count = windows(stored, reset, open);
    if (kind == kWindows) return count;
    if (kind == kEpisodes) return count > 0;
    return count > 0 ? stored : 0;
  }
};

}  // namespace replaykit
