// What the kernel is asked about fresh memory.
#pragma once

#include <cstdint>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace replaykit {

// Asks for large pages for fresh memory: fewer misses of the address cache in random reads. Only
// whole aligned large pages inside the range; a hint that may be refused.
inline void ask_for_large_pages(char* address, std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::uintptr_t large = std::uintptr_t{1} << 21;
  const auto from = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t start = (from + large - 1) & ~(large - 1);
  const std::uintptr_t end = (from + static_cast<std::uintptr_t>(bytes)) & ~(large - 1);
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
  (void)address;
  (void)bytes;
#endif
}

}  // namespace replaykit
