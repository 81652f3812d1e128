// Merges the few parts of a tile in the CTA that brings the last of them: parts are there already,
// and no launch has to follow. Parts are added up in their order whoever does it: results repeat
// bit for bit.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/mla/row_end.cuh>
#include <flashinfer/ptx/progress.cuh>

namespace flashinfer {

// Called by kThreads threads of a CTA, which `synchronize` brings together.
template <typename O, int kDimCkv, int kThreads>
class MlaLastMerge {
  static constexpr int kRowThreads = kDimCkv / 8;                  // a thread has eight columns
  static constexpr int kStep = kThreads / kRowThreads, kRows = 4;  // that a thread has at once
  static_assert(sizeof(O) == 2);

 public:
  // The part of `item` is written. `is_last` is in shared memory.
  template <typename Synchronize>
  __device__ __forceinline__ static void end_item(const MlaParams& params, const MlaWorkItem& item,
                                                  int num_rows, uint32_t& is_last,
                                                  const Synchronize& synchronize) {
    const MlaMerge merge = params.merges[item.merge];
    synchronize();
    if (threadIdx.x == 0) {
      uint32_t* const counter = &params.counters[item.merge].parts;
      ptx::release();
      is_last = ptx::count_and_see(counter, 1) + 1 == static_cast<uint32_t>(merge.num_parts);
      if (is_last) *counter = 0;  // for the next launch
    }
    synchronize();
    if (!is_last) return;
#pragma unroll 1
    for (int row = 0; row < num_rows; row += kStep * kRows) {
      merge_rows(params, merge, row + static_cast<int>(threadIdx.x) / kRowThreads, num_rows);
    }
  }

 private:
  // Rows first, first + kStep, ...
  __device__ __forceinline__ static void merge_rows(const MlaParams& params, const MlaMerge& merge,
                                                    int first, int num_rows) {
    const int thread = threadIdx.x % kRowThreads;
    float output[kRows][8] = {}, sum[kRows] = {}, largest[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) largest[i] = -math::inf;
#pragma unroll 2
    for (int part = 0; part < merge.num_parts; ++part) {
      const int slot = merge.slot_begin + part * merge.slot_stride;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = min(first + i * kStep, num_rows - 1);
        const int64_t slot_row = int64_t{slot} * kMlaTileRows + row;
        const float lse = __ldcg(params.partial_lse + slot_row);
        const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(
            static_cast<const O*>(params.partial_o) + slot_row * kDimCkv + thread * 8));
        add(lse, bits, output[i], sum[i], largest[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i * kStep;
      if (row >= num_rows) return;
      const MlaRowEnd end(params, merge.qo_begin, merge.row_begin + row, largest[i], sum[i]);
      if (thread == 0) end.write_lse(params);
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] =
            PackedPair<O>::pack(output[i][2 * k] * end.factor, output[i][2 * k + 1] * end.factor);
      }
      *reinterpret_cast<uint4*>(end.template row<O>(params) + thread * 8) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }

  __device__ __forceinline__ static void add(float lse, const uint4& bits, float (&output)[8],
                                             float& sum, float& largest) {
    const float next = fmaxf(largest, lse), reference = next == -math::inf ? 0.f : next;
    const float shrink = math::ptx_exp2(largest - reference);
    const float weight = math::ptx_exp2(lse - reference);
    largest = next;
    sum = fmaf(sum, shrink, weight);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float value = to_float(O{static_cast<uint16_t>(words[e / 2] >> e % 2 * 16)});
      output[e] = fmaf(output[e], shrink, value * weight);
    }
  }
};

}  // namespace flashinfer
