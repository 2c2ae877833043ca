// Python bindings of gathers in background threads.
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "reads.h"
#include "row_arguments.h"

namespace replaykit {

namespace {

// A gather under way, with the objects whose memory it uses. The destructor ends the gather before
// it releases these objects.
class Begun {
 public:
  Begun(std::shared_ptr<Read> read, nb::object kept)
      : read_(std::move(read)), kept_(std::move(kept)) {}
  Begun(const Begun&) = delete;
  Begun& operator=(const Begun&) = delete;
  // The copying threads need no interpreter lock, so waiting for them here is safe.
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

// The gathers under way of the same rows in the current process.
class Reads {
 public:
  std::shared_ptr<Readers> of_this_process() {
    const long process = this_process();
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
  std::shared_ptr<Readers> readers_ = std::make_shared<Readers>(this_process());
};

}  // namespace

void bind_reads(nb::module_& m) {
  nb::class_<Begun>(m, "Begun", "A gather in background threads.")
      .def("wait", &Begun::wait, "Wait until the gather has ended, and help; not thread-safe.")
      .def_prop_ro("over", &Begun::over, "True if the gather has ended.");

  nb::class_<Reads>(m, "Reads", "Gathers under way. Their rows must not be written meanwhile.")
      .def(nb::init<>())
      .def("begin",
           [](Reads& self, const Table& table, std::int64_t index, std::int64_t n,
              std::int64_t limit, const List& to, const List& strides, int threads,
              nb::object kept) {
             std::vector<Side> sides = as_sides(table.width(), to, strides);
             List at = checked_index(index, n, checked_limit(table, limit));
             auto read = std::make_shared<Read>(table, std::move(at), std::move(sides), threads,
                                                self.of_this_process());
             auto begun = std::make_unique<Begun>(read, std::move(kept));
             if (n) Reading::begin(read);
             return begun.release();
           },
           nb::arg("table"), nb::arg("index"), nb::arg("n"), nb::arg("limit"), nb::arg("to"),
           nb::arg("strides"), nb::arg("threads"), nb::arg("kept").none(), nb::rv_policy::take_ownership,
           "Begin a Table.gather; `kept` keeps the memory of rows and copies alive. Raise "
           "IndexError if a row is outside [0, limit).")
      .def("wait", &Reads::wait, "Wait until no gather is under way, and help.");
}

}  // namespace replaykit
