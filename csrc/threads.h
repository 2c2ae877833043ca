// Loops on several threads, and threads of a process that are started once.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <unistd.h>
#endif

namespace replaykit {

inline long this_process() {
#if defined(__unix__) || defined(__APPLE__)
  return static_cast<long>(getpid());
#else
  return 0;
#endif
}

// Returns the object of this process. A forked process has no threads of its parent, and its copies
// of the locks have an arbitrary state. So it gets a new object. No object is ever destroyed,
// because its threads may outlive all objects when the process exits.
template <typename Threads>
Threads& of_this_process() {
  static std::atomic<Threads*> current{nullptr};
  Threads* found = current.load(std::memory_order_acquire);
  const long process = this_process();
  if (found != nullptr && found->process == process) return *found;
  Threads* made = new Threads(process);
  if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
  delete made;  // another thread was faster
  return *found;
}

// Starts threads that call serve(), until there are `wanted`. The system may refuse to start more.
template <typename Serve>
void start_threads(int& threads, int wanted, const Serve& serve) {
  for (; threads < wanted; ++threads) {
    try {
      std::thread(serve).detach();
    } catch (const std::system_error&) {
      return;
    }
  }
}

// The process that loaded the core.
inline const long kHome = this_process();

// Functions of the OpenMP that torch has loaded. `start` calls work(data) on several threads, and
// returns when it has ended on all of them.
struct OpenMP {
  void (*start)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
  int (*number)();
  int (*threads)();
};

// Returns OpenMP, or null if it cannot be used. After any operation torch's threads stay awake for a
// while and keep their processors busy, so other threads would compete with them. A forked process
// has no threads of OpenMP, and would wait for them.
inline const OpenMP* openmp() {
#if defined(__unix__) || defined(__APPLE__)
  static const OpenMP found{
      reinterpret_cast<decltype(OpenMP::start)>(dlsym(RTLD_DEFAULT, "GOMP_parallel")),
      reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num")),
      reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"))};
  const bool usable = found.start != nullptr && found.number != nullptr && found.threads != nullptr;
  return usable && kHome == this_process() ? &found : nullptr;
#else
  return nullptr;
#endif
}

inline std::mutex loop_running;

// Calls work(begin, end) for parts of [0, n) on up to `threads` threads, or once if OpenMP cannot be
// used. `work` must not throw. Each thread always has the same part, because its processor may have
// the memory of the last batch in its cache. While a loop is running, callers of other loops run
// them alone, because OpenMP would start other threads for each calling thread.
template <typename Work>
void run_parts(std::int64_t n, int threads, const Work& work) {
  const OpenMP* const omp = threads < 2 ? nullptr : openmp();
  std::unique_lock<std::mutex> alone(loop_running, std::defer_lock);
  if (omp == nullptr || !alone.try_lock()) return work(std::int64_t{0}, n);
  struct Loop {
    const OpenMP& omp;
    const Work& work;
    const std::int64_t n;
  } loop{*omp, work, n};
  const auto part = [](void* data) {
    const Loop& loop = *static_cast<Loop*>(data);
    const std::int64_t number = loop.omp.number(), threads = loop.omp.threads();
    loop.work(loop.n * number / threads, loop.n * (number + 1) / threads);
  };
  omp->start(part, &loop, static_cast<unsigned>(threads), 0);
}

}  // namespace replaykit
