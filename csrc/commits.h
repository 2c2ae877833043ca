// A write of a few rows that counts all at once: what it overwrites is noted in a journal, then
// numbers are stored that tell how much counts. The bytes are those of `replaykit/recovery`, whose
// classes do the same at any size: `Journal.save_run`, `Home.set` and `States.commit`. What is written lies in
// files that are mapped, so that it stays if the process is killed between two stores: their order
// is what others rely on. The caller holds the lock of who writes.
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
  // Rows that are noted, under the number by which the journal names them.
  struct Rows {
    std::int64_t number;
    const std::uint8_t* base;
    std::int64_t rows, width;
  };

  // `even` and `odd`: where the states of these numbers lie. Addresses are multiples of 8.
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

  // Number of the latest state, 0 for none.
  std::int64_t latest() const {
    const std::int64_t even = state(0)[kNumber], odd = state(1)[kNumber];
    return even > odd ? even : odd;
  }

  // How many bytes were noted for the state of that number.
  std::int64_t used(std::int64_t number) const {
    return journal()[kOwner] == number ? journal()[kUsed] : 0;
  }

  // How many bytes the rows from `first` to `until` are. Throws where there are no such rows.
  std::int64_t size(std::int64_t first, std::int64_t until) const {
    if (first < 0 || until <= first) throw std::out_of_range(kNoRows);
    for (const Rows& of : rows_) {
      if (until > of.rows) throw std::out_of_range(kNoRows);
    }
    std::int64_t bytes = 0;
    for (const Rows& of : rows_) bytes += (until - first) * of.width;
    return bytes;
  }

  // Notes the rows from `first` to `until` for the state that comes next. False, and nothing has
  // changed: the journal is too short.
  bool note(std::int64_t first, std::int64_t until) {
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

  // Notes elements of a table of 8 bytes each, then stores others in their place. False, and nothing
  // has changed: the journal is too short, or the table.
  bool put(std::int64_t table, std::int64_t* cells, std::int64_t length, Numbers at, Numbers values,
           std::int64_t count) {
    const std::int64_t number = latest() + 1, before = used(number);
    if (before < 0 || before > journal_.size - kJournalHead) return false;
    const std::int64_t room = journal_.size - kJournalHead - before - 8 * kEntry;
    if (room < 0 || count > room / 16) return false;
    for (std::int64_t i = 0; i < count; ++i) {
      if (at[i] < 0) throw std::out_of_range("expected elements of a table");
      if (at[i] >= length) return false;
    }
    own(number);
    std::uint8_t* to = journal_.base + kJournalHead + before;
    const std::int64_t entry[kEntry] = {table, 8, count, -1, 16 * count, 0};
    std::memcpy(to, entry, sizeof entry);
    to += sizeof entry;
    auto* known = reinterpret_cast<std::int64_t*>(to);
    for (std::int64_t i = 0; i < count; ++i) {
      known[i] = at[i];
      known[count + i] = cells[at[i]];
    }
    store(journal()[kUsed], before + 8 * kEntry + 16 * count);
    for (std::int64_t i = 0; i < count; ++i) cells[at[i]] = values[i];
    return true;
  }

  // Has numbers be the state from now on, and `more` behind them; returns its number. 0, and
  // nothing has changed: there is too little room.
  std::int64_t commit(const std::int64_t* numbers, std::int64_t count, const std::int64_t* more,
                      std::int64_t more_count) {
    const std::int64_t number = latest() + 1, all = count + more_count;
    const Bytes& place = states_[number % 2];
    if (all > place.size / 8 - kStateHead) return 0;
    std::int64_t* to = state(number % 2);
    store(to[kNumber], 0);
    std::int64_t* values = to + kStateHead;
    // What has no entries may have no address.
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

  // Nothing that is stored before it is stored after it, and the other way round.
  static void store(std::int64_t& to, std::int64_t number) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    __atomic_store_n(&to, number, __ATOMIC_RELEASE);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }

  // In this order: what was noted for another state never counts for this one.
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
