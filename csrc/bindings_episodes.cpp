// Python bindings of the episode index. They check arrays and ranges. The caller holds the lock of
// the storage, as for all parts that a write changes.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "episode_columns.h"
#include "episode_sums.h"
#include "episodes.h"

namespace replaykit {

namespace {

// For up to this many steps, the work takes less time than releasing and taking the interpreter
// lock.
constexpr std::int64_t kReleaseAbove = 1024;

// The highest time and number of rows. The core multiplies them by 32.
constexpr std::int64_t kMost = std::int64_t{1} << 56;

// A new NumPy array, int64 [rows, n], for results.
struct Answers {
  Answers(std::int64_t rows, std::int64_t n)
      : array(numpy_empty()(nb::make_tuple(rows, n), "int64")),
        memory(array, "array", Array::kInt64, 2) {}

  // `numpy.empty`, which is looked up once.
  static nb::handle numpy_empty() {
    static const nb::handle found = nb::getattr(nb::module_::import_("numpy"), "empty").release();
    return found;
  }

  std::int64_t* out() const { return memory.out(); }

  nb::object array;
  Array memory;
};

// An array that may be missing.
struct Optional : std::optional<Array> {
  Optional(nb::handle array, const char* name, Array::Kind kind, int dimensions) {
    if (!array.is_none()) emplace(array, name, kind, dimensions);
  }
};

// A counting rule, as `CountLaw.key` in Python returns it.
using Law = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool,
                       bool>;

struct Index {
  Index(std::int64_t slots, std::int64_t lanes, std::int64_t start, Numbers gone, Numbers head)
      : episodes(slots, lanes, start, gone, head) {}

  EpisodeSums& sums(const Law& law, int kind) {
    const auto& [least, add, below, past, open_future, closed, intact] = law;
    constexpr std::int64_t limit = std::int64_t{1} << 31;  // sums of such numbers fit into 64 bits
    for (const std::int64_t one : {least, add, below, past, open_future}) {
      if (one < -limit || one > limit) {
        refuse(nb::value_error, "expected numbers of a law up to 2**31, got ", one);
      }
    }
    if (below < 0 || past < 0 || open_future < 0 || kind < 0 || kind > 2) {
      throw nb::value_error("expected below, past and open_future of at least 0, and a kind");
    }
    EpisodeSums& found = laws.of({least, add, below, past, open_future, closed, intact, kind});
    released<kReleaseAbove>(found.behind(episodes), [&] { found.refresh(episodes); });
    return found;
  }

  // Calls work(sums, numbers, n), which returns the position of a wrong number, or n. Each number
  // takes `length` steps, or a search.
  template <typename Work>
  void for_numbers(const Law& law, int kind, nb::handle number, std::int64_t length,
                   const Work& work) {
    const Array numbers(number, "number", Array::kInt64, 1);
    const std::int64_t n = numbers.size();
    const EpisodeSums& found = sums(law, kind);
    const std::int64_t wrong = released<kReleaseAbove>(
        n * (4 + length), [&] { return work(found, numbers.numbers(), n); });
    if (wrong == n) return;
    const std::string windows =
        length == 0 ? "" : " of windows of " + std::to_string(length) + " rows";
    refuse(nb::index_error, "expected numbers in [0, ", found.total(), ")", windows, ", got ",
           numbers.numbers()[wrong]);
  }

  void check_kind(bool pooled) const {
    if (episodes.pooled() != pooled) {
      throw nb::value_error(pooled ? "expected a pool, got a ring" : "expected a ring, got a pool");
    }
  }

  void check_records(const std::vector<std::int64_t>& given) const {
    check_kind(true);
    for (const std::int64_t at : given) {
      if (at < 0 || at >= episodes.records()) throw nb::index_error("expected records of streams");
    }
  }

  // Checks that rows [first, until) are in the columns, and that the columns match the episodes.
  void check(const EpisodeColumns& columns, std::int64_t first, std::int64_t until) const {
    check_length("lanes", columns.lanes(), episodes.pooled() ? 1 : episodes.lanes());
    if (first < 0 || first > until || until > columns.slots()) {
      refuse(nb::index_error, "expected rows in [0, ", columns.slots(), "), got ", first, " to ",
             until);
    }
  }

  Episodes episodes;
  EpisodeLaws laws;
  EpisodeWriter writer;
};

void check_numbers(const Array& array, const char* name, std::int64_t least, std::int64_t most) {
  for (std::int64_t i = 0; i < array.size(); ++i) {
    const std::int64_t one = array.numbers()[i];
    if (one < least || one > most) {
      refuse(nb::index_error, "expected numbers in [", least, ", ", most, "] in `", name, "`, got ",
             one);
    }
  }
}

// Counts of the oldest rows of streams.
struct Oldest {
  Oldest(const Index& self, nb::handle records, nb::handle counts)
      : record(records, "records", Array::kInt64, 1), count(counts, "counts", Array::kInt64, 1) {
    self.check_kind(true);
    check_length("counts", count.size(), record.size());
    check_numbers(record, "records", 0, self.episodes.records() - 1);
    each([&](std::int64_t at, std::int64_t n) {
      const std::int64_t stored = self.episodes.lane(at).hi - self.episodes.lane(at).lo;
      if (n < 0 || n > stored) {
        refuse(nb::value_error, "expected 0 to ", stored, " rows of a stream, got ", n);
      }
      sum += n;
    });
  }

  template <typename Work>
  void each(const Work& work) const {
    for (std::int64_t i = 0; i < record.size(); ++i) work(record.numbers()[i], count.numbers()[i]);
  }

  Array record, count;
  std::int64_t sum = 0;
};

// Makes a function that asks for `columns` results of elements. `ask` returns the position of an
// element without a row, or the number of elements.
auto by_element(std::int64_t columns,
                std::int64_t (Episodes::*ask)(Numbers, std::int64_t, std::int64_t*) const) {
  return [=](const Index& self, nb::handle element) {
    const Array elements(element, "element", Array::kInt64, 1);
    const std::int64_t n = elements.size();
    const Answers found(columns, n);
    const std::int64_t wrong = released<kReleaseAbove>(
        n, [&] { return (self.episodes.*ask)(elements.numbers(), n, found.out()); });
    if (wrong == n) return found.array;
    refuse(nb::index_error, "expected elements of stored rows, got ", elements.numbers()[wrong]);
  };
}

// Does the same for rows, given by time and lane.
auto by_row(std::int64_t columns,
            std::int64_t (Episodes::*ask)(Numbers, Numbers, std::int64_t, std::int64_t*) const) {
  return [=](const Index& self, nb::handle time, nb::handle lane) {
    const Array times(time, "time", Array::kInt64, 1), lanes(lane, "lane", Array::kInt64, 1);
    const std::int64_t n = times.size();
    check_length("lane", lanes.size(), n);
    const Answers found(columns, n);
    const Episodes& episodes = self.episodes;
    const std::int64_t wrong = released<kReleaseAbove>(
        n, [&] { return (episodes.*ask)(times.numbers(), lanes.numbers(), n, found.out()); });
    if (wrong == n) return found.array;
    refuse(nb::index_error, "expected stored rows, got time ", times.numbers()[wrong], " of lane ",
           lanes.numbers()[wrong]);
  };
}

// Does the same for windows, given by number.
auto by_number(std::int64_t columns,
               std::int64_t (EpisodeSums::*ask)(const Episodes&, Numbers, std::int64_t,
                                                std::int64_t*) const) {
  return [=](Index& self, const Law& law, int kind, nb::handle number) {
    const Answers found(columns, static_cast<std::int64_t>(nb::len(number)));
    self.for_numbers(law, kind, number, 0, [&](auto& sums, Numbers numbers, auto n) {
      return (sums.*ask)(self.episodes, numbers, n, found.out());
    });
    return found.array;
  };
}

void check_codes(const std::uint8_t* codes, std::int64_t n) {
  const bool known = std::all_of(codes, codes + n, [](int code) {
    return code == 0 || code == kSevered || code == kRestored;
  });
  if (!known) throw nb::value_error("expected codes of 0, 4 or 5");
}

using Flag = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, int, bool, int>;
using Id = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;

void bind_columns(nb::module_& m) {
  nb::class_<EpisodeColumns>(m, "EpisodeColumns", "Columns that mark the ends of episodes.")
      .def("__init__",
           [](EpisodeColumns* self, const std::vector<Flag>& flags, const std::vector<Id>& ids,
              std::int64_t slots, std::int64_t lanes, nb::handle) {
             std::vector<FlagColumn> own;
             for (const auto& [base, stride, values, bytes, sign, role] : flags) {
               if (values < 0 || (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) ||
                   role < 0 || role > FlagColumn::kCode) {
                 throw nb::value_error("expected flags of 1, 2, 4 or 8 bytes and a role");
               }
               own.push_back(
                   {reinterpret_cast<const char*>(base), stride, values, bytes, sign, role});
             }
             std::vector<IdColumn> names;
             for (const auto& [base, stride, bytes] : ids) {
               if (bytes < 0) throw nb::value_error("expected ids of at least 0 bytes");
               names.push_back({reinterpret_cast<const char*>(base), stride, bytes});
             }
             new (self) EpisodeColumns(std::move(own), std::move(names), slots, lanes);
           },
           nb::arg("flags"), nb::arg("ids"), nb::arg("slots"), nb::arg("lanes"),
           nb::arg("owner").none(), nb::keep_alive<1, 6>(),
           "Read columns at the addresses of flags and ids, which `owner` keeps.");
}

}  // namespace

void bind_episodes(nb::module_& m) {
  bind_columns(m);
  m.def("whole_episode",
        [](const std::vector<std::uintptr_t>& columns, const std::vector<std::int64_t>& sizes,
           std::int64_t n) {
          if (sizes.empty() || sizes.size() != columns.size() || sizes[0] != 8 || n < 1) {
            throw nb::value_error("expected columns of rows, and their sizes");
          }
          return whole_episode(columns, sizes, n);
        },
        "Return the key of n rows that have one key, and a flag only at the last row, else None.");

  nb::class_<Index>(m, "Episodes", "The boundaries of episodes among the rows of streams.")
      .def("__init__",
           [](Index* self, std::int64_t slots, std::int64_t lanes, std::int64_t start,
              nb::handle gone, nb::handle head) {
             const std::int64_t limit = lanes == 0 ? std::int64_t{1} << 32 : kMost / lanes;
             if (slots < 1 || lanes < 0 || slots > limit || start < 0 || start > kMost) {
               throw nb::value_error("expected at least one slot, lanes and a start");
             }
             const Array rows(gone, "gone", Array::kInt64, 1);
             const Array heads(head, "head", Array::kInt64, 1);
             check_length("gone", rows.size(), lanes);
             check_length("head", heads.size(), lanes);
             check_numbers(rows, "gone", 0, kMost);
             check_numbers(heads, "head", kReset, kEvicted);
             new (self) Index(slots, lanes, start, rows.numbers(), heads.numbers());
           },
           "Make a ring of lanes, or a pool of streams if there are no lanes.")
      .def_prop_ro("lo", [](const Index& self) { return self.episodes.lo(); })
      .def_prop_ro("hi", [](const Index& self) { return self.episodes.hi(); })
      .def_prop_ro("version", [](const Index& self) { return self.episodes.version(); })
      .def("append_columns",
           [](Index& self, const EpisodeColumns& columns, std::int64_t first, std::int64_t until,
              nb::handle after, nb::handle ends) {
             self.check(columns, first, until);
             self.check_kind(false);
             const Optional rows(after, "after", Array::kInt64, 1);
             const Optional codes(ends, "ends", Array::kUint8, 2);
             const std::int64_t n = rows && codes ? rows->size() : 0;
             if (n > 0) {
               check_length("ends", codes->size(0), n);
               check_length("ends", codes->size(1), columns.lanes());
               check_codes(codes->bytes(), n * columns.lanes());
               check_numbers(*rows, "after", first, until - 1);
             }
             released<kReleaseAbove>((until - first) * columns.lanes(), [&] {
               self.writer.append_ending(self.episodes, columns, first, until,
                                         rows ? rows->numbers() : Numbers{nullptr, 0},
                                         codes ? codes->bytes() : nullptr, n);
             });
           },
           nb::arg("columns"), nb::arg("first"), nb::arg("until"), nb::arg("after").none(),
           nb::arg("ends").none(),
           "Append rows of the columns to a ring, and call `close` after n of the rows.")
      .def("append_streams",
           [](Index& self, const EpisodeColumns& columns, std::int64_t first, nb::handle records,
              nb::handle slots, nb::handle row_ids, nb::handle segments, nb::handle stops) {
             const Array record(records, "records", Array::kInt64, 1);
             const Array slot(slots, "slots", Array::kInt64, 1);
             const Array row_id(row_ids, "row_ids", Array::kInt64, 1);
             const Optional segment(segments, "segments", Array::kInt64, 1);
             const Optional stop(stops, "stops", Array::kUint8, 1);
             const std::int64_t n = record.size();
             self.check(columns, first, first + n);
             self.check_kind(true);
             check_length("slots", slot.size(), n);
             check_length("row_ids", row_id.size(), n);
             check_length("segments", segment ? segment->size() : n, n);
             check_length("stops", stop ? stop->size() : n, n);
             check_numbers(record, "records", 0, self.episodes.records() - 1);
             check_numbers(slot, "slots", 0, self.episodes.slots() - 1);
             if (stop) check_codes(stop->bytes(), n);
             const Numbers parts = segment ? segment->numbers() : Numbers{nullptr, 0};
             const StreamRows rows{n, record.numbers(), slot.numbers(), row_id.numbers(),
                                   segment ? &parts : nullptr, stop ? stop->bytes() : nullptr};
             return released<kReleaseAbove>(n, [&] {
               return self.writer.append_streams(self.episodes, columns, first, rows);
             });
           },
           nb::arg("columns"), nb::arg("first"), nb::arg("records"), nb::arg("slots"),
           nb::arg("row_ids"), nb::arg("segments").none(), nb::arg("stops").none(),
           "Append rows to streams. If records of streams without rows are returned, renumber.")
      .def("run_of",
           [](const Index& self, const std::vector<std::int64_t>& records, std::int64_t n) {
             self.check_records(records);
             return self.episodes.run_of(records, n);
           },
           "Return the first slot of all n rows of streams in consecutive slots, or -1.")
      .def("replace_run",
           [](Index& self, const EpisodeColumns& columns, std::int64_t first, std::int64_t n,
              const std::vector<std::int64_t>& gone, std::int64_t slot, std::int64_t row_id,
              std::int64_t head) {
             self.check(columns, first, first + n);
             self.check_records(gone);
             if (n < 1 || slot < 0 || slot > self.episodes.slots() - n || head < kReset ||
                 head > kEvicted) {
               throw nb::value_error("expected slots and a head");
             }
             return self.writer.replace_run(self.episodes, columns, first, n, gone, slot, row_id,
                                            head);
           },
           "Drop streams, and append rows as a new stream, whose record is returned. Renumber.")
      .def("start",
           [](Index& self, std::int64_t gone, std::int64_t head, std::int64_t first_row) {
             self.check_kind(true);
             if (gone < 0 || gone > kMost || head < kReset || head > kEvicted) {
               throw nb::value_error("expected rows of at least 0 and a head");
             }
             return self.episodes.start(gone, head, first_row);
           },
           "Start the lane of a stream, and return its record.")
      .def("oldest",
           [](const Index& self, nb::handle records, nb::handle counts) {
             const Oldest rows(self, records, counts);
             const Answers slots(1, rows.sum);
             std::int64_t* slot = slots.out();
             rows.each([&](auto at, auto n) { slot = self.episodes.oldest(at, n, slot); });
             return slots.array;
           },
           "Return the slots of the oldest rows of streams, stream after stream.")
      .def("late_begins", [](Index& self) { return self.episodes.late_begins(); },
           "Return the slots of the oldest rows of streams that are not resets.")
      .def("drop_oldest",
           [](Index& self, nb::handle records, nb::handle counts) {
             const Oldest rows(self, records, counts);
             rows.each([&](auto at, auto n) { self.episodes.drop_oldest(at, n); });
             return self.episodes.drop_empty();
           },
           "Drop the oldest rows of distinct streams. If records of streams without rows are "
           "returned, renumber.")
      .def("relocate",
           [](Index& self, nb::handle source, nb::handle target) {
             const Array from(source, "source", Array::kInt64, 1);
             const Array to(target, "target", Array::kInt64, 1);
             self.check_kind(true);
             check_length("target", to.size(), from.size());
             const std::int64_t n = from.size();
             const std::int64_t wrong = self.episodes.relocate(from.numbers(), to.numbers(), n);
             if (wrong == n) return;
             refuse(nb::index_error, "expected a stored row and a slot without a row, got ",
                    from.numbers()[wrong], " and ", to.numbers()[wrong]);
           },
           "Move rows of a pool to slots without a row.")
      .def("renumber",
           [](Index& self, nb::handle order) {
             const Array records(order, "order", Array::kInt64, 1);
             self.check_kind(true);
             check_numbers(records, "order", 0, self.episodes.records() - 1);
             self.episodes.renumber(records.numbers(), records.size());
           },
           "Set the order of the lanes of a pool, as records.")
      .def("close",
           [](Index& self, nb::handle lanes, int code) {
             const Array given(lanes, "lanes", Array::kBool, 1);
             check_length("lanes", given.size(), self.episodes.lanes());
             if (code < 1 || code > kRestored) throw nb::value_error("expected a code from 1 to 5");
             for (std::int64_t rank = 0; rank < given.size(); ++rank) {
               if (given.bytes()[rank]) self.episodes.close_lane(self.episodes.record(rank), code);
             }
           },
           "End the open episodes of lanes, bool [lanes].")
      .def("lookup", by_row(4, &Episodes::lookup),
           "Return begin, last, code and head of stored rows.")
      .def("rows", by_row(5, &Episodes::rows), "Return the results of `Episodes::rows`.")
      .def("place", by_element(2, &Episodes::place), "Return time and lane of stored elements.")
      .def("around", by_element(6, &Episodes::around),
           "Return time, lane, begin, last, code and head of stored elements.")
      .def("per_lane",
           [](const Index& self) {
             const Episodes& episodes = self.episodes;
             const std::int64_t n = episodes.lanes();
             const Answers found(6, n);
             for (std::int64_t rank = 0; rank < n; ++rank) {
               const std::int64_t at = episodes.record(rank);
               const Episodes::Lane& lane = episodes.lane(at);
               const std::int64_t row[] = {lane.lo,         lane.hi,     lane.is_open(),
                                           lane.head_begin, lane.newest, lane.segment};
               for (std::int64_t i = 0; i < 6; ++i) found.out()[i * n + rank] = row[i];
             }
             return found.array;
           },
           "Return bounds, is_open, head_begin, newest and segment of each lane.")
      .def("table",
           [](const Index& self) {
             const std::int64_t n = self.episodes.count();
             const Answers found(6, n);
             released<kReleaseAbove>(n, [&] { self.episodes.table(found.out()); });
             return found.array;
           },
           "Return lane, begin, first, last, code and head of all episodes.")
      .def("totals",
           [](Index& self, const Law& law, int kind) {
             const Answers found(1, self.episodes.lanes());
             self.sums(law, kind).totals(found.out());
             return found.array;
           },
           "Return the number of windows, episodes or rows of each lane.")
      .def("total",
           [](Index& self, const Law& law, int kind) { return self.sums(law, kind).total(); },
           "Return the number of windows, episodes or rows in all lanes.")
      .def("find", by_number(5, &EpisodeSums::find),
           "Return lane, base, rows, count and rest of windows, given by their numbers.")
      .def("pick", by_number(1, &EpisodeSums::pick),
           "Return the elements of single rows, given by their numbers.")
      .def("slices",
           [](Index& self, const Law& law, nb::handle number, std::int64_t length) {
             if (length < 1 || length > self.episodes.slots()) {
               refuse(nb::value_error, "expected windows of 1 to ", self.episodes.slots(),
                      " rows, got ", length);
             }
             const auto rows = static_cast<std::int64_t>(nb::len(number)) * length;
             const Answers found(2, rows);
             std::int64_t* const to = found.out();
             self.for_numbers(law, kWindows, number, length, [&](auto& sums, auto numbers, auto n) {
               return sums.slices(self.episodes, numbers, n, length, to, to + rows);
             });
             return found.array;
           },
           "Return the elements of windows, given by number, and the window position of each.")
      .def("nbytes",
           [](const Index& self) { return self.episodes.bytes() + self.laws.bytes(); },
           "Return the memory of the index in bytes.");
}

}  // namespace replaykit
