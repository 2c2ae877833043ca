// Drives csrc/linked.h alone, to be built with sanitizers: writes of rows of several streams to any
// slots, and reads of what they lead to, against plain vectors of whole rows. Exits with 0 if all
// agree. `--break` reads a row of the batch past its end, which must end the program.
#include "linked.h"  // first, so that it has to include what it uses
#include "harness.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using replaykit::Batch;
using replaykit::Field;
using replaykit::Followed;
using replaykit::Linked;
using replaykit::RowNumbers;

using Bytes = std::vector<unsigned char>;
using Numbers = std::vector<std::int64_t>;

char* address(Bytes& bytes) { return reinterpret_cast<char*>(bytes.data()); }
std::size_t at(std::int64_t place) { return static_cast<std::size_t>(place); }

Bytes exactly(std::int64_t count) {
  Bytes bytes(at(count), 0xEE);
  bytes.shrink_to_fit();
  return bytes;
}

// Leaves of a row: an observation, a flag, and what the observation led to.
const Numbers kFollows = {-1, -1, 0};
constexpr std::size_t kFlag = 1;

struct Row {
  std::int64_t stream = -1, number = -1;  // number: when it was written, -1 for never
  std::vector<Bytes> leaves;
};

struct Store {
  std::int64_t slots, size, entries = 0, free = 0, written = 0;
  Bytes root, flag, own, map, after, before, stack;
  bool wide;
  std::vector<Row> model;
  std::map<std::int64_t, std::int64_t> newest;  // slot of the newest row of each stream

  Store(Random& random, std::int64_t slots_, std::int64_t size_)
      : slots(slots_), size(size_), root(exactly(slots * size)), flag(exactly(slots)),
        wide(random() % 2 != 0), model(at(slots)) {
    for (Bytes* numbers : {&map, &after, &before}) {
      *numbers = exactly(slots * (wide ? 8 : 4));
      std::fill(numbers->begin(), numbers->end(), static_cast<unsigned char>(0));
    }
  }

  std::int64_t* numbers() { return reinterpret_cast<std::int64_t*>(stack.data()); }
  RowNumbers table(Bytes& bytes) { return {address(bytes), wide}; }

  void grow(std::int64_t more) {
    Bytes larger = exactly((entries + more) * size), longer = exactly((entries + more) * 8);
    std::copy(own.begin(), own.end(), larger.begin());
    std::copy(stack.begin(), stack.begin() + free * 8, longer.begin());
    own = std::move(larger);
    stack = std::move(longer);
    for (std::int64_t i = 0; i < more; ++i) numbers()[free++] = entries + i;
    entries += more;
  }

  Linked core() {
    const std::vector<Field> leaves = {
        {address(root), size, size}, {address(flag), 1, 1}, {address(own), size, size}};
    return Linked(Followed(leaves, kFollows, {kFlag}, {}, slots, 1, table(map),
                           {entries, numbers(), &free}),
                  table(after), table(before));
  }

  // Every row leads where it did, and knows the next row of its stream where nobody came between.
  void check() {
    Numbers index;
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      if (model[at(slot)].number >= 0) index.push_back(slot);
    }
    index.shrink_to_fit();
    const auto n = static_cast<std::int64_t>(index.size());
    Bytes got = exactly(n * size);
    core().gather(index.data(), n, {{address(got), size}}, 2);
    std::vector<int> used(at(entries), 0);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t slot = index[at(i)], entry = table(map).at(slot);
      const Row& row = model[at(slot)];
      REQUIRE(std::equal(row.leaves[2].begin(), row.leaves[2].end(), got.begin() + i * size));
      const std::int64_t next = slot + table(after).at(slot);
      REQUIRE(next >= 0 && next < slots);
      if (next != slot) {
        REQUIRE(next + table(before).at(next) == slot);
        REQUIRE(model[at(next)].stream == row.stream && model[at(next)].number > row.number);
        REQUIRE((entry == 0) == (model[at(next)].leaves[0] == row.leaves[2]));
      } else {
        REQUIRE(entry != 0);
      }
      if (entry) ++used[at(entry - 1)];
    }
    for (std::int64_t i = 0; i < free; ++i) ++used[at(numbers()[i])];
    for (const int count : used) REQUIRE(count == 1);
  }
};

Bytes random_bytes(Random& random, std::int64_t count) {
  Bytes bytes = exactly(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(below(random, 3));
  return bytes;
}

bool goes_wrong(const Row& a, const Row& b) {
  return a.leaves[2] != b.leaves[0] && !a.leaves[kFlag][0];
}

void random_stores(Random& random, std::int64_t widest, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    Store store(random, 1 + below(random, 14), 1 + below(random, widest));
    const std::int64_t streams = 1 + below(random, 4);
    for (int turn = 0; turn < 10; ++turn) {
      Numbers slots(at(store.slots));
      std::iota(slots.begin(), slots.end(), 0);
      std::shuffle(slots.begin(), slots.end(), random);
      const std::int64_t n = 1 + below(random, store.slots);
      slots.resize(at(n));
      slots.shrink_to_fit();
      std::vector<Row> rows;
      Batch batch;
      batch.followers.assign(at(n), -1);
      std::map<std::int64_t, std::int64_t> last;  // place of the last row of each stream
      bool wrong = false;
      for (std::int64_t i = 0; i < n; ++i) {
        Row row;
        row.stream = below(random, streams);
        row.number = store.written + i;
        row.leaves = {random_bytes(random, store.size), Bytes(1, random() % 4 == 0),
                      random_bytes(random, store.size)};
        const auto known = store.newest.find(row.stream);
        const Row* earlier = nullptr;
        if (last.count(row.stream)) {
          earlier = &rows[at(last[row.stream])];
        } else if (known != store.newest.end()) {
          earlier = &store.model[at(known->second)];
        }
        if (earlier && random() % 4) row.leaves[0] = earlier->leaves[2];
        if (last.count(row.stream)) {
          wrong |= goes_wrong(*earlier, row);
          batch.followers[at(last[row.stream])] = i;
        } else if (earlier) {
          batch.newest.push_back(known->second);
          batch.first.push_back(i);
          batch.expected.push_back(static_cast<std::int64_t>(random() % 2));
          wrong |= batch.expected.back() && goes_wrong(*earlier, row);
        }
        last[row.stream] = i;
        rows.push_back(row);
      }
      std::vector<Bytes> memory;
      std::vector<const char*> addresses;
      for (std::size_t leaf = 0; leaf < 3; ++leaf) {
        Bytes all;
        for (const Row& one : rows) {
          all.insert(all.end(), one.leaves[leaf].begin(), one.leaves[leaf].end());
        }
        all.shrink_to_fit();
        memory.push_back(std::move(all));
      }
      for (Bytes& all : memory) addresses.push_back(address(all));
      const Store then = store;
      for (bool again = true; again;) {
        Linked core = store.core();
        REQUIRE(core.compare(addresses, batch, 2) == wrong);
        REQUIRE(core.compared() == n);
        const std::int64_t missing = core.write(slots, addresses, 2);
        again = missing > 0;
        REQUIRE(core.compared() == (again ? n : -1));
        if (again) {
          REQUIRE(store.root == then.root && store.own == then.own && store.map == then.map);
          REQUIRE(store.after == then.after && store.free == then.free);
          store.grow(missing);
        }
      }
      for (std::int64_t i = 0; i < n; ++i) store.model[at(slots[at(i)])] = rows[at(i)];
      for (auto one = store.newest.begin(); one != store.newest.end();) {
        const bool gone = std::count(slots.begin(), slots.end(), one->second) > 0;
        one = gone ? store.newest.erase(one) : std::next(one);
      }
      for (const auto& [stream, place] : last) store.newest[stream] = slots[at(place)];
      store.written += n;
      store.check();
      // Rows of one stream that were written one after the other know of each other.
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::int64_t next = batch.followers[i];
        const std::int64_t step = next < 0 ? 0 : slots[at(next)] - slots[i];
        REQUIRE(store.table(store.after).at(slots[i]) == step);
      }
      for (std::size_t k = 0; k < batch.newest.size(); ++k) {
        const std::int64_t slot = batch.newest[k];
        if (std::count(slots.begin(), slots.end(), slot)) continue;
        REQUIRE(slot + store.table(store.after).at(slot) == slots[at(batch.first[k])]);
      }
    }
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

void links_that_lead_nowhere(Random& random) {
  Store store(random, 4, 3);
  store.grow(4);
  std::vector<Bytes> row = {random_bytes(random, 3), Bytes(1, 0), random_bytes(random, 3)};
  std::vector<const char*> addresses;
  for (Bytes& leaf : row) addresses.push_back(address(leaf));
  const Batch alone{{-1}, {}, {}, {}};
  Bytes out = exactly(3);
  const std::int64_t index = 2;
  for (const std::int64_t step : {std::int64_t{-3}, std::int64_t{2}}) {
    for (Bytes* table : {&store.after, &store.before}) {
      Linked core = store.core();
      store.table(*table).put(2, step);
      if (table == &store.after) refused([&] { core.gather(&index, 1, {{address(out), 3}}, 1); });
      core.compare(addresses, alone, 1);
      refused([&] { core.write({2}, addresses, 1); });
      store.table(*table).put(2, 0);
    }
  }
  Linked core = store.core();
  refused([&] { core.compare(addresses, {{-1}, {1}, {0}, {0}}, 1); });  // slot 1 has no entry
}

int read_past_the_end(std::int64_t one) {
  Random random(1);
  Store store(random, 5, 64);
  std::vector<Bytes> row = {random_bytes(random, 64), Bytes(1, 0), random_bytes(random, 64)};
  std::vector<const char*> addresses;
  for (Bytes& leaf : row) addresses.push_back(address(leaf));
  Linked core = store.core();
  return core.compare(addresses, {{one}, {}, {}, {}}, 1) ? 1 : 0;
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
  Random random(13);
  random_stores(random, 6, 500);
  random_stores(random, 700, 60);
  random_stores(random, 400'000, 3);  // rows that threads share
  links_that_lead_nowhere(random);
  std::puts("all agree");
  return 0;
}
