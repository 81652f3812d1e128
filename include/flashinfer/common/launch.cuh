// Launches one kernel with the attributes our kernels use.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

namespace flashinfer {

// `enable_pdl` lets the grid start before its predecessor in the stream has finished (sm_90); the kernel must then call
// ptx::grid_dependency_wait before it touches global memory.
template <typename Params>
inline cudaError_t launch_kernel(void (*kernel)(Params), dim3 grid, dim3 block, size_t smem_bytes,
                                 cudaStream_t stream, bool enable_pdl, const Params& params) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = enable_pdl ? 1 : 0;
  void* args[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), args);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
