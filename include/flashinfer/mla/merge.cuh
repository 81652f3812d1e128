// Merges the parts of tiles whose KV range was cut.
//
// A group of threads has one thread for each four columns of a row. If rows have few parts,
// each group of a CTA takes one row. If they have many, each group takes every kGroups-th part of
// the same row, and the groups' sums are added in shared memory. The order is fixed: results repeat
// bit for bit.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/row_end.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename O, int kDimCkv>
class MlaMerger {
 public:
  static constexpr int kThreads = 512;
  static constexpr int kColumnThreads = kDimCkv / 4, kGroups = kThreads / kColumnThreads;

  struct Shared {
    float4 outputs[kGroups][kColumnThreads];
    float sums[kGroups];
  };

  __device__ __forceinline__ MlaMerger(const MlaParams& params, Shared& shared)
      : params_(params),
        shared_(shared),
        thread_(threadIdx.x % kColumnThreads),
        group_(threadIdx.x / kColumnThreads) {}

  // The plan is older than the grid before, which has waited for it: only the parts come from
  // there. Or that grid has planned for itself.
  __device__ __forceinline__ void run() {
    if (params_.plans_itself) ptx::grid_dependency_wait();
    const int num_units = params_.header->num_merges * kRows;
    MlaMerge merge = {};
    if (static_cast<int>(blockIdx.x) < num_units) merge = params_.merges[blockIdx.x / kRows];
    ptx::grid_dependency_wait();
    for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
      if (unit != static_cast<int>(blockIdx.x)) merge = params_.merges[unit / kRows];
      const int place = unit % kRows;
      if (merge.num_parts > kFewParts) {
        merge_together(merge, place);
      } else if (place < kRows / kGroups) {
        merge_alone(merge, place * kGroups + group_);
      }
    }
  }

 private:
  static constexpr int kRows = kMlaTileRows, kFewParts = 8;

  __device__ __forceinline__ bool has_row(const MlaMerge& merge, int row) const {
    return merge.row_begin + row < merge.qo_len * static_cast<int>(params_.num_heads.divisor);
  }

  __device__ __forceinline__ static float low_half(uint32_t pair) {
    return to_float(O{static_cast<uint16_t>(pair)});
  }
  __device__ __forceinline__ static float high_half(uint32_t pair) {
    return to_float(O{static_cast<uint16_t>(pair >> 16)});
  }

  // The thread's group adds the parts first, first + step, ...
  __device__ __forceinline__ float add_parts(const MlaMerge& merge, int row, int first, int step,
                                             float largest, float4& output) const {
    float sum = 0.f;
    output = make_float4(0.f, 0.f, 0.f, 0.f);
    const float reference = largest == -math::inf ? 0.f : largest;
#pragma unroll 8
    for (int part = first; part < merge.num_parts; part += step) {
      const int slot_row = mla_slot_row(merge, part, row);
      const float weight = math::ptx_exp2(params_.partial_lse[slot_row] - reference);
      const uint2 bits = reinterpret_cast<const uint2*>(static_cast<const O*>(params_.partial_o) +
                                                        int64_t{slot_row} * kDimCkv)[thread_];
      sum += weight;
      output.x = fmaf(low_half(bits.x), weight, output.x);
      output.y = fmaf(high_half(bits.x), weight, output.y);
      output.z = fmaf(low_half(bits.y), weight, output.z);
      output.w = fmaf(high_half(bits.y), weight, output.w);
    }
    return sum;
  }

  // Each warp reads all parts, so that no warp waits for another.
  __device__ __forceinline__ float find_largest(const MlaMerge& merge, int row) const {
    float largest = -math::inf;
    for (int part = threadIdx.x % 32; part < merge.num_parts; part += 32) {
      largest = fmaxf(largest, params_.partial_lse[mla_slot_row(merge, part, row)]);
    }
    return warp_reduce_max(largest);
  }

  __device__ __forceinline__ void merge_alone(const MlaMerge& merge, int row) const {
    if (!has_row(merge, row)) return;
    const float largest = find_largest(merge, row);
    float4 output;
    const float sum = add_parts(merge, row, 0, 1, largest, output);
    write(merge, row, largest, sum, output);
  }

  __device__ __forceinline__ void merge_together(const MlaMerge& merge, int row) const {
    if (!has_row(merge, row)) return;  // the same for all threads
    const float largest = find_largest(merge, row);
    float4 output;
    float sum = add_parts(merge, row, group_, kGroups, largest, output);
    __syncthreads();  // the row before has been read
    shared_.outputs[group_][thread_] = output;
    if (thread_ == 0) shared_.sums[group_] = sum;
    __syncthreads();
    if (group_ != 0) return;
#pragma unroll
    for (int i = 1; i < kGroups; ++i) {
      const float4 other = shared_.outputs[i][thread_];
      output = make_float4(output.x + other.x, output.y + other.y, output.z + other.z,
                           output.w + other.w);
      sum += shared_.sums[i];
    }
    write(merge, row, largest, sum, output);
  }

  __device__ __forceinline__ void write(const MlaMerge& merge, int row, float largest, float sum,
                                        const float4& output) const {
    const MlaRowEnd end(params_, merge.qo_begin, merge.row_begin + row, largest, sum);
    if (thread_ == 0) end.write_lse(params_);
    using Bits = typename PackedPair<O>::Bits;
    Bits* const target = reinterpret_cast<Bits*>(end.template row<O>(params_) + thread_ * 4);
    target[0] = PackedPair<O>::pack(output.x * end.factor, output.y * end.factor);
    target[1] = PackedPair<O>::pack(output.z * end.factor, output.w * end.factor);
  }

  const MlaParams& params_;
  Shared& shared_;
  const int thread_, group_;
};

template <typename O, int kDimCkv>
__global__ void __launch_bounds__(MlaMerger<O, kDimCkv>::kThreads)
    mla_merge_kernel(const __grid_constant__ MlaParams params) {
  __shared__ typename MlaMerger<O, kDimCkv>::Shared shared;
  MlaMerger<O, kDimCkv>(params, shared).run();
}

#ifndef __CUDACC_RTC__

template <typename O, int kDimCkv>
inline cudaError_t launch_mla_merge(const MlaParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_kernel(mla_merge_kernel<O, kDimCkv>, dim3(4 * params.num_ctas),
                       dim3(MlaMerger<O, kDimCkv>::kThreads), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
