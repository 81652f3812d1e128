// Where the KV rows of a block lie, for warps that load rows themselves.
#pragma once

#include <cstdint>
#include <flashinfer/mla/mla_params.h>

namespace flashinfer {

// Four warps have 16 rows of a block each; lane i knows row i % 16 of its warp's.
//
// Rows beyond the item repeat its last one, and pages that do not exist the cache's last one, so
// that no load has a condition: the compiler would load into other registers, copy from there, and
// so wait for each load at once. What rows beyond the item hold gets no weight.
template <typename Kpe>
class MlaCacheRows {
 public:
  static constexpr int kWarpRows = 16;
  // In units of 16 bytes.
  struct Places {
    int ckv, kpe;
  };

  __device__ __forceinline__ explicit MlaCacheRows(const MlaParams& params)
      : params_(params), row_(first_row() + threadIdx.x % kWarpRows) {}

  // The warp's first row of a block.
  __device__ __forceinline__ static int first_row() { return threadIdx.x / 32 % 4 * kWarpRows; }

  __device__ __forceinline__ int find_page(const MlaWorkItem& item, int block_token) const {
    const uint32_t number = params_.page_size.divide(token_of(item, block_token));
    return params_.kv_indices[item.kv_base + static_cast<int>(number)];
  }

  __device__ __forceinline__ Places find(const MlaWorkItem& item, int found_page,
                                         int block_token) const {
    return place_of(params_, found_page, token_of(item, block_token));
  }

  // Where token `token` of a request lies, whose page is known.
  __device__ __forceinline__ static Places place_of(const MlaParams& params, int found_page,
                                                    uint32_t token) {
    const int64_t page = min(static_cast<uint32_t>(found_page), params.num_pages - 1);
    const int64_t slot = token - params.page_size.divide(token) * params.page_size.divisor;
    const auto unit = [&](const MlaCache& cache, int bytes) {
      return static_cast<int>((page * cache.stride_page + slot * cache.stride_token) * bytes >> 4);
    };
    return {unit(params.ckv, 1), unit(params.kpe, sizeof(Kpe))};
  }

 private:
  __device__ __forceinline__ int token_of(const MlaWorkItem& item, int block_token) const {
    return min(block_token + row_, item.kv_end - 1);
  }

  const MlaParams& params_;
  const int row_;
};

}  // namespace flashinfer
