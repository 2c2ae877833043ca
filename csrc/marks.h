// Marks the ends of windows and of episodes in the rows of a batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace replaykit {

// A column of flags, one byte per row, `stride` bytes apart. Every flag that is set ends an
// episode.
struct FlagOfRows {
  enum Meaning : int { kEnd = 0, kTruncated = 1, kTerminated = 2 };
  const std::uint8_t* base;
  std::int64_t stride;
  int meaning;
};

// Writes three bytes for each of `n` rows. `done` is 1 if an episode or a window ends there.
// `truncated` is 1 if a flag marks a truncation, or if only the window ends. `terminated` is 1 if a
// flag marks a termination. Rows of one window are consecutive and have the same number in
// `window`. The loop handles one flag after the other, since the columns of a batch are far apart
// in memory.
inline void mark_windows(const std::vector<FlagOfRows>& flags, const std::int64_t* window,
                         std::int64_t n, std::uint8_t* done, std::uint8_t* truncated,
                         std::uint8_t* terminated) {
  if (n < 1) return;
  const auto bytes = static_cast<std::size_t>(n);
  std::memset(done, 0, bytes);
  std::memset(truncated, 0, bytes);
  std::memset(terminated, 0, bytes);
  for (const FlagOfRows& flag : flags) {
    std::uint8_t* also = flag.meaning == FlagOfRows::kTruncated    ? truncated
                         : flag.meaning == FlagOfRows::kTerminated ? terminated
                                                                   : done;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint8_t set = flag.base[i * flag.stride] != 0;
      done[i] |= set;
      also[i] |= set;
    }
  }
  for (std::int64_t i = 0; i < n; ++i) {
    if (i + 1 < n && window[i + 1] == window[i]) continue;
    truncated[i] |= static_cast<std::uint8_t>(!done[i]);
    done[i] = 1;
  }
}

// A column of flags in a batch that is updated in place, one byte per row. If `known` is false, the
// old values are not read.
struct OwnFlag {
  std::uint8_t* base;
  std::int64_t stride;
  bool known;
  bool at(std::int64_t row) const { return known && base[row * stride] != 0; }
  void set(std::int64_t row, bool value) const { base[row * stride] = value; }
};

// Does the same as `mark_windows`, but done, truncated and terminated are columns of the batch
// itself. `more` has other flags that end an episode.
inline void mark_own(const OwnFlag& done, const OwnFlag& truncated, const OwnFlag& terminated,
                     const std::vector<FlagOfRows>& more, const std::int64_t* window,
                     std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    bool cut = truncated.at(i), over = terminated.at(i), end = done.at(i);
    for (const FlagOfRows& flag : more) {
      const bool set = flag.base[i * flag.stride] != 0;
      cut |= set && flag.meaning == FlagOfRows::kTruncated;
      over |= set && flag.meaning == FlagOfRows::kTerminated;
      end |= set;
    }
    end |= cut || over;
    const bool last = i + 1 == n || window[i + 1] != window[i];
    done.set(i, end || last);
    truncated.set(i, cut || (last && !end));
    terminated.set(i, over);
  }
}

}  // namespace replaykit
