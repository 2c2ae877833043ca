// The Python face of gathers that go on by themselves.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "reads.h"
#include "row_arguments.h"

namespace nb = nanobind;
using replaykit::as_sides;
using replaykit::checked_index;
using replaykit::checked_limit;
using replaykit::List;
using replaykit::Read;
using replaykit::Readers;
using replaykit::Reading;
using replaykit::Table;

namespace {

// A gather under way, and what it reads and writes. It is over before that is let go.
class Begun {
 public:
  Begun(std::shared_ptr<Read> read, nb::object kept)
      : read_(std::move(read)), kept_(std::move(kept)) {}
  Begun(const Begun&) = delete;
  Begun& operator=(const Begun&) = delete;
  // Those that copy need no interpreter lock, so that they may be waited for here.
  ~Begun() { Reading::abandon(*read_); }

  void wait() {
    if (!read_->over()) {
      nb::gil_scoped_release release;
      Reading::finish(*read_);
    }
    kept_ = nb::none();
  }

  bool over() const { return read_->over(); }

 private:
  std::shared_ptr<Read> read_;
  nb::object kept_;
};

// Gathers of one set of rows, of the process that begins them.
class Reads {
 public:
  std::shared_ptr<Readers> of_this_process() {
    const long process = replaykit::this_process();
    if (readers_->process != process) readers_ = std::make_shared<Readers>(process);
    return readers_;
  }

  void wait() {
    const std::shared_ptr<Readers> readers = readers_;
    if (!readers->under_way) return;
    nb::gil_scoped_release release;
    Reading::await_all(*readers);
  }

 private:
  std::shared_ptr<Readers> readers_ = std::make_shared<Readers>(replaykit::this_process());
};

}  // namespace

void replaykit::bind_reads(nb::module_& m) {
  nb::class_<Begun>(m, "Begun", "A gather that goes on by itself.")
      .def("wait", &Begun::wait, "Waits until it is over, and helps; for one caller at a time.")
      .def_prop_ro("over", &Begun::over, "Whether all has been copied.");

  nb::class_<Reads>(m, "Reads", "Gathers under way of rows that nobody may write meanwhile.")
      .def(nb::init<>())
      .def("begin",
           [](Reads& self, const Table& table, std::int64_t index, std::int64_t n,
              std::int64_t limit, const List& to, const List& strides, int threads,
              nb::object kept) {
             std::vector<replaykit::Side> sides = as_sides(table, to, strides);
             List at = checked_index(index, n, checked_limit(table, limit));
             auto read = std::make_shared<Read>(table, std::move(at), std::move(sides), threads,
                                                self.of_this_process());
             auto begun = std::make_unique<Begun>(read, std::move(kept));
             if (n) Reading::begin(read);
             return begun.release();
           },
           nb::arg("table"), nb::arg("index"), nb::arg("n"), nb::arg("limit"), nb::arg("to"),
           nb::arg("strides"), nb::arg("threads"), nb::arg("kept").none(), nb::rv_policy::take_ownership,
           "Begins what Table.gather does; `kept` holds the memory of rows and copies. IndexError for "
           "a row outside [0, limit).")
      .def("wait", &Reads::wait, "Waits until none is under way, and helps.");
}
