// The launcher that all_reduce.cu compiles for one configuration and all_reduce_jit_binding.cc
// calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/comm/allreduce_params.h>

namespace flashinfer {

cudaError_t all_reduce(const AllReduceParams& params, const AllReduceSchedule& schedule,
                       bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
