// Threads that share the tasks of one call: the caller and num_threads − 1 workers.
//
// A call publishes (function, number of tasks); whoever is free claims the next task. The caller waits for tasks,
// never for threads: a worker that the kernel has not woken, or that a neighbour's process keeps off the CPU, costs
// nothing, because the caller does its share. Waiting spins for tens of microseconds at most (the gap between two
// kernels of one step), then sleeps in the kernel: CPUs are shared.
#pragma once

#include <atomic>
#include <climits>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int64_t kSpinNs = 40000;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

inline int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

template <class Ready>
inline bool spin_until(Ready ready) {
  int64_t deadline = 0;
  for (uint32_t i = 0;; ++i) {
    if (ready()) return true;
    relax();
    if (i % 16 == 15) {
      int64_t now = monotonic_ns();
      if (deadline == 0) deadline = now + kSpinNs;
      if (now >= deadline) return false;
    }
  }
}

inline void futex_wait(std::atomic<uint32_t>* at, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(at), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>* at) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(at), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads) {
    sigset_t all, before;  // signals are the main thread's
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < num_threads; ++i) std::thread([this, i] { work(i); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  int num_threads() const { return num_threads_; }

  // Calls task(index, thread) for every index < total, thread < num_threads; returns when all have returned.
  template <class Task>
  void run(uint32_t total, Task&& task) {
    if (num_threads_ == 1 || total <= 1) {
      for (uint32_t i = 0; i < total; ++i) task(i, 0);
      return;
    }
    function_ = [](void* context, uint32_t index, int thread) {
      (*static_cast<std::remove_reference_t<Task>*>(context))(index, thread);
    };
    context_ = &task;
    done_.store(0, std::memory_order_relaxed);
    word_.store(static_cast<uint64_t>(total) << 32);
    if (num_sleeping_.load() > 0) {
      wake_.fetch_add(1);
      futex_wake_all(&wake_);
    }
    while (claim_and_run(0)) {
    }
    wait_for_all(total);
  }

 private:
  // word_: total in the upper half, the next task in the lower one. A claim below total is exclusive, and holds
  // the call open, so function_ and context_ are its own; a claim at or above total touches nothing.
  bool claim_and_run(int thread) {
    uint64_t seen = word_.load();
    if (static_cast<uint32_t>(seen) >= seen >> 32) return false;
    uint64_t claimed = word_.fetch_add(1);
    uint32_t index = static_cast<uint32_t>(claimed), total = claimed >> 32;
    if (index >= total) return false;
    function_(context_, index, thread);
    if (done_.fetch_add(1) + 1 == total && caller_sleeps_.load()) futex_wake_all(&done_);
    return true;
  }

  void wait_for_all(uint32_t total) {
    if (spin_until([&] { return done_.load() == total; })) return;
    caller_sleeps_.store(true);
    for (uint32_t done = done_.load(); done != total; done = done_.load()) futex_wait(&done_, done);
    caller_sleeps_.store(false);
  }

  void work(int thread) {
    auto has_task = [this] {
      uint64_t seen = word_.load();
      return static_cast<uint32_t>(seen) < seen >> 32;
    };
    for (;;) {
      while (claim_and_run(thread)) {
      }
      if (spin_until(has_task)) continue;
      uint32_t seen = wake_.load();
      num_sleeping_.fetch_add(1);
      if (!has_task()) futex_wait(&wake_, seen);
      num_sleeping_.fetch_sub(1);
    }
  }

  const int num_threads_;
  void (*function_)(void*, uint32_t, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<uint32_t> num_sleeping_{0};
};

// A thread's buffer, 64-byte aligned, that only grows. Contents do not outlive the next `get`.
class Scratch {
 public:
  float* get(size_t count) {
    if (buffer_.size() < count + 16) buffer_.resize(count + 16);
    uintptr_t at = reinterpret_cast<uintptr_t>(buffer_.data());
    return reinterpret_cast<float*>((at + 63) & ~uintptr_t{63});
  }

 private:
  std::vector<float> buffer_;
};
