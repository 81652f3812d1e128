#include "mla.h"

#include <flashinfer/mla/sm90/launch.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t mla(const MlaParams& params, bool merges, bool enable_pdl, cudaStream_t stream) {
  using Q = dtype::FLASHINFER_CFG_DTYPE_Q;
  using Ckv = dtype::FLASHINFER_CFG_DTYPE_KV;
  constexpr bool kScaled = FLASHINFER_CFG_SCALED_GROUPS;
  using T = std::conditional_t<sizeof(Ckv) == 1 && !kScaled, dtype::float16, Q>;
  using Plain =
      MlaTile<T, dtype::FLASHINFER_CFG_DTYPE_O, FLASHINFER_CFG_HEAD_DIM_CKV,
              FLASHINFER_CFG_HEAD_DIM_KPE, Q, Ckv, dtype::FLASHINFER_CFG_DTYPE_KPE, kScaled>;
  using Tile = std::conditional_t<FLASHINFER_CFG_PROFILED, MlaProfiledTile<Plain>, Plain>;
  // A plan that was made on the device has no counters.
  const bool merges_itself = merges && params.plan_is_older;
  const cudaError_t status = launch_mla_sm90<Tile>(params, merges_itself, enable_pdl, stream);
  if (status != cudaSuccess || !merges || merges_itself) return status;
  return launch_mla_merge<Tile::O, Tile::kDimCkv>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
