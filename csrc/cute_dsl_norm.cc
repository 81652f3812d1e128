// The launcher of flashinfer/cute_dsl/norm_kernel.py, which stands in for norm.cu: the same binding
// calls it.
#include <norm_kernel.h>

#include "cute_dsl_library.h"
#include "ffi_checks.h"
#include "norm.h"

namespace flashinfer {
namespace {

cute_dsl::Library library(_mlir_norm_kernel_cuda_init, _mlir_norm_kernel_cuda_load_to_device);

}  // namespace

cudaError_t norm(const NormParams& params, bool vectorizable, const DeviceInfo& device,
                 bool enable_pdl, cudaStream_t stream) {
  if (params.hidden_size != FLASHINFER_CFG_HIDDEN) {
    ffi::raise("ValueError",
               "`input` must have %d columns, for which the kernel was compiled, got %u",
               FLASHINFER_CFG_HIDDEN, params.hidden_size);
  }
  if (!vectorizable) {
    ffi::raise("ValueError",
               "rows of all tensors must start at multiples of 16 bytes (of 8 elements of 8 bits) "
               "for kernels in CuTe-DSL");
  }
  const cudaError_t status = library.load();
  if (status != cudaSuccess) return status;
  const auto writable = [](const void* pointer) { return const_cast<void*>(pointer); };
  return static_cast<cudaError_t>(cute_dsl_norm_kernel_wrapper(
      nullptr, params.input.data, params.residual.data, params.out.data, writable(params.weight),
      writable(params.bias), writable(params.out_scale), params.out_scale_value, params.eps,
      params.weight_offset, params.input.stride_outer, params.input.stride_inner,
      params.residual.stride_outer, params.residual.stride_inner, params.out.stride_outer,
      params.out.stride_inner, static_cast<int32_t>(params.num_rows),
      static_cast<int32_t>(params.num_heads), static_cast<int32_t>(device.num_sms), enable_pdl,
      stream));
}

}  // namespace flashinfer
