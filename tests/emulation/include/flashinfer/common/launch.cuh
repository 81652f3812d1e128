// In place of the product's header: the CTAs of a launch run one after the other, each with shared
// memory full of NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/ptx/cp_async.cuh>

namespace flashinfer {

template <typename Params>
inline cudaError_t launch_kernel(void (*kernel)(Params), dim3 grid, dim3 block, size_t smem_bytes,
                                 cudaStream_t, bool, const Params& params,
                                 unsigned cluster_size = 0) {
  (void)cluster_size;  // a cluster's CTAs are emulated one by one, and share nothing
  if (smem_bytes > emulation::kMaxSharedBytes) emulation::fail("too much shared memory");
  emulation::shared_bytes = smem_bytes;
  gridDim = grid;
  blockDim = block;
  const std::function<void(int)> enter = [](int thread) { threadIdx = dim3(thread, 0, 0); };
  for (unsigned i = 0; i < grid.x * grid.y * grid.z; ++i) {
    blockIdx = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
    std::memset(dynamic_shared, 0xff, smem_bytes);
    emulation::block.run(block.x, i, [&] { kernel(params); }, enter);
    ptx::check_no_copy_is_left();
  }
  return cudaSuccess;
}

}  // namespace flashinfer
