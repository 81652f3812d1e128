// The launcher of flashinfer/cute_dsl/moe_finalize_kernel.py, which stands in for moe_combine.cu:
// the same binding calls it.
#include <moe_finalize_kernel.h>

#include "cute_dsl_library.h"
#include "ffi_checks.h"
#include "moe_combine.h"

namespace flashinfer {
namespace {

cute_dsl::Library library(_mlir_moe_finalize_kernel_cuda_init,
                          _mlir_moe_finalize_kernel_cuda_load_to_device);

}  // namespace

cudaError_t moe_combine(const MoeCombineParams& params, bool enable_pdl, cudaStream_t stream) {
  if (params.top_k != FLASHINFER_CFG_TOP_K) {
    ffi::raise("ValueError", "`entry_row` must have %d columns, for which the kernel was compiled",
               FLASHINFER_CFG_TOP_K);
  }
  const cudaError_t status = library.load();
  if (status != cudaSuccess) return status;
  const auto writable = [](const void* pointer) { return const_cast<void*>(pointer); };
  return static_cast<cudaError_t>(cute_dsl_moe_finalize_kernel_wrapper(
      nullptr, writable(params.rows), writable(params.entry_row), writable(params.weights),
      params.out, params.rows_stride, params.out_stride, static_cast<int32_t>(params.num_rows),
      static_cast<int32_t>(params.num_tokens), static_cast<int32_t>(params.hidden), enable_pdl,
      stream));
}

}  // namespace flashinfer
