// Gathers and scatters several fields in one pass over the rows of a table. No Python, no torch, no
// global state. The caller has checked the memory at every address. It checks the positions of rows
// with `first_outside`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "pages.h"
#include "threads.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#define REPLAYKIT_PAGES 1
#endif

namespace replaykit {

// A part of every row of a table. The part of row i has `bytes` bytes and begins at base + i *
// stride.
struct Field {
  char* base;
  std::int64_t stride;
  std::int64_t bytes;
};

// The source or target of rows outside the table. Row i begins at address + i * stride.
struct Side {
  char* address;
  std::int64_t stride;
};

namespace detail {

// The distance between the prefetch and the copy, in bytes. Rows are prefetched to the second level
// of the cache. It has room for a batch of small rows and, unlike the first level, allows enough
// misses at the same time. Gathering 256 rows of 176 bytes took 3 us. It took 7 us with a prefetch
// of 14 rows into the first level, and 10 us without prefetch.
constexpr std::int64_t kAheadBytes = 128 << 10;
// The maximum number of bytes to prefetch per row, if it is not copied in pieces.
constexpr std::int64_t kPrefetchBytes = 512;
constexpr std::int64_t kLine = 64;
// Rows of this size are copied in pieces, which are prefetched so many bytes earlier.
constexpr std::int64_t kWideBytes = 4 << 10, kPiece = 256, kAheadOfPieces = 8 << 10;
// For fewer bytes, a second thread costs more time than it saves.
constexpr std::int64_t kBytesToShare = 1 << 20;

inline void prefetch_line(const char* address) {
  __builtin_prefetch(address, 0, 2);
  // Without this line, GCC assumes that a function that only prefetches has no effect, and drops
  // its calls.
  __asm__ volatile("");
}

inline void prefetch(const char* address, std::int64_t bytes) {
  const std::int64_t reach = std::min(bytes, kPrefetchBytes);
  for (std::int64_t at = 0; at < reach; at += kLine) prefetch_line(address + at);
  // A row that does not start at a cache line may extend into another line.
  if (reach > 0) prefetch_line(address + reach - 1);
}

constexpr std::int64_t kCopiedHere = 256;

// Copies bytes. A memcpy of constant size compiles to one or two loads and stores.
inline void copy(char* to, const char* from, std::int64_t bytes) {
  switch (bytes) {
    case 0: return;
    case 1: *to = *from; return;
    case 2: std::memcpy(to, from, 2); return;
    case 4: std::memcpy(to, from, 4); return;
    case 8: std::memcpy(to, from, 8); return;
    case 16: std::memcpy(to, from, 16); return;
    default: break;
  }
  if (bytes < 16 || bytes > kCopiedHere) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  // This takes half the time of a call of memcpy. The last piece overlaps the previous one.
  for (std::int64_t at = 0; at + 16 <= bytes; at += 16) std::memcpy(to + at, from + at, 16);
  std::memcpy(to + bytes - 16, from + bytes - 16, 16);
}

// Copies wide rows. The hardware prefetcher alone would start again at each page and row. With one
// thread, a gather of rows of 4 KiB like this takes 0.7 of the time, and of 12 KiB 0.65.
template <typename From>
void copy_pieces(std::int64_t begin, std::int64_t end, std::int64_t bytes, Side side, From from) {
  std::int64_t row = begin, first = 0;
  const auto prefetch_next = [&] {
    if (row == end) return;
    const std::int64_t size = std::min(kPiece, bytes - first);
    const char* const piece = from(row) + first;
    for (std::int64_t at = 0; at < size; at += kLine) __builtin_prefetch(piece + at, 0, 3);
    first += size;
    if (first == bytes) first = 0, ++row;
  };
  for (std::int64_t at = 0; at < kAheadOfPieces; at += kPiece) prefetch_next();
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t at = 0; at < bytes; at += kPiece) {
      prefetch_next();
      const auto size = static_cast<std::size_t>(std::min(kPiece, bytes - at));
      std::memcpy(side.address + i * side.stride + at, from(i) + at, size);
    }
  }
}

// Copies `bytes` bytes from from(i) to row i of a side, for i in [begin, end).
template <typename From>
void copy_ahead(std::int64_t begin, std::int64_t end, std::int64_t bytes, Side side, From from) {
  if (bytes >= kWideBytes) return copy_pieces(begin, end, bytes, side, from);
  const std::int64_t ahead = kAheadBytes / std::clamp(bytes, kLine, kPrefetchBytes);
  const std::int64_t warm = std::min(end, begin + ahead);
  for (std::int64_t i = begin; i < warm; ++i) prefetch(from(i), bytes);
  for (std::int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) prefetch(from(i + ahead), bytes);
    copy(side.address + i * side.stride, from(i), bytes);
  }
}

// The number of rows that are copied before the first check for reads from disk. Another check
// follows after the last row. Each check takes as long as a dozen rows.
constexpr std::int64_t kFirstRows = 32;

// Splits [0, n) over threads if there are enough bytes. `work(begin, end)` must not throw.
template <typename Work>
void parallel(std::int64_t n, std::int64_t row_bytes, int threads, const Work& work) {
  if (threads < 2 || n * row_bytes < kBytesToShare) {
    work(std::int64_t{0}, n);
  } else {
    run_parts(n, threads, work);
  }
}

#ifdef REPLAYKIT_PAGES
// Returns a counter that grows whenever this thread waits for, or requests, a block of a file.
inline std::int64_t blocks_read() {
  rusage usage;
#ifdef RUSAGE_THREAD
  getrusage(RUSAGE_THREAD, &usage);
#else
  getrusage(RUSAGE_SELF, &usage);
#endif
  return static_cast<std::int64_t>(usage.ru_inblock) + static_cast<std::int64_t>(usage.ru_majflt);
}

// Returns whether the page of an address is in the page cache. Returns true if the system cannot
// report this.
inline bool resident(const char* address, std::uintptr_t page) {
#ifdef __linux__
  unsigned char in_cache = 1;
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(address) & ~(page - 1);
  if (mincore(reinterpret_cast<void*>(start), page, &in_cache) != 0) return true;
  return (in_cache & 1) != 0;
#else
  (void)address;
  (void)page;
  return true;
#endif
}

inline void will_need(const char* address, std::int64_t bytes, std::uintptr_t page) {
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(address) & ~(page - 1);
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(address) + bytes;
  madvise(reinterpret_cast<void*>(start), end - start, MADV_WILLNEED);  // only a hint
}
#endif

}  // namespace detail

// Concatenates n rows of two sides into contiguous rows at `to`. Each row has `left_bytes` from the
// left side and `right_bytes` from the right side.
inline void join(const Side& left, std::int64_t left_bytes, const Side& right,
                 std::int64_t right_bytes, std::int64_t n, char* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    detail::copy(to, left.address + i * left.stride, left_bytes);
    detail::copy(to + left_bytes, right.address + i * right.stride, right_bytes);
    to += left_bytes + right_bytes;
  }
}

class Table {
 public:
  Table(std::vector<Field> fields, std::int64_t rows) : fields_(std::move(fields)), rows_(rows) {
    for (const Field& field : fields_) row_bytes_ += field.bytes;
  }

  std::int64_t rows() const { return rows_; }
  std::int64_t row_bytes() const { return row_bytes_; }
  const std::vector<Field>& fields() const { return fields_; }
  std::int64_t width() const { return static_cast<std::int64_t>(fields_.size()); }

  // Returns the index of the first position that is outside [0, limit), or n.
  static std::int64_t first_outside(const std::int64_t* index, std::int64_t n, std::int64_t limit) {
    std::uint64_t wrong = 0;  // one pass over the batch without a branch
    for (std::int64_t i = 0; i < n; ++i) {
      wrong |= static_cast<std::uint64_t>(static_cast<std::uint64_t>(index[i]) >=
                                          static_cast<std::uint64_t>(limit));
    }
    if (!wrong) return n;
    return std::find_if(index, index + n,
                        [limit](std::int64_t at) { return at < 0 || at >= limit; }) - index;
  }

  // For every row `index[i]`, copies the `count` rows of its lane that end with it, oldest first.
  // Field f of the j-th of these rows is copied to sides[f * count + j]. Only `reach[i]` rows
  // before row `index[i]` exist. Missing rows are replaced by the oldest existing row, or by zero
  // bytes with `zero`. The caller has checked positions and reaches.
  void frames(const std::int64_t* index, const std::int64_t* reach, std::int64_t n,
              std::int64_t lanes, std::int64_t count, bool zero, const std::vector<Side>& sides,
              int threads) const {
    detail::parallel(n, row_bytes_ * count, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::size_t f = 0; f < fields_.size(); ++f) {
        if (!fields_[f].bytes) continue;
        const Side* to = sides.data() + f * static_cast<std::size_t>(count);
        frames_of(fields_[f], index, reach, begin, end, lanes, count, zero, to);
      }
    });
  }

  // Copies the rows index[begin .. end) out of the table, field f to sides[f]. The caller has
  // checked the positions.
  void gather_range(const std::int64_t* index, std::int64_t begin, std::int64_t end,
                    const std::vector<Side>& sides) const {
    for (std::size_t f = 0; f < fields_.size(); ++f) {
      const Field& field = fields_[f];
      if (!field.bytes) continue;
      // A store of bytes could change the target of a reference, so the function has copies.
      const auto row = [base = field.base, stride = field.stride, index](std::int64_t i) {
        return base + index[i] * stride;
      };
      detail::copy_ahead(begin, end, field.bytes, sides[f], row);
    }
  }

  // Does the same as `gather_range` for all rows `index`, on up to `threads` threads.
  void gather(const std::int64_t* index, std::int64_t n, const std::vector<Side>& sides,
              int threads) const {
    detail::parallel(n, row_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      gather_range(index, begin, end, sides);
    });
  }

  // Does the same as `gather` for fields in mapped files. Rows in the page cache are read like
  // memory. When a row must be read from disk, the function gives the kernel a hint with the pages
  // of all remaining rows. The kernel then reads them in parallel instead of one after the other.
  // With `cold`, the hint is given before the first row. Returns whether anything was read from
  // disk.
  bool gather_mapped(const std::int64_t* index, std::int64_t n, const std::vector<Side>& sides,
                     int threads, bool cold) const {
#ifdef REPLAYKIT_PAGES
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    std::atomic<bool> read{false};
    detail::parallel(n, row_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      if (mapped_range(index, begin, end, sides, page, cold)) read = true;
    });
    return read;
#else
    (void)cold;
    gather(index, n, sides, threads);
    return false;
#endif
  }

  // Copies rows into the slots `slots`, field f from sides[f]. The caller has checked the slots.
  void scatter(const std::int64_t* slots, std::int64_t n, const std::vector<Side>& sides,
               int threads) const {
    scatter_to([slots](std::int64_t i) { return slots[i]; }, n, sides, threads);
  }

  // Returns whether any of n rows, which are contiguous on each side, may lie in this table.
  bool overlaps(const std::vector<Side>& sides, std::int64_t n) const {
    for (std::size_t f = 0; f < fields_.size(); ++f) {
      const char* const start = sides[f].address;
      const char* const stop = start + n * fields_[f].bytes;
      for (const Field& field : fields_) {
        const char* const end = field.base + (rows_ - 1) * field.stride + field.bytes;
        if (start < end && field.base < stop && start < stop) return true;
      }
    }
    return false;
  }

  // Copies n <= rows() rows to slots first, first + 1, ..., wrapping around after the last slot.
  void scatter_ring(std::int64_t first, std::int64_t n, const std::vector<Side>& sides,
                    int threads) const {
    const auto slot = [=](std::int64_t i) {
      return first + i < rows_ ? first + i : first + i - rows_;
    };
    scatter_to(slot, n, sides, threads);
  }

 private:
  template <typename Slot>
  void scatter_to(const Slot& slot, std::int64_t n, const std::vector<Side>& sides,
                  int threads) const {
    detail::parallel(n, row_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::size_t f = 0; f < fields_.size(); ++f) {
        const auto [base, stride, bytes] = fields_[f];
        if (!bytes) continue;  // an empty field may have no address
        for (std::int64_t i = begin; i < end; ++i) {
          detail::copy(base + slot(i) * stride, sides[f].address + i * sides[f].stride, bytes);
        }
      }
    });
  }

  void frames_of(const Field& field, const std::int64_t* index, const std::int64_t* reach,
                 std::int64_t begin, std::int64_t end, std::int64_t lanes, std::int64_t count,
                 bool zero, const Side* to) const {
    const auto at = [&](std::int64_t i, std::int64_t age) {
      const std::int64_t row = index[i] - age * lanes;
      return field.base + (row < 0 ? row + rows_ : row) * field.stride;
    };
    const std::int64_t wide = std::clamp(field.bytes, detail::kLine, detail::kPrefetchBytes);
    const std::int64_t ahead = std::max<std::int64_t>(1, detail::kAheadBytes / (wide * count));
    for (std::int64_t i = begin - ahead; i < end; ++i) {
      if (const std::int64_t next = i + ahead; next < end) {
        for (std::int64_t age = std::min(count - 1, reach[next]); age >= 0; --age) {
          detail::prefetch(at(next, age), field.bytes);
        }
      }
      if (i < begin) continue;
      for (std::int64_t j = 0; j < count; ++j) {
        const std::int64_t age = count - 1 - j;
        char* const target = to[j].address + i * to[j].stride;
        if (zero && age > reach[i]) {
          std::memset(target, 0, static_cast<std::size_t>(field.bytes));
        } else {
          detail::copy(target, at(i, std::min(age, reach[i])), field.bytes);
        }
      }
    }
  }

#ifdef REPLAYKIT_PAGES
  bool mapped_range(const std::int64_t* index, std::int64_t begin, std::int64_t end,
                    const std::vector<Side>& sides, std::uintptr_t page, bool cold) const {
    const std::int64_t before = detail::blocks_read();
    // Looks up a page of the first row before any read, since reading an uncached page also caches
    // its neighbours.
    bool advised = cold;
    if (!advised && begin < end && !fields_.empty() && fields_.front().bytes) {
      const Field& first = fields_.front();
      advised = !detail::resident(first.base + index[begin] * first.stride, page);
    }
    std::int64_t block = advised ? end - begin : detail::kFirstRows;
    if (advised) advise(index, begin, end, page);
    while (begin < end) {
      const std::int64_t stop = std::min(end, begin + block);
      gather_range(index, begin, stop, sides);
      begin = stop;
      block = end - begin;
      if (!advised && begin < end && detail::blocks_read() != before) {
        advise(index, begin, end, page);
        advised = true;
      }
    }
    return detail::blocks_read() != before;
  }

  void advise(const std::int64_t* index, std::int64_t begin, std::int64_t end,
            std::uintptr_t page) const {
    for (const Field& field : fields_) {
      if (!field.bytes) continue;
      for (std::int64_t i = begin; i < end; ++i) {
        detail::will_need(field.base + index[i] * field.stride, field.bytes, page);
      }
    }
  }
#endif

  std::vector<Field> fields_;
  std::int64_t rows_;
  std::int64_t row_bytes_ = 0;
};

}  // namespace replaykit
