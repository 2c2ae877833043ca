// The Python face of new goals: addresses that the caller has checked.
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "relabel.h"

namespace nb = nanobind;
using replaykit::NumberRows;

namespace {

template <typename Number>
Number* at(std::uintptr_t address) {
  return reinterpret_cast<Number*>(address);
}

template <typename Number>
void run(std::uintptr_t chosen, std::int64_t n, std::int64_t width, double limit, NumberRows fresh,
         NumberRows achieved, const NumberRows old[2], NumberRows reward,
         const std::uintptr_t to[3]) {
  Number* goals[2] = {at<Number>(to[0]), at<Number>(to[1])};
  replaykit::relabel<Number>(at<const std::uint8_t>(chosen), n, width, limit, fresh, achieved, old,
                             reward, goals, at<Number>(to[2]));
}

}  // namespace

void replaykit::bind_relabel(nb::module_& m) {
  m.def(
      "relabel",
      [](bool doubles, std::uintptr_t chosen, std::int64_t n, std::int64_t width, double limit,
         std::uintptr_t fresh, std::uintptr_t achieved, std::int64_t achieved_stride,
         std::uintptr_t goal, std::int64_t goal_stride, std::uintptr_t next_goal,
         std::int64_t next_goal_stride, std::uintptr_t reward, std::int64_t reward_stride,
         std::uintptr_t new_goal, std::uintptr_t new_next_goal, std::uintptr_t new_reward) {
        if (n < 0 || width < 0) throw nb::value_error("expected at least 0 rows and numbers");
        const auto rows = [](std::uintptr_t base, std::int64_t stride) {
          return NumberRows{at<const char>(base), stride};
        };
        const NumberRows old[2] = {rows(goal, goal_stride), rows(next_goal, next_goal_stride)};
        const std::uintptr_t to[3] = {new_goal, new_next_goal, new_reward};
        const std::int64_t size = doubles ? sizeof(double) : sizeof(float);
        const auto work = doubles ? run<double> : run<float>;
        // Up to so many numbers the work is shorter than handing the interpreter lock over.
        constexpr std::int64_t release_above = 4096;
        const auto all = [&] {
          work(chosen, n, width, limit, rows(fresh, width * size), rows(achieved, achieved_stride),
               old, rows(reward, reward_stride), to);
        };
        if (n * width <= release_above) {
          all();
        } else {
          nb::gil_scoped_release release;
          all();
        }
      },
      "Writes the goals and rewards of a batch whose chosen rows get fresh goals [n, width].");
}
