// Merges rows of a tile of few parts, as most cut tiles are (part_merge.cuh): short code without
// divisions, in which a thread makes one weight. A launch ends with it.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/output.cuh>
#include <flashinfer/mla/row_end.cuh>
#include <flashinfer/mla/sm90/merge_share.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

// Called by the 256 threads that multiply.
template <typename Tile>
class MlaFewPartMerge {
  using O = typename Tile::O;
  static constexpr int kThreads = Tile::kConsumerThreads, kWarps = kThreads / 32;
  static constexpr int kRowBytes = Tile::kDimCkv * 2, kRowThreads = kRowBytes / 16;
  static_assert(sizeof(O) == 2);

 public:
  // A row has a thread for each, which makes its weight.
  static constexpr int kMostParts = 8;

  // `shared`: the place of queries and keys.
  __device__ __forceinline__ MlaFewPartMerge(const MlaParams& params, const MlaMergeShare& share,
                                             uint32_t shared)
      : params_(params),
        share_(share),
        merge_(share.merge),
        step_(share.step),
        first_(share.first),
        shared_(shared) {}

  template <typename Synchronize>
  __device__ __forceinline__ void run(const Synchronize& synchronize) {
    const int most = merge_.num_parts <= kMostParts / 2 ? kMostRows : kMostRows / 2;
#pragma unroll 1
    for (; first_ < share_.num_rows; first_ += most * step_) {
      const int end = min(share_.num_rows, first_ + most * step_);
      const float lse = load_lse(end);
      copy(end);
      weigh(end, lse);
      ptx::cp_async_wait<0>();
      synchronize();
      add(end);
      synchronize();  // rows and weights have been read
    }
  }

 private:
  static constexpr int kMostRows = kThreads / kMostParts;  // at once
  static constexpr int kStep = kThreads / kRowThreads;     // rows that are added up side by side
  static constexpr int kWeightBytes = kMostParts * 4;      // of a row
  static_assert(kMostRows / 2 * kMostParts * kRowBytes <= Tile::kOffsetWeights);

  __device__ __forceinline__ uint32_t row_address(int i) const {
    return shared_ + i * merge_.num_parts * kRowBytes;
  }
  __device__ __forceinline__ uint32_t weight_address(int i) const {
    return shared_ + Tile::kOffsetWeights + i * kWeightBytes;
  }

  // Asks for the rows of all parts, a warp for each row.
  __device__ __forceinline__ void copy(int end) const {
    const int warp_idx = threadIdx.x / 32, column = threadIdx.x % 32 * 16;
    const char* const outputs = static_cast<const char*>(params_.partial_o) + column;
    int i = warp_idx;
#pragma unroll 1
    for (int row = first_ + warp_idx * step_; row < end; row += kWarps * step_, i += kWarps) {
      uint32_t target = row_address(i) + column;
#pragma unroll 1
      for (int part = 0; part < merge_.num_parts; ++part, target += kRowBytes) {
        const char* const source = outputs + int64_t{mla_slot_row(merge_, part, row)} * kRowBytes;
#pragma unroll
        for (int bytes = 0; bytes < kRowBytes; bytes += 512) {
          ptx::cp_async_16(target + bytes, source + bytes, true);
        }
      }
    }
    ptx::cp_async_commit();
  }

  // The LSE of the thread's part of its row, -inf where it has none.
  __device__ __forceinline__ float load_lse(int end) const {
    const int part = threadIdx.x % kMostParts;
    const int row = first_ + static_cast<int>(threadIdx.x) / kMostParts * step_;
    if (row >= end || part >= merge_.num_parts) return -math::inf;
    return __ldcg(params_.partial_lse + mla_slot_row(merge_, part, row));
  }

  // Makes weights of the parts' LSEs.
  __device__ __forceinline__ void weigh(int end, float lse) const {
    const int i = threadIdx.x / kMostParts, part = threadIdx.x % kMostParts;
    const int row = first_ + i * step_;
    const float largest = warp_reduce_max(lse, kMostParts);
    const float weight = math::ptx_exp2(lse - (largest == -math::inf ? 0.f : largest));
    const float sum = warp_reduce_sum(weight, kMostParts);
    if (row >= end || part >= merge_.num_parts) return;
    const MlaRowEnd row_end(params_, merge_.qo_begin, merge_.row_begin + row, largest, sum);
    if (part == 0) row_end.write_lse(params_);
    ptx::store_shared_4(weight_address(i) + part * 4, __float_as_uint(weight * row_end.factor));
  }

  // A thread has eight columns of some rows, two at a time: one alone waits for shared memory.
  __device__ __forceinline__ void add(int end) const {
    const int thread = threadIdx.x % kRowThreads, slot_bytes = merge_.num_parts * kRowBytes;
    int i = threadIdx.x / kRowThreads;
#pragma unroll 1
    for (int row = first_ + i * step_; row < end; row += 2 * kStep * step_, i += 2 * kStep) {
      const bool has_second = row + kStep * step_ < end;
      const uint32_t weights = weight_address(i), source = row_address(i) + thread * 16;
      const uint32_t to_second = has_second ? kStep : 0;
      float sums[2][8] = {};
#pragma unroll 2
      for (int part = 0; part < merge_.num_parts; ++part) {
        add_part(sums[0], weights + part * 4, source + part * kRowBytes);
        add_part(sums[1], weights + to_second * kWeightBytes + part * 4,
                 source + to_second * slot_bytes + part * kRowBytes);
      }
      write(sums[0], row, true);
      write(sums[1], row + kStep * step_, has_second);
    }
  }

  __device__ __forceinline__ static void add_part(float (&sums)[8], uint32_t weight,
                                                  uint32_t source) {
    const float factor = __uint_as_float(ptx::load_shared_4(weight));
    const uint4 four = ptx::load_shared_16(source);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float value = to_float(O{static_cast<uint16_t>(words[e / 2] >> e % 2 * 16)});
      sums[e] = fmaf(value, factor, sums[e]);
    }
  }

  __device__ __forceinline__ void write(const float (&sums)[8], int row, bool exists) const {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = PackedPair<O>::pack(sums[2 * k], sums[2 * k + 1]);
    if constexpr (Tile::kPartsAsHeld) transpose_in_quad(words, threadIdx.x % 32);
    if (!exists) return;
    const MlaRowPlace place(params_, merge_.qo_begin, merge_.row_begin + row);
    reinterpret_cast<uint4*>(place.template row<O>(params_))[threadIdx.x % kRowThreads] =
        uint4{words[0], words[1], words[2], words[3]};
  }

  const MlaParams& params_;
  const MlaMergeShare& share_;
  const MlaMerge& merge_;
  const int step_;
  int first_;
  const uint32_t shared_;
};

}  // namespace flashinfer
