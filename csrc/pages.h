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

// Has the pages of a file that lies in memory joined into large ones now, also where the system
// gives none to such files by itself. Only whole aligned large pages inside the range; what the
// system refuses stays as it is. Linux 6.1 and later.
inline void join_pages(char* address, std::int64_t bytes) {
#if defined(__linux__)
  constexpr int collapse = 25;  // MADV_COLLAPSE, which older headers do not name
  constexpr std::uintptr_t large = std::uintptr_t{1} << 21;
  const auto from = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t start = (from + large - 1) & ~(large - 1);
  const std::uintptr_t end = (from + static_cast<std::uintptr_t>(bytes)) & ~(large - 1);
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, collapse);
#else
  (void)address;
  (void)bytes;
#endif
}

}  // namespace replaykit
