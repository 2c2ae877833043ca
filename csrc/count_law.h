// The rule that counts the windows of an episode. replaykit/episodes/boundaries.py defines the
// parameters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace replaykit {

// The unit of a count: windows, episodes with at least one window, or the stored rows of these
// episodes.
enum Counted : int { kWindows = 0, kEpisodes = 1, kRows = 2 };

struct CountLaw {
  std::int64_t least, add, below, past, open_future;
  bool closed, intact;
  int kind;

  auto key() const { return std::tie(least, add, below, past, open_future, closed, intact, kind); }

  // Returns whether every usable row is a window by itself.
  bool single() const { return kind == kWindows && least <= 1 && add == 0; }

  std::int64_t skipped(bool reset) const { return reset ? 0 : past; }

  // Returns the number of the `stored` rows that windows may use.
  std::int64_t usable(std::int64_t stored, bool reset, bool open) const {
    return stored - skipped(reset) - (open ? open_future : 0);
  }

  std::int64_t windows(std::int64_t stored, bool reset, bool open) const {
    if ((closed && open) || (intact && !reset)) return 0;
    const std::int64_t rows = usable(stored, reset, open);
    if (rows < 1) return 0;
    return rows >= least ? std::max<std::int64_t>(0, rows + add) : below;
  }

  // Returns the count of one episode in the unit of this rule.
  std::int64_t mass(std::int64_t stored, bool reset, bool open) const {
    const std::int64_t count = windows(stored, reset, open);
    if (kind == kWindows) return count;
    if (kind == kEpisodes) return count > 0;
    return count > 0 ? stored : 0;
  }
};

}  // namespace replaykit
