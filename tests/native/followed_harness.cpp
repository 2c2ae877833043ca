// Drives csrc/followed.h alone, to be built with sanitizers: writes at the cursor of a ring of rows
// that are stored once, and reads of what they lead to, against plain vectors of whole rows. Exits
// with 0 if all agree. `--break` reads a row of the batch past its end, which must end the program.
#include "followed.h"  // first, so that it has to include what it uses
#include "harness.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using replaykit::Entries;
using replaykit::Field;
using replaykit::Followed;
using replaykit::RowNumbers;
using replaykit::Side;

using Bytes = std::vector<unsigned char>;
using Numbers = std::vector<std::int64_t>;

// Memory of exactly that size, so that a byte too far is out of bounds.
Bytes exactly(std::int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count), 0xEE);
  bytes.shrink_to_fit();
  return bytes;
}

char* address(Bytes& bytes) { return reinterpret_cast<char*>(bytes.data()); }
std::size_t at(std::int64_t place) { return static_cast<std::size_t>(place); }

// Leaves of a row: two observations, a flag, an id, and what the observations led to.
const Numbers kFollows = {-1, -1, -1, -1, 0, 1};
constexpr std::size_t kFlag = 2, kId = 3;
using Row = std::vector<Bytes>;

Numbers sizes_of(std::int64_t first, std::int64_t second) { return {first, second, 1, 2, first, second}; }

// A ring of rows, stored once, and a model that has them all in full.
struct Ring {
  std::int64_t slots, step;
  Numbers sizes, strides;
  std::vector<Bytes> columns;
  Bytes map, stack;
  bool wide;
  std::int64_t entries = 0, free = 0;
  std::vector<Row> model;  // by slot

  Ring(Random& random, std::int64_t slots_, std::int64_t step_, Numbers sizes_)
      : slots(slots_), step(step_), sizes(std::move(sizes_)), wide(random() % 2 != 0),
        model(at(slots_)) {
    for (std::size_t leaf = 0; leaf < sizes.size(); ++leaf) {
      strides.push_back(sizes[leaf] + below(random, 5));
      columns.push_back(exactly(kFollows[leaf] < 0 ? needed(slots, leaf) : 0));
    }
    map = Bytes(at(slots * (wide ? 8 : 4)), 0);
    map.shrink_to_fit();
  }

  std::int64_t needed(std::int64_t rows, std::size_t leaf) const {
    return rows && sizes[leaf] ? (rows - 1) * strides[leaf] + sizes[leaf] : 0;
  }

  RowNumbers entry_map() { return {address(map), wide}; }
  std::int64_t* numbers() { return reinterpret_cast<std::int64_t*>(stack.data()); }

  // More entries, in another place.
  void grow(std::int64_t more) {
    for (std::size_t leaf = 0; leaf < sizes.size(); ++leaf) {
      if (kFollows[leaf] < 0) continue;
      Bytes larger = exactly(needed(entries + more, leaf));
      std::copy(columns[leaf].begin(), columns[leaf].end(), larger.begin());
      columns[leaf] = std::move(larger);
    }
    Bytes longer = exactly((entries + more) * 8);
    std::copy(stack.begin(), stack.begin() + free * 8, longer.begin());
    stack = std::move(longer);
    for (std::int64_t i = 0; i < more; ++i) numbers()[free++] = entries + i;
    entries += more;
  }

  Followed core() {
    std::vector<Field> leaves;
    for (std::size_t leaf = 0; leaf < sizes.size(); ++leaf) {
      leaves.push_back({sizes[leaf] ? address(columns[leaf]) : nullptr, strides[leaf], sizes[leaf]});
    }
    return Followed(leaves, kFollows, {kFlag}, {kId}, slots, step, entry_map(),
                    {entries, numbers(), &free});
  }

  // A row with an entry of its own, as the general path leaves the newest one.
  void place(std::int64_t slot, const Row& row) {
    if (!free) grow(2);
    const std::int64_t number = numbers()[--free];
    for (std::size_t leaf = 0; leaf < sizes.size(); ++leaf) {
      const std::int64_t where = kFollows[leaf] < 0 ? slot : number;
      std::copy(row[leaf].begin(), row[leaf].end(),
                columns[leaf].begin() + where * strides[leaf]);
    }
    entry_map().put(slot, number + 1);
    model[at(slot)] = row;
  }

  // What every row that was written leads to.
  void check(std::int64_t written) {
    Numbers index;
    for (std::int64_t slot = 0; slot < written; ++slot) index.push_back(written - 1 - slot);
    index.shrink_to_fit();
    std::vector<Bytes> got = {exactly(written * (sizes[4] + 3)), exactly(written * sizes[5])};
    const Followed made = core();
    made.gather(index.data(), written, {{address(got[0]), sizes[4] + 3}, {address(got[1]), sizes[5]}},
                2);
    for (std::int64_t i = 0; i < written; ++i) {
      const Row& want = model[at(index[at(i)])];
      REQUIRE(std::equal(want[4].begin(), want[4].end(), got[0].begin() + i * (sizes[4] + 3)));
      REQUIRE(std::equal(want[5].begin(), want[5].end(), got[1].begin() + i * sizes[5]));
    }
  }
};

Bytes random_bytes(Random& random, std::int64_t count, int values) {
  Bytes bytes = exactly(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(below(random, values));
  return bytes;
}

// Rows that go on from `before`; some do not, and of those some say so.
std::vector<Row> next_rows(Random& random, const Numbers& sizes, std::int64_t n, Row before) {
  std::vector<Row> rows;
  for (std::int64_t i = 0; i < n; ++i) {
    Row row;
    for (const std::int64_t size : sizes) row.push_back(random_bytes(random, size, 2));
    row[kFlag][0] = random() % 4 == 0;
    if (random() % 8) row[kId] = before[kId];
    if (random() % 4) {
      row[0] = before[4];
      row[1] = before[5];
    }
    rows.push_back(row);
    before = row;
  }
  return rows;
}

bool goes_wrong(const Row& a, const Row& b) {
  return !(a[4] == b[0] && a[5] == b[1]) && !a[kFlag][0] && a[kId] == b[kId];
}

void random_rings(Random& random, std::int64_t widest, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const std::int64_t slots = 2 + below(random, 12);
    const Numbers sizes = sizes_of(1 + below(random, widest), below(random, 4));
    Ring ring(random, slots, 1, sizes);
    Row row;
    for (const std::int64_t size : sizes) row.push_back(random_bytes(random, size, 2));
    ring.place(0, row);
    std::int64_t newest = 0, written = 1;
    for (int turn = 0; turn < 8; ++turn) {
      const std::int64_t n = 1 + below(random, slots - 1), first = (newest + 1) % slots;
      const std::vector<Row> rows = next_rows(random, sizes, n, ring.model[at(newest)]);
      std::vector<Bytes> batch;
      std::vector<const char*> addresses;
      for (std::size_t leaf = 0; leaf < sizes.size(); ++leaf) {
        Bytes all;
        for (const Row& one : rows) all.insert(all.end(), one[leaf].begin(), one[leaf].end());
        all.shrink_to_fit();
        batch.push_back(std::move(all));
      }
      for (Bytes& all : batch) addresses.push_back(address(all));
      const bool severed = random() % 4 == 0;
      bool wrong = !severed && goes_wrong(ring.model[at(newest)], rows[0]);
      for (std::int64_t i = 0; i + 1 < n; ++i) wrong |= goes_wrong(rows[at(i)], rows[at(i + 1)]);
      const Ring before = ring;
      std::int64_t missing = 0;
      for (bool again = true; again;) {
        Followed core = ring.core();
        REQUIRE(core.compare(addresses, n, newest, severed, 2) == wrong);
        REQUIRE(core.compared() == n);
        missing = core.write(first, addresses, 2);
        again = missing > 0;
        REQUIRE(core.compared() == (again ? n : -1));
        if (again) {
          REQUIRE(ring.columns == before.columns && ring.map == before.map);
          REQUIRE(ring.free == before.free);
          ring.grow(missing);
        }
      }
      for (std::int64_t i = 0; i < n; ++i) ring.model[at((first + i) % slots)] = rows[at(i)];
      newest = (first + n - 1) % slots;
      written = std::max(written, std::min(slots, first + n));
      ring.check(written);
      // As many entries as rows that are not followed, each in use once.
      std::int64_t own = 0;
      std::vector<int> used(at(ring.entries), 0);
      for (std::int64_t slot = 0; slot < slots; ++slot) {
        const std::int64_t entry = ring.entry_map().at(slot);
        const Row& here = ring.model[at(slot)];
        const Row& behind = ring.model[at((slot + 1) % slots)];
        const bool follows = slot != newest && slot < written &&
                             here[4] == behind[0] && here[5] == behind[1];
        REQUIRE((entry == 0) == (follows || slot >= written));
        if (entry) ++own, ++used[at(entry - 1)];
      }
      for (std::int64_t i = 0; i < ring.free; ++i) ++used[at(ring.numbers()[i])];
      REQUIRE(own + ring.free == ring.entries);
      for (const int count : used) REQUIRE(count == 1);
    }
  }
}

// The follower of an element lies a time slot further, in the same lane.
void lanes(Random& random) {
  for (int round = 0; round < 100; ++round) {
    const std::int64_t step = 1 + below(random, 4), slots = step * (1 + below(random, 6));
    Ring ring(random, slots, step, sizes_of(1 + below(random, 40), 3));
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      Row row;
      for (const std::int64_t size : ring.sizes) row.push_back(random_bytes(random, size, 200));
      ring.place(slot, row);
    }
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      if (random() % 2) continue;
      const std::int64_t behind = (slot + step) % slots;
      ring.numbers()[ring.free++] = ring.entry_map().at(slot) - 1;
      ring.entry_map().put(slot, 0);
      ring.model[at(slot)][4] = ring.model[at(behind)][0];
      ring.model[at(slot)][5] = ring.model[at(behind)][1];
    }
    ring.check(slots);
  }
}

template <typename Call>
void refused(const Call& call) {
  try {
    call();
  } catch (const std::runtime_error&) {
    return;
  }
  REQUIRE(false);
}

void entries_that_are_not_there(Random& random) {
  Ring ring(random, 5, 1, sizes_of(4, 2));
  Row row;
  for (const std::int64_t size : ring.sizes) row.push_back(random_bytes(random, size, 200));
  ring.place(0, row);
  std::vector<const char*> addresses;
  for (Bytes& leaf : row) addresses.push_back(address(leaf));
  Followed core = ring.core();
  Bytes out = exactly(6);
  const std::vector<Side> sides = {{address(out), 4}, {address(out) + 4, 2}};
  refused([&] { core.compare(addresses, 1, 1, false, 1); });  // slot 1 has none
  for (const std::int64_t entry : {std::int64_t{-1}, ring.entries + 1}) {
    ring.entry_map().put(2, entry);
    const std::int64_t index = 2;
    refused([&] { core.gather(&index, 1, sides, 1); });
    core.compare(addresses, 1, 0, false, 1);
    refused([&] { core.write(2, addresses, 1); });
    ring.entry_map().put(2, 0);
  }
  core.compare(addresses, 1, 0, false, 1);
  ring.free = ring.entries + 1;
  refused([&] { core.write(1, addresses, 1); });
}

int read_past_the_end(std::int64_t one) {
  Random random(1);
  Ring ring(random, 5, 1, sizes_of(64, 2));
  Row row;
  for (const std::int64_t size : ring.sizes) row.push_back(random_bytes(random, size, 200));
  ring.place(0, row);
  std::vector<const char*> addresses;
  for (Bytes& leaf : row) addresses.push_back(address(leaf));
  Followed core = ring.core();
  return core.compare(addresses, 1 + one, 0, false, 1) ? 1 : 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string argument = count > 1 ? arguments[1] : "";
  if (argument == "--break") {
    volatile std::int64_t one = 1;
    return read_past_the_end(one);
  }
  if (!argument.empty()) {
    std::fprintf(stderr, "unknown argument %s\n", arguments[1]);
    return 3;
  }
  Random random(11);
  random_rings(random, 6, 400);
  random_rings(random, 700, 60);
  random_rings(random, 400'000, 4);  // rows that threads share
  lanes(random);
  entries_that_are_not_there(random);
  std::puts("all agree");
  return 0;
}
