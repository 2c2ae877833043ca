// Rows of a table in and out: gather and scatter of several fields in one pass over the rows.
// No Python, no torch, no global state. The caller has checked that the memory behind every
// address is there; positions of rows are checked here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "pages.h"
#include "pool.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#define REPLAYKIT_PAGES 1
#endif

namespace replaykit {

// `bytes` bytes of every row of a table: row i lies at base + i * stride.
struct Field {
  char* base;
  std::int64_t stride;
  std::int64_t bytes;
};

// Where rows go to or come from outside the table: row i at address + i * stride.
struct Side {
  char* address;
  std::int64_t stride;
};

namespace detail {

// How far ahead of the copy rows are asked for, in bytes. They are brought to the second level of
// the cache, which has room for a batch of small rows and, unlike the first, keeps enough misses
// under way: measured at 256 rows of 176 bytes, 3 us, against 7 us with 14 rows ahead into the first
// level and 10 us without.
constexpr std::int64_t kAheadBytes = 128 << 10;
// Of wider rows the hardware's own prefetcher brings what follows.
constexpr std::int64_t kPrefetchBytes = 512;
constexpr std::int64_t kLine = 64;
// Below this many bytes a second thread costs more than it takes over.
constexpr std::int64_t kBytesToShare = 1 << 20;
constexpr std::int64_t kBytesAPiece = 256 << 10;

inline void prefetch_line(const char* address) {
  __builtin_prefetch(address, 0, 2);
  // GCC takes a function that does nothing but prefetch for one without effect, and calls of it away.
  __asm__ volatile("");
}

inline void prefetch(const char* address, std::int64_t bytes) {
  const std::int64_t reach = std::min(bytes, kPrefetchBytes);
  for (std::int64_t at = 0; at < reach; at += kLine) prefetch_line(address + at);
  // A row that does not start at a line may end in one more.
  if (reach > 0) prefetch_line(address + reach - 1);
}

constexpr std::int64_t kCopiedHere = 256;

// Calls of memcpy with a size known to the compiler are a load and a store or two.
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
  // Half of the time of a call. The last piece overlaps the one before.
  for (std::int64_t at = 0; at + 16 <= bytes; at += 16) std::memcpy(to + at, from + at, 16);
  std::memcpy(to + bytes - 16, from + bytes - 16, 16);
}

// Rows whose pages are looked up before a batch of mapped rows is touched.
constexpr std::int64_t kLooks = 1;
// Rows that are copied before it is asked whether they came from disk. Once, and after the last: each
// time costs as much as a dozen rows.
constexpr std::int64_t kFirstRows = 32;

// Splits [0, n) over threads where the bytes are worth it. `work(begin, end)` must not throw.
template <typename Work>
void parallel(std::int64_t n, std::int64_t row_bytes, int threads, const Work& work) {
  if (threads < 2 || n * row_bytes < kBytesToShare) {
    work(std::int64_t{0}, n);
  } else {
    Pool::run(n, kBytesAPiece / std::max<std::int64_t>(1, row_bytes), threads, work);
  }
}

#ifdef REPLAYKIT_PAGES
// Grows when this thread's reads had to wait for, or have asked for, a block of a file.
inline std::int64_t blocks_read() {
  rusage usage;
#ifdef RUSAGE_THREAD
  getrusage(RUSAGE_THREAD, &usage);
#else
  getrusage(RUSAGE_SELF, &usage);
#endif
  return static_cast<std::int64_t>(usage.ru_inblock) + static_cast<std::int64_t>(usage.ru_majflt);
}

// Whether the page of an address is in the page cache; yes where the system does not tell.
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
  madvise(reinterpret_cast<void*>(start), end - start, MADV_WILLNEED);  // a hint: may be refused
}
#endif

}  // namespace detail

// Puts rows of two sides next to each other, `bytes` of each: n rows one after the other at `to`.
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
  std::int64_t width() const { return static_cast<std::int64_t>(fields_.size()); }

  // First position outside [0, limit); n if there is none.
  static std::int64_t first_outside(const std::int64_t* index, std::int64_t n, std::int64_t limit) {
    std::uint64_t wrong = 0;  // without a branch: it is a pass over the batch
    for (std::int64_t i = 0; i < n; ++i) {
      wrong |= static_cast<std::uint64_t>(static_cast<std::uint64_t>(index[i]) >=
                                          static_cast<std::uint64_t>(limit));
    }
    if (!wrong) return n;
    return std::find_if(index, index + n,
                        [limit](std::int64_t at) { return at < 0 || at >= limit; }) - index;
  }

  // The discounted sum of the one number that the first field is, over row `index[i]` and the
  // `steps[i]` rows of its lane that follow, round the ring; in double precision. Positions and
  // steps have been checked.
  template <typename Number>
  void discounted(const std::int64_t* index, const std::int64_t* steps, std::int64_t n,
                  std::int64_t lanes, double gamma, Number* out) const {
    const Field& field = fields_.front();
    const auto at = [&](std::int64_t row) {
      return field.base + (row < rows_ ? row : row - rows_) * field.stride;
    };
    constexpr std::int64_t kAhead = 16;
    for (std::int64_t i = -kAhead; i < n; ++i) {
      for (std::int64_t k = 0; i + kAhead < n && k <= steps[i + kAhead]; ++k) {
        detail::prefetch_line(at(index[i + kAhead] + k * lanes));
      }
      if (i < 0) continue;
      double sum = 0, weight = 1;
      for (std::int64_t k = 0; k <= steps[i]; ++k, weight *= gamma) {
        if (weight == 0) break;  // what is infinite there does not count
        Number value;
        std::memcpy(&value, at(index[i] + k * lanes), sizeof value);
        sum += weight * static_cast<double>(value);
      }
      out[i] = static_cast<Number>(sum);
    }
  }

  // Copies, for every row `index[i]`, the `count` rows of its lane up to it out, round the ring,
  // oldest first: field f of the j-th of them to sides[f * count + j]. `reach[i]` says how many rows
  // there are before it: in the place of one that there is not comes the first that there is, or,
  // with `zero`, zero bytes. Positions and reaches have been checked.
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

  // Copies rows index[begin .. end) out, field f to sides[f]. Positions have been checked.
  void gather_range(const std::int64_t* index, std::int64_t begin, std::int64_t end,
                    const std::vector<Side>& sides) const {
    for (std::size_t f = 0; f < fields_.size(); ++f) {
      const Field& field = fields_[f];
      if (!field.bytes) continue;
      const Side& side = sides[f];
      const std::int64_t ahead =
          detail::kAheadBytes / std::clamp(field.bytes, detail::kLine, detail::kPrefetchBytes);
      const std::int64_t warm = std::min(end, begin + ahead);
      for (std::int64_t i = begin; i < warm; ++i) {
        detail::prefetch(field.base + index[i] * field.stride, field.bytes);
      }
      for (std::int64_t i = begin; i < end; ++i) {
        if (i + ahead < end) {
          detail::prefetch(field.base + index[i + ahead] * field.stride, field.bytes);
        }
        detail::copy(side.address + i * side.stride, field.base + index[i] * field.stride,
                     field.bytes);
      }
    }
  }

  // The same of all rows `index`, by as many threads as are worth it.
  void gather(const std::int64_t* index, std::int64_t n, const std::vector<Side>& sides,
              int threads) const {
    detail::parallel(n, row_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      gather_range(index, begin, end, sides);
    });
  }

  // The same for fields in mapped files. What lies in the page cache is read as memory is. As soon
  // as a row is found to lie on disk only, the kernel is told the pages of all rows to come, which it
  // then reads side by side instead of one after the other. `cold`: tell it before the first row.
  // Returns whether anything came from disk.
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

  // Copies rows in, to positions `slots` that have been checked, field f from sides[f].
  void scatter(const std::int64_t* slots, std::int64_t n, const std::vector<Side>& sides,
               int threads) const {
    detail::parallel(n, row_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::size_t f = 0; f < fields_.size(); ++f) {
        const Field& field = fields_[f];
        if (!field.bytes) continue;  // it may have no address
        for (std::int64_t i = begin; i < end; ++i) {
          detail::copy(field.base + slots[i] * field.stride, sides[f].address + i * sides[f].stride,
                       field.bytes);
        }
      }
    });
  }

  // Copies n <= rows rows to first, first + 1, ..., going round at the last row.
  void scatter_ring(std::int64_t first, std::int64_t n, const std::vector<Side>& sides,
                    int threads) const {
    detail::parallel(n, row_bytes_, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::size_t f = 0; f < fields_.size(); ++f) {
        const Field& field = fields_[f];
        if (!field.bytes) continue;
        std::int64_t slot = first + begin < rows_ ? first + begin : first + begin - rows_;
        for (std::int64_t i = begin; i < end; ++i) {
          detail::copy(field.base + slot * field.stride, sides[f].address + i * sides[f].stride,
                       field.bytes);
          if (++slot == rows_) slot = 0;
        }
      }
    });
  }

 private:
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
    // A look at a few rows first: touching a page that is not there reads its neighbourhood too.
    bool told = cold || looks_cold(index, begin, end, page);
    std::int64_t block = told ? end - begin : detail::kFirstRows;
    if (told) tell(index, begin, end, page);
    while (begin < end) {
      const std::int64_t stop = std::min(end, begin + block);
      gather_range(index, begin, stop, sides);
      begin = stop;
      block = end - begin;
      if (!told && begin < end && detail::blocks_read() != before) {
        tell(index, begin, end, page);
        told = true;
      }
    }
    return detail::blocks_read() != before;
  }

  bool looks_cold(const std::int64_t* index, std::int64_t begin, std::int64_t end,
                  std::uintptr_t page) const {
    const std::int64_t stop = std::min(end, begin + detail::kLooks);
    for (std::int64_t i = begin; i < stop; ++i) {
      const Field& field = fields_[static_cast<std::size_t>(i - begin) % fields_.size()];
      if (field.bytes && !detail::resident(field.base + index[i] * field.stride, page)) return true;
    }
    return false;
  }

  void tell(const std::int64_t* index, std::int64_t begin, std::int64_t end,
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
