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
  Int lane, begin, first, last, code, head, first_row;
};

// The rows of a lane since its begin, and where they lie.
struct Stream {
  Int start = 0, lo = 0;  // times of the first row, and of the first stored row
  std::vector<std::uint8_t> rows;
  std::vector<Int> cells, ids;
  std::vector<std::uint8_t> name;  // of the newest row
  Int segment = 0, record = 0;

  Int hi() const { return start + static_cast<Int>(rows.size()); }
  std::size_t at(Int time) const { return static_cast<std::size_t>(time - start); }

  void close(Int code) {
    if (lo < hi() && !(rows.back() & 7)) rows.back() |= static_cast<std::uint8_t>(code);
    if (lo < hi() && code >= kSevered) cut = hi() - 1;
  }
  Int cut = -1;  // the time of the newest row that a cut separates from the next row
};

// Every row that ever came, lane by lane.
struct Model {
  Int slots;
  bool pooled;
  std::vector<Stream> lanes;

  std::vector<Episode> episodes() const {
    std::vector<Episode> found;
    for (Int lane = 0; lane < static_cast<Int>(lanes.size()); ++lane) {
      const Stream& own = lanes[static_cast<std::size_t>(lane)];
      Int begin = -1, head = kReset, coming = kReset;
      for (Int time = own.start; time < own.hi(); ++time) {
        const std::uint8_t row = own.rows[own.at(time)];
        if (begin < 0) {
          begin = time;
          head = row & kNotInit ? Int{kCut} : coming;
        }
        if (!(row & 7) && time + 1 < own.hi()) continue;
        coming = (row & 7) == kSevered ? kCut : kReset;
        if (time >= own.lo) {
          const Int kind = begin < own.lo ? Int{kEvicted} : head;
          const Int first_row = pooled ? own.ids[own.at(begin)] : -1;
          found.push_back({lane, begin, std::max(begin, own.lo), time, row & 7, kind, first_row});
        }
        begin = -1;
      }
    }
    return found;
  }

  Int cell(Int lane, Int time) const {
    const Stream& own = lanes[static_cast<std::size_t>(lane)];
    return own.cells[own.at(time)];
  }
};

void same_rows(const Episodes& episodes, const Model& model, const std::vector<Episode>& want) {
  const auto n = static_cast<Int>(want.size());
  REQUIRE(episodes.lanes() == static_cast<Int>(model.lanes.size()));
  REQUIRE(episodes.count() == n);
  std::vector<Int> table(static_cast<std::size_t>(6 * n));
  episodes.table(table.data());
  std::vector<Int> time, lane, cells;
  for (Int i = 0; i < n; ++i) {
    const Episode& own = want[static_cast<std::size_t>(i)];
    const Int columns[] = {own.lane, own.begin, own.first, own.last, own.code, own.head};
    for (Int c = 0; c < 6; ++c) REQUIRE(table[static_cast<std::size_t>(c * n + i)] == columns[c]);
    for (Int at = own.first; at <= own.last; ++at) {
      time.push_back(at);
      lane.push_back(own.lane);
      cells.push_back(model.cell(own.lane, at));
    }
  }
  const auto rows = static_cast<Int>(time.size());
  const auto size = static_cast<std::size_t>(rows);
  std::vector<Int> out(4 * size), around(6 * size), details(5 * size);
  REQUIRE(episodes.lookup(all_of(time), all_of(lane), rows, out.data()) == rows);
  REQUIRE(episodes.around(all_of(cells), rows, around.data()) == rows);
  REQUIRE(episodes.rows(all_of(time), all_of(lane), rows, details.data()) == rows);
  Int at = 0;
  for (const Episode& own : want) {
    for (Int row = own.first; row <= own.last; ++row, ++at) {
      const Int answers[] = {row, own.lane, own.begin, own.last, own.code, own.head};
      for (Int c = 0; c < 6; ++c) {
        REQUIRE(around[static_cast<std::size_t>(c * rows + at)] == answers[c]);
        if (c > 1) REQUIRE(out[static_cast<std::size_t>((c - 2) * rows + at)] == answers[c]);
      }
      REQUIRE(details[static_cast<std::size_t>(at)] == cells[static_cast<std::size_t>(at)]);
      REQUIRE(details[static_cast<std::size_t>(4 * rows + at)] == own.first_row);
    }
  }
  for (Int rank = 0; rank < episodes.lanes(); ++rank) {
    const Stream& own = model.lanes[static_cast<std::size_t>(rank)];
    const std::vector<Int> lanes = {rank};
    Int one[5];
    for (const Int beyond : {own.lo - 1, own.hi(), Int{-1}}) {
      const std::vector<Int> when = {beyond};
      REQUIRE(episodes.lookup(all_of(when), all_of(lanes), 1, one) == 0);
    }
    if (own.lo == own.hi()) continue;
    const std::vector<Int> newest = {own.hi() - 1};
    REQUIRE(episodes.rows(all_of(newest), all_of(lanes), 1, one) == 1);
    const bool cut = own.cut == own.hi() - 1;
    REQUIRE(one[3] == own.hi() - 1 && (!cut || one[1] != 0));
  }
}

void same_windows(const Episodes& episodes, EpisodeLaws& laws, const Model& model,
                  const std::vector<Episode>& want, const CountLaw& law) {
  EpisodeSums& sums = laws.of(law);
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
  std::vector<Int> whole[3];  // numbers of windows of one and of two rows
  for (Int i = 0; i < n; ++i) {
    const Int* row = expected.data() + 5 * i;
    for (Int length = 1; length < 3; ++length) {
      if (row[4] + length <= row[2]) whole[length].push_back(numbers[static_cast<std::size_t>(i)]);
    }
  }
  for (Int length = 1; length < 3; ++length) {
    const std::vector<Int>& fits = whole[length];
    const auto count = static_cast<Int>(fits.size());
    const auto size = static_cast<std::size_t>(count * length);
    std::vector<Int> element(size), window(size);
    REQUIRE(sums.slices(episodes, all_of(fits), count, length, element.data(), window.data()) ==
            count);
    for (std::size_t at = 0; at < size; ++at) {
      const auto i = static_cast<Int>(at) / length, step = static_cast<Int>(at) % length;
      const Int* row = expected.data() + 5 * fits[static_cast<std::size_t>(i)];
      REQUIRE(window[at] == i);
      REQUIRE(element[at] == model.cell(row[0], row[1] + row[4] + step));
    }
    if (length > 1) continue;
    std::vector<Int> picked(size);
    REQUIRE(sums.pick(episodes, all_of(fits), count, picked.data()) == count);
    REQUIRE(picked == element);
  }
  Int one[5];
  const std::vector<Int> beyond = {n};
  REQUIRE(sums.find(episodes, all_of(beyond), 1, one) == 0);
  REQUIRE(sums.pick(episodes, all_of(beyond), 1, one) == 0);
}

void same(const Episodes& episodes, EpisodeLaws& laws, const Model& model, Random& random) {
  const std::vector<Episode> want = model.episodes();
  same_rows(episodes, model, want);
  same_windows(episodes, laws, model, want, {2, -1, 0, 0, 0, false, false, kWindows});
  same_windows(episodes, laws, model, want, {1, 0, 0, 0, 0, false, false, kWindows});
  const Int i = below(random, 12);
  if (random() % 2) {
    same_windows(episodes, laws, model, want,
                 {1 + i % 3, i % 4 - 1, i % 2, i % 3, i % 2, i % 5 == 0, i % 7 == 0, static_cast<int>(i % 3)});
  }
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

// One row of the columns: an end, a begin and ids.
struct Row {
  bool truncated, terminal, fresh;
  std::vector<std::uint8_t> name;

  std::uint8_t code() const {
    const int end = !truncated ? 0 : terminal ? 1 : 2;
    return static_cast<std::uint8_t>(end | (fresh ? 0 : kNotInit));
  }
};

Row random_row(Random& random, Int length, const std::vector<std::uint8_t>& name) {
  Row row{!below(random, length), random() % 2 == 0, random() % 4 != 0, name};
  if (row.name.empty()) row.name.push_back(0);
  if (!below(random, length)) row.name[0] ^= static_cast<std::uint8_t>(1 + random() % 3);
  return row;
}

void put(const Row& row, char* cell) {
  cell[0] = row.truncated ? 2 : 0;
  const std::uint16_t words[] = {0x8000, static_cast<std::uint16_t>(row.terminal ? 0x8001 : 0)};
  std::memcpy(cell + 1, words, 4);
  cell[5] = row.fresh;
  cell[6] = static_cast<char>(row.name[0] & 1);
  std::memset(cell + 7, 0, 8);
  cell[14] = static_cast<char>(row.name[0] >> 1);
}

void add(Stream& lane, const Row& row, Int cell, Int id) {
  if (!lane.name.empty() && lane.name != row.name) lane.close(kSwitched);
  lane.name = row.name;
  lane.rows.push_back(row.code());
  lane.cells.push_back(cell);
  lane.ids.push_back(id);
}

void ring_program(Random& random, Int slots, Int lanes, Int most, Int length, int steps) {
  const std::vector<Int> zero(static_cast<std::size_t>(lanes), 0);
  const std::vector<Int> reset(static_cast<std::size_t>(lanes), kReset);
  Episodes episodes(slots, lanes, 0, all_of(zero), all_of(reset));
  EpisodeLaws laws;
  EpisodeWriter writer;
  Model model{slots, false, std::vector<Stream>(static_cast<std::size_t>(lanes))};
  Columns columns{slots, lanes, 16, std::vector<char>(static_cast<std::size_t>(slots * lanes * 16 - 1))};
  for (int step = 0; step < steps; ++step) {
    if (!below(random, 5)) {
      const Int code = 1 + below(random, 5);
      for (Int lane = 0; lane < lanes; ++lane) {
        if (random() % 2) continue;
        model.lanes[static_cast<std::size_t>(lane)].close(code);
        episodes.close_lane(lane, code);
      }
    }
    for (Int rest = below(random, most + 1); rest > 0;) {
      const Int hi = model.lanes[0].hi(), first = hi % slots, n = std::min(rest, slots - first);
      std::vector<Int> after;
      std::vector<std::uint8_t> ends;
      for (Int slot = first; slot < first + n; ++slot) {
        for (Int lane = 0; lane < lanes; ++lane) {
          Stream& own = model.lanes[static_cast<std::size_t>(lane)];
          const Row row = random_row(random, length, own.name);
          put(row, columns.cell(slot, lane));
          add(own, row, slot * lanes + lane, -1);
          own.lo = std::max<Int>(0, own.hi() - slots);
        }
        if (random() % 6) continue;
        after.push_back(slot);
        for (Stream& own : model.lanes) {
          const std::uint8_t said[] = {0, kSevered, kRestored};
          const std::uint8_t code = said[random() % 3];
          ends.push_back(code);
          if (code) own.close(code);
        }
      }
      writer.append_ending(episodes, columns.said(), first, first + n, all_of(after), ends.data(),
                           static_cast<Int>(after.size()));
      REQUIRE(episodes.lo() == model.lanes[0].lo && episodes.hi() == model.lanes[0].hi());
      rest -= n;
    }
    same(episodes, laws, model, random);
  }
}

// Streams come and go, and their rows take the slots of a ring in turn.
void pool_program(Random& random, Int slots, Int streams, Int most, Int length, int steps) {
  const std::vector<Int> none;
  Episodes episodes(slots, 0, 0, all_of(none), all_of(none));
  EpisodeLaws laws;
  EpisodeWriter writer;
  Model model{slots, true, {}};
  std::vector<Int> keys, owner(static_cast<std::size_t>(slots), -1);  // owner: key by slot
  const auto lane_of = [&](Int key) {
    return std::find(keys.begin(), keys.end(), key) - keys.begin();
  };
  const auto renumber = [&] {
    std::vector<Int> order;
    for (const Stream& own : model.lanes) order.push_back(own.record);
    episodes.renumber(all_of(order), static_cast<Int>(order.size()));
  };
  Int written = 0;
  for (int step = 0; step < steps; ++step) {
    const Int n = below(random, most + 1);
    Columns columns{n + 1, 1, 16, std::vector<char>(static_cast<std::size_t>(16 * n + 16))};
    std::vector<Int> chosen, records, places, ids, segments;
    std::vector<std::uint8_t> stops;
    for (Int i = 0; i < n; ++i) {
      const Int key = below(random, streams);
      chosen.push_back(key);
      if (lane_of(key) < static_cast<Int>(keys.size())) continue;
      Stream fresh;
      fresh.record = episodes.start(0, kReset, 0);
      const auto before = std::upper_bound(keys.begin(), keys.end(), key) - keys.begin();
      model.lanes.insert(model.lanes.begin() + before, fresh);
      keys.insert(keys.begin() + before, key);
    }
    renumber();
    for (Int i = 0; i < n; ++i, ++written) {
      const Int slot = written % slots, key = chosen[static_cast<std::size_t>(i)];
      Stream& own = model.lanes[static_cast<std::size_t>(lane_of(key))];
      if (!own.rows.empty() && own.lo == own.hi()) {
        Stream fresh;
        fresh.start = fresh.lo = own.hi();
        fresh.record = own.record;
        fresh.segment = own.segment;
        own = fresh;
      }
      const Int segment = own.rows.empty() || random() % 8 ? own.segment : own.segment + 1;
      if (segment != own.segment) own.close(kSevered);
      own.segment = segment;
      const Row row = random_row(random, length, own.name);
      put(row, columns.cell(i, 0));
      add(own, row, slot, written);  // before the slot's old row is dropped, which may be of `own`
      Int& was = owner[static_cast<std::size_t>(slot)];
      if (was >= 0) ++model.lanes[static_cast<std::size_t>(lane_of(was))].lo;
      was = key;
      const std::uint8_t said[] = {0, 0, 0, kSevered, kRestored};
      stops.push_back(said[random() % 5]);
      if (stops.back()) own.close(stops.back());
      records.push_back(own.record);
      places.push_back(slot);
      ids.push_back(written);
      segments.push_back(segment);
    }
    const Numbers parts = all_of(segments);
    const auto dropped = writer.append_streams(
        episodes, columns.said(), 0,
        {n, all_of(records), all_of(places), all_of(ids), &parts, stops.data()});
    std::size_t gone = 0;
    for (Int lane = static_cast<Int>(keys.size()); lane-- > 0;) {
      const Stream& own = model.lanes[static_cast<std::size_t>(lane)];
      if (own.lo < own.hi()) continue;
      REQUIRE(std::count(dropped.begin(), dropped.end(), own.record) == 1);
      model.lanes.erase(model.lanes.begin() + lane);
      keys.erase(keys.begin() + lane);
      ++gone;
    }
    REQUIRE(gone == dropped.size());
    renumber();
    same(episodes, laws, model, random);
  }
}

int read_past_the_end(Int one) {
  Columns columns{4, 1, 16, std::vector<char>(63)};
  const std::vector<Int> zero = {0}, reset = {kReset};
  Episodes episodes(8, 1, 0, all_of(zero), all_of(reset));
  EpisodeWriter writer;
  writer.append(episodes, columns.said(), 2, 4 + one);
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
    for (Int lanes = 1; lanes < 4; ++lanes) {
      ring_program(random, slots, lanes, 3 * slots, 4, 60);
      pool_program(random, slots, 2 * lanes, 3 * slots, 4, 60);
    }
  }
  for (const Int length : {1, 2, 30}) {
    ring_program(random, 300, 2, 200, length, 80);
    pool_program(random, 300, 20, 200, length, 80);
  }
  ring_program(random, 20'000, 1, 30'000, 50, 8);  // more rows than are noted in one go
  ring_program(random, 70, 150, 60, 3, 15);
  pool_program(random, 5'000, 300, 4'000, 20, 8);
  std::puts("all agree");
  return 0;
}
