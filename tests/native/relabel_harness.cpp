// Drives csrc/relabel.h alone, to be built with sanitizers: goals drawn from random rings and written
// over random batches against loops over doubles. Exits with 0 if all agree. `--break` reads a column
// that is one row shorter than it says, which must end the program.
#include "relabel.h"  // first, so that it has to include what it uses
#include "harness.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

using replaykit::Numbers;
using replaykit::OwnRows;


template <typename Item>
std::vector<Item> exact(std::int64_t count) {
  std::vector<Item> items(static_cast<std::size_t>(count));
  items.shrink_to_fit();
  return items;
}

// Small whole numbers: goals are reached now and then.
template <typename Number>
std::vector<Number> some(Random& random, std::int64_t count) {
  std::vector<Number> numbers = exact<Number>(count);
  for (Number& one : numbers) one = static_cast<Number>(below(random, 2));
  return numbers;
}

template <typename Number>
char* bytes(std::vector<Number>& numbers) {
  return reinterpret_cast<char*>(numbers.data());
}

template <typename Number>
void one_case(Random& random, bool shorter) {
  const std::int64_t item = sizeof(Number);
  const std::int64_t slots = 1 + below(random, 50), width = shorter ? 3 : below(random, 4);
  const std::int64_t gap = width + below(random, 3), n = shorter ? 400 : below(random, 700);
  std::vector<Number> column =
      some<Number>(random, shorter ? (slots - 1) * gap : (slots - 1) * gap + width);
  const std::int64_t newest = slots + below(random, 200);  // stored: newest - slots < time <= newest
  std::vector<std::int64_t> low = exact<std::int64_t>(n), last = low;
  std::vector<double> chances = exact<double>(n), draws = chances;
  std::uniform_real_distribution<double> uniform(0, 1);
  for (std::size_t i = 0; i < low.size(); ++i) {
    low[i] = newest - below(random, slots);
    last[i] = low[i] + below(random, newest - low[i] + 1);
    chances[i] = uniform(random);
    draws[i] = below(random, 20) ? uniform(random) : 0;
  }
  std::vector<std::uint8_t> chosen = exact<std::uint8_t>(n);
  std::vector<Number> goals = exact<Number>(n * width);
  const auto as_numbers = [](const std::vector<std::int64_t>& times) {
    return Numbers{reinterpret_cast<const char*>(times.data()), 8};
  };
  REQUIRE(replaykit::later_goals(chances.data(), draws.data(), n, 0.7, as_numbers(low),
                                 as_numbers(last), {bytes(column), gap * item, width * item, slots},
                                 chosen.data(), bytes(goals)) == n);
  for (std::int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    REQUIRE(chosen[at] == (chances[at] < 0.7));
    const double count = static_cast<double>(last[at] - low[at] + 1);
    const std::int64_t slot = (low[at] + static_cast<std::int64_t>(draws[at] * count)) % slots;
    for (std::int64_t k = 0; k < width; ++k) {
      REQUIRE(goals[static_cast<std::size_t>(i * width + k)] ==
              column[static_cast<std::size_t>(slot * gap + k)]);
    }
  }

  // A batch of records: what was achieved, both goals, the reward.
  const std::int64_t wide = 3 * width + 1, stride = wide * item;
  std::vector<Number> batch = some<Number>(random, n * wide);
  for (std::int64_t i = 0; i < n; ++i) batch[static_cast<std::size_t>((i + 1) * wide - 1)] = 7;
  const std::vector<Number> before = batch;
  const OwnRows to[2] = {{bytes(batch) + width * item, stride},
                         {bytes(batch) + 2 * width * item, stride}};
  replaykit::relabel<Number>(chosen.data(), n, width, 0.05, {bytes(goals), width * item},
                             {bytes(batch), stride}, to,
                             {bytes(batch) + 3 * width * item, stride});
  for (std::int64_t i = 0; i < n; ++i) {
    const Number* now = batch.data() + i * wide;
    const Number* old = before.data() + i * wide;
    const Number* goal = goals.data() + i * width;
    const bool own = chosen[static_cast<std::size_t>(i)] != 0;
    bool same = true;
    for (std::int64_t k = 0; k < width; ++k) {
      REQUIRE(now[k] == old[k]);
      REQUIRE(now[width + k] == (own ? goal[k] : old[width + k]));
      REQUIRE(now[2 * width + k] == (own ? goal[k] : old[2 * width + k]));
      same = same && old[k] == goal[k];
    }
    REQUIRE(now[3 * width] == (own ? (same ? Number{0} : Number{-1}) : Number{7}));
  }
}

void refusals() {
  const double chance = 0, draws[] = {1, -0.5, 0, 0};
  const std::int64_t low[] = {0, 0, 2, -1}, last[] = {0, 0, 1, 0};
  float column = 1, goal = 2;
  std::uint8_t chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const Numbers from{reinterpret_cast<const char*>(low + i), 8};
    const Numbers to{reinterpret_cast<const char*>(last + i), 8};
    REQUIRE(replaykit::later_goals(&chance, draws + i, 1, 0.5, from, to,
                                   {reinterpret_cast<const char*>(&column), 4, 4, 1}, &chosen,
                                   reinterpret_cast<char*>(&goal)) == 0);
    REQUIRE(goal == 2);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string argument = argc > 1 ? argv[1] : "";
  if (!argument.empty() && argument != "--break") return 3;
  Random random(7);
  for (int i = 0; i < 300; ++i) {
    one_case<float>(random, argument == "--break");
    one_case<double>(random, false);
  }
  refusals();
  std::puts("all agree");
  return 0;
}
