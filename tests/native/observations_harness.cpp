// Drives csrc/observations.h alone, to be built with sanitizers: rows of several streams, placed in
// any slots, against plain vectors of whole rows. Exits with 0 if all agree. `--break` reads a
// batch past its end: that must end the program, or the sanitizers are not on.
#include "observations.h"  // first, so that it has to include what it uses
#include "harness.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using replaykit::Observations;
using replaykit::Side;
using Bytes = std::vector<char>;
using Int = std::int64_t;
using List = Observations::List;

std::size_t at(Int place) { return static_cast<std::size_t>(place); }

// Memory of exactly these bytes.
Bytes exactly(Int count) {
  Bytes bytes(at(count), 0);
  bytes.shrink_to_fit();
  return bytes;
}

// The leaves of a row: an observation, a flag that ends episodes, and the next observation.
constexpr Int kRoot = 0, kFlag = 1, kNext = 2;

struct Row {
  Int stream = -1, number = -1;  // number: when it was written; -1 for never
  Bytes leaves[3];
};

// Rows as columns, one after another.
struct Batch {
  Bytes columns[3];

  Batch(const std::vector<Row>& rows, Int size) {
    for (const Int leaf : {kRoot, kFlag, kNext}) {
      columns[leaf] = exactly(static_cast<Int>(rows.size()) * (leaf == kFlag ? 1 : size));
      auto to = columns[leaf].begin();
      for (const Row& row : rows) to = std::copy(row.leaves[leaf].begin(), row.leaves[leaf].end(), to);
    }
  }

  Observations::Addresses addresses() const {
    return {columns[kRoot].data(), columns[kFlag].data(), columns[kNext].data()};
  }
};

struct Store {
  Int slots, lanes, size, overflow = 0, written = 0, stored = 0;
  Bytes root, flag, own;
  std::vector<std::int32_t> references;
  std::vector<Row> model;
  // The object that writes, and that of another process, which follows.
  Observations core, other;

  Store(Random& random, Int rows, Int lanes_, Int size_)
      : slots(rows), lanes(lanes_), size(size_), root(exactly(rows * size)), flag(exactly(rows)),
        references(at(2 * rows), 0), model(at(rows)),
        core({size, 1, size}, {-1, -1, 0}, {1}, {}, rows, lanes_), other(core) {
    references.shrink_to_fit();
    core.share();
    other.share();
    grow(below(random, 2));
  }

  void grow(Int more) {
    Bytes larger = exactly((overflow + more) * size);
    std::copy(own.begin(), own.end(), larger.begin());
    own = std::move(larger);
    overflow += more;
    const auto base = [](Bytes& bytes) { return reinterpret_cast<Int>(bytes.data()); };
    for (Observations* one : {&core, &other}) {
      one->point({base(root), base(flag), base(own)}, {size, 1, size}, references.data(), overflow);
    }
  }

  // Every row has its two observations, and no entry has two references of a kind.
  void check() const {
    List index;
    for (Int slot = 0; slot < slots; ++slot) {
      if (model[at(slot)].number >= 0) index.push_back(slot);
    }
    index.shrink_to_fit();
    const auto n = static_cast<Int>(index.size());
    std::vector<int> used[2];
    for (auto& kind : used) kind.assign(at(slots + overflow), 0);
    for (const int kind : {Observations::kObservation, Observations::kNext}) {
      Bytes got = exactly(n * size);
      const Side side{got.data(), size};
      core.gather(index.data(), n, kind, &side, 2);
      for (Int i = 0; i < n; ++i) {
        const Bytes& want = model[at(index[at(i)])].leaves[kind == 0 ? kRoot : kNext];
        REQUIRE(std::equal(want.begin(), want.end(), got.begin() + i * size));
        const Int reference = references[at(2 * index[at(i)] + kind)];
        REQUIRE(reference != 0);
        ++used[kind][at(reference > 0 ? reference - 1 : slots - 1 - reference)];
      }
    }
    Int alone = 0;
    for (std::size_t entry = 0; entry < used[0].size(); ++entry) {
      REQUIRE(used[0][entry] <= 1 && used[1][entry] <= 1);
      alone += used[1][entry] && !used[0][entry];
    }
    REQUIRE(core.alone() == alone);
  }

  // Lets the other process follow a write, and sometimes go on writing.
  void follow(Random& random, const List& rows) {
    other.follow(rows, stored);
    REQUIRE(core.alone() == other.alone());
    if (random() % 2) std::swap(core, other);
  }
};

Bytes random_bytes(Random& random, Int count) {
  Bytes bytes = exactly(count);
  for (char& byte : bytes) byte = static_cast<char>(below(random, 2));
  return bytes;
}

Row random_row(Random& random, Int stream, Int size) {
  Row row;
  row.stream = stream;
  for (const Int leaf : {kRoot, kNext}) row.leaves[leaf] = random_bytes(random, size);
  row.leaves[kFlag] = Bytes(1, static_cast<char>(random() % 4 == 0));
  return row;
}

// Plans the batch, provides missing entries, and writes it. Half of the plans are dropped once.
void write(Random& random, Store& store, const Batch& batch, const List& slots,
           const std::vector<std::uint8_t>& keep) {
  Int missing = store.core.plan(slots, keep);
  if (missing == 0 && random() % 2) {
    store.core.forget();
    store.check();
    throw std::runtime_error("begin again");
  }
  if (missing > 0) {
    store.grow(missing + below(random, 2));
    missing = store.core.plan(slots, keep);
  }
  REQUIRE(missing == 0);
  const Int planned = store.core.planned();
  List entries(at(planned)), sources(at(planned));
  store.core.fresh(entries.data(), sources.data());
  const auto [least, most] = store.core.span();
  for (const Int entry : entries) REQUIRE(entry < 0 || (least <= entry && entry <= most));
  store.core.write(batch.addresses(), 2);
}

void random_stores(Random& random, Int widest, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const Int lanes = 1 + below(random, 2);
    Store store(random, lanes * (1 + below(random, 7)), lanes, 1 + below(random, widest));
    const Int streams = 1 + below(random, 4);
    for (int turn = 0; turn < 12; ++turn) {
      List slots(at(store.slots));
      std::iota(slots.begin(), slots.end(), 0);
      // The rows in use are the first ones. New rows of lanes come together.
      const Int limit = std::min(store.slots, store.stored + lanes * (1 + below(random, 3)));
      slots.resize(at(limit));
      std::shuffle(slots.begin(), slots.end(), random);
      for (Int slot = store.stored; slot < limit; ++slot) {
        std::iter_swap(slots.begin() + (slot - store.stored),
                       std::find(slots.begin(), slots.end(), slot));
      }
      slots.resize(at(std::max(limit - store.stored, 1 + below(random, limit))));
      slots.shrink_to_fit();
      const auto n = static_cast<Int>(slots.size());
      std::vector<Row> rows;
      List before, after;
      std::vector<std::uint8_t> keep(at(n), 0);
      const bool placed = random() % 2;
      int want = 0;
      for (Int i = 0; i < n; ++i) {
        Row row = random_row(random, below(random, streams), store.size);
        // The row before it in its stream, in the batch or else in a slot. A wrong row does no
        // harm, so sometimes it is any row.
        Int earlier = -1;
        for (Int other = 0; other < i; ++other) {
          if (rows[at(other)].stream == row.stream) earlier = other;
        }
        const Row* known = earlier < 0 ? nullptr : &rows[at(earlier)];
        if (earlier < 0 && store.stored > 0 && random() % 4) {
          const Int slot = below(random, store.stored);
          earlier = -2 - slot;
          known = &store.model[at(slot)];
        }
        if (known && random() % 4) row.leaves[kRoot] = known->leaves[kNext];
        if (known && known->leaves[kNext] != row.leaves[kRoot] && !known->leaves[kFlag][0]) {
          want |= earlier >= 0 ? 1 : 2;
        }
        before.push_back(earlier);
        const Int later = random() % 3 && store.stored > 0 ? below(random, store.stored) : -1;
        if (later >= 0 && random() % 4) row.leaves[kNext] = store.model[at(later)].leaves[kRoot];
        if (placed) after.push_back(later);
        const Int slot = slots[at(i)];
        if (slot < store.stored && random() % 6 == 0) {
          keep[at(i)] = static_cast<std::uint8_t>(1 + below(random, 3));
          const Row& old = store.model[at(slot)];
          if (keep[at(i)] & 1) row.leaves[kRoot] = old.leaves[kRoot];
          if (keep[at(i)] & 2) row.leaves[kNext] = old.leaves[kNext];
        }
        row.number = store.written++;
        rows.push_back(row);
      }
      const Batch batch(rows, store.size);
      const bool kept = std::any_of(keep.begin(), keep.end(), [](int bits) { return bits != 0; });
      for (bool done = false; !done;) {
        store.core.begin(before, after);
        const int wrong = store.core.compare(batch.addresses(), 2);
        if (!kept) REQUIRE(wrong == want);
        try {
          write(random, store, batch, slots, keep);
          done = true;
        } catch (const std::runtime_error&) {
        }
      }
      for (Int i = 0; i < n; ++i) store.model[at(slots[at(i)])] = rows[at(i)];
      store.stored = limit;
      store.follow(random, slots);
      store.check();
      if (random() % 8 == 0) store.core.derive(store.stored);
      if (random() % 16 == 0) {
        store.core.clear();
        store.other.clear();
        store.model.assign(at(store.slots), Row());
        std::fill(store.references.begin(), store.references.end(), 0);
        store.stored = 0;
      }
    }
  }
}

// A ring of lanes whose rows follow one another. Each observation is stored once.
void runs(Random& random, Int slots, Int lanes, int batches) {
  Store store(random, slots * lanes, lanes, 3);
  std::vector<Bytes> coming(at(lanes), exactly(3));
  Int cursor = 0;
  for (int turn = 0; turn < batches; ++turn) {
    const Int n = 1 + below(random, slots - cursor);
    std::vector<Row> rows;
    List places;
    for (Int i = 0; i < n * lanes; ++i) {
      Row row = random_row(random, i % lanes, 3);
      row.leaves[kFlag][0] = 0;
      row.leaves[kRoot] = coming[at(i % lanes)];
      coming[at(i % lanes)] = row.leaves[kNext];
      row.number = store.written++;
      places.push_back(cursor * lanes + i);
      rows.push_back(row);
    }
    const Int newest = turn == 0 ? -1 : (cursor + slots - 1) % slots * lanes;
    store.core.begin_run(n * lanes, newest);
    const Batch batch(rows, 3);
    REQUIRE(store.core.compare(batch.addresses(), 1) == 0);
    const Int missing = store.core.plan(places, {});
    if (missing > 0) {
      REQUIRE(store.overflow + missing <= lanes + 1);
      store.grow(missing);
      REQUIRE(store.core.plan(places, {}) == 0);
    }
    store.core.write(batch.addresses(), 1);
    for (Int i = 0; i < n * lanes; ++i) store.model[at(places[at(i)])] = rows[at(i)];
    cursor = (cursor + n) % slots;
    store.check();
  }
}

int read_past_the_end(Random& random) {
  Store store(random, 4, 1, 8);
  const Batch batch({random_row(random, 0, 8)}, 8);
  store.core.begin({-1, 0}, {});
  return store.core.compare(batch.addresses(), 1) > 3;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string argument = count > 1 ? arguments[1] : "";
  Random random(5);
  if (argument == "--break") return read_past_the_end(random);
  if (!argument.empty()) {
    std::fprintf(stderr, "unknown argument %s\n", arguments[1]);
    return 3;
  }
  random_stores(random, 1, 150);
  random_stores(random, 3, 300);
  random_stores(random, 700, 20);
  for (Int slots = 1; slots < 9; ++slots) runs(random, slots, 1 + slots % 3, 40);
  std::puts("all agree");
  return 0;
}
