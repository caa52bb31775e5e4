// Host side of the few-token kernels: what a launcher asks of the device, and a launch in clusters.
#ifndef JAX_NMSPARSE_CUDA_BLOCK_LAUNCH_H_
#define JAX_NMSPARSE_CUDA_BLOCK_LAUNCH_H_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "common/problem.h"

namespace nmsparse::cuda::block {

inline constexpr int kMaxSplits = 8;  // the largest cluster that every device with clusters launches
inline constexpr int64_t kMaxGridYz = 65535;

struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;  // of one block
  int major = 0;

  // Blocks that may share a cluster: clusters exist from sm_90 on.
  int max_splits() const { return major >= 9 ? kMaxSplits : 1; }

  // Shared memory of a block where `blocks` should run on a multiprocessor, each of at least `least` bytes: 1 KB of
  // each is the driver's. All of it where that many do not fit anyway.
  int64_t SharedBytesFor(int blocks, int64_t least) const {
    const int64_t share = shared_bytes / blocks - (blocks > 1 ? 1024 : 0);
    return share >= least ? share : shared_bytes;
  }
};

inline cudaError_t QueryDevice(Device* device) {
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device->major, cudaDevAttrComputeCapabilityMajor, id);
  return error;
}

inline bool IsEmpty(const Geometry& geometry) {
  return geometry.batch == 0 || geometry.tokens == 0 || geometry.out_features == 0;
}

// Blocks of `kernel` that run at one time in clusters of `splits` when each takes `shared` bytes: fewer than the
// multiprocessors hold, since a cluster does not straddle the groups they come in. A fact of the device, asked for once
// per Config, which must name the kernel and how many of its blocks fit a multiprocessor.
template <class Config, class Kernel>
int BlocksAtOnce(Kernel* kernel, const Device& device, int threads, int64_t shared, int splits) {
  static std::atomic<int> known[kMaxSplits + 1];
  const int each = static_cast<int>(device.shared_bytes / shared);
  if (splits == 1) return device.multiprocessors * each;
  int blocks = known[splits].load(std::memory_order_relaxed);
  if (blocks != 0) return blocks;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(splits);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(splits));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess || clusters == 0) {
    cudaGetLastError();
    clusters = device.multiprocessors * each / splits;
  }
  blocks = clusters * splits;
  known[splits].store(blocks, std::memory_order_relaxed);
  return blocks;
}

// `grid`: a multiple of `splits` along x.
template <class... Arguments>
cudaError_t LaunchInClusters(void (*kernel)(Arguments...), dim3 grid, int threads, int64_t shared_bytes, int splits,
                             cudaStream_t stream, const Arguments&... arguments) {
  const int shared = static_cast<int>(shared_bytes);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(splits);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = splits > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace nmsparse::cuda::block

#endif  // JAX_NMSPARSE_CUDA_BLOCK_LAUNCH_H_
