// Drives csrc/episodes.h, episode_sums.h and episode_columns.h alone, to be built with sanitizers:
// random writes against every row that ever came, scanned. Exits with 0 if all agree. `--break`
// reads columns past their end: that must end the program, or the sanitizers are not on.
#include "episode_columns.h"  // first, so that they have to include what they use
#include "episode_sums.h"
#include "episodes.h"
#include "harness.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace replaykit;
using Int = std::int64_t;

Numbers all_of(const std::vector<Int>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), 8};
}

struct Episode {
  Int lane, begin, first, last, code, head;
};

// Every row that ever came.
struct Model {
  Int slots, lanes;
  std::vector<std::vector<std::uint8_t>> rows;

  Int hi() const { return static_cast<Int>(rows[0].size()); }
  Int lo() const { return std::max<Int>(0, hi() - slots); }

  void close(Int lane, Int code) {
    auto& own = rows[static_cast<std::size_t>(lane)];
    if (!own.empty() && !(own.back() & 7)) own.back() |= static_cast<std::uint8_t>(code);
  }

  std::vector<Episode> episodes() const {
    std::vector<Episode> found;
    for (Int lane = 0; lane < lanes; ++lane) {
      Int begin = -1, head = kReset, coming = kReset;
      for (Int time = 0; time < hi(); ++time) {
        const std::uint8_t row = rows[static_cast<std::size_t>(lane)][static_cast<std::size_t>(time)];
        if (begin < 0) {
          begin = time;
          head = row & kNotInit ? Int{kCut} : coming;
        }
        if (!(row & 7) && time + 1 < hi()) continue;
        coming = (row & 7) == kSevered ? kCut : kReset;
        if (time >= lo()) {
          const Int kind = begin < lo() ? Int{kEvicted} : head;
          found.push_back({lane, begin, std::max(begin, lo()), time, row & 7, kind});
        }
        begin = -1;
      }
    }
    return found;
  }
};

void same_rows(const Episodes& episodes, const Model& model, const std::vector<Episode>& want) {
  REQUIRE(episodes.lo() == model.lo() && episodes.hi() == model.hi());
  const auto n = static_cast<Int>(want.size());
  REQUIRE(episodes.count() == n);
  std::vector<Int> table(static_cast<std::size_t>(6 * n));
  episodes.table(table.data());
  std::vector<Int> time, lane;
  Int longest = 0;
  for (Int i = 0; i < n; ++i) {
    const Episode& own = want[static_cast<std::size_t>(i)];
    const Int columns[] = {own.lane, own.begin, own.first, own.last, own.code, own.head};
    for (Int c = 0; c < 6; ++c) REQUIRE(table[static_cast<std::size_t>(c * n + i)] == columns[c]);
    longest = std::max(longest, own.last + 1 - own.first);
    for (Int at = own.first; at <= own.last; ++at) {
      time.push_back(at);
      lane.push_back(own.lane);
    }
  }
  REQUIRE(episodes.longest() == longest);
  const auto rows = static_cast<Int>(time.size());
  std::vector<Int> out(static_cast<std::size_t>(4 * rows));
  Int* to = out.data();
  REQUIRE(episodes.lookup(all_of(time), all_of(lane), rows, to, to + rows, to + 2 * rows,
                          to + 3 * rows) == rows);
  Int at = 0;
  for (const Episode& own : want) {
    for (Int row = own.first; row <= own.last; ++row, ++at) {
      REQUIRE(to[at] == own.begin && to[rows + at] == own.last);
      REQUIRE(to[2 * rows + at] == own.code && to[3 * rows + at] == own.head);
    }
  }
  const std::vector<Int> beyond = {model.lo() - 1, model.hi(), -1}, zero(3, 0);
  Int one[4];
  for (std::size_t i = 0; i < 3; ++i) {
    const std::vector<Int> when = {beyond[i]};
    REQUIRE(episodes.lookup(all_of(when), all_of(zero), 1, one, one + 1, one + 2, one + 3) == 0);
  }
}

void same_windows(const Episodes& episodes, EpisodeLaws& laws, const std::vector<Episode>& want,
                  const CountLaw& law) {
  EpisodeSums& sums = laws.of(episodes, law);
  sums.refresh(episodes);
  std::vector<Int> numbers, expected;
  std::vector<Int> totals(static_cast<std::size_t>(episodes.lanes()));
  for (const Episode& own : want) {
    const Int stored = own.last + 1 - own.first;
    const bool reset = own.head == kReset, open = own.code == 0;
    const Int mass = law.mass(stored, reset, open);
    totals[static_cast<std::size_t>(own.lane)] += mass;
    for (Int rest = 0; rest < mass; ++rest) {
      numbers.push_back(static_cast<Int>(numbers.size()));
      const Int row[] = {own.lane, own.first + law.skipped(reset), law.usable(stored, reset, open),
                         law.windows(stored, reset, open), rest};
      expected.insert(expected.end(), row, row + 5);
    }
  }
  const auto n = static_cast<Int>(numbers.size());
  REQUIRE(sums.total() == n);
  std::vector<Int> got(totals.size());
  sums.totals(got.data());
  REQUIRE(got == totals);
  std::vector<Int> out(static_cast<std::size_t>(5 * n));
  REQUIRE(sums.find(episodes, all_of(numbers), n, out.data()) == n);
  for (Int i = 0; i < n; ++i) {
    for (Int c = 0; c < 5; ++c) {
      REQUIRE(out[static_cast<std::size_t>(c * n + i)] == expected[static_cast<std::size_t>(5 * i + c)]);
    }
  }
  std::vector<Int> picked(static_cast<std::size_t>(n));
  REQUIRE(sums.pick(episodes, all_of(numbers), n, picked.data()) == n);
  for (Int i = 0; i < n; ++i) {
    const Int* row = expected.data() + 5 * i;
    REQUIRE(picked[static_cast<std::size_t>(i)] ==
            (row[1] + row[4]) % episodes.slots() * episodes.lanes() + row[0]);
  }
  std::vector<Int> fits;
  for (Int i = 0; i < n; ++i) {
    const Int* row = expected.data() + 5 * i;
    if (row[4] + 2 <= row[2]) fits.push_back(numbers[static_cast<std::size_t>(i)]);
  }
  const auto whole = static_cast<Int>(fits.size());
  std::vector<Int> element(2 * fits.size()), window(2 * fits.size());
  REQUIRE(sums.slices(episodes, all_of(fits), whole, 2, element.data(), window.data()) == whole);
  for (Int i = 0; i < whole; ++i) {
    const Int* row = expected.data() + 5 * fits[static_cast<std::size_t>(i)];
    for (Int step = 0; step < 2; ++step) {
      const auto at = static_cast<std::size_t>(2 * i + step);
      REQUIRE(window[at] == i);
      REQUIRE(element[at] ==
              (row[1] + row[4] + step) % episodes.slots() * episodes.lanes() + row[0]);
    }
  }
  Int one[5];
  const std::vector<Int> beyond = {n};
  REQUIRE(sums.find(episodes, all_of(beyond), 1, one) == 0);
  REQUIRE(sums.pick(episodes, all_of(beyond), 1, one) == 0);
}

// Columns of a ring of rows, as a storage keeps them: flags and ids in records of `stride` bytes.
struct Columns {
  Int slots, lanes, stride;
  std::vector<char> memory;

  char* cell(Int slot, Int lane) { return memory.data() + (slot * lanes + lane) * stride; }
  EpisodeColumns said() {
    const char* base = memory.data();
    return EpisodeColumns({{base, stride, 1, 1, false, FlagColumn::kTruncated},
                           {base + 1, stride, 2, 2, true, FlagColumn::kTerminal},
                           {base + 5, stride, 1, 1, false, FlagColumn::kInit}},
                          {{base + 6, stride, 1}, {base + 7, stride, 8}}, slots, lanes);
  }
};

void random_program(Random& random, Int slots, Int lanes, Int most, Int length, int steps) {
  Episodes episodes(slots, lanes, 0, nullptr, nullptr);
  EpisodeLaws laws;
  LastIds ids;
  Model model{slots, lanes, std::vector<std::vector<std::uint8_t>>(static_cast<std::size_t>(lanes))};
  Columns columns{slots, lanes, 16, std::vector<char>(static_cast<std::size_t>(slots * lanes * 16 - 1))};
  std::vector<char> id(static_cast<std::size_t>(lanes));
  bool compared = false;
  for (int step = 0; step < steps; ++step) {
    const Int kind = below(random, 8);
    if (kind == 0) {
      std::vector<std::uint8_t> chosen(static_cast<std::size_t>(lanes));
      const Int code = 1 + below(random, 5);
      for (Int lane = 0; lane < lanes; ++lane) {
        chosen[static_cast<std::size_t>(lane)] = random() % 2;
        if (chosen[static_cast<std::size_t>(lane)]) model.close(lane, code);
      }
      episodes.close(chosen.data(), code);
    } else if (kind < 4) {
      const Int n = below(random, most + 1);
      std::vector<std::uint8_t> codes(static_cast<std::size_t>(n * lanes));
      for (Int cell = 0; cell < n * lanes; ++cell) {
        const auto end = static_cast<std::uint8_t>(below(random, length) ? 0 : 1 + below(random, 5));
        codes[static_cast<std::size_t>(cell)] = end | (random() % 8 ? 0 : kNotInit);
        model.rows[static_cast<std::size_t>(cell % lanes)].push_back(codes[static_cast<std::size_t>(cell)]);
      }
      episodes.append(codes.data(), n);
      ids.forget();
      compared = false;
    } else {
      const Int first = model.hi() % slots, n = below(random, slots - first + 1);
      std::vector<Int> after;
      std::vector<std::uint8_t> ends;
      for (Int slot = first; slot < first + n; ++slot) {
        for (Int lane = 0; lane < lanes; ++lane) {
          char& own = id[static_cast<std::size_t>(lane)];
          const bool truncated = !below(random, length), terminal = random() % 2, fresh = random() % 4;
          if (!below(random, length)) {
            own ^= static_cast<char>(1 + random() % 3);
            if (compared || slot > first) model.close(lane, kSwitched);
          }
          char* cell = columns.cell(slot, lane);
          cell[0] = truncated ? 2 : 0;
          const std::uint16_t words[] = {0x8000, static_cast<std::uint16_t>(terminal ? 0x8001 : 0)};
          std::memcpy(cell + 1, words, 4);
          cell[5] = fresh;
          cell[6] = own & 1;
          std::memset(cell + 7, 0, 8);
          cell[14] = own >> 1;
          const int end = !truncated ? 0 : terminal ? 1 : 2;
          model.rows[static_cast<std::size_t>(lane)].push_back(
              static_cast<std::uint8_t>(end | (fresh ? 0 : kNotInit)));
        }
        if (kind < 6 || random() % 3) continue;
        after.push_back(slot);
        for (Int lane = 0; lane < lanes; ++lane) {
          const std::uint8_t said[] = {0, kSevered, kRestored};
          const std::uint8_t code = said[random() % 3];
          ends.push_back(code);
          if (code) model.close(lane, code);
        }
      }
      if (after.empty()) {
        ids.append(episodes, columns.said(), first, first + n);
      } else {
        ids.append_ending(episodes, columns.said(), first, first + n, all_of(after), ends.data(),
                          static_cast<Int>(after.size()));
      }
      compared |= n > 0;
    }
    const std::vector<Episode> want = model.episodes();
    same_rows(episodes, model, want);
    same_windows(episodes, laws, want, {2, -1, 0, 0, 0, false, false, kWindows});
    const Int i = below(random, 12);
    if (random() % 2) {
      same_windows(episodes, laws, want,
                   {1 + i % 3, i % 4 - 1, i % 2, i % 3, i % 2, i % 5 == 0, i % 7 == 0, static_cast<int>(i % 3)});
    }
  }
}

int read_past_the_end(Int one) {
  Columns columns{4, 1, 16, std::vector<char>(63)};
  Episodes episodes(8, 1, 0, nullptr, nullptr);
  LastIds ids;
  ids.append(episodes, columns.said(), 2, 4 + one);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string argument = count > 1 ? arguments[1] : "";
  if (argument == "--break") {
    volatile Int one = 1;
    return read_past_the_end(one);
  }
  if (!argument.empty()) {
    std::fprintf(stderr, "unknown argument %s\n", arguments[1]);
    return 3;
  }
  Random random(11);
  for (Int slots = 1; slots < 14; ++slots) {
    for (Int lanes = 1; lanes < 4; ++lanes) random_program(random, slots, lanes, 3 * slots, 4, 60);
  }
  for (const Int length : {1, 2, 30}) random_program(random, 300, 2, 200, length, 80);
  random_program(random, 20'000, 1, 30'000, 50, 8);  // more rows than are noted in one go
  random_program(random, 70, 150, 60, 3, 15);
  std::puts("all agree");
  return 0;
}
