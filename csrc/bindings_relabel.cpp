// The Python face of new goals: addresses that the caller has checked.
#include <nanobind/nanobind.h>

#include <string>

#include "arrays.h"
#include "bindings.h"
#include "relabel.h"

namespace nb = nanobind;
using replaykit::Array;
using replaykit::NumberRows;

namespace {

template <typename Number>
Number* at(std::uintptr_t address) {
  return reinterpret_cast<Number*>(address);
}

template <typename Number>
void run(const std::uint8_t* chosen, std::int64_t n, std::int64_t width, double limit, NumberRows fresh,
         NumberRows achieved, const NumberRows old[2], NumberRows reward,
         const std::uintptr_t to[3]) {
  Number* goals[2] = {at<Number>(to[0]), at<Number>(to[1])};
  replaykit::relabel<Number>(chosen, n, width, limit, fresh, achieved, old,
                             reward, goals, at<Number>(to[2]));
}

// Up to so many numbers the work is shorter than handing the interpreter lock over.
constexpr std::int64_t kReleaseAbove = 4096;

template <typename Work>
void unlocked(std::int64_t numbers, const Work& work) {
  if (numbers <= kReleaseAbove) return work();
  nb::gil_scoped_release release;
  work();
}

}  // namespace

void replaykit::bind_relabel(nb::module_& m) {
  m.def(
      "relabel",
      [](bool doubles, nb::handle chosen, std::int64_t n, std::int64_t width, double limit,
         std::uintptr_t fresh, std::uintptr_t achieved, std::int64_t achieved_stride,
         std::uintptr_t goal, std::int64_t goal_stride, std::uintptr_t next_goal,
         std::int64_t next_goal_stride, std::uintptr_t reward, std::int64_t reward_stride,
         std::uintptr_t new_goal, std::uintptr_t new_next_goal, std::uintptr_t new_reward) {
        if (n < 0 || width < 0) throw nb::value_error("expected at least 0 rows and numbers");
        const Array rows_chosen(chosen, "chosen", Array::kBool, 1);
        replaykit::check_length("chosen", rows_chosen.size(), n);
        const auto rows = [](std::uintptr_t base, std::int64_t stride) {
          return NumberRows{at<const char>(base), stride};
        };
        const NumberRows old[2] = {rows(goal, goal_stride), rows(next_goal, next_goal_stride)};
        const std::uintptr_t to[3] = {new_goal, new_next_goal, new_reward};
        const std::int64_t size = doubles ? sizeof(double) : sizeof(float);
        const auto work = doubles ? run<double> : run<float>;
        unlocked(n * width, [&] {
          work(rows_chosen.bytes(), n, width, limit, rows(fresh, width * size),
               rows(achieved, achieved_stride), old, rows(reward, reward_stride), to);
        });
      },
      "Writes the goals and rewards of a batch whose chosen rows get fresh goals [n, width].");

  m.def(
      "later_goals",
      [](nb::handle draws, nb::handle low, nb::handle last, double p, std::uintptr_t column,
         std::int64_t stride, std::int64_t bytes, std::int64_t slots, nb::handle chosen,
         std::uintptr_t goals) {
        const Array drawn(draws, "draws", Array::kDouble, 2);
        const Array from(low, "low", Array::kInt64, 1), to(last, "last", Array::kInt64, 1);
        const Array out(chosen, "chosen", Array::kBool, 1, true);
        const std::int64_t n = drawn.size(1);
        if (drawn.size(0) != 2 || bytes < 0 || slots < 1) {
          throw nb::value_error("expected two draws a row, bytes of at least 0 and a slot");
        }
        replaykit::check_length("low", from.size(), n);
        replaykit::check_length("last", to.size(), n);
        replaykit::check_length("chosen", out.size(), n);
        std::int64_t wrong = n;
        unlocked(n * 4, [&] {
          wrong = replaykit::later_goals(drawn.doubles(), drawn.doubles() + n, n, p, from.numbers(),
                                         to.numbers(), {at<const char>(column), stride, bytes, slots},
                                         out.bytes_out(), at<char>(goals));
        });
        if (wrong != n) {
          throw nb::index_error(("expected a draw of [0, 1) and times 0 <= low <= last, got others "
                                 "in row " + std::to_string(wrong)).c_str());
        }
      },
      nb::arg("draws"), nb::arg("low"), nb::arg("last"), nb::arg("p"), nb::arg("column"),
      nb::arg("stride"), nb::arg("bytes"), nb::arg("slots"), nb::arg("chosen"), nb::arg("goals"),
      "Chooses rows, and copies what was achieved at times drawn from low .. last for all of them.");
}
