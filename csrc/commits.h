// Commits a write of a few rows as a whole. The old bytes are first written to a journal. Then
// numbers are stored that determine how many rows count. `Journal.save`,
// `RecoveryFolder.set` and `States.commit` of `replaykit/recovery` do the same for writes of any size, in the same format.
// The memory belongs to mapped files, so it survives if the process is killed between two stores.
// Recovery relies on the order of the stores. The caller holds the lock of the writer.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "crc32_table.h"
#include "numbers.h"

namespace replaykit {

class Commits {
 public:
  struct Bytes {
    std::uint8_t* base;
    std::int64_t size;
  };
  // Rows that can be journaled. `number` names them in the journal.
  struct Rows {
    std::int64_t number;
    const std::uint8_t* base;
    std::int64_t rows, width;
  };

  // `even` and `odd` are the memory of the states with even and odd numbers. All addresses must be
  // multiples of 8.
  Commits(Bytes journal, Bytes even, Bytes odd, std::vector<Rows> rows)
      : journal_(journal), states_{even, odd}, rows_(std::move(rows)) {
    if (journal.size < kJournalHead) throw std::invalid_argument("expected a journal of 64 bytes");
    for (const Bytes& state : states_) {
      if (state.size < 8 * kStateHead) throw std::invalid_argument("expected a state of 32 bytes");
    }
    for (const Rows& of : rows_) {
      if (of.rows < 0 || of.width < 1) throw std::invalid_argument("expected rows of some bytes");
    }
  }

  // Returns the number of the latest state, or 0 without a state.
  std::int64_t latest() const {
    const std::int64_t even = state(0)[kNumber], odd = state(1)[kNumber];
    return even > odd ? even : odd;
  }

  // Returns how many bytes were journaled for the state with the given number.
  std::int64_t used(std::int64_t number) const {
    return journal()[kOwner] == number ? journal()[kUsed] : 0;
  }

  // Returns the size in bytes of the rows from `first` to `until`. Throws if no such rows exist.
  std::int64_t size(std::int64_t first, std::int64_t until) const {
    if (first < 0 || until <= first) throw std::out_of_range(kNoRows);
    for (const Rows& of : rows_) {
      if (until > of.rows) throw std::out_of_range(kNoRows);
    }
    std::int64_t bytes = 0;
    for (const Rows& of : rows_) bytes += (until - first) * of.width;
    return bytes;
  }

  // Journals the rows from `first` to `until` for the next state. If the journal is too short,
  // returns false and changes nothing.
  bool journal(std::int64_t first, std::int64_t until) {
    size(first, until);
    const std::int64_t number = latest() + 1, before = used(number);
    if (before < 0 || before > journal_.size - kJournalHead) return false;
    std::int64_t end = kJournalHead + before;
    for (const Rows& of : rows_) {
      end += 8 * kEntry + padded((until - first) * of.width);
      if (end > journal_.size) return false;
    }
    own(number);
    std::uint8_t* to = journal_.base + kJournalHead + before;
    for (const Rows& of : rows_) {
      const std::int64_t bytes = (until - first) * of.width;
      const std::int64_t entry[kEntry] = {of.number, of.width, until - first, first, padded(bytes), 0};
      std::memcpy(to, entry, sizeof entry);
      std::memcpy(to + sizeof entry, of.base + first * of.width, static_cast<std::size_t>(bytes));
      to += 8 * kEntry + padded(bytes);
    }
    store(journal()[kUsed], to - journal_.base - kJournalHead);
    return true;
  }

  // Returns for how many elements of one table the journal has room; -1 if for no entry.
  std::int64_t room() const {
    const std::int64_t before = used(latest() + 1);
    if (before < 0 || before > journal_.size - kJournalHead - 8 * kEntry) return -1;
    return (journal_.size - kJournalHead - before - 8 * kEntry) / 16;
  }

  // Journals elements of a table of doubles, then overwrites them. If the journal or the table is too
  // short, returns false and changes nothing.
  template <typename Number>
  bool put(std::int64_t table, double* cells, std::int64_t length, Numbers at, const Number* values,
           std::int64_t count) {
    if (count > room()) return false;
    for (std::int64_t i = 0; i < count; ++i) {
      if (at[i] < 0) throw std::out_of_range("expected elements of a table");
      if (at[i] >= length) return false;
      __builtin_prefetch(cells + at[i], 1);
    }
    const std::int64_t number = latest() + 1, before = used(number);
    own(number);
    std::uint8_t* to = journal_.base + kJournalHead + before;
    const std::int64_t entry[kEntry] = {table, 8, count, -1, 16 * count, 0};
    std::memcpy(to, entry, sizeof entry);
    to += sizeof entry;
    auto* known = reinterpret_cast<std::int64_t*>(to);
    for (std::int64_t i = 0; i < count; ++i) {
      known[i] = at[i];
      std::memcpy(known + count + i, cells + at[i], sizeof *cells);
    }
    store(journal()[kUsed], before + 8 * kEntry + 16 * count);
    for (std::int64_t i = 0; i < count; ++i) cells[at[i]] = static_cast<double>(values[i]);
    return true;
  }

  // Makes `numbers`, followed by `more`, the latest state, and returns the number of that state. If
  // the numbers do not fit, returns 0 and changes nothing.
  std::int64_t commit(const std::int64_t* numbers, std::int64_t count, const std::int64_t* more,
                      std::int64_t more_count) {
    const std::int64_t number = latest() + 1, all = count + more_count;
    if (all > states_[number % 2].size / 8 - kStateHead) return 0;
    std::int64_t* to = state(number % 2);
    store(to[kNumber], 0);
    std::int64_t* values = to + kStateHead;
    // An empty array may have no address.
    if (count) std::memcpy(values, numbers, static_cast<std::size_t>(8 * count));
    if (more_count) std::memcpy(values + count, more, static_cast<std::size_t>(8 * more_count));
    to[kCount] = all;
    to[kDurable] = 0;
    const std::int64_t before[] = {number, 0, all};
    to[kChecksum] = crc32_of(values, static_cast<std::size_t>(all), crc32_of(before, 3, 0));
    store(to[kNumber], number);
    return number;
  }

 private:
  static constexpr std::int64_t kJournalHead = 64, kStateHead = 4, kEntry = 6;
  static constexpr const char* kNoRows = "expected rows of the storage";
  enum { kOwner, kUsed, kChecked };
  enum { kNumber, kDurable, kCount, kChecksum };

  static std::int64_t padded(std::int64_t bytes) { return (bytes + 7) & ~std::int64_t{7}; }

  // Stores a number. The compiler moves no other store across this store, in either direction.
  static void store(std::int64_t& to, std::int64_t number) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    __atomic_store_n(&to, number, __ATOMIC_RELEASE);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }

  // Starts the journal of a state. The order of the stores ensures that entries of another state
  // never count for this state.
  void own(std::int64_t number) {
    std::int64_t* head = journal();
    if (head[kOwner] == number) return;
    store(head[kUsed], 0);
    store(head[kChecked], 0);
    store(head[kOwner], number);
  }

  std::int64_t* journal() const { return reinterpret_cast<std::int64_t*>(journal_.base); }
  std::int64_t* state(std::int64_t turn) const {
    return reinterpret_cast<std::int64_t*>(states_[turn].base);
  }

  Bytes journal_;
  Bytes states_[2];
  std::vector<Rows> rows_;
};

}  // namespace replaykit
