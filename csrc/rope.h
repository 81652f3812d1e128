// The launcher that rope.cu compiles for one configuration and the rope bindings call.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/rope/rope_params.h>

namespace flashinfer {

#if FLASHINFER_CFG_COMPUTED
using RopeCallParams = ComputedRopeParams;
#else
using RopeCallParams = RopeParams;
#endif

// `vectorizable`: the parts of every head, and the rows of the cos-sin cache, are whole, aligned
// vectors.
cudaError_t rope(const RopeCallParams& params, bool vectorizable, bool enable_pdl,
                 cudaStream_t stream);

}  // namespace flashinfer
