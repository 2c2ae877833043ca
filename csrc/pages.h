// Requests to the kernel for large pages.
#pragma once

#include <cstdint>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace replaykit {

// Gives advice for the whole aligned large pages inside the range. The kernel may ignore it.
inline void advise_large_pages(char* address, std::int64_t bytes, int advice) {
#ifdef MADV_HUGEPAGE
  constexpr std::uintptr_t large = std::uintptr_t{1} << 21;
  const auto from = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t start = (from + large - 1) & ~(large - 1);
  const std::uintptr_t end = (from + static_cast<std::uintptr_t>(bytes)) & ~(large - 1);
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, advice);
#else
  (void)address, (void)bytes, (void)advice;
#endif
}

// Asks for large pages for fresh memory, so that random reads miss the TLB less often.
inline void ask_for_large_pages(char* address, std::int64_t bytes) {
  advise_large_pages(address, bytes, 14);  // MADV_HUGEPAGE
}

// Asks the kernel to join the pages of a file in memory into large pages now, even if such files
// get no large pages by default. Pages that the kernel refuses to join stay unchanged. Requires
// Linux 6.1 or later.
inline void join_pages(char* address, std::int64_t bytes) {
  advise_large_pages(address, bytes, 25);  // MADV_COLLAPSE, which older headers do not define
}

}  // namespace replaykit
