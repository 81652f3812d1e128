// Concatenates K of multi-head latent attention from its parts: k[t, h] = (k_nope[t, h],
// k_rope[t]).
//
// It copies units of 16 bytes (or of what sizes and alignment allow), one per thread: threadIdx.x
// runs over a head, threadIdx.y over heads, threadIdx.z over tokens. The rotary part comes from L1
// for all heads but the first.
#pragma once

#include <flashinfer/common/head_grid.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/concat/concat_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename Unit>
__global__ void __launch_bounds__(256)
    concat_mla_k_kernel(const __grid_constant__ ConcatMlaKParams params) {
  const uint32_t token = heads_first_token_block() * blockDim.z + threadIdx.z;
  const uint32_t head = blockIdx.x * blockDim.y + threadIdx.y;
  const uint32_t row_bytes = params.nope_bytes + params.rope_bytes;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (token >= params.num_tokens || head >= params.num_heads) return;
  const char* nope = static_cast<const char*>(params.k_nope) + token * params.k_nope_stride_token +
                     head * params.k_nope_stride_head;
  const char* rope = static_cast<const char*>(params.k_rope) + token * params.k_rope_stride_token;
  char* k =
      static_cast<char*>(params.k) + token * params.k_stride_token + head * params.k_stride_head;
  for (uint32_t i = threadIdx.x * sizeof(Unit); i < row_bytes; i += blockDim.x * sizeof(Unit)) {
    const char* source = i < params.nope_bytes ? nope + i : rope + (i - params.nope_bytes);
    *reinterpret_cast<Unit*>(k + i) = *reinterpret_cast<const Unit*>(source);
  }
}

#ifndef __CUDACC_RTC__

// `unit_bytes` is 16, 4, 2 or 1, and divides every size, stride and address.
inline cudaError_t launch_concat_mla_k(const ConcatMlaKParams& params, uint32_t unit_bytes,
                                       bool enable_pdl, cudaStream_t stream) {
  constexpr uint32_t kThreads = 256;
  const uint32_t num_units = (params.nope_bytes + params.rope_bytes) / unit_bytes;
  const HeadGrid shape =
      heads_first(make_head_grid(params.num_tokens, params.num_heads, num_units, kThreads));
  void (*kernel)(ConcatMlaKParams) = unit_bytes == 16  ? concat_mla_k_kernel<uint4>
                                     : unit_bytes == 4 ? concat_mla_k_kernel<uint32_t>
                                     : unit_bytes == 2 ? concat_mla_k_kernel<uint16_t>
                                                       : concat_mla_k_kernel<uint8_t>;
  return launch_kernel(kernel, shape.grid, shape.block, 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
