// Drives csrc/marks.h alone, to be built with sanitizers: marks of random windows against what their
// rows say one by one. Exits with 0 if all agree. `--break` says a row too many, which must end the
// program.
#include "marks.h"  // first, so that it has to include what it uses
#include "harness.h"

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace {

using replaykit::FlagOfRows;
using replaykit::MarkOfRows;
using Bytes = std::vector<std::uint8_t>;

void one_case(Random& random, bool longer) {
  const auto n = static_cast<std::size_t>(longer ? 16 : below(random, 40));
  std::vector<std::int64_t> window(n);
  for (std::size_t i = 1; i < n; ++i) window[i] = window[i - 1] + !below(random, 4);
  const auto count = static_cast<std::size_t>(below(random, 5));
  std::vector<Bytes> columns;
  std::vector<FlagOfRows> flags;
  for (std::size_t f = 0; f < count; ++f) {
    const auto stride = static_cast<std::size_t>(1 + below(random, 3));
    columns.emplace_back(n ? (n - 1) * stride + 1 : 0);
    for (std::uint8_t& one : columns.back()) one = static_cast<std::uint8_t>(!below(random, 6));
    flags.push_back({columns.back().data(), static_cast<std::int64_t>(stride),
                     static_cast<int>(below(random, 3))});
  }
  const std::vector<Bytes> before = columns;
  Bytes done(n, 9), truncated(n, 9), terminated(n, 9);
  // One mark may be written over the flag that it is read from.
  const bool over = count > 0 && below(random, 2);
  const MarkOfRows own = {over ? columns.front().data() : truncated.data(),
                          over ? flags.front().stride : 1};
  replaykit::mark_windows(flags, window.data(), static_cast<std::int64_t>(n) + longer,
                          {done.data(), 1}, own, {terminated.data(), 1});
  for (std::size_t i = 0; i < n; ++i) {
    bool said[3] = {false, false, false};
    for (std::size_t f = 0; f < count; ++f) {
      if (before[f][i * static_cast<std::size_t>(flags[f].stride)]) said[flags[f].meaning] = true;
    }
    const bool end = said[0] || said[1] || said[2];
    const bool last = i + 1 == n || window[i] != window[i + 1];
    REQUIRE(done[i] == (end || last));
    REQUIRE(own.base[static_cast<std::int64_t>(i) * own.stride] == (said[1] || (last && !end)));
    REQUIRE(terminated[i] == said[2]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string argument = argc > 1 ? argv[1] : "";
  if (!argument.empty() && argument != "--break") return 3;
  Random random(11);
  for (int i = 0; i < 2000; ++i) one_case(random, argument == "--break");
  std::puts("all agree");
  return 0;
}
