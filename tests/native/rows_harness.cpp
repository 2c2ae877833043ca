// Drives csrc/rows.h and csrc/threads.h alone, to be built with sanitizers: gather, scatter, rings and
// mapped rows of random tables against loops over bytes, and loops shared by threads, at the same
// time and after a fork. Exits with 0 if all agree. `--break` gathers one row past the end, which
// must end the program, `--race` writes from two threads without a lock, `--pool` runs the threads
// alone, and `--forks` alone forks: the thread sanitizer cannot follow a fork, and the allocator of
// the address sanitizer can hang in a child if another thread was allocating.
#include "steps_ahead.h"  // first, so that it has to include what it uses
#include "harness.h"
#include "reads.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

// In place of OpenMP, which the thread sanitizer does not know. `run_parts` finds it by its names.
thread_local int part = 0, parts = 1;

extern "C" int omp_get_thread_num() { return part; }
extern "C" int omp_get_num_threads() { return parts; }
extern "C" void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned) {
  const auto run = [=](int number) {
    part = number, parts = static_cast<int>(threads);
    work(data);
  };
  std::vector<std::thread> others;
  for (int number = 1; number < static_cast<int>(threads); ++number) others.emplace_back(run, number);
  run(0);
  for (std::thread& other : others) other.join();
}

namespace {

using replaykit::Field;
using replaykit::Side;
using replaykit::Table;

using Bytes = std::vector<unsigned char>;

// Memory of exactly the size needed, so that a byte too far is out of bounds.
Bytes some_bytes(Random& random, std::int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count));
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  bytes.shrink_to_fit();
  return bytes;
}

char* address(Bytes& bytes) { return reinterpret_cast<char*>(bytes.data()); }

// A table in memory of its own, and memory for a batch beside it.
struct Case {
  std::int64_t rows = 0;
  std::int64_t batch = 0;
  std::vector<std::int64_t> bytes, strides, side_strides;
  std::vector<Bytes> columns, sides;

  Case(Random& random, std::int64_t rows_, std::int64_t batch_, std::int64_t widest)
      : rows(rows_), batch(batch_) {
    const std::int64_t width = 1 + below(random, 5);
    for (std::int64_t f = 0; f < width; ++f) {
      const bool known = random() % 2 != 0;  // a size that is copied in its own way, or not
      const std::int64_t size =
          known ? std::int64_t{1} << below(random, 6) >> 1 : below(random, widest + 1);
      bytes.push_back(size);
      strides.push_back(size + below(random, 9));
      side_strides.push_back(size + below(random, 9));
      columns.push_back(some_bytes(random, needed(rows, strides.back(), size)));
      sides.push_back(some_bytes(random, needed(batch, side_strides.back(), size)));
    }
  }

  static std::int64_t needed(std::int64_t count, std::int64_t stride, std::int64_t size) {
    return count ? (count - 1) * stride + size : 0;
  }

  Table table() {
    std::vector<Field> fields;
    for (std::size_t f = 0; f < bytes.size(); ++f) {
      // A field without bytes may lie nowhere.
      fields.push_back({bytes[f] ? address(columns[f]) : nullptr, strides[f], bytes[f]});
    }
    return Table(fields, rows);
  }

  std::vector<Side> as_sides() {
    std::vector<Side> made;
    for (std::size_t f = 0; f < bytes.size(); ++f) {
      made.push_back({bytes[f] ? address(sides[f]) : nullptr, side_strides[f]});
    }
    return made;
  }
};

// Byte by byte: row `i` of the batch from, or to, row `row` of the table.
void move(Case& its, std::int64_t i, std::int64_t row, bool in) {
  for (std::size_t f = 0; f < its.bytes.size(); ++f) {
    for (std::int64_t b = 0; b < its.bytes[f]; ++b) {
      auto& stored = its.columns[f][static_cast<std::size_t>(row * its.strides[f] + b)];
      auto& given = its.sides[f][static_cast<std::size_t>(i * its.side_strides[f] + b)];
      (in ? stored : given) = in ? given : stored;
    }
  }
}

void require_same(const Case& a, const Case& b) {
  REQUIRE(a.columns == b.columns);
  REQUIRE(a.sides == b.sides);
}

void random_tables(Random& random, std::int64_t widest, std::int64_t most, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const std::int64_t rows = 1 + below(random, most), batch = below(random, 2 * most);
    const int threads = 1 + static_cast<int>(random() % 3);
    Case got(random, rows, batch, widest);
    std::vector<std::int64_t> index(static_cast<std::size_t>(batch));
    for (std::int64_t& at : index) at = below(random, rows);
    index.shrink_to_fit();
    REQUIRE(Table::first_outside(index.data(), batch, rows) == batch);
    Case want = got;
    for (std::int64_t i = 0; i < batch; ++i) {
      move(want, i, index[static_cast<std::size_t>(i)], false);
    }
    if (round % 3 == 0) {
      got.table().gather(index.data(), batch, got.as_sides(), threads);
    } else {
      got.table().gather_mapped(index.data(), batch, got.as_sides(), threads, round % 3 == 1);
    }
    require_same(got, want);

    // Distinct slots: of two threads nobody knows which comes last.
    std::vector<std::int64_t> slots(static_cast<std::size_t>(rows));
    for (std::int64_t i = 0; i < rows; ++i) slots[static_cast<std::size_t>(i)] = i;
    std::shuffle(slots.begin(), slots.end(), random);
    const std::int64_t written = std::min(rows, batch);
    for (std::int64_t i = 0; i < written; ++i) {
      move(want, i, slots[static_cast<std::size_t>(i)], true);
    }
    got.table().scatter(slots.data(), written, got.as_sides(), threads);
    require_same(got, want);

    const std::int64_t first = below(random, rows);
    for (std::int64_t i = 0; i < written; ++i) move(want, i, (first + i) % rows, true);
    got.table().scatter_ring(first, written, got.as_sides(), threads);
    require_same(got, want);
  }
}

void of_a_slot_named_twice_the_last_row_stays(Random& random) {
  Case got(random, 4, 6, 40), want = got;
  const std::vector<std::int64_t> slots = {1, 3, 1, 1, 3, 0};
  for (std::int64_t i = 0; i < 6; ++i) move(want, i, slots[static_cast<std::size_t>(i)], true);
  got.table().scatter(slots.data(), 6, got.as_sides(), 1);
  require_same(got, want);
}

void positions_outside(Random& random) {
  for (int round = 0; round < 500; ++round) {
    const std::int64_t limit = below(random, 9), n = below(random, 40);
    std::vector<std::int64_t> index(static_cast<std::size_t>(n));
    for (std::int64_t& at : index) at = limit ? below(random, limit) : 0;
    std::int64_t first = limit ? n : 0;
    if (n && random() % 2) {
      constexpr std::int64_t kWrong[] = {-1, 0, INT64_MIN, INT64_MAX};
      const std::int64_t place = below(random, n), wrong = kWrong[random() % 4];
      index[static_cast<std::size_t>(place)] = wrong ? wrong : limit;
      first = limit ? place : 0;
    }
    REQUIRE(Table::first_outside(index.data(), n, limit) == std::min(first, n));
  }
}

// Rows of a file, whose pages are not in memory at first.
void rows_of_a_file(Random& random) {
  char name[] = "/tmp/replaykit-rows-XXXXXX";
  const int file = mkstemp(name);
  REQUIRE(file >= 0);
  unlink(name);
  const std::int64_t stride = 10'000, rows = 300, bytes = 9'001;
  const Bytes content = some_bytes(random, rows * stride);
  REQUIRE(write(file, content.data(), content.size()) == static_cast<ssize_t>(content.size()));
  fsync(file);
#ifdef POSIX_FADV_DONTNEED
  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
#endif
  void* mapped = mmap(nullptr, content.size(), PROT_READ, MAP_SHARED, file, 0);
  REQUIRE(mapped != MAP_FAILED);
  const Table table({{static_cast<char*>(mapped) + 7, stride, bytes}}, rows);
  for (const bool cold : {true, false, true}) {
    std::vector<std::int64_t> index(200);
    for (std::int64_t& at : index) at = below(random, rows);
    Bytes got(static_cast<std::size_t>(200 * bytes));
    table.gather_mapped(index.data(), 200, {{address(got), bytes}}, 2, cold);
    for (std::size_t i = 0; i < index.size(); ++i) {
      const auto start = static_cast<std::size_t>(index[i] * stride + 7);
      REQUIRE(!std::memcmp(&got[i * 9'001], &content[start], 9'001));
    }
  }
  munmap(mapped, content.size());
  close(file);
}

// -- threads --------------------------------------------------------------------------------------

// Every number once, whoever takes it.
void share(std::int64_t n, int threads) {
  const auto size = static_cast<std::size_t>(n);
  std::unique_ptr<std::atomic<int>[]> seen(new std::atomic<int>[size]());
  std::vector<std::int64_t> plain(size, 0);
  replaykit::run_parts(n, threads, [&](std::int64_t begin, std::int64_t end) {
    REQUIRE(0 <= begin && begin <= end && end <= n);
    for (std::int64_t i = begin; i < end; ++i) {
      seen[static_cast<std::size_t>(i)].fetch_add(1, std::memory_order_relaxed);
      plain[static_cast<std::size_t>(i)] = i * i;  // what other threads wrote is there afterwards
    }
  });
  for (std::int64_t i = 0; i < n; ++i) {
    REQUIRE(seen[static_cast<std::size_t>(i)].load(std::memory_order_relaxed) == 1);
    REQUIRE(plain[static_cast<std::size_t>(i)] == i * i);
  }
}

void shared_loops() {
  REQUIRE(replaykit::openmp() != nullptr);
  for (const std::int64_t n : {0, 1, 5, 1000}) {
    for (const int threads : {0, 1, 2, 5, 3}) share(n, threads);
  }
}

void loops_at_the_same_time(int rounds) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([caller, rounds] {
      for (int round = 0; round < rounds; ++round) share(200 + caller, 1 + (round + caller) % 4);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// A child has none of its parent's threads, and locks in whatever state they were.
void loops_after_a_fork() {
  std::atomic<bool> stop{false};
  std::thread busy([&stop] {
    while (!stop) share(500, 3);
  });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      REQUIRE(replaykit::openmp() == nullptr);
      share(1000, 4);
      share(10, 2);
      std::_Exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  busy.join();
}

// Gathers that go on by themselves are waited for, given up, and waited for by who writes, in any
// order; what was waited for is right, and nothing is touched afterwards.
void gathers_begun(int turns) {
  constexpr std::int64_t kRows = 300, kBytes = 4096;
  Bytes column(kRows * kBytes);
  for (std::int64_t row = 0; row < kRows; ++row) {
    std::memset(column.data() + row * kBytes, static_cast<int>(row % 251), kBytes);
  }
  Random random(static_cast<std::uint64_t>(turns));
  const Table table({{address(column), kBytes, kBytes}}, kRows);
  auto readers = std::make_shared<replaykit::Readers>(replaykit::this_process());
  for (int turn = 0; turn < turns; ++turn) {
    std::vector<std::shared_ptr<replaykit::Read>> reads;
    std::vector<Bytes> to;
    std::vector<std::vector<std::int64_t>> chosen;
    for (int one = 0; one < 3; ++one) {
      std::vector<std::int64_t> index;
      for (std::int64_t i = 1 + below(random, 400); i > 0; --i) index.push_back(below(random, kRows));
      to.emplace_back(index.size() * kBytes);
      chosen.push_back(index);
      const std::vector<replaykit::Side> sides = {{address(to.back()), kBytes}};
      const int threads = 1 + static_cast<int>(below(random, 3));
      reads.push_back(std::make_shared<replaykit::Read>(table, index, sides, threads, readers));
      replaykit::Reading::begin(reads.back());
    }
    if (below(random, 2)) replaykit::Reading::await_all(*readers);
    for (std::size_t one = 0; one < reads.size(); ++one) {
      if (!below(random, 3)) {
        replaykit::Reading::abandon(*reads[one]);
        Bytes().swap(to[one]);
        continue;
      }
      replaykit::Reading::finish(*reads[one]);
      for (std::size_t i = 0; i < chosen[one].size(); ++i) {
        const auto expected = static_cast<char>(chosen[one][i] % 251);
        REQUIRE(static_cast<char>(to[one][i * kBytes]) == expected);
        REQUIRE(static_cast<char>(to[one][(i + 1) * kBytes - 1]) == expected);
      }
    }
    replaykit::Reading::await_all(*readers);
    REQUIRE(readers->under_way == 0);
    std::memset(column.data(), 0, kBytes);  // a write: nobody reads
  }
}

void several_begin_gathers(int turns) {
  std::thread one([turns] { gathers_begun(turns); });
  std::thread other([turns] { gathers_begun(turns + 1); });
  gathers_begun(turns + 2);
  one.join();
  other.join();
}

// What was begun before a fork is done by the child itself, and its own by threads of its own.
void gathers_after_a_fork() {
  constexpr std::int64_t kRows = 2000, kBytes = 2048;
  Bytes column(kRows * kBytes, 7), to(kRows * kBytes, 0);
  const Table table({{address(column), kBytes, kBytes}}, kRows);
  std::vector<std::int64_t> index(kRows, 5);
  const std::vector<replaykit::Side> sides = {{address(to), kBytes}};
  for (int round = 0; round < 20; ++round) {
    auto readers = std::make_shared<replaykit::Readers>(replaykit::this_process());
    auto read = std::make_shared<replaykit::Read>(table, index, sides, 2, readers);
    replaykit::Reading::begin(read);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      replaykit::Reading::await_all(*readers);
      replaykit::Reading::finish(*read);
      for (const auto byte : to) REQUIRE(static_cast<int>(byte) == 7);
      gathers_begun(3);
      std::_Exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    replaykit::Reading::finish(*read);
  }
}

// Sums, and what rows say of the last step, against loops over bytes; and rows that are none.
void steps_ahead(Random& random) {
  using replaykit::StepsAhead;
  for (int turn = 0; turn < 60; ++turn) {
    const std::int64_t lanes = 1 + below(random, 3), slots = 1 + below(random, 40);
    const std::int64_t rows = lanes * slots, n = below(random, 90), most = 1 + below(random, 9);
    Case got(random, rows, n, 90);
    Bytes column(static_cast<std::size_t>(rows * 9));
    std::vector<float> values;
    for (std::int64_t row = 0; row < rows; ++row) {
      values.push_back(static_cast<float>(below(random, 17) - 8));
      std::memcpy(column.data() + row * 9, &values.back(), sizeof(float));
      column[static_cast<std::size_t>(row * 9 + 8)] = random() % 2 != 0;
    }
    std::vector<std::int64_t> index, time, last;
    std::vector<double> discounts;
    for (std::int64_t i = 0; i < most; ++i) discounts.push_back(static_cast<double>(i));
    for (std::int64_t i = 0; i < n; ++i) {
      index.push_back(below(random, rows));
      time.push_back(below(random, 99));
      last.push_back(time.back() + below(random, slots));
    }
    Case want = got;
    const auto size = static_cast<std::size_t>(n);
    std::vector<float> sums(size), after(size);
    std::vector<std::int64_t> used(size), ends(size);
    const std::unique_ptr<bool[]> open(new bool[size]());
    const bool flagged = random() % 2 != 0;
    const auto numbers = [](const std::vector<std::int64_t>& all) {
      return replaykit::Numbers{reinterpret_cast<const char*>(all.data()), 8};
    };
    std::vector<Field> fields;
    for (std::size_t f = 0; f < got.bytes.size(); ++f) {
      fields.push_back({got.bytes[f] ? address(got.columns[f]) : nullptr, got.strides[f],
                        got.bytes[f]});
    }
    const StepsAhead plan({address(column), 9, 4},
                          {flagged ? address(column) + 8 : nullptr, 9, 1}, fields, rows, lanes,
                          0.5, discounts);
    const StepsAhead::Answers answers = {reinterpret_cast<char*>(sums.data()),
                                         reinterpret_cast<char*>(after.data()), used.data(),
                                         ends.data(), flagged ? open.get() : nullptr};
    if (n > 0) {
      const auto at = static_cast<std::size_t>(below(random, n));
      const std::int64_t kept = index[at];
      for (const std::int64_t wrong : {std::int64_t{-1}, rows, INT64_MAX, INT64_MIN}) {
        index[at] = wrong;
        REQUIRE(plan.run(numbers(index), numbers(time), numbers(last), n, answers,
                         got.as_sides()) == static_cast<std::int64_t>(at));
        require_same(got, want);
      }
      index[at] = kept;
    }
    REQUIRE(plan.run(numbers(index), numbers(time), numbers(last), n, answers, got.as_sides()) == n);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const std::int64_t steps = std::min(last[at] - time[at], most - 1);
      double sum = 0, weight = 1;
      for (std::int64_t k = 0; k <= steps; ++k, weight /= 2) {
        sum += weight * values[static_cast<std::size_t>((index[at] + k * lanes) % rows)];
      }
      REQUIRE(sums[at] == static_cast<float>(sum) && after[at] == static_cast<float>(steps));
      REQUIRE(used[at] == steps + 1 && ends[at] == time[at] + steps);
      const std::int64_t end = (index[at] + steps * lanes) % rows;
      REQUIRE(!flagged || open[at] == (column[static_cast<std::size_t>(end * 9 + 8)] == 0));
      if (steps > 0) move(want, i, end, false);
    }
    require_same(got, want);
  }
}

void frames_of_rows(Random& random) {
  for (int turn = 0; turn < 80; ++turn) {
    const std::int64_t lanes = 1 + below(random, 3), slots = 1 + below(random, 20);
    const std::int64_t count = 1 + below(random, 5), n = below(random, 90);
    const bool zero = random() % 2 != 0;
    Case its(random, lanes * slots, 0, turn % 4 ? 40 : 9000);
    std::vector<std::int64_t> index, reach;
    for (std::int64_t i = 0; i < n; ++i) {
      index.push_back(below(random, lanes * slots));
      reach.push_back(below(random, slots));
    }
    std::vector<Side> sides;
    std::vector<Bytes> got, want;
    for (const std::int64_t bytes : its.bytes) {
      for (std::int64_t j = 0; j < count; ++j) got.push_back(some_bytes(random, n * bytes));
    }
    want = got;
    for (std::size_t s = 0; s < got.size(); ++s) {
      const std::int64_t bytes = its.bytes[s / static_cast<std::size_t>(count)];
      sides.push_back({address(got[s]), bytes});
      const Bytes& column = its.columns[s / static_cast<std::size_t>(count)];
      const std::int64_t stride = its.strides[s / static_cast<std::size_t>(count)];
      const std::int64_t age = count - 1 - static_cast<std::int64_t>(s) % count;
      for (std::int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const std::int64_t back = std::min(age, reach[at]) * lanes;
        const std::int64_t row = (index[at] - back + lanes * slots) % (lanes * slots);
        for (std::int64_t b = 0; b < bytes; ++b) {
          want[s][static_cast<std::size_t>(i * bytes + b)] =
              zero && age > reach[at] ? 0 : column[static_cast<std::size_t>(row * stride + b)];
        }
      }
    }
    const int threads = 1 + static_cast<int>(random() % 2);
    its.table().frames(index.data(), reach.data(), n, lanes, count, zero, sides, threads);
    REQUIRE(got == want);
  }
}

void rows_next_to_each_other(Random& random) {
  for (int turn = 0; turn < 50; ++turn) {
    const std::int64_t n = below(random, 30);
    const std::int64_t sizes[] = {below(random, 20), below(random, 20)};
    const std::int64_t strides[] = {sizes[0] + below(random, 5), sizes[1] + below(random, 5)};
    Bytes parts[] = {some_bytes(random, Case::needed(n, strides[0], sizes[0])),
                     some_bytes(random, Case::needed(n, strides[1], sizes[1]))};
    Bytes to = some_bytes(random, n * (sizes[0] + sizes[1]));
    replaykit::join({address(parts[0]), strides[0]}, sizes[0], {address(parts[1]), strides[1]},
                    sizes[1], n, address(to));
    std::size_t at = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      for (int side = 0; side < 2; ++side) {
        for (std::int64_t b = 0; b < sizes[side]; ++b) {
          REQUIRE(to[at++] == parts[side][static_cast<std::size_t>(i * strides[side] + b)]);
        }
      }
    }

  }
}

int gather_past_the_end(std::int64_t one) {
  Random random(1);
  Bytes column = some_bytes(random, 64), to(16);
  const Table table({{address(column), 16, 16}}, 4);
  const std::int64_t index = 3 + one;
  table.gather(&index, 1, {{address(to), 16}}, 1);
  return 0;
}

int write_without_a_lock() {
  std::int64_t sum = 0;
  std::thread other([&sum] { for (int i = 0; i < 10'000; ++i) ++sum; });
  for (int i = 0; i < 10'000; ++i) ++sum;
  other.join();
  volatile std::int64_t seen = sum;
  static_cast<void>(seen);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string argument = count > 1 ? arguments[1] : "";
  if (argument == "--break") {
    volatile std::int64_t one = 1;
    return gather_past_the_end(one);
  }
  if (argument == "--race") return write_without_a_lock();
  const bool forks = argument == "--forks";
  if (!argument.empty() && argument != "--pool" && !forks) {
    std::fprintf(stderr, "unknown argument %s\n", arguments[1]);
    return 3;
  }
  if (argument.empty()) {
    Random random(7);
    random_tables(random, 40, 60, 400);
    random_tables(random, 700, 300, 20);       // rows beyond what is prefetched
    random_tables(random, 60'000, 60, 10);     // batches that threads share
    of_a_slot_named_twice_the_last_row_stays(random);
    positions_outside(random);
    rows_of_a_file(random);
    steps_ahead(random);
    frames_of_rows(random);
    rows_next_to_each_other(random);
  }
  shared_loops();
  loops_at_the_same_time(150);
  several_begin_gathers(60);
  if (forks) gathers_after_a_fork();
  if (forks) loops_after_a_fork();
  std::puts("all agree");
  return 0;
}
