// Finishes a row whose K and V have all been seen, and merges rows that were split.
#pragma once

#include <flashinfer/attention/attention_params.h>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/tile_row.cuh>
#include <flashinfer/attention/math.cuh>
#include <flashinfer/attention/variant.cuh>
#include <flashinfer/collective/group_max.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/quantization/group_scale.cuh>

namespace flashinfer {

// Brings `kParts` sums of exponentials to a common maximum. `part(i)` is (largest exponent, sum),
// and weights[i] becomes the factor of that part's values.
template <bool kSoftmax, typename Part, int kParts>
__device__ __forceinline__ void combine_sums(const Part& part, float (&weights)[kParts],
                                             float& largest, float& sum) {
  float2 parts[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    parts[i] = part(i);
    largest = fmaxf(largest, parts[i].x);
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    weights[i] = !kSoftmax                  ? 1.f
                 : parts[i].x == -math::inf ? 0.f
                                            : math::ptx_exp2(parts[i].x - largest);
    sum = fmaf(parts[i].y, weights[i], sum);
  }
}

// Factor of a KV head's outputs.
template <typename Variant>
__device__ __forceinline__ float output_scale(const AttentionTensors& tensors, uint32_t kv_head) {
  if constexpr (Variant::kHasHeadScales) {
    return tensors.v_scale * head_scale(tensors.head_scales.v, kv_head);
  } else {
    return tensors.v_scale;
  }
}

// Whether outputs are codes, which a row's scale multiplies: a group of per-token quantisation.
template <typename O>
inline constexpr bool kIsCode = sizeof(O) == 1;
inline constexpr float kLeastMagnitude = 1e-10f;  // of a row; a row of zeros has a scale, too

// The row's scale; null unless outputs are codes.
template <typename O>
__device__ __forceinline__ float* scale_of_row(const OutputScale& scale, int64_t token,
                                               uint32_t qo_head_idx) {
  if constexpr (!kIsCode<O>) return nullptr;
  return scale.data + token * scale.stride_token + qo_head_idx * scale.stride_head;
}

// Where a finished row goes, and the factor of its values.
template <typename O, typename Variant, typename View>
struct FinishedRow {
  O* output;
  const Variant& variant;
  const View& view;
  uint32_t request, qo_idx, qo_head_idx;
  float largest, sum, scale, factor;

  // Passes m and d to `variant` once, which may change them. Writes the row's LSE (base 2) to
  // `lse`, unless that is null.
  __device__ __forceinline__ FinishedRow(O* output, float* lse, Variant& variant, const View& view,
                                         uint32_t request, uint32_t qo_idx, uint32_t qo_head_idx,
                                         float m, float d, float v_scale)
      : output(output),
        variant(variant),
        view(view),
        request(request),
        qo_idx(qo_idx),
        qo_head_idx(qo_head_idx),
        largest(m),
        sum(d),
        scale(1.f) {
    if constexpr (!Variant::use_softmax) {
      factor = v_scale;
      if (lse != nullptr) *lse = this->lse();
    } else {
      if constexpr (Variant::kHasMDUpdate) {
        variant.MDUpdate(view, 0u, qo_head_idx, largest, sum, scale);
      }
      if (lse != nullptr) *lse = this->lse();
      // A row that saw no key gives 0, not 0 / 0.
      factor = largest == -math::inf ? 0.f : scale * math::ptx_rcp(sum) * v_scale;
      if constexpr (Variant::kHasOutputTransform) factor = v_scale;
    }
  }

  // Returns the LSE in base 2, or NaN without softmax.
  __device__ __forceinline__ float lse() const {
    if constexpr (!Variant::use_softmax) return math::nan;
    return largest == -math::inf ? -math::inf : largest + log2f(sum);
  }

  __device__ __forceinline__ float value(float sum_of_values) const {
    if constexpr (Variant::kHasOutputTransform) {
      return variant.OutputTransform(view, sum_of_values, request, qo_idx, qo_head_idx, largest,
                                     sum, scale) *
             factor;
    } else {
      return sum_of_values * factor;
    }
  }

  template <int N>
  __device__ __forceinline__ void store(int column, const float (&values)[N]) {
    float finished[N];
#pragma unroll
    for (int i = 0; i < N; ++i) finished[i] = value(values[i]);
    Vector<O, N> vector;
    vector.from_floats(finished);
    vector.store(output + column);
  }

  // Stores a row of which each lane of a warp has some vectors: `visit(store)` calls `store(column,
  // values)` for each. A row of codes has one for each lane.
  template <typename Visit>
  __device__ __forceinline__ void store_row(const Visit& visit, float* row_scale) {
    if constexpr (kIsCode<O>) {
      Vector<float, 4> row;
      visit([&](int, const float (&values)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) row.elements[i] = value(values[i]);
      });
      MagnitudeMax<float> magnitude;
      magnitude.include(row);
      const auto found =
          scale::float32::of<code::e4m3>(magnitude.reduce<32>(), kLeastMagnitude, 1.f);
      const int lane_idx = threadIdx.x % 32;
      if (lane_idx == 0) *row_scale = found.stored;
#pragma unroll
      for (int i = 0; i < 4; ++i) row.elements[i] *= found.reciprocal;
      Vector<O, 4> codes;
      codes.from_floats(row.elements);
      codes.store(output + lane_idx * 4);
    } else {
      visit([&](int column, const auto& values) { store(column, values); });
    }
  }
};

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float weight) {
  sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
  sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
}

// What a warp has added up of the parts of a row that was split.
template <bool kSoftmax, int kHeadDimVO>
struct MergedParts {
  static constexpr int kVectors = (kHeadDimVO + 127) / 128;  // of 4 columns per lane
  static constexpr int kBatch = kVectors == 1 ? 4 : 2;       // parts that are loaded together
  float4 output[kVectors] = {};
  float largest = -math::inf, sum = 0.f;

  // Adds the parts in the slots `first`, first + step, ... that are among begin ... end - 1. All
  // parts of a batch and their sums are loaded together, so that a batch waits once.
  template <typename Params>
  __device__ __forceinline__ void add(const Params& params, uint32_t kv_head, int row, int first,
                                      int step, int begin, int end) {
    for (; first < end; first += kBatch * step) {
      float2 sums[kBatch + 1];
      float4 values[kBatch][kVectors];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int slot = first + b * step;
        const int64_t partial =
            (int64_t{slot} * params.num_kv_heads.divisor + kv_head) * params.rows_per_slot + row;
        const bool is_part = slot >= begin && slot < end;
        sums[b] = is_part ? params.partial_sums[partial] : float2{-math::inf, 0.f};
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const float* address = params.partial_o + partial * kHeadDimVO + column(i);
          values[b][i] = is_part && column(i) < kHeadDimVO
                             ? *reinterpret_cast<const float4*>(address)
                             : float4{0.f, 0.f, 0.f, 0.f};
        }
      }
      sums[kBatch] = float2{largest, sum};
      float weights[kBatch + 1];
      largest = -math::inf, sum = 0.f;
      combine_sums<kSoftmax>([&](int b) { return sums[b]; }, weights, largest, sum);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float4 merged = {0.f, 0.f, 0.f, 0.f};
        add_scaled(merged, output[i], weights[kBatch]);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) add_scaled(merged, values[b][i], weights[b]);
        output[i] = merged;
      }
    }
  }

  // First of the columns of this lane's vector `i`.
  __device__ __forceinline__ static int column(int i) { return (i * 32 + threadIdx.x % 32) * 4; }
};

inline constexpr int kMergeThreads = 256;

// Grid (num_merges * num_kv_heads, rows_per_slot / merged_rows). The warps of a row take its parts
// in turn, and their results are added in shared memory in order of the warps.
template <typename Variant, typename O, int kHeadDimVO, typename Params>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ Params params) {
  constexpr int kWarps = kMergeThreads / 32;
  using Parts = MergedParts<Variant::use_softmax, kHeadDimVO>;
  constexpr int kVectors = Parts::kVectors;
  __shared__ float4 shared_output[kWarps][kVectors * 32];
  __shared__ float2 shared_sum[kWarps];
  const uint32_t merge_idx = params.num_kv_heads.divide(blockIdx.x);
  const uint32_t kv_head = blockIdx.x - merge_idx * params.num_kv_heads.divisor;
  // Part of the plan: ready before the preceding grid. So are lengths, which that grid has read.
  MergeItem item;
  if constexpr (Params::kReadsLengths) {
    item = find_merge(params.lengths, merge_idx);
  } else {
    item = params.merges[merge_idx];
  }
  const int rows_per_cta = params.merged_rows;
  const int warps_per_row = kWarps / rows_per_cta;
  const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
  const int row = blockIdx.y * rows_per_cta + warp_idx / warps_per_row;
  const int row_warp = warp_idx % warps_per_row;
  const bool exists = warp_idx < rows_per_cta * warps_per_row && row < item.num_rows;
  ptx::grid_launch_and_wait();
  if (static_cast<int>(blockIdx.y) * rows_per_cta >= item.num_rows) return;

  const int slot_end = exists ? item.slot_end : 0;
  // A window leaves out other parts in front for another chunk of a prompt. Which parts are added
  // together must not depend on that, so those left out have places, too, and add nothing.
  Parts parts;
  const int left_out = item.first_part % (Parts::kBatch * warps_per_row);
  parts.add(params, kv_head, row, item.slot_begin - left_out + row_warp, warps_per_row,
            item.slot_begin, slot_end);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) shared_output[warp_idx][i * 32 + lane_idx] = parts.output[i];
  if (lane_idx == 0) shared_sum[warp_idx] = float2{parts.largest, parts.sum};
  __syncthreads();
  if (!exists || row_warp != 0) return;

  float weights[kWarps], largest = -math::inf, sum = 0.f;
  combine_sums<Variant::use_softmax>(
      [&](int w) { return w < warps_per_row ? shared_sum[warp_idx + w] : float2{-math::inf, 0.f}; },
      weights, largest, sum);
  const AttentionTensors& tensors = params.tensors[item.kind];
  const uint32_t packed = item.row_begin + row;
  const uint32_t qo_idx = params.group_size.divide(packed);
  const uint32_t qo_head_idx =
      kv_head * params.group_size.divisor + packed - qo_idx * params.group_size.divisor;
  const RequestParams<typename Params::Variant> view(params.variant, item.qo_len, item.kv_len);
  Variant variant(view, item.request, reinterpret_cast<uint8_t*>(shared_output));
  const int64_t token = item.qo_begin + int64_t{qo_idx};
  float* const lse = lane_idx == 0 && tensors.lse != nullptr
                         ? tensors.lse + token * params.variant.num_qo_heads + qo_head_idx
                         : nullptr;
  FinishedRow<O, Variant, RequestParams<typename Params::Variant>> target(
      static_cast<O*>(tensors.o) + token * tensors.o_stride_token +
          qo_head_idx * tensors.o_stride_head,
      lse, variant, view, item.request, qo_idx, qo_head_idx, largest, sum,
      output_scale<Variant>(tensors, kv_head));
  const auto for_each_vector = [&](const auto& store) {
    for (int vector = lane_idx; vector < kHeadDimVO / 4; vector += 32) {
      float4 merged = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w < warps_per_row) add_scaled(merged, shared_output[warp_idx + w][vector], weights[w]);
      }
      const float values[4] = {merged.x, merged.y, merged.z, merged.w};
      store(vector * 4, values);
    }
  };
  target.store_row(for_each_vector, scale_of_row<O>(params.o_scale, token, qo_head_idx));
}

#ifndef __CUDACC_RTC__

// Merges the partial results that an attention launch left in the workspace, if any: those that its
// own CTAs did not merge.
template <typename Variant, typename O, int kHeadDimVO, typename Params>
inline cudaError_t launch_merge(const Params& params, bool enable_pdl, cudaStream_t stream) {
  if (params.num_merges == 0 || params.counters != nullptr) return cudaSuccess;
  return launch_kernel(merge_kernel<Variant, O, kHeadDimVO, Params>,
                       dim3(params.num_merges * params.num_kv_heads.divisor,
                            ceil_div(params.rows_per_slot, params.merged_rows)),
                       dim3(kMergeThreads), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
