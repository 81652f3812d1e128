// Ends a product of one row whose columns are heads of queries, keys and values: norms and turns
// them, stores queries, and appends keys and values to a paged cache, as rope/rope.cuh does. A
// cluster has one head, which the first warp of its first CTA finishes.
#pragma once

#include <flashinfer/gemm/one_row.cuh>
#include <flashinfer/gemm/one_row_heads_params.h>
#include <flashinfer/layout/page_table.cuh>
#include <flashinfer/rope/rope.cuh>

namespace flashinfer {

// `Rope`: RopeTraits that keep rows. kColumns: elements of a head.
template <typename Rope, int kColumns>
class OneRowHeads {
  using T = typename Rope::T;
  static constexpr int kVecSize = kColumns / 64;  // two such vectors are a lane's

  // A lane loads these before the product.
  struct alignas(16) Lane {
    detail::Rotation<kVecSize> rotation;
    Vector<T, kVecSize> weights[2], bias[2];
    PageSlot slot;
  };

 public:
  using Params = OneRowHeadsParams;
  static constexpr bool kByFirst = true;
  static constexpr uint32_t kMostSplits = 8;
  static constexpr uint32_t kSharedBytes = 32 * sizeof(Lane);

  __device__ __forceinline__ static void prepare(const Params& params, uint32_t head,
                                                 char* shared) {
    if (threadIdx.x >= 32) return;
    const RopeParams& rope = params.rope;
    const RopeSegment& segment = segment_of(rope, head);
    const detail::RopeUnit unit = detail::rope_unit<Rope, kVecSize>(segment, threadIdx.x);
    Lane& lane = reinterpret_cast<Lane*>(shared)[threadIdx.x];
    if (segment.rotates) {
      detail::Rotation<kVecSize> rotation;
      detail::load_rotation<typename Rope::TCache>(rope, detail::rope_position(rope, 0, 0), unit,
                                                   rotation);
      lane.rotation = rotation;
    }
    const uint32_t columns[2] = {unit.first, unit.second};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (segment.norm_weight != nullptr) {
        lane.weights[i].load(static_cast<const T*>(segment.norm_weight) + columns[i]);
      }
      if (params.bias != nullptr) {
        lane.bias[i].load(static_cast<const T*>(params.bias) + head * kColumns + columns[i]);
      }
    }
    if (segment.appends) lane.slot = find_slot(rope.table, 0);
  }

  __device__ __forceinline__ static void finish(const Params& params, uint32_t first, uint32_t,
                                                const float* received, uint32_t splits,
                                                const char* shared) {
    if (threadIdx.x >= 32) return;
    const RopeParams& rope = params.rope;
    const uint32_t head = first / kColumns;
    const RopeSegment& segment = segment_of(rope, head);
    const detail::RopeUnit unit = detail::rope_unit<Rope, kVecSize>(segment, threadIdx.x);
    const Lane lane = reinterpret_cast<const Lane*>(shared)[threadIdx.x];
    float a[1][kVecSize] = {}, b[1][kVecSize] = {};
    for (uint32_t s = 0; s < splits; ++s) {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        a[0][j] += received[s * kColumns + unit.first + j];
        b[0][j] += received[s * kColumns + unit.second + j];
      }
    }
    if (params.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        a[0][j] += lane.bias[0][j];
        b[0][j] += lane.bias[1][j];
      }
    }
    if (segment.norm_weight != nullptr) {
      detail::normalize_head(a[0], b[0], lane.weights[0], lane.weights[1], 32, rope.norm_eps);
    }
    if (segment.rotates) detail::rotate<Rope>(a[0], b[0], lane.rotation);
    const uint32_t number = head - segment.first_cta;
    if (segment.appends) {
      if (!lane.slot.exists) return;
      auto* const out = detail::rope_row<typename Rope::TOut>(segment.out, lane.slot.slot, number) +
                        lane.slot.page * segment.out.stride_page;
      detail::store_heads<Rope::kScaleCache>(out, segment, unit, 1, a, b);
    } else {
      auto* const out = detail::rope_row<typename Rope::TRow>(segment.out, 0, number);
      detail::store_heads<false>(out, segment, unit, 1, a, b);
    }
  }

 private:
  __device__ __forceinline__ static const RopeSegment& segment_of(const RopeParams& rope,
                                                                  uint32_t head) {
    uint32_t which = 0;
    while (which + 1 < rope.num_segments && head >= rope.segments[which + 1].first_cta) ++which;
    return rope.segments[which];
  }
};

#ifndef __CUDACC_RTC__

template <typename Rope, int kColumns>
inline cudaError_t launch_one_row_heads(OneRowHeadsParams params, uint32_t splits, bool enable_pdl,
                                        cudaStream_t stream) {
  uint32_t heads = 0;
  for (uint32_t i = 0; i < params.rope.num_segments; ++i) {
    RopeSegment& segment = params.rope.segments[i];
    segment.units = FastDivisor(32);
    segment.first_cta = heads;
    heads += segment.num_heads;
  }
  if (params.n != heads * kColumns) return cudaErrorInvalidValue;
  using Traits = OneRowTraits<typename Rope::T, kColumns, true, OneRowHeads<Rope, kColumns>>;
  return launch_one_row<Traits>(params, splits, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
