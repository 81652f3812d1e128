// The launcher that group_quant.cu compiles for one configuration and group_quant_jit_binding.cc
// calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/quantization/group_quant_params.h>

namespace flashinfer {

// Fills in the fields of a launch (first_row, num_groups, divide_by_scale_cols) itself.
cudaError_t group_quant(const GroupQuantParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
