// Python bindings of new goals. The caller has checked the addresses.
#include <nanobind/nanobind.h>

#include <string>

#include "arrays.h"
#include "bindings.h"
#include "relabel.h"

namespace nb = nanobind;
using replaykit::Array;
using replaykit::NumberRows;
using replaykit::released;

namespace {

template <typename Number>
Number* at(std::uintptr_t address) {
  return reinterpret_cast<Number*>(address);
}

template <typename Number>
void run(const std::uint8_t* chosen, std::int64_t n, std::int64_t width, double limit,
         NumberRows fresh, NumberRows achieved, const NumberRows old[2], NumberRows reward,
         const std::uintptr_t to[3]) {
  Number* goals[2] = {at<Number>(to[0]), at<Number>(to[1])};
  replaykit::relabel<Number>(chosen, n, width, limit, fresh, achieved, old,
                             reward, goals, at<Number>(to[2]));
}

// For up to this many numbers, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 4096;

// The arguments of `later_goals`.
class Later {
 public:
  Later(nb::handle draws, nb::handle low, nb::handle last, std::uintptr_t column,
        std::int64_t stride, std::int64_t slots, nb::handle chosen, nb::handle goals)
      : draws_(draws, "draws", Array::kDouble, 2),
        low_(low, "low", Array::kInt64, 1),
        last_(last, "last", Array::kInt64, 1),
        chosen_(chosen, "chosen", Array::kBool, 1, true),
        goals_(goals, "goals", Array::kNumbers, 2, true),
        rows_{at<const char>(column), stride, goals_.size(1) * goals_.item(), slots} {
    if (draws_.size(0) != 2 || slots < 1) {
      throw nb::value_error("expected two draws a row, and a slot");
    }
    replaykit::check_length("low", low_.size(), size());
    replaykit::check_length("last", last_.size(), size());
    replaykit::check_length("chosen", chosen_.size(), size());
    replaykit::check_length("goals", goals_.size(), size());
  }

  std::int64_t size() const { return draws_.size(1); }
  const std::uint8_t* chosen() const { return chosen_.bytes(); }
  bool doubles() const { return goals_.item() == sizeof(double); }
  std::int64_t width() const { return goals_.size(1); }
  NumberRows goals() const {
    return {reinterpret_cast<const char*>(goals_.bytes()), width() * goals_.item()};
  }

  // Returns whether all draws and times were valid; otherwise the goals must not be used.
  bool run(double p) {
    done_ = replaykit::later_goals(draws_.doubles(), draws_.doubles() + size(), size(), p,
                                   low_.numbers(), last_.numbers(), rows_, chosen_.bytes_out(),
                                   reinterpret_cast<char*>(goals_.bytes_out()));
    return done_ == size();
  }

  void check() const {
    if (done_ != size()) {
      throw nb::index_error(("expected draws of [0, 1) and times 0 <= low <= last, got others in "
                             "row " + std::to_string(done_)).c_str());
    }
  }

 private:
  Array draws_, low_, last_, chosen_, goals_;
  replaykit::RingRows rows_;
  std::int64_t done_ = 0;
};

// Drawing and reading a row takes as long as relabeling this many numbers.
constexpr std::int64_t kNumbersADraw = 4;

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
        released<kReleaseAbove>(n * width, [&] {
          work(rows_chosen.bytes(), n, width, limit, rows(fresh, width * size),
               rows(achieved, achieved_stride), old, rows(reward, reward_stride), to);
        });
      },
      "Write the goals and rewards of a batch; chosen rows get the new goals `fresh` [n, width].");

  m.def(
      "later_goals",
      [](nb::handle draws, nb::handle low, nb::handle last, double p, std::uintptr_t column,
         std::int64_t stride, std::int64_t slots, nb::handle chosen, nb::handle goals) {
        Later later(draws, low, last, column, stride, slots, chosen, goals);
        released<kReleaseAbove>(later.size() * kNumbersADraw, [&] { later.run(p); });
        later.check();
      },
      nb::arg("draws"), nb::arg("low"), nb::arg("last"), nb::arg("p"), nb::arg("column"),
      nb::arg("stride"), nb::arg("slots"), nb::arg("chosen"), nb::arg("goals"),
      "Choose rows; for every row, copy the goal achieved at a time drawn from low .. last.");

  m.def(
      "relabel_later",
      [](nb::handle draws, nb::handle low, nb::handle last, double p, std::uintptr_t column,
         std::int64_t stride, std::int64_t slots, nb::handle chosen, nb::handle goals,
         double limit, std::uintptr_t achieved, std::int64_t achieved_stride, std::uintptr_t goal,
         std::int64_t goal_stride, std::uintptr_t next_goal, std::int64_t next_goal_stride,
         std::uintptr_t reward, std::int64_t reward_stride) {
        Later later(draws, low, last, column, stride, slots, chosen, goals);
        const replaykit::OwnRows to[2] = {{at<char>(goal), goal_stride},
                                          {at<char>(next_goal), next_goal_stride}};
        const auto work =
            later.doubles() ? replaykit::overwrite<double> : replaykit::overwrite<float>;
        released<kReleaseAbove>(later.size() * kNumbersADraw, [&] {
          if (!later.run(p)) return;
          work(later.chosen(), later.size(), later.width(), limit, later.goals(),
               {at<const char>(achieved), achieved_stride}, to, {at<char>(reward), reward_stride});
        });
        later.check();
      },
      "Call `later_goals`, and overwrite the goals and rewards in the chosen rows of a batch.");
}
