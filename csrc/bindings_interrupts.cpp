// Defers signals until the state is consistent. Also provides a lock that defers signals while it
// is held.
//
// Python runs signal handlers between any two bytecodes of its main thread, and a handler may raise
// an exception. So no change that takes several bytecodes is atomic. While signals are deferred, a
// handler that only records the signal replaces the installed handlers. Only the main thread runs
// this code, with the interpreter lock held.

#ifdef _WIN32
enum { LOCK_EX, LOCK_NB, LOCK_UN };
static int flock(int, int) { return 0; }
#else
#include <sys/file.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <utility>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;

namespace {

using Clock = std::chrono::steady_clock;

// A SIGINT or SIGTERM is handled at once if the same signal has already been waiting this long.
constexpr std::chrono::milliseconds kPatience{1000};
// Microseconds between checks for signals while the main thread waits for a lock.
constexpr PY_TIMEOUT_T kLook = 50'000;

constexpr std::array kSignals{
    SIGINT, SIGTERM,
#ifndef _WIN32
    SIGHUP, SIGQUIT, SIGALRM, SIGVTALRM, SIGPROF, SIGUSR1, SIGUSR2,
#endif
};

// An object that replaces a handler, and records signals while it is in use. Afterwards, a call of
// the object calls the replaced handler, since a program may have saved the object as the previous
// handler.
struct Deferrer {
  nb::object handler;
  bool in_use = false;
};

// Contexts in a deferring one: signals are handled, end no wait, or wait even if repeated.
enum Kind { kAllowed, kShields, kSeals };

class Interrupts {
 public:
  void enter() {
    if (!here()) return;
    if (depth_ == 0) hold();
    ++depth_;
  }

  void leave() {
    if (depth_ == 0 || !here() || --depth_ > 0) return;
    counts_ = {};
    give_back();
  }

  // Handles the deferred signals.
  void check() {
    while (!pending_.empty() && counts_[kShields] == 0 && here()) {
      const int number = pending_.front().number;
      pending_.erase(pending_.begin());
      handle(number, nb::handle(reinterpret_cast<PyObject*>(PyEval_GetFrame())));
    }
  }

  void allow() {
    check();
    begin<kAllowed>();
  }

  template <Kind kind>
  void begin() {
    if (depth_ > 0 && here()) ++counts_[kind];
  }

  template <Kind kind>
  void end() {
    if (counts_[kind] > 0 && here()) --counts_[kind];
  }

  void defer(int number, nb::handle frame) {
    const auto now = Clock::now();
    const auto waits = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending& one) { return one.number == number; });
    const bool known = waits != pending_.end();
    const bool ends = counts_[kSeals] == 0 && (number == SIGINT || number == SIGTERM);
    const bool allowed = counts_[kAllowed] > 0 && counts_[kShields] == 0;
    if (allowed || (known && ends && now - waits->since >= kPatience)) {
      if (known) pending_.erase(waits);
      handle(number, frame);
    } else if (!known) {
      pending_.push_back({number, now});
    }
  }

  // Drops all state in a forked process, since the deferring code of its parent does not run there.
  void forked() {
    main_ = PyThread_get_thread_ident();
    depth_ = 0;
    counts_ = {};
    pending_.clear();
    give_back();
  }

 private:
  struct Pending {
    int number;
    Clock::time_point since;
  };

  bool here() {
    if (main_ == 0) prepare();
    return PyThread_get_thread_ident() == main_;
  }

  void prepare() {
    const nb::module_ signals = nb::module_::import_("_signal");
    const nb::module_ core = nb::module_::import_("replaykit.native._core");
    get_ = signals.attr("getsignal");
    set_ = signals.attr("signal");
    const nb::module_ os = nb::module_::import_("os");
    if (nb::hasattr(os, "register_at_fork")) {
      os.attr("register_at_fork")(nb::arg("after_in_child") = core.attr("_forked"));
    }
    const nb::object thread = nb::module_::import_("threading").attr("main_thread")();
    main_ = nb::cast<unsigned long>(thread.attr("ident"));
  }

  void hold() {
    try {
      for (const int number : kSignals) {
        nb::object handler = get_(number);
        if (!PyCallable_Check(handler.ptr())) continue;
        held_.emplace_back(number, deferrer_of(number, std::move(handler)));
        const nb::object deferrer = held_.back().second;
        nb::cast<Deferrer&>(deferrer).in_use = true;
        set_(number, deferrer);  // handles earlier signals first, which may raise
      }
    } catch (...) {
      give_back();
      throw;
    }
  }

  // Restores the handlers, then handles the recorded signals. If a handler raises an exception, it
  // is raised after all handlers are restored. The remaining signals are then sent to the process
  // again.
  void give_back() {
    nb::object raised;
    for (std::size_t back = held_.size(); back > 0;) {
      try {
        const auto& [number, deferrer] = held_[back - 1];
        if (get_(number).is(deferrer)) set_(number, nb::cast<Deferrer&>(deferrer).handler);
        nb::cast<Deferrer&>(deferrer).in_use = false;
        --back;
      } catch (nb::python_error& error) {  // from a handler restored before
        raised = nb::borrow(error.value());
      }
    }
    std::vector<Pending> arrived;
    arrived.swap(pending_);
    const std::vector<std::pair<int, nb::object>> held = std::move(held_);
    held_.clear();
    for (const Pending& one : arrived) {
      if (raised.is_valid()) {
        PyErr_SetInterruptEx(one.number);
        continue;
      }
      try {
        handle(held, one.number, nb::handle(reinterpret_cast<PyObject*>(PyEval_GetFrame())));
      } catch (nb::python_error& error) {
        raised = nb::borrow(error.value());
      }
    }
    if (raised.is_valid()) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
      throw nb::python_error();
    }
  }

  void handle(int number, nb::handle frame) { handle(held_, number, frame); }

  static void handle(const std::vector<std::pair<int, nb::object>>& held, int number,
                     nb::handle frame) {
    for (const auto& [known, deferrer] : held) {
      if (known != number) continue;
      const nb::object kept = nb::cast<Deferrer&>(deferrer).handler;  // a call may enter and leave
      kept(number, frame.is_valid() ? frame : nb::handle(Py_None));
      return;
    }
  }

  // Returns the object that replaced the same handler before, or a new object.
  nb::object deferrer_of(int number, nb::object handler) {
    for (auto& [known, deferrer] : deferrers_) {
      if (known != number) continue;
      Deferrer& before = nb::cast<Deferrer&>(deferrer);
      if (before.in_use || !before.handler.is(handler)) {
        deferrer = nb::cast(Deferrer{std::move(handler)});
      }
      return deferrer;
    }
    deferrers_.emplace_back(number, nb::cast(Deferrer{std::move(handler)}));
    return deferrers_.back().second;
  }

  unsigned long main_ = 0;
  long depth_ = 0;
  std::array<long, 3> counts_{};  // of the contexts of each kind that are entered
  std::vector<Pending> pending_;
  std::vector<std::pair<int, nb::object>> held_, deferrers_;
  nb::object get_, set_;
};

// Returns the only instance of a process. It is never destroyed, since Python's objects would no
// longer exist then.
Interrupts& interrupts() {
  static Interrupts& one = *new Interrupts;
  return one;
}

class Lock {
 public:
  Lock() : lock_(PyThread_allocate_lock()) {
    if (lock_ == nullptr) throw std::bad_alloc();
  }
  Lock(const Lock&) = delete;
  ~Lock() {
    if (owner_.load() != 0) PyThread_release_lock(lock_);
    PyThread_free_lock(lock_);
  }

  bool acquire(bool blocking, double timeout) {
    const unsigned long me = PyThread_get_thread_ident();
    if (owner_.load(std::memory_order_relaxed) == me) {
      ++depth_;
      return true;
    }
    interrupts().enter();
    try {
      if (!PyThread_acquire_lock(lock_, NOWAIT_LOCK) && !(blocking && waited(timeout))) {
        interrupts().leave();
        return false;
      }
    } catch (...) {
      interrupts().leave();
      throw;
    }
    owner_.store(me, std::memory_order_relaxed);
    depth_ = 1;
    return true;
  }

  void release() {
    if (!is_owned()) {
      PyErr_SetString(PyExc_RuntimeError, "cannot release un-acquired lock");
      throw nb::python_error();
    }
    if (--depth_ > 0) return;
    owner_.store(0, std::memory_order_relaxed);
    PyThread_release_lock(lock_);
    interrupts().leave();
  }

  bool is_owned() const {
    return owner_.load(std::memory_order_relaxed) == PyThread_get_thread_ident();
  }

  long depth() const { return depth_; }  // for the owner

 private:
  // Waits for the lock, and raises exceptions of signal handlers during the wait. A negative
  // timeout means no limit.
  bool waited(double timeout) {
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                          std::chrono::duration<double>(std::fmax(timeout, 0.0)));
    while (true) {
      PY_TIMEOUT_T pause = kLook;
      if (timeout >= 0) {
        const auto left = std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now());
        if (left.count() <= 0) return false;
        if (left.count() < pause) pause = left.count();
      }
      PyLockStatus status = PY_LOCK_FAILURE;
      {
        const nb::gil_scoped_release release;
        status = PyThread_acquire_lock_timed(lock_, pause, 0);
      }
      if (status == PY_LOCK_ACQUIRED) return true;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      interrupts().check();
    }
  }

  PyThread_type_lock lock_;
  std::atomic<unsigned long> owner_{0};
  long depth_ = 0;  // of the owner
};

// Names of attributes that every acquisition reads. They live as long as the process.
PyObject* const kFile = PyUnicode_InternFromString("_fd");
PyObject* const kEnter = PyUnicode_InternFromString("_enter");
PyObject* const kCommit = PyUnicode_InternFromString("_commit");

// A lock that calls methods of its subclass in Python. `_commit` is called before its outermost
// release. A lock over a file also excludes other processes. `_enter` is called after its outermost
// acquisition, and `_wait` if another process has locked the file `_fd`.
class CommitLock : public Lock {
 public:
  explicit CommitLock(bool shared) : shared_(shared) {}

  static bool acquire_with(nb::handle self, bool blocking, double timeout, bool patient) {
    auto& lock = nb::cast<CommitLock&>(self);
    if (!lock.acquire(blocking, timeout)) return false;
    if (!lock.shared_ || lock.depth() > 1) return true;
    bool locked = false;
    try {
      locked = lock_file(self, LOCK_EX | LOCK_NB) ||
               nb::cast<bool>(self.attr("_wait")(blocking ? timeout : 0.0, patient));
      if (locked) self.attr(nb::handle(kEnter))();
    } catch (...) {
      unlock_file(self);  // an interrupted wait may have taken it
      lock.release();
      throw;
    }
    if (!locked) lock.release();
    return locked;
  }

  static void release_with(nb::handle self) {
    auto& lock = nb::cast<CommitLock&>(self);
    if (!lock.is_owned() || lock.depth() > 1) return lock.release();
    const auto leave = [&] {
      if (lock.shared_) unlock_file(self);
      lock.released_ = Clock::now();
      lock.release();
    };
    try {
      self.attr(nb::handle(kCommit))();
    } catch (...) {
      leave();
      throw;
    }
    leave();
  }

  // Acquires the lock, but not the file. Returns false if this thread already holds the lock.
  bool enter_apart() {
    acquire(true, -1.0);
    if (depth() > 1) {
      release();
      return false;
    }
    return apart = true;
  }

  void leave_apart() {
    apart = false;
    release();
  }

  double idle() const { return std::chrono::duration<double>(Clock::now() - released_).count(); }

  bool apart = false;

 private:
  static bool lock_file(nb::handle self, int how) {
    if (flock(nb::cast<int>(self.attr(nb::handle(kFile))), how) == 0) return true;
    if (errno == EWOULDBLOCK) return false;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }

  // Does nothing if the file is closed, as in a child that was forked under the lock.
  static void unlock_file(nb::handle self) {
    const nb::object file = nb::getattr(self, nb::handle(kFile), nb::none());
    if (!file.is_none()) flock(nb::cast<int>(file), LOCK_UN);
  }

  bool shared_;
  Clock::time_point released_{};
};

const auto kNone = nb::arg().none();

// A context that calls two methods of `interrupts()`.
template <void (Interrupts::*begin)(), void (Interrupts::*end)()>
struct Context {
  static void bind(nb::module_& m, const char* name, const char* doc) {
    nb::class_<Context>(m, name, doc)
        .def(nb::init<>())
        .def("__enter__", [](Context&) { (interrupts().*begin)(); })
        .def("__exit__",
             [](Context&, nb::handle, nb::handle, nb::handle) { (interrupts().*end)(); }, kNone,
             kNone, kNone);
  }
};

}  // namespace

void replaykit::bind_interrupts(nb::module_& m) {
  nb::class_<Deferrer>(m, "Deferrer", "The temporary replacement for the handler of a signal.")
      .def("__call__",
           [](const Deferrer& self, int number, nb::handle frame) {
             if (self.in_use) return interrupts().defer(number, frame);
             const nb::object handler = self.handler;
             handler(number, frame);
           },
           nb::arg("number"), nb::arg("frame").none());
  m.def("_forked", [] { interrupts().forked(); });
  m.def("check_interrupts", [] { interrupts().check(); }, "Handle the deferred signals.");

  Context<&Interrupts::enter, &Interrupts::leave>::bind(
      m, "Deferred", "A context in which signals are deferred.");
  Context<&Interrupts::allow, &Interrupts::end<kAllowed>>::bind(
      m, "Allowed", "A context inside `Deferred` in which signals are handled.");
  Context<&Interrupts::begin<kShields>, &Interrupts::end<kShields>>::bind(
      m, "Shielded", "A context inside `Deferred` in which no signal ends a wait.");
  Context<&Interrupts::begin<kSeals>, &Interrupts::end<kSeals>>::bind(
      m, "Sealed", "A context inside `Deferred` in which repeated signals are deferred, too.");

  nb::class_<Lock>(m, "Lock",
                   "A re-entrant lock that defers signals while the main thread holds it.")
      .def(nb::init<>())
      .def("acquire", &Lock::acquire, nb::arg("blocking") = true, nb::arg("timeout") = -1.0)
      .def("release", &Lock::release)
      .def("_is_owned", &Lock::is_owned)
      .def("__enter__", [](Lock& self) { return self.acquire(true, -1.0); })
      .def("__exit__", [](Lock& self, nb::handle, nb::handle, nb::handle) { self.release(); },
           kNone, kNone, kNone);

  nb::class_<CommitLock, Lock>(
      m, "CommitLock",
      "A `Lock` that calls `_commit()` before its outermost release. With `shared`, it also locks "
      "the file `_fd`, and then calls `_enter()`; `_wait(timeout, patient)` waits for the file.")
      .def(nb::init<bool>(), nb::arg("shared"))
      .def("acquire", &CommitLock::acquire_with, nb::arg("blocking") = true,
           nb::arg("timeout") = -1.0, nb::arg("patient") = false)
      .def("release", &CommitLock::release_with)
      .def("enter_apart", &CommitLock::enter_apart)
      .def("leave_apart", &CommitLock::leave_apart)
      .def_ro("apart", &CommitLock::apart)
      .def_prop_ro("idle", &CommitLock::idle, "Seconds since the latest release.")
      .def("__enter__",
           [](nb::handle self) { return CommitLock::acquire_with(self, true, -1.0, false); })
      .def("__exit__",
           [](nb::handle self, nb::handle, nb::handle, nb::handle) { CommitLock::release_with(self); },
           kNone, kNone, kNone);
}
