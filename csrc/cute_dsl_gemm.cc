// The launcher of flashinfer/cute_dsl/moe_grouped_gemm_kernel.py, which stands in for gemm_sm90.cu:
// the same binding calls it.
#include <moe_grouped_gemm_kernel.h>

#include <algorithm>
#include <cstdint>

#include "cute_dsl_library.h"
#include "ffi_checks.h"
#include "gemm.h"

namespace flashinfer {
namespace {

// Size of what a cluster computes at a time.
constexpr int64_t kCluster = FLASHINFER_CFG_CLUSTER_ROWS;
constexpr int64_t kRows = kCluster * FLASHINFER_CFG_TILE_ROWS;
constexpr int64_t kColumns = FLASHINFER_CFG_TILE_COLUMNS;

cute_dsl::Library library(_mlir_moe_grouped_gemm_kernel_cuda_init,
                          _mlir_moe_grouped_gemm_kernel_cuda_load_to_device);

// Results are stored in pairs.
void check_pairs(const GemmParams& params) {
  const int64_t element = ffi::dtype::FLASHINFER_CFG_DTYPE_OUT.bits / 8;
  const bool aligned = reinterpret_cast<uintptr_t>(params.d.data) % (2 * element) == 0;
  if (params.n % 2 != 0 || params.d.stride_row % 2 != 0 || params.d.stride_batch % 2 != 0 ||
      !aligned) {
    ffi::raise("ValueError",
               "`out` must have an even number of columns and rows that begin at even elements for "
               "kernels in CuTe-DSL, got %u columns and a stride of %lld",
               params.n, static_cast<long long>(params.d.stride_row));
  }
}

cudaError_t num_ctas(const GemmParams& params, int32_t& ctas) {
  int device = 0, num_sms = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  const int64_t tiles = (params.m + kRows - 1) / kRows * ((params.n + kColumns - 1) / kColumns) *
                        int64_t{params.num_groups};
  const int64_t most = params.max_ctas ? std::min<int64_t>(params.max_ctas, num_sms) : num_sms;
  const int64_t clusters = std::max<int64_t>(most / kCluster, 1);
  ctas = static_cast<int32_t>(std::min(tiles, clusters) * kCluster);
  return status;
}

}  // namespace

cudaError_t gemm(const GemmParams& params, bool enable_pdl, cudaStream_t stream) {
  check_pairs(params);
  int32_t ctas = 0;
  cudaError_t status = num_ctas(params, ctas);
  if (status == cudaSuccess) status = library.load();
  if (status != cudaSuccess) return status;
  const auto writable = [](const void* pointer) { return const_cast<void*>(pointer); };
  const GemmScaleMatrix &a = params.a_scale, &b = params.b_scale;
  return static_cast<cudaError_t>(cute_dsl_moe_grouped_gemm_kernel_wrapper(
      nullptr, params.a.data, params.b.data, params.d.data, writable(a.data), writable(b.data),
      writable(params.group_rows), static_cast<int32_t>(params.m), static_cast<int32_t>(params.n),
      static_cast<int32_t>(params.k), static_cast<int32_t>(params.num_groups), params.a.stride_row,
      params.a.stride_batch, params.b.stride_row, params.b.stride_batch, params.d.stride_row,
      params.d.stride_batch, a.stride_row, a.stride_k, a.stride_batch, b.stride_row, b.stride_k,
      b.stride_batch, static_cast<int32_t>(params.group_stride), ctas, enable_pdl, stream));
}

}  // namespace flashinfer
