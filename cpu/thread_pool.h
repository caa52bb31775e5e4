// Parallel on XLA's intra-op thread pool.
#ifndef JAX_NMSPARSE_CPU_THREAD_POOL_H_
#define JAX_NMSPARSE_CPU_THREAD_POOL_H_

#include "cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace nmsparse {

// The pool offers no way to wait, and the caller may itself be one of its threads. So indices are claimed from an
// atomic counter, the caller claims too until none is left, and then waits only for indices that some thread is already
// running: a pool that is busy, or whose only thread is the caller, makes the loop slower and never stops it.
class PoolParallel final : public Parallel {
 public:
  explicit PoolParallel(::xla::ffi::ThreadPool pool);

 protected:
  void Run(int64_t count, Body body, void* context) override;

 private:
  ::xla::ffi::ThreadPool pool_;
};

}  // namespace nmsparse

#endif  // JAX_NMSPARSE_CPU_THREAD_POOL_H_
