// Marks the ends of windows and of episodes in the rows of a batch.
#pragma once

#include <algorithm>
#include <cstdint>
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

// A column to write, one byte per row. It may be one of the flags.
struct MarkOfRows {
  std::uint8_t* base;
  std::int64_t stride;
};

// Writes three marks for each of `n` rows. `done` is 1 if an episode or a window ends there.
// `truncated` is 1 if a flag marks a truncation, or if only the window ends. `terminated` is 1 if a
// flag marks a termination. Rows of one window are consecutive and have the same number in
// `window`. The loop handles one flag after the other, since columns may be far apart in memory.
inline void mark_windows(const std::vector<FlagOfRows>& flags, const std::int64_t* window,
                         std::int64_t n, MarkOfRows done, MarkOfRows truncated,
                         MarkOfRows terminated) {
  constexpr std::int64_t kBlock = 256;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t end = std::min(n, begin + kBlock);
    std::uint8_t set[kBlock] = {};  // a bit for each meaning
    for (const FlagOfRows& flag : flags) {
      for (std::int64_t i = begin; i < end; ++i) {
        const bool own = flag.base[i * flag.stride] != 0;
        set[i - begin] |= static_cast<std::uint8_t>(own << flag.meaning);
      }
    }
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint8_t own = set[i - begin];
      const bool last = i + 1 == n || window[i + 1] != window[i];
      done.base[i * done.stride] = own != 0 || last;
      truncated.base[i * truncated.stride] = ((own >> FlagOfRows::kTruncated) & 1) | (last && !own);
      terminated.base[i * terminated.stride] = (own >> FlagOfRows::kTerminated) & 1;
    }
  }
}

}  // namespace replaykit
