// A pool of threads that share the work of loops. Threads are reused, since starting a thread takes
// as long as copying a megabyte. The threads start with the first loop that is long enough.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
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

// Each process has one pool, which all tables share. Any free thread takes the next piece of a
// loop, and so does the caller. If a thread wakes late on a busy machine, it does not delay the
// others.
class Pool {
 public:
  // Calls work(begin, end) for pieces of [0, n) on up to `threads` threads, including the caller's.
  // `work` must not throw. While a loop is running, callers of other loops run them alone.
  template <typename Work>
  static void run(std::int64_t n, std::int64_t piece, int threads, const Work& work) {
    Pool& pool = of_this_process<Pool>();
    std::unique_lock<std::mutex> alone(pool.busy_, std::try_to_lock);
    if (threads < 2 || !alone.owns_lock()) {
      work(std::int64_t{0}, n);
      return;
    }
    Job job;
    job.call = [](const void* context, std::int64_t begin, std::int64_t end) {
      (*static_cast<const Work*>(context))(begin, end);
    };
    job.context = &work;
    job.n = n;
    job.piece = std::max<std::int64_t>(1, piece);
    pool.share(job, threads - 1);
  }

  explicit Pool(long process) : process(process) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const long process;

 private:
  struct Job {
    void (*call)(const void*, std::int64_t, std::int64_t) = nullptr;
    const void* context = nullptr;
    std::int64_t n = 0;
    std::int64_t piece = 1;
    std::atomic<std::int64_t> next{0};

    void work() {
      for (;;) {
        const std::int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
        if (begin >= n) return;
        call(context, begin, std::min(n, begin + piece));
      }
    }
  };

  void share(Job& job, int helpers) {
    {
      std::lock_guard<std::mutex> guard(state_);
      start_threads(threads_, helpers, [this] { serve(); });
      job_ = &job;
      places_ = std::min(helpers, threads_);
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> guard(state_);
    job_ = nullptr;  // no more threads can join
    done_.wait(guard, [this] { return inside_ == 0; });
  }

  void serve() {
    std::unique_lock<std::mutex> guard(state_);
    for (;;) {
      wake_.wait(guard, [this] { return job_ != nullptr && places_ > 0; });
      Job* job = job_;
      --places_;
      ++inside_;
      guard.unlock();
      job->work();
      guard.lock();
      if (--inside_ == 0) done_.notify_all();
    }
  }

  std::mutex busy_;  // locked by the caller whose loop is running
  std::mutex state_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  int threads_ = 0;
  int places_ = 0;
  int inside_ = 0;
};

}  // namespace replaykit
