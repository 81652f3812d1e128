#include "mla.h"

#include <flashinfer/mla/portable/launch.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t mla(const MlaParams& params, bool merges, bool enable_pdl, cudaStream_t stream) {
  using T = dtype::FLASHINFER_CFG_DTYPE_Q;
  using O = dtype::FLASHINFER_CFG_DTYPE_O;
  constexpr int kDimCkv = FLASHINFER_CFG_HEAD_DIM_CKV, kDimKpe = FLASHINFER_CFG_HEAD_DIM_KPE;
  const cudaError_t status = launch_mla_portable<T, O, kDimCkv, kDimKpe, FLASHINFER_CFG_PROFILED>(
      params, enable_pdl, stream);
  if (status != cudaSuccess || !merges) return status;
  return launch_mla_merge<O, kDimCkv>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
