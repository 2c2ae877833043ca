// Gathers in background threads that do not use Python. A caller waits for a gather when it needs
// the rows that the gather copies, or when it wants to write to the source rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "rows.h"

namespace replaykit {

// The number of gathers under way that read the same rows in one process.
struct Readers {
  explicit Readers(long process) : process(process) {}
  const long process;
  std::atomic<std::int64_t> under_way{0};
};

constexpr std::int64_t kBytesAPiece = 256 << 10;

// A gather that was begun. Threads take its pieces, and so does a caller that waits for it. The
// caller has checked the positions, and keeps the memory of rows and sides alive until the gather
// has ended.
struct Read {
  Read(const Table& table, std::vector<std::int64_t> index, std::vector<Side> sides, int threads,
       std::shared_ptr<Readers> readers)
      : table(table), index(std::move(index)), sides(std::move(sides)), readers(std::move(readers)),
        rows(static_cast<std::int64_t>(this->index.size())),
        piece(std::max<std::int64_t>(1, kBytesAPiece / std::max<std::int64_t>(1, table.row_bytes()))),
        places(threads), left(rows) {}

  // Copies pieces until no piece is left. Returns whether this thread completed the gather.
  bool work() {
    bool last = false;
    for (;;) {
      const std::int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= rows) return last;
      const std::int64_t end = std::min(rows, begin + piece);
      table.gather_range(index.data(), begin, end, sides);
      last = left.fetch_sub(end - begin, std::memory_order_acq_rel) == end - begin;
    }
  }

  // Stops handing out pieces. Returns whether this ended the gather, because no thread was copying.
  bool stop() {
    const std::int64_t taken = std::min(rows, next.exchange(rows, std::memory_order_relaxed));
    const std::int64_t never = rows - taken;
    return left.fetch_sub(never, std::memory_order_acq_rel) == never && never > 0;
  }

  bool over() const { return left.load(std::memory_order_acquire) == 0; }
  bool taken() const { return next.load(std::memory_order_relaxed) >= rows; }

  const Table table;
  const std::vector<std::int64_t> index;
  const std::vector<Side> sides;
  const std::shared_ptr<Readers> readers;
  const std::int64_t rows, piece;
  int places;  // number of threads that may still join; the lock of `Reading` guards it
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> left;
};

// The threads of a process that run gathers. Gathers run in the order in which they were begun.
class Reading {
 public:
  // Begins a gather of at least one row.
  static void begin(const std::shared_ptr<Read>& read) { of_this_process<Reading>().add(read); }

  // Waits until a gather has ended, and helps with it.
  static void finish(Read& read) {
    if (read.over()) return;
    if (read.readers->process != this_process()) {
      // The parent process began this gather, but its threads do not exist in this process.
      read.table.gather(read.index.data(), read.rows, read.sides, 1);
      read.left = 0;
      return;
    }
    Reading& reading = of_this_process<Reading>();
    if (read.work()) {
      reading.ended(read);
    } else {
      reading.await([&read] { return read.over(); });
    }
  }

  // Ends a gather whose rows are not needed, after the pieces under way have been copied.
  static void abandon(Read& read) {
    if (read.over() || read.readers->process != this_process()) return;
    Reading& reading = of_this_process<Reading>();
    if (read.stop()) {
      reading.ended(read);
    } else {
      reading.await([&read] { return read.over(); });
    }
  }

  // Waits until no gather of these rows is under way.
  static void await_all(const Readers& readers) {
    if (!readers.under_way || readers.process != this_process()) return;
    of_this_process<Reading>().await([&readers] { return readers.under_way == 0; });
  }

  explicit Reading(long process) : process(process) {}
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  const long process;

 private:
  void add(const std::shared_ptr<Read>& read) {
    const std::int64_t pieces = (read->rows + read->piece - 1) / read->piece;
    const int places = static_cast<int>(std::min<std::int64_t>(std::max(1, read->places), pieces));
    read->places = places;  // no other thread can access `read` yet
    {
      std::lock_guard<std::mutex> guard(state_);
      start_threads(threads_, places, [this] { serve(); });  // a waiting caller helps anyway
      read->readers->under_way.fetch_add(1);
      reads_.push_back(read);
    }
    if (places > 1) {
      wake_.notify_all();
    } else {
      wake_.notify_one();
    }
  }

  void ended(const Read& read) {
    {
      std::lock_guard<std::mutex> guard(state_);
      const auto found = std::find_if(reads_.begin(), reads_.end(),
                                      [&read](const auto& one) { return one.get() == &read; });
      if (found != reads_.end()) reads_.erase(found);
      read.readers->under_way.fetch_sub(1);
    }
    done_.notify_all();
  }

  template <typename Done>
  void await(const Done& done) {
    std::unique_lock<std::mutex> guard(state_);
    while (!done()) {
      // A woken thread may start to run only much later.
      if (const std::shared_ptr<Read> read = open()) {
        guard.unlock();
        if (read->work()) ended(*read);
        guard.lock();
      } else {
        done_.wait(guard);
      }
    }
  }

  // Returns the first gather with pieces left.
  std::shared_ptr<Read> open() const {
    for (const auto& read : reads_) {
      if (!read->taken()) return read;
    }
    return nullptr;
  }

  std::shared_ptr<Read> joined() const {
    for (const auto& read : reads_) {
      if (read->places > 0 && !read->taken()) {
        --read->places;
        return read;
      }
    }
    return nullptr;
  }

  void serve() {
    std::unique_lock<std::mutex> guard(state_);
    for (;;) {
      std::shared_ptr<Read> read = joined();
      if (read == nullptr) {
        wake_.wait(guard);
        continue;
      }
      guard.unlock();
      if (read->work()) ended(*read);
      read.reset();
      guard.lock();
    }
  }

  std::mutex state_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<Read>> reads_;  // gathers that have not ended
  int threads_ = 0;
};

}  // namespace replaykit
