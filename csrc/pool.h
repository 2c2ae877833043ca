// Loops on several threads, and threads of a process that are started once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
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

// Starts work(data) on several threads of OpenMP, and returns when it has ended on all of them.
using StartOpenMP = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// Returns GOMP_parallel of the OpenMP that torch has loaded, or null. After any operation torch's
// threads stay awake for a while and keep their processors busy, so other threads would compete with
// them. A forked process has no threads of OpenMP, and would wait for them.
inline StartOpenMP openmp() {
#if defined(__unix__) || defined(__APPLE__)
  static const auto found = reinterpret_cast<StartOpenMP>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return kHome == this_process() ? found : nullptr;
#else
  return nullptr;
#endif
}

// Calls work(begin, end) for pieces of [0, n) on up to `threads` threads, or on this one if OpenMP
// cannot be used. `work` must not throw. A thread that is late on a busy machine gets fewer pieces.
template <typename Work>
void run_pieces(std::int64_t n, std::int64_t piece, int threads, const Work& work) {
  const StartOpenMP start = threads < 2 ? nullptr : openmp();
  if (start == nullptr) return work(std::int64_t{0}, n);
  struct Loop {
    const Work& work;
    const std::int64_t n, piece;
    std::atomic<std::int64_t> next{0};
  } loop{work, n, std::max<std::int64_t>(1, piece)};
  const auto take = [](void* data) {
    Loop& loop = *static_cast<Loop*>(data);
    for (std::int64_t at; (at = loop.next.fetch_add(loop.piece)) < loop.n;) {
      loop.work(at, std::min(loop.n, at + loop.piece));
    }
  };
  start(take, &loop, static_cast<unsigned>(threads), 0);
}

}  // namespace replaykit
