// In place of the product's header: the CTAs of a launch run one after the other, each with shared
// memory full of NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/ptx/cp_async.cuh>

#include <algorithm>

namespace flashinfer {

template <typename Params>
inline cudaError_t launch_kernel(void (*kernel)(Params), dim3 grid, dim3 block, size_t smem_bytes,
                                 cudaStream_t, bool, const Params& params,
                                 unsigned cluster_size = 0) {
  // Otherwise a cluster's CTAs are emulated one by one, and share nothing.
  const unsigned ctas = std::max(1u, std::min(cluster_size, emulation::kMaxClusterCtas));
  if (smem_bytes > emulation::kMaxSharedBytes) emulation::fail("too much shared memory");
  emulation::cluster_ctas = ctas;
  emulation::cta_bytes = (smem_bytes + 1023) / 1024 * 1024;
  emulation::shared_bytes = (ctas - 1) * emulation::cta_bytes + smem_bytes;
  gridDim = grid;
  blockDim = block;
  for (unsigned first = 0; first < grid.x * grid.y * grid.z; first += ctas) {
    const std::function<void(int)> enter = [&](int thread) {
      const unsigned i = first + thread / block.x;
      threadIdx = dim3(thread % block.x, 0, 0);
      blockIdx = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
    };
    std::memset(dynamic_shared, 0xff, emulation::shared_bytes);
    emulation::block.run(ctas * block.x, first, [&] { kernel(params); }, enter);
    ptx::check_no_copy_is_left();
  }
  return cudaSuccess;
}

}  // namespace flashinfer
