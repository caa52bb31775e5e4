#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace nmsparse {
namespace {

// Shared by the caller and its helpers. A helper that the pool starts after the loop has ended finds no index left and
// touches nothing but this, which is why it is reference counted and does not live in the caller's frame.
struct Loop {
  Parallel::Body body;
  void* context;
  int64_t count;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> finished{0};
  std::mutex mutex;
  std::condition_variable all_finished;

  void Work(int worker) {
    int64_t done = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count; ++done) body(context, i, worker);
    if (done == 0) return;
    if (finished.fetch_add(done, std::memory_order_acq_rel) + done == count) {
      std::lock_guard<std::mutex> lock(mutex);
      all_finished.notify_one();
    }
  }

  void Wait() {
    auto all = [this] { return finished.load(std::memory_order_acquire) == count; };
    // The last index usually ends within microseconds of the caller's own last one.
    for (int spin = 0; spin < 2000; ++spin) {
      if (all()) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#else
      std::this_thread::yield();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex);
    all_finished.wait(lock, all);
  }
};

}  // namespace

PoolParallel::PoolParallel(::xla::ffi::ThreadPool pool)
    : Parallel(static_cast<int>(std::clamp<int64_t>(pool.num_threads(), 1, 256))), pool_(pool) {}

void PoolParallel::Run(int64_t count, Body body, void* context) {
  auto loop = std::make_shared<Loop>();
  loop->body = body;
  loop->context = context;
  loop->count = count;
  const int helpers = static_cast<int>(std::min<int64_t>(workers(), count)) - 1;
  for (int worker = 1; worker <= helpers; ++worker) {
    pool_.Schedule([loop, worker] { loop->Work(worker); });
  }
  loop->Work(0);
  loop->Wait();
}

}  // namespace nmsparse
