// The memory layout of an 8-ary segment tree. This header only computes levels. No Python, no
// torch.
//
// Everything in this header is a plain type or a `static` function, since files that are compiled
// for different processors include it. An inline function with linkage could be emitted only once,
// with instructions that the other file's processor lacks.
#pragma once

#include <cstdint>

namespace replaykit {

constexpr int kFan = 8;
constexpr int kFanBits = 3;
constexpr int kMaxLevels = 21;  // 8^21 = 2^63

// Level 0 has one entry per eight leaves. Level l+1 has one entry per eight entries of level l. The
// last level has at most eight entries. Every level begins at a multiple of eight entries, and is
// padded with the identity to a multiple of eight. So a node always consists of eight whole
// entries, and a node of doubles is one aligned cache line of 64 bytes.
struct TreeLevels {
  std::int64_t capacity;
  std::int64_t count[kMaxLevels];    // entries in use
  std::int64_t offset[kMaxLevels];   // first entry, counted from the start of level 0
  int depth;
};

static inline std::int64_t eighths(std::int64_t n) { return (n >> kFanBits) + ((n & 7) != 0); }

// Requires a capacity of at least 1. Cost: O(log8 capacity).
static inline TreeLevels levels_of(std::int64_t capacity) {
  TreeLevels levels = {};
  levels.capacity = capacity;
  std::int64_t below = capacity, offset = 0;
  do {
    below = eighths(below);
    levels.count[levels.depth] = below;
    levels.offset[levels.depth] = offset;
    offset += eighths(below) << kFanBits;
    ++levels.depth;
  } while (below > kFan);
  return levels;
}

}  // namespace replaykit
