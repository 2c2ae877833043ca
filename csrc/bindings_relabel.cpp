// Python bindings of new goals. The caller has checked the addresses.

#include "arrays.h"
#include "bindings.h"
#include "relabel.h"

namespace replaykit {

namespace {

// For up to this many numbers, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 4096;

// Drawing and reading a row takes as long as relabeling this many numbers.
constexpr std::int64_t kNumbersADraw = 4;

}  // namespace

void bind_relabel(nb::module_& m) {
  m.def(
      "later_goals",
      [](nb::handle draws, nb::handle low, nb::handle last, double p, std::uintptr_t column,
         std::int64_t stride, std::int64_t slots, nb::handle chosen, nb::handle goals) {
        const Array both(draws, "draws", Array::kDouble, 2);
        const Array lows(low, "low", Array::kInt64, 1), lasts(last, "last", Array::kInt64, 1);
        const Array rows(chosen, "chosen", Array::kBool, 1, true);
        const Array fresh(goals, "goals", Array::kNumbers, 2, true);
        if (both.size(0) != 2 || slots < 1) {
          throw nb::value_error("expected two draws a row, and a slot");
        }
        const std::int64_t n = both.size(1);
        check_length("low", lows.size(), n);
        check_length("last", lasts.size(), n);
        check_length("chosen", rows.size(), n);
        check_length("goals", fresh.size(), n);
        const RingRows ring = {at<const char>(column), stride, fresh.size(1) * fresh.item(), slots};
        const std::int64_t done = released<kReleaseAbove>(n * kNumbersADraw, [&] {
          return later_goals(both.doubles(), both.doubles() + n, n, p, lows.numbers(),
                             lasts.numbers(), ring, rows.bytes_out(),
                             reinterpret_cast<char*>(fresh.bytes_out()));
        });
        if (done == n) return;
        refuse(nb::index_error,
               "expected draws of [0, 1) and times 0 <= low <= last, got others in row ", done);
      },
      "Choose rows; for every row, copy the goal achieved at a time drawn from low .. last.");

  m.def(
      "relabel",
      [](nb::handle chosen, nb::handle goals, double limit, std::uintptr_t achieved,
         std::int64_t achieved_stride, std::uintptr_t goal, std::int64_t goal_stride,
         std::uintptr_t next_goal, std::int64_t next_goal_stride, std::uintptr_t reward,
         std::int64_t reward_stride) {
        const Array rows(chosen, "chosen", Array::kBool, 1);
        const Array fresh(goals, "goals", Array::kNumbers, 2);
        const std::int64_t n = rows.size(), width = fresh.size(1);
        check_length("goals", fresh.size(), n);
        const OwnRows to[2] = {{at<char>(goal), goal_stride}, {at<char>(next_goal), next_goal_stride}};
        const bool doubles = fresh.item() == sizeof(double);
        const auto work = doubles ? relabel<double> : relabel<float>;
        released<kReleaseAbove>(n * width, [&] {
          work(rows.bytes(), n, width, limit,
               {reinterpret_cast<const char*>(fresh.bytes()), width * fresh.item()},
               {at<const char>(achieved), achieved_stride}, to, {at<char>(reward), reward_stride});
        });
      },
      "Write new goals and rewards in the chosen rows of a batch.");
}

}  // namespace replaykit
