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
  return launch_mla_sm90<Tile>(params, merges, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
