// The eight warps of the narrow MLA kernel that multiply. All have the same 16 query rows, in
// registers. Of a block of KV, a warp makes the logits of 8 tokens, and adds the values of all
// tokens to its eighth of the output's columns:
//
//   S(j) of 8 tokens;  tell their largest;  barrier;  P(j) of 8 tokens;  O += P(j - 1) V(j - 1)
//
// The barrier shows all warps the largest logits of block j and the weights of block j - 1. Both
// have two places, so that one barrier a block suffices.
//
// Keys and values are widened between shared memory and the tensor cores. Weights are exponentials
// relative to a reference per row, which moves only when a logit exceeds it by 2^kHeadroom.
#pragma once

#include <flashinfer/common/math.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/row_end.cuh>
#include <flashinfer/mla/sm90/last_merge.cuh>
#include <flashinfer/mla/sm90/narrow/queries.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/mma.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

template <typename Tile>
class MlaNarrowAttention {
  using T = typename Tile::T;
  using Ckv = typename Tile::Ckv;
  using Kpe = typename Tile::Kpe;
  static constexpr float kHeadroom = 8.f;
  static constexpr int kMathBarrier = 1;
  using Logits = float[4];
  // Of each group of 16 columns the even ones, then the odd ones: values of 8 bits come in pairs.
  using Output = float[Tile::kGroups][2][4];

 public:
  __device__ __forceinline__ MlaNarrowAttention(const MlaParams& params, char* shared,
                                                MlaNarrowControl<Tile>& control)
      : params_(params), memory_(shared), control_(control), shared_(ptx::shared_address(shared)) {
    warp_idx_ = threadIdx.x / 32;
    lane_idx_ = threadIdx.x % 32;
    row_ = lane_idx_ / 4;
  }

  __device__ __forceinline__ void run() {
    const int end = params_.cta_begin[blockIdx.x + 1];
    for (int i = params_.cta_begin[blockIdx.x]; i < end; ++i) {
      const MlaWorkItem item = params_.items[i];
      num_rows_ = mla_tile_rows(params_, item);
      for (int pass = 0; pass < mla_passes<Tile>(num_rows_); ++pass) {
        attend(item, pass * Tile::kRows);
      }
      if (item.slot >= 0 && params_.merges_itself) {
        MlaLastMerge<typename Tile::O, Tile::kDimCkv, Tile::kMathThreads>::end_item(
            params_, item, num_rows_, control_.is_last, [] { synchronize(); });
      }
    }
  }

 private:
  __device__ __forceinline__ void attend(const MlaWorkItem& item, int first_row) {
    Output output = {};
    MlaNarrowQueries<Tile> queries;
    queries.load(params_, item, first_row + row_, num_rows_, lane_idx_, scales_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scales_[h] *= params_.sm_scale_log2;
      largest_[h] = -math::inf;
      sum_[h] = 0.f;
      limits_[h] = mla_visible_tokens(params_, item, first_row + row_ + 8 * h);
    }
    least_limit_ = mla_visible_tokens(params_, item, first_row);
    float shrink[2] = {1.f, 1.f};  // of the output, before the weights that are there are used
    bool moves = false;
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      Logits logits;
      ptx::mbarrier_wait(address(control_.full[stage_]), phase_);
      multiply_keys(queries, logits);
      tell_largest(logits, token);
      synchronize();
      if (token != item.kv_begin) {
        if (moves) multiply(output, shrink);
        moves = weigh(logits, shrink);
        add_values(output, previous_stage_);
      } else {
        moves = weigh(logits, shrink);
      }
      next_block();
    }
    if (item.kv_begin < item.kv_end) {
      synchronize();
      if (moves) multiply(output, shrink);
      add_values(output, previous_stage_);
    }
    finish(output, item, first_row);
  }

  template <typename U>
  __device__ __forceinline__ static uint32_t address(U& in_shared) {
    return ptx::shared_address(&in_shared);
  }
  __device__ __forceinline__ static void synchronize() {
    ptx::named_barrier_sync(kMathBarrier, Tile::kMathThreads);
  }
  __device__ __forceinline__ void next_block() {
    previous_stage_ = stage_;
    parity_ ^= 1;
    if (++stage_ == Tile::kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // ---- Logits ----

  // Logits of the warp's 16 rows and 8 tokens. Eight lanes read neighbouring tokens' columns, of
  // which the banks tell apart every fourth token.
  __device__ __forceinline__ void multiply_keys(const MlaNarrowQueries<Tile>& queries,
                                                Logits& logits) const {
    const int token = warp_idx_ * Tile::kTokens + row_ % 2 * 4 + row_ / 2;
    const uint32_t keys = shared_ + stage_ * Tile::kStageBytes + token * Tile::kPitch;
    float sums[4][4] = {};  // so that products need not wait for each other
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      uint32_t pairs[8];
      widen(ptx::load_shared_16(keys + 64 * chunk + lane_idx_ % 4 * 16), pairs);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::mma_m16n8k16<T>(sums[step], queries.ckv[chunk][step], pairs[2 * step],
                             pairs[2 * step + 1]);
      }
    }
    if constexpr (Tile::kRopeSteps != 0) multiply_rope(queries, sums, keys + Tile::kDimCkv);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      logits[e] = (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e]);
    }
  }

  __device__ __forceinline__ void multiply_rope(const MlaNarrowQueries<Tile>& queries,
                                                float (&sums)[4][4], uint32_t keys) const {
    constexpr int kParts = static_cast<int>(sizeof(Kpe)), kSteps = 4 / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4 bits = ptx::load_shared_16(keys + 64 * part + lane_idx_ % 4 * 16);
      uint32_t pairs[8];
      if constexpr (sizeof(Kpe) == 1) {
        widen(bits, pairs);
      } else {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = convert(words[i]);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = part * kSteps + i;
        ptx::mma_m16n8k16<T>(sums[step], queries.kpe[step], pairs[2 * i], pairs[2 * i + 1]);
      }
    }
  }
  __device__ __forceinline__ static void widen(const uint4& bytes, uint32_t (&pairs)[8]) {
    float8_to_half2<Ckv>(bytes.x, pairs[0], pairs[1]);
    float8_to_half2<Ckv>(bytes.y, pairs[2], pairs[3]);
    float8_to_half2<Ckv>(bytes.z, pairs[4], pairs[5]);
    float8_to_half2<Ckv>(bytes.w, pairs[6], pairs[7]);
  }
  // A pair of 16 bits as T.
  __device__ __forceinline__ static uint32_t convert(uint32_t pair) {
    if constexpr (std::is_same_v<Kpe, T> || sizeof(Kpe) == 1) return pair;
    return PackedPair<T>::pack(to_float(Kpe{static_cast<uint16_t>(pair)}),
                               to_float(Kpe{static_cast<uint16_t>(pair >> 16)}));
  }

  // The lane's logits are of tokens t and t + 4 of the warp's. Hidden ones become -inf.
  __device__ __forceinline__ void tell_largest(Logits& logits, int block_token) {
    const int token = block_token + warp_idx_ * Tile::kTokens + lane_idx_ % 4;
    if (block_token + Tile::kBlock > least_limit_) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (token + e % 2 * 4 >= limits_[e / 2]) logits[e] = -math::inf;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = fmaxf(logits[2 * h], logits[2 * h + 1]);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      if (lane_idx_ % 4 == 0) {
        control_.largest[parity_][row_ + 8 * h][warp_idx_] = largest * scales_[h];
      }
    }
  }

  // ---- Weights ----

  // Stores the weights of the lane's logits. `shrink` is the factor for the output so far; returns
  // whether it is not 1 in some row.
  __device__ __forceinline__ bool weigh(const Logits& logits, float (&shrink)[2]) {
    bool moves = false;
    char* const own = memory_ + Tile::kOffsetWeights + parity_ * Tile::kWeightBytes +
                      (warp_idx_ * Tile::kTokens + lane_idx_ % 4) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto* told = reinterpret_cast<const float4*>(control_.largest[parity_][row_ + 8 * h]);
      const float4 a = told[0], b = told[1];
      const float largest =
          fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
      shrink[h] = 1.f;
      if (largest > largest_[h] + kHeadroom) {
        shrink[h] = math::ptx_exp2(largest_[h] - largest);
        largest_[h] = largest;
        moves = true;
      }
      const float reference = largest_[h] == -math::inf ? 0.f : largest_[h];
      float weights[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        weights[e] = math::ptx_exp2(fmaf(logits[2 * h + e], scales_[h], -reference));
      }
      sum_[h] = fmaf(sum_[h], shrink[h], weights[0] + weights[1]);
      const uint32_t pair = PackedPair<T>::pack(weights[0], weights[1]);
      char* const row = own + (row_ + 8 * h) * Tile::kWeightPitch;
      *reinterpret_cast<uint16_t*>(row) = static_cast<uint16_t>(pair);
      *reinterpret_cast<uint16_t*>(row + 8) = static_cast<uint16_t>(pair >> 16);
    }
    return __any_sync(0xffffffffu, moves);
  }

  __device__ __forceinline__ static void multiply(Output& output, const float (&factors)[2]) {
#pragma unroll
    for (int group = 0; group < Tile::kGroups; ++group) {
#pragma unroll
      for (int e = 0; e < 8; ++e) output[group][e / 4][e % 4] *= factors[e % 4 / 2];
    }
  }

  // ---- Values ----

  // Adds the values of the block before the current one, and gives its place back.
  __device__ __forceinline__ void add_values(Output& output, int stage) {
    const uint32_t weights = shared_ + Tile::kOffsetWeights + (parity_ ^ 1) * Tile::kWeightBytes +
                             lane_idx_ % 16 * Tile::kWeightPitch + lane_idx_ / 16 * 16;
    // Lane i gives row i % 16 of 16 tokens, of the first or the second of two groups of columns.
    const uint32_t values = shared_ + stage * Tile::kStageBytes + lane_idx_ % 16 * Tile::kPitch +
                            (warp_idx_ * Tile::kGroups + lane_idx_ / 16) * 16;
#pragma unroll
    for (int token = 0; token < Tile::kBlock; token += 16) {
      uint32_t p[4];
      ptx::ldmatrix_x4(p, weights + token * 2);
#pragma unroll
      for (int group = 0; group < Tile::kGroups; group += 2) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, values + token * Tile::kPitch + group * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t even[2], odd[2];
          float8_values<Ckv>(v[2 * i], even[0], odd[0]);
          float8_values<Ckv>(v[2 * i + 1], even[1], odd[1]);
          ptx::mma_m16n8k16<T>(output[group + i][0], p, even[0], even[1]);
          ptx::mma_m16n8k16<T>(output[group + i][1], p, odd[0], odd[1]);
        }
      }
    }
    __syncwarp();
    if (lane_idx_ == 0) ptx::mbarrier_arrive(address(control_.empty[stage]));
  }

  // ---- The end ----

  __device__ __forceinline__ void finish(const Output& output, const MlaWorkItem& item,
                                         int first_row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 2);
      if (lane_idx_ % 4 == 0) control_.sums[pass_parity_][row_ + 8 * h][warp_idx_] = sum_[h];
    }
    synchronize();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + row_ + 8 * h;
      if (row >= num_rows_) continue;
      const float* sums = control_.sums[pass_parity_][row_ + 8 * h];
      float sum = sums[0];
#pragma unroll
      for (int warp = 1; warp < Tile::kWarps; ++warp) sum += sums[warp];
      write_row(output, item, row, h, sum);
    }
    pass_parity_ ^= 1;
  }

  // To the output, or as a part of it to the workspace.
  __device__ __forceinline__ void write_row(const Output& output, const MlaWorkItem& item, int row,
                                            int h, float sum) const {
    using O = typename Tile::O;
    const bool writes_lse = warp_idx_ == 0 && lane_idx_ % 4 == 0;
    O* target;
    float factor;
    if (item.slot >= 0) {
      const int64_t slot_row = int64_t{item.slot} * kMlaTileRows + row;
      target = static_cast<O*>(params_.partial_o) + slot_row * Tile::kDimCkv;
      factor = sum == 0.f ? 0.f : 1.f / sum;  // NaN stays NaN
      if (writes_lse) {
        params_.partial_lse[slot_row] = sum == 0.f ? -math::inf : largest_[h] + math::ptx_log2(sum);
      }
    } else {
      const MlaRowEnd end(params_, item.qo_begin, item.row_begin + row, largest_[h], sum);
      target = end.template row<O>(params_);
      factor = end.factor;
      if (writes_lse) end.write_lse(params_);
    }
    target += warp_idx_ * Tile::kGroups * 16 + lane_idx_ % 4 * 4;
#pragma unroll
    for (int group = 0; group < Tile::kGroups; ++group) {
      const auto& even = output[group][0];
      const auto& odd = output[group][1];
      const int e = 2 * h;
      *reinterpret_cast<uint2*>(target + group * 16) = {
          PackedPair<O>::pack(even[e] * factor, odd[e] * factor),
          PackedPair<O>::pack(even[e + 1] * factor, odd[e + 1] * factor)};
    }
  }

  const MlaParams& params_;
  char* const memory_;
  MlaNarrowControl<Tile>& control_;
  const uint32_t shared_;
  int warp_idx_, lane_idx_, row_;
  int num_rows_ = 0;
  int stage_ = 0, previous_stage_ = 0;
  uint32_t phase_ = 0, parity_ = 0, pass_parity_ = 0;
  int limits_[2], least_limit_;
  float scales_[2];            // of logits of the thread's rows
  float largest_[2], sum_[2];  // of the thread's rows; sums of its own weights
};

}  // namespace flashinfer
