// Python bindings of the episode index. They check arrays and ranges. The caller holds the lock of
// the storage, as for all parts that a write changes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "episode_columns.h"
#include "episode_sums.h"
#include "episodes.h"

namespace nb = nanobind;
using replaykit::Array;
using replaykit::check_length;
using replaykit::CountLaw;
using replaykit::EpisodeColumns;
using replaykit::Episodes;
using replaykit::EpisodeSums;
using replaykit::FlagColumn;
using replaykit::Numbers;

namespace {

// For up to this many steps, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 1024;

template <typename Work>
auto unlocked(std::int64_t steps, const Work& work) {
  if (steps <= kReleaseAbove) return work();
  nb::gil_scoped_release release;
  return work();
}

// Memory for `rows` columns of n results.
struct Answers : Array {
  Answers(nb::handle out, std::int64_t rows, std::int64_t n) : Array(out, "out", kInt64, 2, true) {
    check_length("out", size(0), rows);
    check_length("out", size(1), n);
  }
};

struct Index {
  Index(std::int64_t slots, std::int64_t lanes, std::int64_t start, const std::int64_t* begin,
        const std::int64_t* head)
      : episodes(slots, lanes, start, begin, head) {}

  EpisodeSums& sums(std::int64_t least, std::int64_t add, std::int64_t below, std::int64_t past,
                    std::int64_t open_future, int closed, int intact, int kind) {
    constexpr std::int64_t limit = std::int64_t{1} << 31;  // sums of such numbers fit into 64 bits
    for (const std::int64_t one : {least, add, below, past, open_future}) {
      if (one < -limit || one > limit) {
        throw nb::value_error(("expected numbers of a law up to 2**31, got " +
                               std::to_string(one)).c_str());
      }
    }
    if (below < 0 || past < 0 || open_future < 0 || kind < 0 || kind > 2) {
      throw nb::value_error("expected below, past and open_future of at least 0, and a kind");
    }
    EpisodeSums& found =
        laws.of(episodes, {least, add, below, past, open_future, closed != 0, intact != 0, kind});
    unlocked(found.behind(episodes), [&] { found.refresh(episodes); });
    return found;
  }

  // Checks that rows [first, until) are in the columns, and that the columns match the episodes.
  void check(const EpisodeColumns& columns, std::int64_t first, std::int64_t until) const {
    check_length("lanes", columns.lanes(), episodes.lanes());
    if (first < 0 || first > until || until > columns.slots()) {
      throw nb::index_error(("expected rows in [0, " + std::to_string(columns.slots()) +
                             "), got " + std::to_string(first) + " to " +
                             std::to_string(until)).c_str());
    }
    if (ids.known() && columns.has_ids()) {
      check_length("ids", static_cast<std::int64_t>(ids.bytes().size()),
                   columns.id_bytes() * columns.lanes());
    }
  }

  [[noreturn]] void not_stored(Numbers time, Numbers lane, std::int64_t at) const {
    throw nb::index_error(
        ("expected times in [" + std::to_string(episodes.lo()) + ", " +
         std::to_string(episodes.hi()) + ") of lanes in [0, " + std::to_string(episodes.lanes()) +
         "), got time " + std::to_string(time[at]) + " of lane " + std::to_string(lane[at])).c_str());
  }

  Episodes episodes;
  replaykit::EpisodeLaws laws;
  replaykit::LastIds ids;
};

using Flag = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, int, bool, int>;
using Id = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;

void bind_columns(nb::module_& m) {
  nb::class_<EpisodeColumns>(m, "EpisodeColumns", "Columns that mark the ends of episodes.")
      .def("__init__",
           [](EpisodeColumns* self, const std::vector<Flag>& flags, const std::vector<Id>& ids,
              std::int64_t slots, std::int64_t lanes) {
             std::vector<FlagColumn> own;
             for (const auto& [base, stride, values, bytes, sign, role] : flags) {
               if (values < 0 || (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) ||
                   role < 0 || role > 3) {
                 throw nb::value_error("expected flags of 1, 2, 4 or 8 bytes and a role");
               }
               own.push_back({reinterpret_cast<const char*>(base), stride, values, bytes, sign, role});
             }
             std::vector<replaykit::IdColumn> names;
             for (const auto& [base, stride, bytes] : ids) {
               if (bytes < 0) throw nb::value_error("expected ids of at least 0 bytes");
               names.push_back({reinterpret_cast<const char*>(base), stride, bytes});
             }
             new (self) EpisodeColumns(std::move(own), std::move(names), slots, lanes);
           },
           nb::arg("flags"), nb::arg("ids"), nb::arg("slots"), nb::arg("lanes"));
}

}  // namespace

void replaykit::bind_episodes(nb::module_& m) {
  bind_columns(m);

  nb::class_<Index>(m, "Episodes", "The boundaries of episodes among the rows of a ring.")
      .def("__init__",
           [](Index* self, std::int64_t slots, std::int64_t lanes, std::int64_t start,
              nb::object begin, nb::object head) {
             constexpr std::int64_t most = std::int64_t{1} << 56;
             if (slots < 1 || lanes < 1 || slots > most / lanes || start < 0 || start > most) {
               throw nb::value_error("expected at least one slot and lane, and a start");
             }
             std::vector<std::int64_t> begins, heads;
             if (!begin.is_none()) {
               const Array given(begin, "begin", Array::kInt64, 1);
               check_length("begin", given.size(), lanes);
               for (std::int64_t at = 0; at < lanes; ++at) begins.push_back(given.numbers()[at]);
             }
             if (!head.is_none()) {
               const Array given(head, "head", Array::kInt64, 1);
               check_length("head", given.size(), lanes);
               for (std::int64_t at = 0; at < lanes; ++at) heads.push_back(given.numbers()[at]);
             }
             for (const std::int64_t one : begins) {
               if (one < -1 || (one >= start && one != -1)) {
                 throw nb::value_error("expected begins before the start, or -1");
               }
             }
             for (const std::int64_t one : heads) {
               if (one < 1 || one > 3) throw nb::value_error("expected heads of 1, 2 or 3");
             }
             new (self) Index(slots, lanes, start, begins.empty() ? nullptr : begins.data(),
                              heads.empty() ? nullptr : heads.data());
           },
           nb::arg("slots"), nb::arg("lanes"), nb::arg("start"), nb::arg("begin").none(),
           nb::arg("head").none())
      .def_prop_ro("slots", [](const Index& self) { return self.episodes.slots(); })
      .def_prop_ro("lanes", [](const Index& self) { return self.episodes.lanes(); })
      .def_prop_ro("lo", [](const Index& self) { return self.episodes.lo(); })
      .def_prop_ro("hi", [](const Index& self) { return self.episodes.hi(); })
      .def_prop_ro("version", [](const Index& self) { return self.episodes.version(); })
      .def("append",
           [](Index& self, nb::handle codes) {
             const Array given(codes, "codes", Array::kUint8, 2);
             check_length("codes", given.size(1), self.episodes.lanes());
             unlocked(given.size(0) * given.size(1),
                      [&] { self.episodes.append(given.bytes(), given.size(0)); });
           },
           nb::arg("codes"), "Append rows with codes uint8 [n, lanes].")
      .def("append_columns",
           [](Index& self, const EpisodeColumns& columns, std::int64_t first, std::int64_t until) {
             self.check(columns, first, until);
             unlocked((until - first) * columns.lanes(), [&] {
               self.ids.append(self.episodes, columns, first, until);
             });
           },
           nb::arg("columns"), nb::arg("first"), nb::arg("until"),
           "Append rows [first, until), read from their stored columns.")
      .def("append_ending",
           [](Index& self, const EpisodeColumns& columns, std::int64_t first, std::int64_t until,
              nb::handle after, nb::handle ends) {
             self.check(columns, first, until);
             const Array rows(after, "after", Array::kInt64, 1);
             const Array codes(ends, "ends", Array::kUint8, 2);
             check_length("ends", codes.size(0), rows.size());
             check_length("ends", codes.size(1), columns.lanes());
             for (std::int64_t i = 0, least = first; i < rows.size(); ++i) {
               const std::int64_t row = rows.numbers()[i];
               if (row < least || row >= until) {
                 throw nb::index_error(("expected rising rows from " + std::to_string(first) +
                                        " to " + std::to_string(until) + " in `after`, got " +
                                        std::to_string(row)).c_str());
               }
               least = row + 1;
             }
             for (std::int64_t i = 0; i < rows.size() * columns.lanes(); ++i) {
               const int code = codes.bytes()[i];
               if (code != 0 && code != replaykit::kSevered && code != kRestored) {
                 throw nb::value_error("expected codes of 0, 4 or 5 in `ends`");
               }
             }
             unlocked((until - first) * columns.lanes(), [&] {
               self.ids.append_ending(self.episodes, columns, first, until, rows.numbers(),
                                      codes.bytes(), rows.size());
             });
           },
           nb::arg("columns"), nb::arg("first"), nb::arg("until"), nb::arg("after"),
           nb::arg("ends"),
           "Append rows with cuts after the rows `after`, int64 [n]. `ends` has the codes of the "
           "lanes, uint8 [n, lanes]; 0 ends nothing.")
      .def("close",
           [](Index& self, nb::handle lanes, int code) {
             const Array given(lanes, "lanes", Array::kBool, 1);
             check_length("lanes", given.size(), self.episodes.lanes());
             if (code < 1 || code > kRestored) throw nb::value_error("expected a code from 1 to 5");
             self.episodes.close(given.bytes(), code);
           },
           nb::arg("lanes"), nb::arg("code"), "End the open episodes of lanes, bool [lanes].")
      .def("forget_ids", [](Index& self) { self.ids.forget(); })
      .def("last_ids",
           [](const Index& self) -> nb::object {
             if (!self.ids.known()) return nb::none();
             const auto& bytes = self.ids.bytes();
             return nb::bytes(bytes.data(), bytes.size());
           },
           "Return the ids in the newest row, lane by lane, or None if they are not known.")
      .def("set_last_ids",
           [](Index& self, nb::bytes ids) {
             const auto* from = static_cast<const std::uint8_t*>(ids.data());
             self.ids.set(std::vector<std::uint8_t>(from, from + ids.size()));
           },
           nb::arg("ids"))
      .def("lookup",
           [](const Index& self, nb::handle time, nb::handle lane, nb::handle out) {
             const Array times(time, "time", Array::kInt64, 1);
             const Array lanes(lane, "lane", Array::kInt64, 1);
             const std::int64_t n = times.size();
             check_length("lane", lanes.size(), n);
             const Answers found(out, 4, n);
             std::int64_t* to = found.out();
             const std::int64_t wrong = unlocked(n, [&] {
               return self.episodes.lookup(times.numbers(), lanes.numbers(), n, to, to + n,
                                           to + 2 * n, to + 3 * n);
             });
             if (wrong != n) self.not_stored(times.numbers(), lanes.numbers(), wrong);
           },
           nb::arg("time"), nb::arg("lane"), nb::arg("out"),
           "Write begin, last, code and head of stored rows.")
      .def("first",
           [](const Index& self) {
             const std::int64_t time = self.episodes.lo(), lane = 0;
             const Numbers times{reinterpret_cast<const char*>(&time), 8};
             const Numbers lanes{reinterpret_cast<const char*>(&lane), 8};
             std::int64_t begin = 0, last = 0, code = 0, head = 0;
             if (self.episodes.lookup(times, lanes, 1, &begin, &last, &code, &head) != 1) {
               throw nb::index_error("expected a stored row, got none");
             }
             return nb::make_tuple(begin, head);
           },
           "Return begin and head of the oldest row in the first lane.")
      .def("around",
           [](const Index& self, nb::handle element, nb::handle out) {
             const Array elements(element, "element", Array::kInt64, 1);
             const std::int64_t n = elements.size();
             const Answers found(out, 6, n);
             std::int64_t* to = found.out();
             const Episodes& episodes = self.episodes;
             const std::int64_t wrong = unlocked(n, [&]() -> std::int64_t {
               const std::int64_t bad = episodes.place(elements.numbers(), n, to, to + n);
               if (bad != n) return bad;
               const Numbers time{reinterpret_cast<const char*>(to), 8};
               const Numbers lane{reinterpret_cast<const char*>(to + n), 8};
               return episodes.lookup(time, lane, n, to + 2 * n, to + 3 * n, to + 4 * n, to + 5 * n);
             });
             if (wrong != n) {
               throw nb::index_error(("expected elements of stored rows, got " +
                                      std::to_string(elements.numbers()[wrong])).c_str());
             }
           },
           nb::arg("element"), nb::arg("out"),
           "Write time, lane, begin, last, code and head of stored elements.")
      .def("codes",
           [](const Index& self, nb::handle time, nb::handle lane, nb::handle out) {
             const Array times(time, "time", Array::kInt64, 1);
             const Array lanes(lane, "lane", Array::kInt64, 1);
             const std::int64_t n = times.size();
             check_length("lane", lanes.size(), n);
             const Answers found(out, 1, n);
             const std::int64_t wrong = unlocked(n, [&] {
               return self.episodes.codes(times.numbers(), lanes.numbers(), n, found.out());
             });
             if (wrong != n) self.not_stored(times.numbers(), lanes.numbers(), wrong);
           },
           nb::arg("time"), nb::arg("lane"), nb::arg("out"), "Write the codes of stored rows.")
      .def("per_lane",
           [](const Index& self, nb::handle out) {
             const Episodes& episodes = self.episodes;
             const Answers found(out, 2, episodes.lanes());
             for (std::int64_t at = 0; at < episodes.lanes(); ++at) {
               found.out()[at] = episodes.is_open(episodes.lane(at));
               found.out()[episodes.lanes() + at] = episodes.lane(at).head_begin;
             }
           },
           nb::arg("out"), "Write whether lanes are open, and the begins of headless episodes.")
      .def("severed",
           [](Index& self) {
             const auto& found = self.episodes.severed();
             return std::vector<std::pair<std::int64_t, std::int64_t>>(found.begin(), found.end());
           },
           "Return time and lane of the rows at cuts.")
      .def("count", [](const Index& self) { return self.episodes.count(); },
           "Return the number of stored episodes.")
      .def("table",
           [](const Index& self, nb::handle out) {
             const std::int64_t n = self.episodes.count();
             const Answers found(out, 6, n);
             unlocked(n, [&] { self.episodes.table(found.out()); });
           },
           nb::arg("out"), "Write lane, begin, first, last, code and head of all episodes.")
      .def("longest",
           [](const Index& self) {
             return unlocked(self.episodes.count(), [&] { return self.episodes.longest(); });
           },
           "Return the largest number of stored rows of an episode.")
      .def("totals",
           [](Index& self, std::int64_t least, std::int64_t add, std::int64_t below,
              std::int64_t past, std::int64_t open_future, int closed, int intact, int kind,
              nb::handle out) {
             const Answers found(out, 1, self.episodes.lanes());
             self.sums(least, add, below, past, open_future, closed, intact, kind)
                 .totals(found.out());
           },
           "Write the number of windows, episodes or rows of each lane.")
      .def("total",
           [](Index& self, std::int64_t least, std::int64_t add, std::int64_t below,
              std::int64_t past, std::int64_t open_future, int closed, int intact, int kind) {
             return self.sums(least, add, below, past, open_future, closed, intact, kind).total();
           },
           "Return the number of windows, episodes or rows in all lanes.")
      .def("find",
           [](Index& self, std::int64_t least, std::int64_t add, std::int64_t below,
              std::int64_t past, std::int64_t open_future, int closed, int intact, int kind,
              nb::handle number, nb::handle out) {
             const Array numbers(number, "number", Array::kInt64, 1);
             const std::int64_t n = numbers.size();
             const Answers found(out, 5, n);
             const EpisodeSums& sums =
                 self.sums(least, add, below, past, open_future, closed, intact, kind);
             const std::int64_t wrong = unlocked(4 * n, [&] {
               return sums.find(self.episodes, numbers.numbers(), n, found.out());
             });
             if (wrong != n) {
               throw nb::index_error(("expected numbers in [0, " + std::to_string(sums.total()) +
                                      "), got " + std::to_string(numbers.numbers()[wrong])).c_str());
             }
           },
           "Write lane, base, rows, count and rest of windows, given by their numbers.")
      .def("pick",
           [](Index& self, std::int64_t least, std::int64_t add, std::int64_t below,
              std::int64_t past, std::int64_t open_future, int closed, int intact, int kind,
              nb::handle number, nb::handle out) {
             const Array numbers(number, "number", Array::kInt64, 1);
             const std::int64_t n = numbers.size();
             const Answers found(out, 1, n);
             const EpisodeSums& sums =
                 self.sums(least, add, below, past, open_future, closed, intact, kind);
             const std::int64_t wrong = unlocked(4 * n, [&] {
               return sums.pick(self.episodes, numbers.numbers(), n, found.out());
             });
             if (wrong != n) {
               throw nb::index_error(("expected numbers in [0, " + std::to_string(sums.total()) +
                                      "), got " + std::to_string(numbers.numbers()[wrong])).c_str());
             }
           },
           "Write the elements of single rows, given by their numbers.")
      .def("slices",
           [](Index& self, std::int64_t least, std::int64_t add, std::int64_t below,
              std::int64_t past, std::int64_t open_future, int closed, int intact,
              nb::handle number, std::int64_t length, nb::handle element, nb::handle window) {
             const Array numbers(number, "number", Array::kInt64, 1);
             const std::int64_t n = numbers.size();
             if (length < 1 || length > self.episodes.slots()) {
               throw nb::value_error(("expected windows of 1 to " +
                                      std::to_string(self.episodes.slots()) + " rows, got " +
                                      std::to_string(length)).c_str());
             }
             const Array elements(element, "element", Array::kInt64, 1, true);
             const Array windows(window, "window", Array::kInt64, 1, true);
             check_length("element", elements.size(), n * length);
             check_length("window", windows.size(), n * length);
             const EpisodeSums& sums =
                 self.sums(least, add, below, past, open_future, closed, intact, kWindows);
             const std::int64_t wrong = unlocked(4 * n + n * length, [&] {
               return sums.slices(self.episodes, numbers.numbers(), n, length, elements.out(),
                                  windows.out());
             });
             if (wrong != n) {
               throw nb::index_error(("expected numbers in [0, " + std::to_string(sums.total()) +
                                      ") of windows of " + std::to_string(length) + " rows, got " +
                                      std::to_string(numbers.numbers()[wrong])).c_str());
             }
           },
           "Write the elements of windows, given by number, and the window position of each.")
      .def("nbytes",
           [](const Index& self) { return self.episodes.bytes() + self.laws.bytes(); },
           "Return the memory of the index in bytes.");
}
