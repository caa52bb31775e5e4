// What the launchers ask of the device and of their problem, and a launch, in clusters or not.
#ifndef JAX_NMSPARSE_CUDA_LAUNCH_H_
#define JAX_NMSPARSE_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "common/problem.h"

namespace nmsparse::cuda {

inline constexpr int kMaxSplits = 8;  // the largest cluster that every device with clusters launches
inline constexpr int64_t kMaxGridYz = 65535;
inline constexpr int kHopperSharedBytes = 227 * 1024;  // that a block may use on compute capability 9.0

struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;      // of one block
  int major = 0, minor = 0;  // compute capability

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
  const auto read = [&](cudaDeviceAttr attribute, int* value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, id);
  };
  read(cudaDevAttrMultiProcessorCount, &device->multiprocessors);
  read(cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->shared_bytes);
  read(cudaDevAttrComputeCapabilityMajor, &device->major);
  read(cudaDevAttrComputeCapabilityMinor, &device->minor);
  return error;
}

// The same for kernels of wgmma, which exists on compute capability 9.0 alone.
inline cudaError_t QueryHopper(Device* device) {
  const cudaError_t error = QueryDevice(device);
  if (error != cudaSuccess) return error;
  return device->major == 9 && device->minor == 0 ? cudaSuccess : cudaErrorNotSupported;
}

// Whether 16-byte accesses, the copy engine's too, may start there.
inline bool IsAligned(const void* start) { return reinterpret_cast<uintptr_t>(start) % 16 == 0; }

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

// `grid`: a multiple of `cluster` along every axis.
template <class... Arguments>
cudaError_t LaunchInClusters(void (*kernel)(Arguments...), dim3 grid, int threads, int64_t shared_bytes, dim3 cluster,
                             cudaStream_t stream, const Arguments&... arguments) {
  const int shared = static_cast<int>(shared_bytes);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster.x;
  attribute.val.clusterDim.y = cluster.y;
  attribute.val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace nmsparse::cuda

#endif  // JAX_NMSPARSE_CUDA_LAUNCH_H_
