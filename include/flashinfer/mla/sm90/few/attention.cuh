// The warps of the MLA kernel for few rows of 16 bits that multiply. Two groups of four warps take
// turns at blocks of KV, each with outputs of its own, which they add up at the end of an item. A
// warp of a group has a quarter of the columns, of keys and of values:
//
//   S(j) of its columns;  barrier of the group;  S(j) of all columns;  P(j);  O += P(j) V(j)
//
// All warps of a group add up the same logits in the same order, and make the same weights of them,
// in the registers from which the second product takes them.
//
// Weights are exponentials relative to a reference per row, which moves only when a logit exceeds
// it by 2^kHeadroom.
#pragma once

#include <flashinfer/common/exp2.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/output.cuh>
#include <flashinfer/mla/sm90/boxes.cuh>
#include <flashinfer/mla/sm90/few/tile.cuh>
#include <flashinfer/mla/sm90/last_merge.cuh>
#include <flashinfer/mla/sm90/share.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/mma.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tma.cuh>

namespace flashinfer {

template <typename Tile_>
class MlaFewAttention {
 public:
  using Tile = Tile_;
  using Control = MlaFewControl<Tile>;

 private:
  using T = typename Tile::T;
  using O = typename Tile::O;
  static constexpr float kHeadroom = 8.f;
  static constexpr int kMathBarrier = 1, kGroupBarrier = 2;  // the last is one of each group
  static constexpr int kOutputTiles = Tile::kOutputTiles, kTokenTiles = Tile::kTokenTiles;
  using Queries = uint32_t[Tile::kKeySteps][4];
  using Logits = float[kTokenTiles][4];
  using Weights = uint32_t[kTokenTiles / 2][4];
  using Output = float[kOutputTiles][4];

 public:
  __device__ __forceinline__ MlaFewAttention(const MlaSm90Params& params, char* shared,
                                             Control& control)
      : params_(params.mla), control_(control), shared_(ptx::shared_address(shared)) {
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
    Queries queries;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_queries(queries, item, first_row, h);
      largest_[h] = -math::inf;
      sum_[h] = 0.f;
      limits_[h] = mla_visible_tokens(params_, item, first_row + row_ + 8 * h);
    }
    least_limit_ = mla_visible_tokens(params_, item, first_row);
    Output output = {};
#pragma unroll 1
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      // All wait for all blocks: the parity of a barrier tells only a block from the next one
      // there.
      ptx::mbarrier_wait_soon(address(control_.full[stage_]), phase_);
      if (turn_ == group_) attend_block(queries, output, item, token);
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

  __device__ __forceinline__ void attend_block(const Queries& queries, Output& output,
                                               const MlaWorkItem& item, int token) {
    if (token + Tile::kBlock > item.kv_end) clear_rows(item.kv_end - token);
    Logits logits = {};
    Weights weights;
    multiply_keys(queries, logits);
    add_up(logits);
    if (weigh(logits, token, weights)) shrink(output);
    add_values(output, weights);
  }

  template <typename U>
  __device__ __forceinline__ static uint32_t address(U& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  // ---- Queries ----

  // Row `row_` + 8 h of the pass, zeros if there is none.
  __device__ __forceinline__ void load_queries(Queries& queries, const MlaWorkItem& item,
                                               int first_row, int h) const {
    const int row = first_row + row_ + 8 * h;
    const bool exists = row < num_rows_;
    const MlaRowPlace place(params_, item.qo_begin, item.row_begin + (exists ? row : 0));
    const auto load = [&](const MlaRows& rows, int column) -> uint32_t {
      const T* const source = static_cast<const T*>(rows.data) + place.token * rows.stride_token +
                              place.head * rows.stride_head + column + lane_idx_ % 4 * 2;
      return exists ? *reinterpret_cast<const uint32_t*>(source) : 0;
    };
#pragma unroll
    for (int step = 0; step < Tile::kKeySteps; ++step) {
      const bool is_rope = step >= Tile::kCkvSteps;
      const int first = is_rope ? warp_idx_ * 16 : warp_idx_ * Tile::kWarpColumns + step * 16;
      const MlaRows& rows = is_rope ? params_.q_pe : params_.q_nope;
      queries[step][h] = load(rows, first);
      queries[step][2 + h] = load(rows, first + 8);
    }
  }

  // ---- Logits ----

  // Columns here have 16 bytes. Where those of the warp begin in a row of the block; `lane_column`:
  // the lane's among those that are read at once.
  static constexpr int kColumns = Tile::kWarpColumns / 8;
  static_assert(kColumns % 8 == 0);
  __device__ __forceinline__ uint32_t first_place(int row, int lane_column) const {
    return shared_ + stage_ * Tile::kStageBytes +
           swizzled_offset<Tile::kBlock>(row, warp_idx_ * kColumns + lane_column);
  }
  // The place of column `column` beyond that.
  __device__ __forceinline__ static uint32_t place(uint32_t first, int column) {
    return (first ^ (column % 8 * 16)) + column / 8 * Tile::kChunkBytes;
  }

  // Clears the warp's columns of rows beyond the item: 0 * NaN is not 0.
  __device__ __forceinline__ void clear_rows(int num_tokens) const {
    for (int row = num_tokens; row < Tile::kBlock; ++row) {
      if (lane_idx_ < kColumns) {
        ptx::store_shared_16(place(first_place(row, 0), lane_idx_), uint4{0, 0, 0, 0});
      }
    }
    ptx::async_proxy_fence();
    __syncwarp();
  }

  // The keys of the block's tokens and 16 columns: fragments of four products.
  using Keys = uint32_t[2][4];
  __device__ __forceinline__ static void load_keys(Keys& keys, uint32_t from) {
    ptx::ldmatrix_x4(keys[0], from);
    ptx::ldmatrix_x4(keys[1], from + 16 * 128);
  }

  __device__ __forceinline__ void multiply_keys(const Queries& queries, Logits& logits) const {
    constexpr int kAhead = 2;
    // Lane i gives a row of matrix i / 8: of the first or the second 8 columns, then of 8 tokens.
    const int row = lane_idx_ % 8 + lane_idx_ / 16 * 8, column = lane_idx_ / 8 % 2;
    const uint32_t first = first_place(row, column);
    const uint32_t rope =
        shared_ + stage_ * Tile::kStageBytes +
        swizzled_offset<Tile::kBlock>(row, Tile::kChunksCkv * 8 + warp_idx_ * 2 + column);
    const auto from = [&](int step) {
      return step < Tile::kCkvSteps ? place(first, step * 2) : rope;
    };
    Keys keys[kAhead + 1];
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load_keys(keys[step], from(step));
#pragma unroll
    for (int step = 0; step < Tile::kKeySteps; ++step) {
      if (step + kAhead < Tile::kKeySteps) {
        load_keys(keys[(step + kAhead) % (kAhead + 1)], from(step + kAhead));
      }
      const Keys& now = keys[step % (kAhead + 1)];
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        ptx::mma_m16n8k16<T>(logits[tile], queries[step], now[tile / 2][tile % 2 * 2],
                             now[tile / 2][tile % 2 * 2 + 1]);
      }
    }
  }

  __device__ __forceinline__ uint32_t exchange(int group, int warp) const {
    return shared_ + Tile::kOffsetExchange + group * Tile::kExchangeBytes +
           warp * 2 * Tile::kPartBytes + lane_idx_ * 16;
  }

  // Adds what the group's other warps have of the same logits. Pairs first, so that all warps get
  // the same sums.
  __device__ __forceinline__ void add_up(Logits& logits) {
    const uint32_t parity = parity_ * Tile::kPartBytes;
    const uint32_t own = exchange(group_, warp_idx_) + parity;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) store(own + tile * 512, logits[tile]);
    ptx::named_barrier_sync(kGroupBarrier + group_, Tile::kGroupThreads);
    const uint32_t beside = exchange(group_, warp_idx_ ^ 1) + parity;
    const uint32_t third = exchange(group_, warp_idx_ ^ 2) + parity;
    const uint32_t fourth = exchange(group_, warp_idx_ ^ 3) + parity;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      float a[4], b[4], c[4];
      load(a, beside + tile * 512);
      load(b, third + tile * 512);
      load(c, fourth + tile * 512);
#pragma unroll
      for (int e = 0; e < 4; ++e) logits[tile][e] = (logits[tile][e] + a[e]) + (b[e] + c[e]);
    }
    parity_ ^= 1;
  }
  __device__ __forceinline__ static void store(uint32_t at, const float (&x)[4]) {
    ptx::store_shared_16(at, uint4{__float_as_uint(x[0]), __float_as_uint(x[1]),
                                   __float_as_uint(x[2]), __float_as_uint(x[3])});
  }
  __device__ __forceinline__ static void load(float (&x)[4], uint32_t at) {
    const uint4 bits = ptx::load_shared_16(at);
    x[0] = __uint_as_float(bits.x), x[1] = __uint_as_float(bits.y);
    x[2] = __uint_as_float(bits.z), x[3] = __uint_as_float(bits.w);
  }

  // ---- Weights ----

  // Returns whether the output so far must be multiplied by `shrink_`.
  __device__ __forceinline__ bool weigh(Logits& logits, int block_token, Weights& weights) {
    const int token = block_token + lane_idx_ % 4 * 2;
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -math::inf;
#pragma unroll
      for (int i = 0; i < 2 * kTokenTiles; ++i) {
        float& logit = logits[i / 2][2 * h + i % 2];
        logit *= params_.sm_scale_log2;
        if (block_token + Tile::kBlock > least_limit_ && token + i / 2 * 8 + i % 2 >= limits_[h]) {
          logit = -math::inf;
        }
        largest = fmaxf(largest, logit);
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      shrink_[h] = 1.f;
      if (largest > largest_[h] + kHeadroom) {
        shrink_[h] = math::ptx_exp2(largest_[h] - largest);
        largest_[h] = largest;
        moves = true;
      }
      const float reference = largest_[h] == -math::inf ? 0.f : largest_[h];
      float sum = 0.f;
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const float first = math::ptx_exp2(logits[tile][2 * h] - reference);
        const float second = math::ptx_exp2(logits[tile][2 * h + 1] - reference);
        sum += first + second;
        weights[tile / 2][tile % 2 * 2 + h] = PackedPair<T>::pack(first, second);
      }
      sum_[h] = fmaf(sum_[h], shrink_[h], sum);
    }
    return __any_sync(0xffffffffu, moves);
  }

  __device__ __forceinline__ void shrink(Output& output) const {
#pragma unroll
    for (int i = 0; i < 4 * kOutputTiles; ++i) output[i / 4][i % 4] *= shrink_[i % 4 / 2];
  }

  // ---- Values ----

  // Fragments of 16 tokens and 16 columns: of two products.
  __device__ __forceinline__ static void load_values(uint32_t (&values)[4], uint32_t first, int i) {
    constexpr int kPairs = kOutputTiles / 2;
    ptx::ldmatrix_x4_trans(values, place(first, i % kPairs * 2) + i / kPairs * 16 * 128);
  }

  __device__ __forceinline__ void add_values(Output& output, const Weights& weights) const {
    constexpr int kAhead = 3, kPairs = kOutputTiles / 2, kLoads = Tile::kBlock / 16 * kPairs;
    const uint32_t first = first_place(lane_idx_ % 16, lane_idx_ / 16);
    uint32_t values[kAhead + 1][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_values(values[i], first, i);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i + kAhead < kLoads) {
        load_values(values[(i + kAhead) % (kAhead + 1)], first, i + kAhead);
      }
      const auto& now = values[i % (kAhead + 1)];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        ptx::mma_m16n8k16<T>(output[i % kPairs * 2 + k], weights[i / kPairs], now[2 * k],
                             now[2 * k + 1]);
      }
    }
  }

  // ---- The end ----

  // The first group gets the first half of a warp's columns, the second the other half.
  __device__ __forceinline__ void finish(const Output& output, const MlaWorkItem& item,
                                         int first_row) {
    constexpr int kHalf = kOutputTiles / 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 2);
      if (warp_idx_ == 0 && lane_idx_ % 4 == 0) {
        control_.largest[group_][row_ + 8 * h] = largest_[h];
        control_.sums[group_][row_ + 8 * h] = sum_[h];
      }
    }
    synchronize();  // logits have been read
    const bool is_second = group_ == 1;
    const uint32_t sent = exchange(group_, warp_idx_);
    float kept[kHalf][4];
#pragma unroll
    for (int tile = 0; tile < kHalf; ++tile) {
      float other[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        kept[tile][e] = is_second ? output[kHalf + tile][e] : output[tile][e];
        other[e] = is_second ? output[tile][e] : output[kHalf + tile][e];
      }
      store(sent + tile * 512, other);
    }
    synchronize();
    float sums[2], largest[2];
    add_groups(kept, sums, largest);
    synchronize();  // before logits are told again
    if constexpr (Tile::kInPairs) {
      const auto value = [&](int i) -> float& { return kept[i / 4][i % 4]; };
      if (!Tile::PairMerge::exchange(value, largest, sums, control_.parts_full,
                                     shared_ + Tile::kOffsetReceived, group_)) {
        return;
      }
    }
    write_rows(kept, item, first_row, largest, sums);
  }

  __device__ __forceinline__ static void synchronize() {
    ptx::named_barrier_sync(kMathBarrier, Tile::kMathThreads);
  }

  __device__ __forceinline__ void add_groups(float (&output)[kOutputTiles / 2][4], float (&sums)[2],
                                             float (&largest)[2]) const {
    float factors[2][2];  // of the own and the other group, of rows
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float other_largest = control_.largest[group_ ^ 1][row_ + 8 * h];
      largest[h] = fmaxf(largest_[h], other_largest);
      const float reference = largest[h] == -math::inf ? 0.f : largest[h];
      factors[0][h] = math::ptx_exp2(largest_[h] - reference);
      factors[1][h] = math::ptx_exp2(other_largest - reference);
      sums[h] = sum_[h] * factors[0][h] + control_.sums[group_ ^ 1][row_ + 8 * h] * factors[1][h];
    }
    const uint32_t received = exchange(group_ ^ 1, warp_idx_);
#pragma unroll
    for (int tile = 0; tile < kOutputTiles / 2; ++tile) {
      float other[4];
      load(other, received + tile * 512);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        output[tile][e] = fmaf(output[tile][e], factors[0][e / 2], other[e] * factors[1][e / 2]);
      }
    }
  }

  // To the output, or as a part of it to the workspace.
  __device__ __forceinline__ void write_rows(const float (&output)[kOutputTiles / 2][4],
                                             const MlaWorkItem& item, int first_row,
                                             const float (&largest)[2],
                                             const float (&sums)[2]) const {
    const int slot = Tile::kInPairs ? -1 : item.slot;  // what pairs write is whole
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + row_ + 8 * h;
      const float sum = sums[h];
      const bool exists = row < num_rows_;
      const bool writes_lse = threadIdx.x < 32 && lane_idx_ % 4 == 0;
      MlaRowTarget<O> place;
      if (exists) {
        place = begin_row<O, Tile::kDimCkv, kMlaTileRows>(params_, item, slot, row, largest[h], sum,
                                                          writes_lse);
      }
      const float factor = place.factor;
      O* const target =
          place.target + (2 * warp_idx_ + group_) * (Tile::kWarpColumns / 2) + lane_idx_ % 4 * 8;
#pragma unroll
      for (int tile = 0; tile < kOutputTiles / 2; tile += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pairs[i] = PackedPair<O>::pack(output[tile + i][2 * h] * factor,
                                         output[tile + i][2 * h + 1] * factor);
        }
        transpose_in_quad(pairs, lane_idx_);
        if (exists) {
          *reinterpret_cast<uint4*>(target + tile * 8) =
              uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
        }
      }
    }
  }

  const MlaParams& params_;
  Control& control_;
  const uint32_t shared_;
  int group_, warp_idx_, lane_idx_, row_;  // of the group's warps; the first of the thread's rows
  int num_rows_ = 0;
  int stage_ = 0, turn_ = 0;
  uint32_t phase_ = 0, parity_ = 0;
  int limits_[2], least_limit_;
  float largest_[2], sum_[2], shrink_[2];  // of the thread's rows; sums of its own weights
};

}  // namespace flashinfer
