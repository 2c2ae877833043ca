#pragma once

#include <cstdint>

namespace replaykit {

// int64 numbers in the caller's memory, `stride` bytes apart.
struct Numbers {
  const char* base;
  std::int64_t stride;
  std::int64_t operator[](std::int64_t i) const {
    return *reinterpret_cast<const std::int64_t*>(base + i * stride);
  }
};

}  // namespace replaykit
