// Drives csrc/commits.h alone, to be built with sanitizers: writes, commits and programs that end in
// between, against plain copies. Exits with 0 if all agree. `--break` notes rows of memory that is
// shorter than it was said to be: it must end the program, or the sanitizers are not on.
#include "commits.h"  // first, so that it has to include what it uses
#include "harness.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

namespace {

using replaykit::Commits;

using Bytes = std::vector<std::uint8_t>;
using Numbers = std::vector<std::int64_t>;
using Doubles = std::vector<double>;

Commits::Bytes view(Numbers& numbers) {
  return {reinterpret_cast<std::uint8_t*>(numbers.data()),
          static_cast<std::int64_t>(8 * numbers.size())};
}

// Bit by bit, as the polynomial is defined.
std::uint32_t plain_crc(const Numbers& numbers, std::uint32_t sum) {
  sum = ~sum;
  for (const std::int64_t number : numbers) {
    for (int byte = 0; byte < 8; ++byte) {
      sum ^= static_cast<std::uint32_t>(static_cast<std::uint64_t>(number) >> (8 * byte)) & 255u;
      for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) ? 0xEDB88320u : 0u);
    }
  }
  return ~sum;
}

// Files of exactly these sizes, so that one step too far is out of bounds.
struct Files {
  Numbers journal, even, odd;
  Bytes records, column;
  Doubles table;
  std::int64_t rows;

  Files(Random& random, std::int64_t count)
      : journal(static_cast<std::size_t>(8 + below(random, 200))),
        even(static_cast<std::size_t>(4 + below(random, 12))),
        odd(static_cast<std::size_t>(4 + below(random, 12))),
        records(static_cast<std::size_t>(count * 13)), column(static_cast<std::size_t>(count * 8)),
        table(static_cast<std::size_t>(1 + below(random, 9))), rows(count) {}

  Commits opened() {
    return {view(journal), view(even), view(odd),
            {{1000, records.data(), rows, 13}, {1001, column.data(), rows, 8}}};
  }
};

// Puts back what was noted for the next state, the latest first, as who opens the files does.
void undo(Files& files) {
  const std::int64_t next = std::max(files.even[0], files.odd[0]) + 1;
  if (files.journal[0] != next) return;
  std::vector<std::size_t> entries;
  std::size_t at = 8;
  const auto end = static_cast<std::size_t>(8 + files.journal[1] / 8);
  while (at < end) {
    entries.push_back(at);
    at += 6 + static_cast<std::size_t>(files.journal[at + 4] / 8);
  }
  REQUIRE(at == end);
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    const std::int64_t* head = &files.journal[*entry];
    if (head[0] == 8) {
      REQUIRE(head[1] == 8 && head[3] == -1);
      for (std::int64_t i = head[2] - 1; i >= 0; --i) {
        std::memcpy(&files.table[static_cast<std::size_t>(head[6 + i])], head + 6 + head[2] + i, 8);
      }
      continue;
    }
    Bytes& rows = head[0] == 1000 ? files.records : files.column;
    REQUIRE(head[0] == 1000 || head[0] == 1001);
    REQUIRE(head[1] == (head[0] == 1000 ? 13 : 8));
    std::memcpy(rows.data() + head[3] * head[1], head + 6, static_cast<std::size_t>(head[1] * head[2]));
  }
}

replaykit::Numbers strided(const Numbers& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), 8};
}

void require_state(Files& files, std::int64_t number, const Numbers& expected) {
  Numbers& state = number % 2 ? files.odd : files.even;
  REQUIRE(state[0] == number && state[1] == 0);
  REQUIRE(state[2] == static_cast<std::int64_t>(expected.size()));
  REQUIRE(std::equal(expected.begin(), expected.end(), state.begin() + 4));
  REQUIRE(state[3] == plain_crc(expected, plain_crc({number, 0, state[2]}, 0)));
}

void random_programs() {
  Random random(1);
  for (int program = 0; program < 400; ++program) {
    const std::int64_t rows = 1 + below(random, 12);
    Files files(random, rows);
    Bytes records = files.records, column = files.column;  // as they were committed
    Doubles table = files.table;
    auto commits = std::make_unique<Commits>(files.opened());
    std::int64_t number = 0;
    Numbers last;
    for (int step = 0; step < 40; ++step) {
      REQUIRE(commits->latest() == number);
      const std::int64_t first = below(random, rows);
      const std::int64_t until = first + 1 + below(random, rows - first);
      const std::int64_t kind = below(random, 8);
      if (kind < 3) {
        const std::int64_t used = commits->used(number + 1);
        if (!commits->journal(first, until)) {
          REQUIRE(commits->used(number + 1) == used);
          continue;
        }
        REQUIRE(commits->used(number + 1) > used);
        for (std::int64_t byte = 13 * first; byte < 13 * until; ++byte) ++files.records[byte];
        for (std::int64_t byte = 8 * first; byte < 8 * until; ++byte) --files.column[byte];
      } else if (kind < 5) {
        const auto length = static_cast<std::int64_t>(files.table.size());
        Numbers at(static_cast<std::size_t>(below(random, 6)));
        std::vector<float> values(at.size());
        for (std::int64_t& one : at) one = below(random, length + (below(random, 8) == 0));
        for (float& one : values) one = static_cast<float>(random());
        Doubles expected = files.table;
        const std::int64_t used = commits->used(number + 1);
        const bool done = commits->put(8, files.table.data(), length, strided(at), values.data(),
                                       static_cast<std::int64_t>(at.size()));
        if (done) {
          for (std::size_t i = 0; i < at.size(); ++i) expected[static_cast<std::size_t>(at[i])] = values[i];
        } else {
          REQUIRE(commits->used(number + 1) == used);
        }
        REQUIRE(files.table == expected);
      } else if (kind < 7) {
        Numbers own(static_cast<std::size_t>(below(random, 8))), more(static_cast<std::size_t>(below(random, 8)));
        for (std::int64_t& one : own) one = static_cast<std::int64_t>(random());
        for (std::int64_t& one : more) one = static_cast<std::int64_t>(random());
        const std::int64_t done =
            commits->commit(own.data(), static_cast<std::int64_t>(own.size()), more.data(),
                            static_cast<std::int64_t>(more.size()));
        const Numbers& state = number % 2 ? files.even : files.odd;
        if (own.size() + more.size() + 4 > state.size()) {
          REQUIRE(done == 0);
          continue;
        }
        REQUIRE(done == ++number);
        own.insert(own.end(), more.begin(), more.end());
        last = own;
        require_state(files, number, last);
        records = files.records;
        column = files.column;
        table = files.table;
      } else {  // the program ends here; another one opens the files
        undo(files);
        REQUIRE(files.records == records && files.column == column && files.table == table);
        files.journal[1] = 0;
        commits = std::make_unique<Commits>(files.opened());
        if (number) require_state(files, number, last);
      }
    }
  }
}

template <typename Work>
bool refused(const Work& work) {
  try {
    work();
  } catch (const std::logic_error&) {
    return true;
  }
  return false;
}

void what_does_not_fit() {
  Random random(2);
  Files files(random, 4);
  Commits commits = files.opened();
  constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  REQUIRE(refused([&] { commits.journal(-1, 2); }) && refused([&] { commits.journal(2, 2); }));
  REQUIRE(refused([&] { commits.journal(0, 5); }) && refused([&] { commits.size(least, most); }));
  REQUIRE(refused([&] { commits.size(0, most); }));
  const Numbers wrong = {-1};
  REQUIRE(refused([&] { commits.put(8, files.table.data(), 1, strided(wrong), wrong.data(), 1); }));
  REQUIRE(commits.used(1) == 0 && commits.latest() == 0);
  Numbers shorter(7), state(3);
  REQUIRE(refused([&] { Commits(view(shorter), view(files.even), view(files.odd), {}); }));
  REQUIRE(refused([&] { Commits(view(files.journal), view(state), view(files.odd), {}); }));
  REQUIRE(refused([&] { Commits(view(files.journal), view(files.even), view(files.odd), {{1, nullptr, 3, 0}}); }));
  commits.commit(nullptr, 0, nullptr, 0);
  REQUIRE(commits.latest() == 1);
}

// The size is read at run time, so that no compiler can know it.
int note_past_the_end(std::int64_t ahead) {
  Numbers journal(64), even(8), odd(8);
  const std::vector<std::uint8_t> rows(static_cast<std::size_t>(16));
  Commits commits(view(journal), view(even), view(odd), {{1, rows.data(), 2 + ahead, 8}});
  return commits.journal(1, 2 + ahead) ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) {
    volatile int one = 1;
    if (std::strcmp(arguments[1], "--break") == 0) return note_past_the_end(one);
    std::fprintf(stderr, "unknown argument %s\n", arguments[1]);
    return 3;
  }
  random_programs();
  what_does_not_fit();
  std::puts("all agree");
  return 0;
}
