// The warpgroups that multiply: 64 query rows each.
//
// While the tensor cores sum p v of one tile, a warpgroup makes weights of the next tile's logits,
// and while it does, the other warpgroup has the tensor cores: they take turns. J. Shah et al.,
// "FlashAttention-3", 2024.
#pragma once

#include <flashinfer/attention/hopper_producer.cuh>
#include <flashinfer/attention/output.cuh>
#include <flashinfer/attention/rows.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

template <typename Traits, typename Params>
class HopperConsumer {
  using Tile = typename Traits::Tile;
  using Variant = typename Traits::Variant;
  using Rows = TileRows<Traits, Params>;
  using Mma = typename Tile::Mma;
  static_assert(Variant::use_softmax || Tile::kElement == 2, "8 bits hold weights, not logits");
  static constexpr int kSteps = Tile::kTileKV / Tile::kStepTokens;

 public:
  __device__ __forceinline__ HopperConsumer(const HopperParams<Params>& params, char* shared,
                                            HopperControl& control)
      : params_(params.attention),
        tensors_(params.attention.tensors[0]),
        control_(control),
        shared_(shared) {
    // Shuffled, so that the compiler knows it to be the same in all lanes.
    group_idx_ = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  }

  __device__ __forceinline__ void run() {
    // The last group gives the first its first turn.
    if (group_idx_ == Tile::kConsumers - 1) pass_turn();
    while (true) {
      ptx::mbarrier_wait(address(control_.work_full[work_.stage]), work_.phase);
      const HopperControl::Work& work = control_.work[work_.stage];
      if (work.item.request < 0) break;
      attend(work.item, work.kv_head);
      arrive(control_.work_empty[work_.stage]);
      work_.advance();
    }
    ptx::grid_launch_dependents();
  }

 private:
  template <typename T>
  __device__ __forceinline__ static uint32_t address(T& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  // The warp has read what the barrier guards.
  __device__ __forceinline__ static void arrive(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(address(barrier));
  }

  // Barrier 2 + group: the tensor cores are free for the group.
  __device__ __forceinline__ void await_turn() const {
    ptx::named_barrier_sync(2 + group_idx_, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    ptx::named_barrier_arrive(group_idx_ + 1 == Tile::kConsumers ? 2 : 3 + group_idx_, 256);
  }

  __device__ __forceinline__ void attend(const WorkItem& item, uint32_t kv_head) {
    Rows rows(params_, item, kv_head, shared_ + Tile::kOffsetOutput);
    WarpState<Tile> state;
    rows.begin(state);
    const int num_tiles = ceil_div(max(item.kv_end - item.kv_begin, 0), Tile::kTileKV);
    ptx::mbarrier_wait(address(control_.q_full), q_phase_);
    q_phase_ ^= 1;
    if (num_tiles > 0) stream(rows, state, item, num_tiles);
    if constexpr (!Tile::kOutputOverQ) arrive(control_.q_empty);
    rows.end(state);

    const int num_packed = item.qo_len * static_cast<int>(params_.group_size.divisor);
    const int num_rows = min(num_packed - item.row_begin, Tile::kTileQ);
    if constexpr (Tile::kOutputOverQ) {
      ptx::named_barrier_sync(kOutputBarrier, Tile::kConsumerThreads);  // all have read q
    }
    OutputWriter<Traits, Params>(params_, tensors_, item, kv_head, num_rows, rows.variant,
                                 rows.view, shared_ + Tile::kOffsetOutput, nullptr)
        .write(state);
    if constexpr (Tile::kOutputOverQ) {
      ptx::async_proxy_fence();
      arrive(control_.q_empty);
    }
  }

  // From the last tile to the first: where rows see different keys comes first.
  __device__ __forceinline__ void stream(Rows& rows, WarpState<Tile>& state, const WorkItem& item,
                                         int num_tiles) {
    float logits[1][Tile::kTokenTiles][4];
    float shrink[1][2];
    uint32_t p[kSteps][1][4];
    const float scale = rows.scale_log2();

    ptx::mbarrier_wait(address(control_.k_full[k_ring_.stage]), k_ring_.phase);
    await_turn();
    ptx::wgmma_fence();
    multiply_qk(logits[0]);
    ptx::wgmma_commit();
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(logits[0]);
    release_keys();
    int first_token = item.kv_begin + (num_tiles - 1) * Tile::kTileKV;
    weigh(rows, state, logits, scale, first_token, shrink);
    pack(logits, p);

    for (int tile = num_tiles - 2; tile >= 0; --tile) {
      first_token -= Tile::kTileKV;
      ptx::mbarrier_wait(address(control_.k_full[k_ring_.stage]), k_ring_.phase);
      await_turn();
      ptx::wgmma_fence();
      multiply_qk(logits[0]);
      ptx::wgmma_commit();
      ptx::mbarrier_wait(address(control_.v_full[v_ring_.stage]), v_ring_.phase);
      ptx::wgmma_fence();
      multiply_pv(state, p);
      ptx::wgmma_commit();
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::wgmma_done(logits[0]);
      release_keys();
      const bool shrinks = weigh(rows, state, logits, scale, first_token, shrink);
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(state.output[0]);
      release_values();
      if (shrinks) rows.shrink_output(state, shrink);
      pack(logits, p);
    }
    ptx::mbarrier_wait(address(control_.v_full[v_ring_.stage]), v_ring_.phase);
    ptx::wgmma_fence();
    multiply_pv(state, p);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(state.output[0]);
    release_values();
  }

  __device__ __forceinline__ void release_keys() {
    arrive(control_.k_empty[k_ring_.stage]);
    k_ring_.advance();
  }
  __device__ __forceinline__ void release_values() {
    arrive(control_.v_empty[v_ring_.stage]);
    v_ring_.advance();
  }

  // logits = q k^T for the group's rows.
  __device__ __forceinline__ void multiply_qk(float (&logits)[Tile::kTokenTiles][4]) const {
    const uint32_t q = address(*shared_) + group_idx_ * 64 * 128;
    const uint32_t k = address(*shared_) + Tile::kOffsetK + k_ring_.stage * Tile::kBytesK;
#pragma unroll
    for (int step = 0; step < Tile::kHeadDimQK * Tile::kElement / 32; ++step) {
      const int chunk = step / 4, within = step % 4 * 32;
      ptx::wgmma<Mma, false>(logits, ptx::wgmma_operand(q + chunk * Tile::kTileQ * 128 + within),
                             ptx::wgmma_operand(k + chunk * Tile::kTileKV * 128 + within),
                             step > 0);
    }
  }

  // output += p v
  __device__ __forceinline__ void multiply_pv(WarpState<Tile>& state,
                                              const uint32_t (&p)[kSteps][1][4]) const {
    constexpr int kPart = Tile::kHeadDimVO < 128 ? Tile::kHeadDimVO : 128;  // columns
    const uint32_t v = address(*shared_) + Tile::kOffsetV + v_ring_.stage * Tile::kBytesV;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < Tile::kHeadDimVO / kPart; ++part) {
        auto& sums = reinterpret_cast<float (&)[kPart / 8][4]>(state.output[0][part * kPart / 8]);
        uint64_t operand;
        if constexpr (Tile::kTransposedV) {
          operand = ptx::wgmma_operand(v + step / 4 * Tile::kHeadDimVO * 128 + part * kPart * 128 +
                                       step % 4 * 32);
        } else {
          operand = ptx::wgmma_operand(v + part * 2 * Tile::kTileKV * 128 + step * 16 * 128,
                                       Tile::kTileKV * 128);
        }
        ptx::wgmma<Mma, !Tile::kTransposedV>(sums, p[step][0], operand, true);
      }
    }
  }

  // Makes weights of logits; `shrink` is what the output is to be multiplied by if it says so.
  __device__ __forceinline__ bool weigh(Rows& rows, WarpState<Tile>& state,
                                        float (&logits)[1][Tile::kTokenTiles][4], float scale,
                                        int first_token, float (&shrink)[1][2]) const {
    if (Variant::kNegatesQuery && params_.variant.sm_scale < 0.f) {
#pragma unroll
      for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) logits[0][j][e] = -logits[0][j][e];
      }
    }
    constexpr float kUnscaled[1][2] = {{1.f, 1.f}};
    if (rows.has_hidden_keys(first_token)) {
      rows.template transform<true>(logits, first_token, kUnscaled);
    } else {
      rows.template transform<false>(logits, first_token, kUnscaled);
    }
    if constexpr (!Variant::use_softmax) return false;
    // In halves, so that the exponentials of one overlap with the maxima of the other.
    constexpr int kHalf = Tile::kTokenTiles / 2;
    float first[2], second[2], first_sum[2] = {0.f, 0.f}, second_sum[2] = {0.f, 0.f};
    bool changes = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      first[h] = Rows::template grown<0, kHalf>(state.largest[0][h], logits[0], h, scale);
    }
    exponentials<0>(logits[0], scale, first, first_sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      second[h] = Rows::template grown<kHalf, 2 * kHalf>(first[h], logits[0], h, scale);
      changes |= second[h] != state.largest[0][h];
    }
    exponentials<kHalf>(logits[0], scale, second, second_sum);
    const bool shrinks = __any_sync(0xffffffffu, changes);
    if (shrinks) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = math::ptx_exp2(first[h] - second[h]);
        first_sum[h] *= factor;
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
          logits[0][j][2 * h] *= factor;
          logits[0][j][2 * h + 1] *= factor;
        }
        shrink[0][h] = math::ptx_exp2(state.largest[0][h] - second[h]);
        state.sum[0][h] *= shrink[0][h];
        state.largest[0][h] = second[h];
      }
    }
    state.sum[0][0] += first_sum[0] + second_sum[0];
    state.sum[0][1] += first_sum[1] + second_sum[1];
    return shrinks;
  }

  // Of half a tile, from token tile kBegin on.
  template <int kBegin>
  __device__ __forceinline__ static void exponentials(float (&logits)[Tile::kTokenTiles][4],
                                                      float scale, const float (&largest)[2],
                                                      float (&sum)[2]) {
#pragma unroll
    for (int j = kBegin; j < kBegin + Tile::kTokenTiles / 2; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        logits[j][e] = math::ptx_exp2(fmaf(logits[j][e], scale, -largest[e / 2]));
      }
      sum[0] += logits[j][0] + logits[j][1];
      sum[1] += logits[j][2] + logits[j][3];
    }
  }

  __device__ __forceinline__ static void pack(const float (&logits)[1][Tile::kTokenTiles][4],
                                              uint32_t (&p)[kSteps][1][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) Rows::pack(logits, step, p[step]);
  }

  static constexpr int kOutputBarrier = 1 + 1 + Tile::kConsumers;

  const Params& params_;
  const AttentionTensors& tensors_;
  HopperControl& control_;
  char* const shared_;
  int group_idx_;
  Ring<2> work_;
  Ring<Tile::kStages> k_ring_, v_ring_;
  uint32_t q_phase_ = 0;
};

}  // namespace flashinfer
