// The launcher that attention_mask_ranges.cu compiles and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/attention/mask_ranges_params.h>

namespace flashinfer {

cudaError_t mask_ranges(const MaskRangesParams& params, cudaStream_t stream);

}  // namespace flashinfer
