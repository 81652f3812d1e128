// The two warpgroups that multiply. Each has all 64 rows of the tile and half of the output's
// columns. A step has two blocks of KV: the first warpgroup computes the weights of the first
// block, the second warpgroup the weights of the second.
//
//   first                                     second
//   S0 = q K0^T                               (waits for S0)
//   P0 = weights of S0                        S1 = q K1^T
//   O += P0 V0[:, left]        --- P0 --->    O += P0 V0[:, right]  while P1 = weights of S1
//   O += P1 V1[:, left]        <--- P1 ---    O += P1 V1[:, right]
//
// While one computes weights, the tensor cores work for the other. A warpgroup reads its own
// weights from registers and the other's from shared memory, where P1 takes the place of P0. Parts
// of KV are given back as soon as their products have ended: what comes there is needed again less
// than a step later.
//
// Weights are exponentials relative to a reference per row, which both warpgroups share. It is not
// the row's largest logit: it moves only when a logit exceeds it by 2^kHeadroom. This is rare, so
// the output is seldom scaled again.
#pragma once

#include <flashinfer/common/exp2.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/output.cuh>
#include <flashinfer/mla/sm90/part_merge.cuh>
#include <flashinfer/mla/sm90/part_rows.cuh>
#include <flashinfer/mla/sm90/producer.cuh>
#include <flashinfer/mla/sm90/values.cuh>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mbarrier_cluster.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

// `kSharers`: CTAs of the cluster, which have the same KV rows.
template <typename Tile, int kGroup, int kSharers>
class MlaConsumer {
  // Whether the next step's logits are asked for before the last values have ended, and the first
  // block's values before the second softmax. KV is then given back later, which costs more where
  // steps wait for memory: with few heads.
  static constexpr bool kAhead = kSharers == 2 || Tile::kWidens;
  static constexpr bool kScalesQueries = Tile::kWidens && !Tile::kScaled;
  static constexpr bool kQueriesAreBoxes = Tile::template kQueriesAreBoxes<kSharers>;
  using T = typename Tile::T;
  static constexpr int kLogitTiles = Tile::kBlock / 8, kSteps = Tile::kBlock / 16;
  static constexpr float kHeadroom = 8.f;
  static constexpr int kOther = 1 - kGroup;
  using Logits = float[kLogitTiles][4];
  using Weights = uint32_t[kSteps][4];
  using Output = float[Tile::kOutputTiles][4];

 public:
  __device__ __forceinline__ MlaConsumer(const MlaParams& params, char* shared, MlaControl& control)
      : params_(params),
        control_(control),
        profile_(params, kGroup, kMlaProfileGroups, threadIdx.x % 128 == 0),
        shared_(ptx::shared_address(shared)) {
    warp_idx_ = threadIdx.x / 32 % 4;
    lane_idx_ = threadIdx.x % 32;
    row_ = warp_idx_ * 16 + lane_idx_ / 4;
  }

  // Returns the merge of the last item's part, or -1.
  __device__ __forceinline__ int run() {
    const MlaShare share = Tile::kWidens ? MlaShare(params_) : MlaShare::guess(params_);
    MlaWorkItem item = share.first;
    ptx::grid_dependency_wait();
    ptx::cluster_wait();
    MlaPartMerge<Tile> merge(params_, control_, shared_);
    merge.count_start(share);
    for (int i = share.begin; i < share.end; ++i) {
      if (i != share.begin) item = params_.items[i];
      attend(item, (i - share.begin) % 2);
      if (i + 1 < share.end) merge.template end_item<kGroup>(item);
    }
    return share.begin < share.end && item.slot >= 0 ? item.merge : -1;
  }

 private:
  template <typename U>
  __device__ __forceinline__ static uint32_t address(U& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  // Tells that the warp has read what the barrier guards.
  __device__ __forceinline__ void arrive(uint64_t& barrier) const {
    __syncwarp();
    if (lane_idx_ == 0) ptx::mbarrier_arrive(address(barrier));
  }

  // The same of KV, which all CTAs of the cluster wait for.
  __device__ __forceinline__ void give_back(uint64_t& barrier) const {
    __syncwarp();
    if (lane_idx_ == 0) ptx::mbarrier_arrive(address(barrier));
    if (kSharers == 2 && lane_idx_ == 1) {
      ptx::mbarrier_arrive_relaxed(ptx::remote_address(address(barrier), ptx::cluster_rank() ^ 1));
    }
  }

  __device__ __forceinline__ uint32_t block_address(int block) const {
    return shared_ + Tile::kOffsetK + block * Tile::kBlockBytes;
  }

  __device__ __forceinline__ void attend(const MlaWorkItem& item, uint32_t parity) {
    Output output;
#pragma unroll
    for (int j = 0; j < Tile::kOutputTiles; ++j) {
      output[j][0] = output[j][1] = output[j][2] = output[j][3] = 0.f;
    }
    largest_[0] = largest_[1] = -math::inf;
    sum_[0] = sum_[1] = 0.f;
    set_limits(item);
    if constexpr (!kQueriesAreBoxes) ptx::mbarrier_wait(address(control_.q_full), parity);
    set_scales();
    Logits logits;
    if (kGroup == 0 && item.kv_begin < item.kv_end) multiply_keys(logits, item, item.kv_begin);
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kStep) {
      const bool has_second = token + Tile::kBlock < item.kv_end;
      const bool is_last = token + Tile::kStep >= item.kv_end;
      if constexpr (kGroup == 0) {
        first_step(output, logits, item, token, has_second, is_last);
      } else {
        second_step(output, item, token + Tile::kBlock, has_second, is_last);
      }
    }
    if (!kQueriesAreBoxes && item.kv_begin >= item.kv_end) arrive(control_.q_empty);
    profile_.begin(MlaEvent::kOutput);
    finish(output, item, parity);
    profile_.end(MlaEvent::kOutput);
  }

  // ---- Steps ----

  // `logits`: of this step, then of the next.
  __device__ __forceinline__ void first_step(Output& output, Logits& logits,
                                             const MlaWorkItem& item, int token, bool has_second,
                                             bool is_last) {
    Weights weights;
    float largest[2], shrink[2];
    if (is_last) arrive(control_.q_empty);
    if constexpr (Tile::kRopeFirst) give_back(control_.kv_empty[0][kRope]);
    profile_.begin(MlaEvent::kWeights);
    find_largest(logits, largest, token);
    const bool moves = weigh(logits, weights, largest, shrink);
    publish(weights);
    profile_.end(MlaEvent::kWeights);
    ptx::named_barrier_arrive(kWeightsOfFirst, Tile::kConsumerThreads);
    profile_.begin(MlaEvent::kValues);
    if (moves) multiply(output, shrink);
    ptx::wgmma_fence();
    add_values_of_registers(output, weights, kLeft);
    finish_values(output, control_.kv_empty[0][kLeft]);
    profile_.end(MlaEvent::kValues);
    if (!has_second) return;
    ptx::named_barrier_sync(kWeightsOfSecond, Tile::kConsumerThreads);
    profile_.begin(MlaEvent::kValues);
    if (follow(shrink)) multiply(output, shrink);
    ptx::wgmma_fence();
    add_values_of_shared(output, kLeft);
    if (is_last || !kAhead) finish_values(output, control_.kv_empty[1][kLeft]);
    profile_.end(MlaEvent::kValues);
    if (is_last) return;
    profile_.begin(MlaEvent::kKeys);
    begin_keys(logits, item, token + Tile::kStep);
    if constexpr (kAhead) {
      ptx::wgmma_wait<1>();
      ptx::wgmma_done(output);
      give_back(control_.kv_empty[1][kLeft]);
    }
    continue_keys(logits, token + Tile::kStep + Tile::kBlock < item.kv_end);
    profile_.end(MlaEvent::kKeys);
  }

  __device__ __forceinline__ void second_step(Output& output, const MlaWorkItem& item, int token,
                                              bool has_second, bool is_last) {
    float shrink[2];
    if (!has_second) {
      arrive(control_.q_empty);
      ptx::named_barrier_sync(kWeightsOfFirst, Tile::kConsumerThreads);
      profile_.begin(MlaEvent::kValues);
      if (follow(shrink)) multiply(output, shrink);
      ptx::wgmma_fence();
      add_values_of_shared(output, kRight);
      finish_values(output, control_.kv_empty[0][kRight]);
      profile_.end(MlaEvent::kValues);
      return;
    }
    Logits logits;
    Weights weights;
    float largest[2];
    ptx::named_barrier_sync(kTurn, Tile::kConsumerThreads);  // the first's logits are nearly done
    profile_.begin(MlaEvent::kKeys);
    begin_keys(logits, item, token);
    continue_keys(logits, false);
    if constexpr (!kAhead) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(logits);
      find_largest(logits, largest, token);
      if (is_last) arrive(control_.q_empty);
    }
    profile_.end(MlaEvent::kKeys);
    ptx::named_barrier_sync(kWeightsOfFirst, Tile::kConsumerThreads);
    profile_.begin(MlaEvent::kValues);
    if (follow(shrink)) {
      // The compiler takes no other writes to sums while products are under way.
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(logits);
      multiply(output, shrink);
    }
    ptx::wgmma_fence();
    add_values_of_shared(output, kRight);
    if constexpr (kAhead) {
      ptx::wgmma_wait<1>();
      ptx::wgmma_done(logits);
    }
    if constexpr (Tile::kRopeFirst) give_back(control_.kv_empty[1][kRope]);
    profile_.begin(MlaEvent::kWeights);
    if (kAhead) find_largest(logits, largest, token);
    if (kAhead && is_last) arrive(control_.q_empty);
    const bool moves = weigh(logits, weights, largest, shrink);
    finish_values(output, control_.kv_empty[0][kRight]);
    publish(weights);
    profile_.end(MlaEvent::kWeights);
    ptx::named_barrier_arrive(kWeightsOfSecond, Tile::kConsumerThreads);
    profile_.end(MlaEvent::kValues);
    profile_.begin(MlaEvent::kValues);
    if (moves) multiply(output, shrink);
    ptx::wgmma_fence();
    add_values_of_registers(output, weights, kRight);
    finish_values(output, control_.kv_empty[1][kRight]);
    profile_.end(MlaEvent::kValues);
  }

  // ---- Products ----

  // logits = q K^T of the warpgroup's own block.
  __device__ __forceinline__ void multiply_keys(Logits& logits, const MlaWorkItem& item,
                                                int token) {
    profile_.begin(MlaEvent::kKeys);
    begin_keys(logits, item, token);
    continue_keys(logits, token + Tile::kBlock < item.kv_end);
    profile_.end(MlaEvent::kKeys);
  }

  // The first chunk of it.
  __device__ __forceinline__ void begin_keys(Logits& logits, const MlaWorkItem& item, int token) {
    phase_ ^= 1;
    const int num_tokens = item.kv_end - token;
    if (num_tokens < Tile::kBlock) clear_rows(num_tokens, phase_);
    multiply_chunk(logits, 0);
    ptx::wgmma_commit();
  }

  // The other chunks. The first warpgroup waits for them. In pairs it tells the second before the
  // last one has ended, so that logits follow logits without a gap.
  __device__ __forceinline__ void continue_keys(Logits& logits, bool tells) const {
#pragma unroll
    for (int i = 1; i < Tile::kChunks; ++i) {
      if (kGroup == 0 && i == Tile::kChunks - 1) ptx::wgmma_commit();
      multiply_chunk(logits, i);
    }
    ptx::wgmma_commit();
    if (kGroup == 0) {
      ptx::wgmma_wait<kAhead ? 1 : 0>();
      if (tells) ptx::named_barrier_arrive(kTurn, Tile::kConsumerThreads);
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(logits);
    }
  }

  __device__ __forceinline__ void multiply_chunk(Logits& logits, int i) const {
    const int chunk = chunk_in_turn(i);
    const uint64_t q = ptx::wgmma_operand(shared_ + Tile::kOffsetQ);
    const uint64_t k = ptx::wgmma_operand(block_address(kGroup), 0, Tile::group_bytes(chunk));
    if (chunk % Tile::kChunksTogether == 0) {
      wait_for_chunk(chunk, phase_);
      // Who stores has fenced; with values of one scale products are a little faster fenced twice.
      if (Tile::kWidens && !Tile::kScaled) ptx::async_proxy_fence();
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma<T, false>(logits, ptx::wgmma_advance(q, chunk * Tile::kChunkBytes + step * 32),
                           ptx::wgmma_advance(k, Tile::chunk_offset(chunk) + step * 32),
                           i + step != 0);
    }
  }

  __device__ __forceinline__ void wait_for_chunk(int chunk, uint32_t phase) const {
    ptx::mbarrier_wait_soon(address(control_.kv_full[kGroup][chunk]), phase);
  }

  // The chunk at position i: the producer loads what is free first before the rest.
  __device__ __forceinline__ static constexpr int chunk_in_turn(int i) {
    constexpr int kFirst = Tile::kRopeFirst ? 1 : 0;  // of the halves
    if (i < kFirst || i == Tile::kChunksCkv + kFirst) return Tile::kChunksCkv;
    return (i - kFirst + kGroup * Tile::kChunksHalf) % Tile::kChunksCkv;
  }

  // Waits for the products with values, and releases the values.
  __device__ __forceinline__ void finish_values(Output& output, uint64_t& empty) const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(output);
    give_back(empty);
  }

  // Values of the warpgroup's own block.
  __device__ __forceinline__ void add_values_of_registers(Output& output, const Weights& weights,
                                                          int half) {
    const uint64_t v = mla_value_operand<Tile>(block_address(kGroup), half);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) add_mla_values<Tile>(output, weights[step], v, step);
    ptx::wgmma_commit();
  }

  // The other warpgroup's values. It has waited for them, and its barrier makes them visible here.
  __device__ __forceinline__ void add_values_of_shared(Output& output, int half) {
    const uint64_t v = mla_value_operand<Tile>(block_address(kOther), half);
    const uint64_t p = ptx::wgmma_operand(shared_ + Tile::kOffsetWeights);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      add_mla_values<Tile>(output, ptx::wgmma_advance(p, step * 32), v, step);
    }
    ptx::wgmma_commit();
  }

  // Clears rows of the own block that are beyond the request: 0 * NaN is not 0.
  __device__ __forceinline__ void clear_rows(int num_tokens, uint32_t phase) {
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::kChunks; chunk += Tile::kChunksTogether) {
      wait_for_chunk(chunk, phase);
    }
    for (int row = num_tokens + warp_idx_; row < Tile::kBlock; row += 4) {
      for (int column = lane_idx_; column < Tile::kChunks * 8; column += 32) {
        ptx::store_shared_16(block_address(kGroup) + Tile::offset(row, column), uint4{0, 0, 0, 0});
      }
    }
    ptx::async_proxy_fence();
    ptx::named_barrier_sync(kGroupBarrier + kGroup, 128);
  }

  // ---- Weights ----

  // The tokens that the thread's two rows see, and the fewest that a row of the tile sees.
  __device__ __forceinline__ void set_limits(const MlaWorkItem& item) {
    limits_[0] = mla_visible_tokens(params_, item, row_);
    limits_[1] = mla_visible_tokens(params_, item, row_ + 8);
    least_limit_ = mla_visible_tokens(params_, item, 0);
  }

  __device__ __forceinline__ void set_scales() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scales_[h] =
          params_.sm_scale_log2 * (kScalesQueries ? control_.row_scale[row_ + 8 * h] : 1.f);
    }
  }

  // The largest logits of the thread's rows, scaled; hidden ones become -inf.
  __device__ __forceinline__ void find_largest(Logits& logits, float (&largest)[2],
                                               int token) const {
    if (token + Tile::kBlock > least_limit_) hide(logits, token);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(logits[0][2 * h], logits[0][2 * h + 1]);
#pragma unroll
      for (int j = 1; j < kLogitTiles; ++j)
        largest[h] = fmaxf(largest[h], fmaxf(logits[j][2 * h], logits[j][2 * h + 1]));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
      largest[h] *= scales_[h];
    }
  }

  // Turns the block's logits into weights. `shrink` is the factor for the output so far; returns
  // whether it is not 1 in some row of the warp.
  __device__ __forceinline__ bool weigh(const Logits& logits, Weights& weights,
                                        const float (&largest)[2], float (&shrink)[2]) {
    float reference[2];
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      shrink[h] = 1.f;
      if (largest[h] > largest_[h] + kHeadroom) {
        if (largest_[h] != -math::inf) {  // else there is nothing to scale
          shrink[h] = math::ptx_exp2(largest_[h] - largest[h]);
          moves = true;
        }
        largest_[h] = largest[h];
      }
      reference[h] = largest_[h] == -math::inf ? 0.f : largest_[h];
    }
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int h = r % 2, j = 2 * step + r / 2;
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          pair[e] = math::ptx_exp2(fmaf(logits[j][2 * h + e], scales_[h], -reference[h]));
          sum[h] += pair[e];
        }
        weights[step][r] = PackedPair<T>::pack(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_[h] = fmaf(sum_[h], shrink[h], sum[h]);
    return __any_sync(0xffffffffu, moves);
  }

  __device__ __forceinline__ void hide(Logits& logits, int token) const {
#pragma unroll
    for (int j = 0; j < kLogitTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (token + j * 8 + lane_idx_ % 4 * 2 + e % 2 >= limits_[e / 2]) logits[j][e] = -math::inf;
      }
    }
  }

  // Gives the other warpgroup the weights and references. The warp overwrites rows of weights that
  // it alone has read, in products that have ended.
  __device__ __forceinline__ void publish(const Weights& weights) {
    const int row = warp_idx_ * 16 + lane_idx_ % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::stmatrix_x4(
          shared_ + Tile::kOffsetWeights + swizzled_offset<64>(row, 2 * step + lane_idx_ / 16),
          weights[step]);
    }
    if (lane_idx_ % 4 == 0) {
      control_.largest[kGroup][row_] = largest_[0];
      control_.largest[kGroup][row_ + 8] = largest_[1];
    }
    ptx::async_proxy_fence();
  }

  // Takes over the other warpgroup's references.
  __device__ __forceinline__ bool follow(float (&shrink)[2]) {
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = control_.largest[kOther][row_ + 8 * h];
      shrink[h] = 1.f;
      if (largest != largest_[h]) {
        if (largest_[h] != -math::inf) {
          shrink[h] = math::ptx_exp2(largest_[h] - largest);
          sum_[h] *= shrink[h];
          moves = true;
        }
        largest_[h] = largest;
      }
    }
    return __any_sync(0xffffffffu, moves);
  }

  __device__ __forceinline__ static void multiply(Output& output, const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < 4 * Tile::kOutputTiles; ++i) output[i / 4][i % 4] *= factors[i % 4 / 2];
  }

  // ---- The item's end ----

  __device__ __forceinline__ void finish(Output& output, const MlaWorkItem& item, uint32_t parity) {
    float sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 2);
      if (lane_idx_ % 4 == 0) control_.sums[parity][kGroup][row_ + 8 * h] = sum_[h];
    }
    ptx::named_barrier_sync(kItemEnd, Tile::kConsumerThreads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = control_.sums[parity][0][row_ + 8 * h] + control_.sums[parity][1][row_ + 8 * h];
    }
    if (Tile::kPartsAsHeld && item.slot >= 0) {
      write_part<Tile>(params_, item.slot, output, largest_, sum, kGroup, row_, lane_idx_);
    } else {
      write_output<Tile>(params_, item, output, largest_, sum, kGroup, row_, lane_idx_);
    }
  }

  const MlaParams& params_;
  MlaControl& control_;
  MlaProfile<Tile::kProfiled> profile_;
  const uint32_t shared_;
  int warp_idx_, lane_idx_, row_;
  uint32_t phase_ = 1;  // of the own block
  int limits_[2], least_limit_;
  float scales_[2];            // of logits of the thread's rows
  float largest_[2], sum_[2];  // of the thread's rows; sums of its own weights
};

}  // namespace flashinfer
