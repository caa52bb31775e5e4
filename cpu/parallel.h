// A parallel loop, free of XLA: kernels say what to do for each index, the handlers (XLA's intra-op pool) and the
// sanitizer harness (plain threads) say where it runs.
#ifndef JAX_NMSPARSE_CPU_PARALLEL_H_
#define JAX_NMSPARSE_CPU_PARALLEL_H_

#include <cstdint>

namespace nmsparse {

class Parallel {
 public:
  using Body = void (*)(void* context, int64_t index, int worker);

  // At most this many indices run at a time; `worker` is below it, and no two running indices have the same one.
  int workers() const { return workers_; }

  // Calls body(index, worker) for every index below count, in any order, and returns when all have returned. What body
  // computes for an index must not depend on `worker`, which only tells whose scratch memory to use.
  template <typename F>
  void For(int64_t count, F&& body) {
    if (count == 1 || workers_ == 1) {
      for (int64_t i = 0; i < count; ++i) body(i, 0);
    } else if (count > 1) {
      Run(count, [](void* context, int64_t i, int worker) { (*static_cast<F*>(context))(i, worker); }, &body);
    }
  }

 protected:
  explicit Parallel(int workers) : workers_(workers < 1 ? 1 : workers) {}
  ~Parallel() = default;
  virtual void Run(int64_t count, Body body, void* context) = 0;

 private:
  int workers_;
};

}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_PARALLEL_H_
