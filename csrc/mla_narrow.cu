#include "mla.h"

#include <flashinfer/mla/sm90/narrow/attention.cuh>
#include <flashinfer/mla/sm90/ring_launch.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

template <bool kInPairs>
using AttentionOf = MlaNarrowAttention<
    MlaNarrowTile<dtype::FLASHINFER_CFG_DTYPE_O, FLASHINFER_CFG_HEAD_DIM_CKV,
                  FLASHINFER_CFG_HEAD_DIM_KPE, dtype::FLASHINFER_CFG_DTYPE_Q,
                  dtype::FLASHINFER_CFG_DTYPE_KV, dtype::FLASHINFER_CFG_DTYPE_KPE, kInPairs>>;

cudaError_t mla(const MlaParams& params, bool merges, bool enable_pdl, cudaStream_t stream) {
  using Tile = AttentionOf<false>::Tile;
  // With three terms of a query registers would be spilled.
  if constexpr (Tile::kTerms <= 2) {
    if (params.in_pairs) return launch_mla_ring<AttentionOf<true>>(params, enable_pdl, stream);
  }
  const cudaError_t status = launch_mla_ring<AttentionOf<false>>(params, enable_pdl, stream);
  if (status != cudaSuccess || !merges || params.merges_itself) return status;
  return launch_mla_merge<Tile::O, Tile::kDimCkv>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
