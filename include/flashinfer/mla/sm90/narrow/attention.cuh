// The warps of the MLA kernel for few rows of 8 bits that multiply. Two groups of four warps take
// turns at blocks of KV, each with outputs of its own, which they add up at the end of an item:
//
//   S(j) = K(j) Q of all columns;  P(j);  barrier of the group;  O += P(j) V(j)
//
// Logits are products of the keys as they are (wgmma): a block's 64 tokens are rows, query rows
// are columns, as many for each as its value has terms (queries.cuh). The tensor cores add up fewer
// bits of such products than of others, so that each chunk of columns has a sum of its own.
//
// Values are widened between shared memory and the tensor cores: a warp has a quarter of the
// columns. Weights are exponentials relative to a reference per row, which moves only when a logit
// exceeds it by 2^kHeadroom: it is not known before the barrier, and weights are made anew then.
#pragma once

#include <flashinfer/common/float8.cuh>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/output.cuh>
#include <flashinfer/mla/sm90/boxes.cuh>
#include <flashinfer/mla/sm90/last_merge.cuh>
#include <flashinfer/mla/sm90/narrow/queries.cuh>
#include <flashinfer/mla/sm90/share.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/mma.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tma.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

template <typename Tile_>
class MlaNarrowAttention {
 public:
  using Tile = Tile_;
  using Control = MlaNarrowControl<Tile>;

 private:
  using T = typename Tile::T;
  using O = typename Tile::O;
  using Ckv = typename Tile::Ckv;
  using Kpe = typename Tile::Kpe;
  static constexpr float kHeadroom = 8.f;
  static constexpr int kMathBarrier = 1, kGroupBarrier = 2;     // the last is one of each group
  static constexpr int kUnits = Tile::kUnits, kThreadRows = 4;  // rows of a thread's logits
  using Logits = float[kThreadRows][2];
  // Of each 16 columns the even ones, then the odd ones: values of 8 bits come in pairs.
  template <int kCount>
  using Columns = float[kCount][2][4];
  using Output = Columns<kUnits>;

 public:
  __device__ __forceinline__ MlaNarrowAttention(const MlaSm90Params& params, char* shared,
                                                Control& control)
      : params_(params.mla),
        memory_(shared),
        control_(control),
        shared_(ptx::shared_address(shared)),
        is_copied_(params.box_rows == 0) {
    group_ = threadIdx.x / Tile::kGroupThreads;
    warp_idx_ = threadIdx.x / 32 % Tile::kGroupWarps;
    lane_idx_ = threadIdx.x % 32;
    row_ = lane_idx_ / 4;
  }

  __device__ __forceinline__ void run() {
    const MlaShare share(params_);
    MlaWorkItem item = share.first;
    ptx::grid_dependency_wait();
    for (int i = share.begin; i < share.end; ++i) {
      if (i != share.begin) item = params_.items[i];
      num_rows_ = mla_tile_rows(params_, item);
      for (int pass = 0; pass < mla_passes<Tile>(num_rows_); ++pass) {
        attend(item, pass * Tile::kRows);
      }
      if (!Tile::kInPairs && item.slot >= 0 && params_.merges_itself) {
        MlaLastMerge<O, Tile::kDimCkv, Tile::kMathThreads>::end_item(
            params_, item, num_rows_, control_.is_last, [] { synchronize(); });
      }
    }
  }

 private:
  __device__ __forceinline__ void attend(const MlaWorkItem& item, int first_row) {
    synchronize();  // outputs have been read where queries will lie
    MlaNarrowQueries<Tile>::load(params_, item, first_row, num_rows_, memory_, control_);
    ptx::async_proxy_fence();
    synchronize();
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = logit_row(i);
      scales_[i] = control_.scales[row];
      rope_scales_[i] = control_.rope_scales[row];
      limits_[i] = mla_visible_tokens(params_, item, first_row + row);
      reference_[i] = -math::inf;
      sum_[i] = 0.f;
    }
    least_limit_ = mla_visible_tokens(params_, item, first_row);
    largest_[0] = largest_[1] = -math::inf;
    Output output = {};
#pragma unroll 1
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      // All wait for all blocks: the parity of a barrier tells only a block from the next one
      // there.
      ptx::mbarrier_wait_soon(address(control_.full[stage_]), phase_);
      if (turn_ == group_) attend_block(output, item, token);
      __syncwarp();
      if (lane_idx_ == 0) ptx::mbarrier_arrive(address(control_.empty[stage_]));
      turn_ ^= 1;
      if (++stage_ == Tile::kStages) {
        stage_ = 0;
        phase_ ^= 1;
      }
    }
    finish(output, item, first_row);
  }

  __device__ __forceinline__ void attend_block(Output& output, const MlaWorkItem& item, int token) {
    Logits logits;
    multiply_keys(logits);
    hide(logits, token);
    if (weigh(logits)) {
      float shrink[2];
      move_references(logits, shrink);
      multiply(output, shrink);
    }
    if (token + Tile::kBlock > item.kv_end) clear_rows(item.kv_end - token);
    add_values(output);
    parity_ ^= 1;
  }

  template <typename U>
  __device__ __forceinline__ static uint32_t address(U& in_shared) {
    return ptx::shared_address(&in_shared);
  }
  __device__ __forceinline__ static void synchronize() {
    ptx::named_barrier_sync(kMathBarrier, Tile::kMathThreads);
  }
  __device__ __forceinline__ uint32_t stage() const { return shared_ + stage_ * Tile::kStageBytes; }
  // Row `i` of the thread's logits.
  __device__ __forceinline__ int logit_row(int i) const {
    return i / 2 * 8 + lane_idx_ % 4 * 2 + i % 2;
  }

  // ---- Logits ----

  template <int kTerms>
  using Sums = float[2 * kTerms][4];

  __device__ __forceinline__ void multiply_keys(Logits& logits) const {
    Sums<Tile::kTerms> sums[Tile::kChunksCkv];
    Sums<Tile::kRopeTerms> rope;
    if (is_copied_) ptx::async_proxy_fence();
    ptx::wgmma_fence();
    const uint64_t keys = ptx::wgmma_operand(stage());
    const uint64_t queries = ptx::wgmma_operand(shared_ + Tile::kOffsetQueries);
#pragma unroll
    for (int i = 0; i < Tile::kChunksCkv * 4; ++i) {
      const int chunk = i / 4, step = i % 4;
      ptx::wgmma<Ckv, false>(
          sums[chunk], ptx::wgmma_advance(keys, chunk * Tile::kChunkBytes + step * 32),
          ptx::wgmma_advance(queries, chunk * Tile::kQueryChunkBytes + step * 32), step != 0);
    }
    if constexpr (Tile::kDimKpe != 0) multiply_rope(rope);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunksCkv; ++chunk) ptx::wgmma_done(sums[chunk]);
    if constexpr (Tile::kDimKpe != 0) ptx::wgmma_done(rope);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = add_terms<Ckv>(sums[0], i, h);
#pragma unroll
        for (int chunk = 1; chunk < Tile::kChunksCkv; ++chunk) {
          sum += add_terms<Ckv>(sums[chunk], i, h);
        }
        logits[i][h] = sum * scales_[i];
        if constexpr (Tile::kDimKpe != 0) {
          logits[i][h] = fmaf(add_terms<Kpe>(rope, i, h), rope_scales_[i], logits[i][h]);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_rope(Sums<Tile::kRopeTerms>& sums) const {
    const uint32_t first_key = stage() + Tile::kChunksCkv * Tile::kChunkBytes;
    const uint32_t first_query = shared_ + Tile::kOffsetRopeQueries;
    constexpr bool kWide = sizeof(Kpe) == 2;
    const auto operand = [](uint32_t first) {
      return kWide ? ptx::wgmma_operand(first) : ptx::wgmma_operand_64(first);
    };
    const uint64_t keys = operand(first_key), queries = operand(first_query);
#pragma unroll
    for (int step = 0; step < Tile::kRopeRowBytes / 32; ++step) {
      ptx::wgmma<Kpe, false>(sums, ptx::wgmma_advance(keys, step * 32),
                             ptx::wgmma_advance(queries, step * 32), step != 0);
    }
  }

  // The smallest terms first.
  template <typename Key, int kTiles>
  __device__ __forceinline__ static float add_terms(const float (&sums)[kTiles][4], int i, int h) {
    constexpr int kTerms = kTiles / 2;
    constexpr float kUnit = 1.f / (1 << kMlaBits<Key>);
    float sum = 0.f;
#pragma unroll
    for (int term = kTerms - 1; term >= 0; --term) {
      const int value = i * kTerms + term;
      const float product = sums[value / 2][2 * h + value % 2];
      sum = term == kTerms - 1 ? product : fmaf(sum, kUnit, product);
    }
    return sum;
  }

  // Logits of tokens that a row does not see become -inf.
  __device__ __forceinline__ void hide(Logits& logits, int block_token) const {
    if (block_token + Tile::kBlock <= least_limit_) return;
    const int token = block_token + warp_idx_ * 16 + row_;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (token + 8 * h >= limits_[i]) logits[i][h] = -math::inf;
      }
    }
  }

  // ---- Weights ----

  __device__ __forceinline__ uint32_t weights() const {
    return shared_ + Tile::kOffsetWeights + (2 * group_ + parity_) * Tile::kWeightBytes;
  }

  // Stores the weights of the thread's logits and adds them up. Returns whether a logit of the
  // block exceeds its reference by too much: then they are made anew.
  __device__ __forceinline__ bool weigh(const Logits& logits) {
    bool exceeds = false;
    float sums[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      exceeds |= fmaxf(logits[i][0], logits[i][1]) > reference_[i] + kHeadroom;
    }
    store_weights(logits, sums);
    if (ptx::named_barrier_any(kGroupBarrier + group_, Tile::kGroupThreads, exceeds)) return true;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) sum_[i] += sums[i];
    return false;
  }

  __device__ __forceinline__ void store_weights(const Logits& logits,
                                                float (&sums)[kThreadRows]) const {
    float weights_of[kThreadRows][2];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const float reference = reference_[i] == -math::inf ? 0.f : reference_[i];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        weights_of[i][h] = math::ptx_exp2(logits[i][h] - reference);
      }
      sums[i] = weights_of[i][0] + weights_of[i][1];
    }
    // Matrices of 8 tokens and 8 rows: both of the first 8 rows, then of the others.
    uint32_t pairs[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      pairs[m] =
          PackedPair<T>::pack(weights_of[m / 2 * 2][m % 2], weights_of[m / 2 * 2 + 1][m % 2]);
    }
    const int row = lane_idx_ / 16 * 8 + lane_idx_ % 8;
    const int token = warp_idx_ * 16 + lane_idx_ / 8 % 2 * 8;
    ptx::stmatrix_x4_trans(weights() + row * Tile::kWeightPitch + token * 2, pairs);
  }

  // Moves the references of rows whose logits exceed it, and makes the block's weights anew.
  // `shrink`: factors of the thread's rows of outputs.
  __device__ __forceinline__ void move_references(const Logits& logits, float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float largest = fmaxf(logits[i][0], logits[i][1]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      }
      if (row_ == 0) control_.told[group_][warp_idx_][logit_row(i)] = largest;
    }
    synchronize_group();
    float sums[kThreadRows], factors[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      factors[i] = move(reference_[i], largest_told(logit_row(i)));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) shrink[h] = move(largest_[h], largest_told(row_ + 8 * h));
    store_weights(logits, sums);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) sum_[i] = fmaf(sum_[i], factors[i], sums[i]);
    synchronize_group();
  }
  __device__ __forceinline__ void synchronize_group() const {
    ptx::named_barrier_sync(kGroupBarrier + group_, Tile::kGroupThreads);
  }
  __device__ __forceinline__ float largest_told(int row) const {
    const auto& told = control_.told[group_];
    return fmaxf(fmaxf(told[0][row], told[1][row]), fmaxf(told[2][row], told[3][row]));
  }
  __device__ __forceinline__ static float move(float& reference, float largest) {
    if (!(largest > reference + kHeadroom)) return 1.f;
    const float shrink = math::ptx_exp2(reference - largest);
    reference = largest;
    return shrink;
  }

  __device__ __forceinline__ static void multiply(Output& output, const float (&factors)[2]) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int e = 0; e < 8; ++e) output[unit][e / 4][e % 4] *= factors[e % 4 / 2];
    }
  }

  // ---- Values ----

  // Where unit `unit` of the warp's 16 bytes of token `token` lies.
  __device__ __forceinline__ uint32_t value_place(int token, int unit) const {
    return stage() + swizzled_offset<Tile::kBlock>(token, warp_idx_ * kUnits + unit);
  }

  // Clears the warp's columns of rows beyond the item: 0 * NaN is not 0.
  __device__ __forceinline__ void clear_rows(int num_tokens) const {
    for (int token = num_tokens; token < Tile::kBlock; ++token) {
      if (lane_idx_ < kUnits) {
        ptx::store_shared_16(value_place(token, lane_idx_), uint4{0, 0, 0, 0});
      }
    }
    ptx::async_proxy_fence();
    __syncwarp();
  }

  __device__ __forceinline__ void add_values(Output& output) const {
    constexpr int kAhead = 2, kPairs = kUnits / 2, kLoads = Tile::kBlock / 16 * kPairs;
    // Lane i gives row i % 16 of 16 tokens, of the first or the second of two units.
    const uint32_t first = value_place(lane_idx_ % 16, lane_idx_ / 16);
    const uint32_t rows = weights() + lane_idx_ % 16 * Tile::kWeightPitch + lane_idx_ / 16 * 16;
    uint32_t p[Tile::kBlock / 16][4], values[kAhead + 1][4];
    const auto load = [&](int i) {
      // A warp's units lie within a chunk.
      ptx::ldmatrix_x4_trans(values[i % (kAhead + 1)],
                             (first ^ i % kPairs * 32) + i / kPairs * 16 * 128);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
    for (int k = 0; k < Tile::kBlock / 16; ++k) ptx::ldmatrix_x4(p[k], rows + k * 32);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i + kAhead < kLoads) load(i + kAhead);
      const auto& now = values[i % (kAhead + 1)];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t even[2], odd[2];
        float8_values<Ckv>(now[2 * k], even[0], odd[0]);
        float8_values<Ckv>(now[2 * k + 1], even[1], odd[1]);
        auto& sums = output[i % kPairs * 2 + k];
        ptx::mma_m16n8k16<T>(sums[0], p[i / kPairs], even[0], even[1]);
        ptx::mma_m16n8k16<T>(sums[1], p[i / kPairs], odd[0], odd[1]);
      }
    }
  }

  // ---- The end ----

  // The first group gets the first half of a warp's columns, the second the other half.
  __device__ __forceinline__ void finish(const Output& output, const MlaWorkItem& item,
                                         int first_row) {
    constexpr int kHalf = kUnits / 2;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum_[i] += __shfl_xor_sync(0xffffffffu, sum_[i], distance);
      }
      if (row_ != 0) continue;
      control_.sums[group_][warp_idx_][logit_row(i)] = sum_[i];
      if (warp_idx_ == 0) control_.largest[group_][logit_row(i)] = reference_[i];
    }
    synchronize();  // queries and weights have been read
    const bool is_second = group_ == 1;
    Columns<kHalf> kept;
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) {
      uint4 other;
      uint32_t* const words = &other.x;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float first = output[i / 2][i % 2][e], second = output[kHalf + i / 2][i % 2][e];
        kept[i / 2][i % 2][e] = is_second ? second : first;
        words[e] = __float_as_uint(is_second ? first : second);
      }
      ptx::store_shared_16(exchange(group_) + i * 512, other);
    }
    synchronize();
    float largest[2], sums[2];
    add_groups(kept, largest, sums);
    if constexpr (Tile::kInPairs) {
      const auto value = [&](int i) -> float& { return kept[i / 8][i / 4 % 2][i % 4]; };
      if (!Tile::PairMerge::exchange(value, largest, sums, control_.parts_full,
                                     shared_ + Tile::kOffsetReceived, group_)) {
        return;
      }
    }
    write_rows(kept, item, first_row, largest, sums);
  }

  __device__ __forceinline__ uint32_t exchange(int group) const {
    return shared_ + Tile::kOffsetExchange + group * Tile::kExchangeBytes +
           warp_idx_ * (Tile::kExchangeBytes / Tile::kGroupWarps) + lane_idx_ * 16;
  }

  __device__ __forceinline__ float sum_told(int group, int row) const {
    const auto& sums = control_.sums[group];
    return (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]);
  }

  template <int kCount>
  __device__ __forceinline__ void add_groups(Columns<kCount>& output, float (&largest)[2],
                                             float (&sums)[2]) const {
    float factors[2][2];  // of the own and the other group, of rows
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_ + 8 * h;
      const float other_largest = control_.largest[group_ ^ 1][row];
      largest[h] = fmaxf(largest_[h], other_largest);
      const float reference = largest[h] == -math::inf ? 0.f : largest[h];
      factors[0][h] = math::ptx_exp2(largest_[h] - reference);
      factors[1][h] = math::ptx_exp2(other_largest - reference);
      sums[h] = sum_told(group_, row) * factors[0][h] + sum_told(group_ ^ 1, row) * factors[1][h];
    }
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const uint4 bits = ptx::load_shared_16(exchange(group_ ^ 1) + i * 512);
      const float other[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y),
                              __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = output[i / 2][i % 2][e];
        sum = fmaf(sum, factors[0][e / 2], other[e] * factors[1][e / 2]);
      }
    }
  }

  // To the output, or as a part of it to the workspace.
  template <int kCount>
  __device__ __forceinline__ void write_rows(const Columns<kCount>& output, const MlaWorkItem& item,
                                             int first_row, const float (&largest)[2],
                                             const float (&sums)[2]) const {
    const int slot = Tile::kInPairs ? -1 : item.slot;  // what pairs write is whole
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + row_ + 8 * h;
      if (row >= num_rows_) continue;
      const float sum = sums[h];
      const bool writes_lse = threadIdx.x < 32 && lane_idx_ % 4 == 0;
      const auto place = begin_row<O, Tile::kDimCkv, kMlaTileRows>(params_, item, slot, row,
                                                                   largest[h], sum, writes_lse);
      const float factor = place.factor;
      O* const target =
          place.target + (2 * warp_idx_ + group_) * (Tile::kWarpColumns / 2) + lane_idx_ % 4 * 4;
#pragma unroll
      for (int unit = 0; unit < kCount; ++unit) {
        const auto& even = output[unit][0];
        const auto& odd = output[unit][1];
        const int e = 2 * h;
        *reinterpret_cast<uint2*>(target + unit * 16) = {
            PackedPair<O>::pack(even[e] * factor, odd[e] * factor),
            PackedPair<O>::pack(even[e + 1] * factor, odd[e + 1] * factor)};
      }
    }
  }

  const MlaParams& params_;
  char* const memory_;
  Control& control_;
  const uint32_t shared_;
  const bool is_copied_;                   // KV comes by threads, not by the copy engine
  int group_, warp_idx_, lane_idx_, row_;  // of the group's warps; the first of its rows of outputs
  int num_rows_ = 0;
  int stage_ = 0, turn_ = 0;
  uint32_t phase_ = 0, parity_ = 0;
  int limits_[kThreadRows], least_limit_;
  float scales_[kThreadRows], rope_scales_[kThreadRows];
  float reference_[kThreadRows], sum_[kThreadRows];  // of logits; sums of the thread's weights
  float largest_[2];                                 // the same references, of rows of outputs
};

}  // namespace flashinfer
