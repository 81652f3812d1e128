// Launches one kernel with the attributes our kernels use.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

namespace flashinfer {

// `enable_pdl` lets the grid start before its predecessor in the stream has finished (sm_90); the
// kernel must then call ptx::grid_dependency_wait before it touches global memory. `cluster_size`
// CTAs, consecutive in x, form a cluster (sm_90); 0 launches without.
template <typename Params>
inline cudaError_t launch_kernel(void (*kernel)(Params), dim3 grid, dim3 block, size_t smem_bytes,
                                 cudaStream_t stream, bool enable_pdl, const Params& params,
                                 unsigned cluster_size = 0) {
  cudaLaunchAttribute attributes[2];
  unsigned num_attributes = 0;
  if (enable_pdl) {
    attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[num_attributes++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster_size != 0) {
    attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
    attributes[num_attributes].val.clusterDim.x = cluster_size;
    attributes[num_attributes].val.clusterDim.y = 1;
    attributes[num_attributes++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  void* args[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), args);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
