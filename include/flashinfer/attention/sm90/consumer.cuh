// The consumer warpgroups: each multiplies 64 query rows with K and V.
//
// A warpgroup turns the logits of the next tile into weights while the tensor cores sum p v of the
// current tile. Meanwhile the other warpgroup uses the tensor cores: they take turns. J. Shah et
// al., "FlashAttention-3", 2024.
//
// Measurements, also of what lost: docs/tuning/attention_sm90.md and attention_sm90_fp8.md.
#pragma once

#include <flashinfer/attention/events.cuh>
#include <flashinfer/attention/sm90/weights.cuh>
#include <flashinfer/attention/sm90/output.cuh>
#include <flashinfer/attention/sm90/producer.cuh>
#include <flashinfer/attention/sm90/products.cuh>
#include <flashinfer/attention/sm90/query.cuh>
#include <flashinfer/attention/rows.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/wgmma.cuh>
#include <new>

namespace flashinfer {

template <typename Traits, typename Params>
class HopperConsumer {
  using Tile = typename Traits::Tile;
  using Variant = typename Traits::Variant;
  using Rows = TileRows<Traits, Params>;
  using Products = HopperProducts<Traits>;
  static_assert(Variant::use_softmax || Tile::kElement == 2, "8 bits hold weights, not logits");
  using Span = typename AttentionProfile<Params>::Span;
  static constexpr int kSteps = Products::kSteps;
  static constexpr int kHalfTile = Tile::kTokenTiles / (Tile::kHalvesTiles ? 2 : 1);
  // Half tiles are rare without a mask, and ptxas lacks registers for both forms with heads of 64.
  static constexpr bool kHalvesProducts = Traits::kMask != MaskMode::none;
  static constexpr bool kFewForms = hopper_has_few_forms<Traits>();
  // With 8-bit operands a warp's chain of instructions limits a tile's time, so a step without
  // visible tokens is skipped. Bit masks would need code and registers for each number of steps.
  static constexpr bool kSkipsSteps =
      Tile::kProductsAre8Bit && Variant::use_softmax && !kFewForms &&
      (Traits::kMask == MaskMode::causal || Traits::kMask == MaskMode::none);
  using Logits = float[1][Tile::kTokenTiles][4];
  using Weights = typename Products::Weights;
  // If only the softmax reads the logits, the inverse scale of q is folded into the row's scale.
  static constexpr bool kUnscalesLogits =
      Tile::kConvertsQuery && (Variant::kHasLogitsTransform || !Variant::use_softmax);

 public:
  __device__ __forceinline__ HopperConsumer(const HopperParams<Params>& params, char* shared,
                                            HopperControl& control)
      : params_(params.attention),
        output_map_(params.o),
        tensors_(params.attention.tensors[0]),
        control_(control),
        profile_(params_, threadIdx.x / 128, kHopperProfileGroups<Tile>, threadIdx.x % 128 == 0),
        shared_(shared) {
    // The shuffle tells the compiler that the value is the same in all lanes.
    group_idx_ = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  }

  __device__ __forceinline__ void run() {
    // The last group gives the first group its first turn.
    if (group_idx_ == Tile::kConsumers - 1) pass_turn();
    await_work();
    while (work(item_).item.request >= 0) attend();
    ptx::tma_store_wait_read();  // the copy engine reads shared memory until then
    ptx::grid_launch_dependents();
  }

 private:
  template <typename T>
  __device__ __forceinline__ static uint32_t address(T& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  // Signals that this warp has finished reading what the barrier guards.
  __device__ __forceinline__ static void arrive(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(address(barrier));
  }

  // Barrier 2 + g says that the tensor cores are free for group g.
  __device__ __forceinline__ void await_turn() const {
    ptx::named_barrier_sync(2 + group_idx_, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    ptx::named_barrier_arrive(group_idx_ + 1 == Tile::kConsumers ? 2 : 3 + group_idx_, 256);
  }

  // Items are numbered, and the number of stages in their rings is a power of two.
  __device__ __forceinline__ const HopperControl::Work& work(uint32_t number) const {
    return control_.work[number % HopperControl::kWorkStages];
  }
  __device__ __forceinline__ void await_work() const {
    ptx::mbarrier_wait(work_full(), work_phase());
  }
  __device__ __forceinline__ bool test_work() const {
    return ptx::mbarrier_test(work_full(), work_phase());
  }
  __device__ __forceinline__ uint32_t work_full() const {
    return address(control_.work_full[item_ % HopperControl::kWorkStages]);
  }
  __device__ __forceinline__ uint32_t work_phase() const {
    return item_ / HopperControl::kWorkStages % 2;
  }
  __device__ __forceinline__ void await_query() const {
    const Span span(profile_, AttentionEvent::kQuery);
    ptx::mbarrier_wait(query_full(), query_phase());
  }
  __device__ __forceinline__ bool test_query() const {
    return ptx::mbarrier_test(query_full(), query_phase());
  }
  __device__ __forceinline__ uint32_t query_full() const {
    return address(control_.q_full[item_ % Tile::kStagesQ]);
  }
  __device__ __forceinline__ uint32_t query_phase() const { return item_ / Tile::kStagesQ % 2; }
  // Waits for q. If q is converted to float16, this also adjusts the `scale` of the rows' logits.
  __device__ __forceinline__ void take_query(float (&scale)[2]) const {
    await_query();
    if constexpr (Tile::kConvertsQuery) {
      const uint32_t stage = address(*shared_) + item_ % Tile::kStagesQ * Tile::kBytesQ;
      float inverse_scale[2];
      make_query_float16<Tile>(stage + threadIdx.x / 32 * 16 * 128, inverse_scale);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kUnscalesLogits) {
          control_.inverse_query_scale[first_row<Tile>() + 8 * h] = inverse_scale[h];
        } else {
          scale[h] = fmaxf(scale[h] * inverse_scale[h], 1e-30f);  // not 0, see scale_log2()
        }
      }
      // The other warps' rows are ready, too.
      ptx::named_barrier_sync(kQueryBarrier + group_idx_, 128);
    }
  }

  __device__ __forceinline__ static int num_tiles(const WorkItem& item) {
    return ceil_div(max(item.kv_end - item.kv_begin, 0), Tile::kTileKV);
  }

  // Where a warp is among an item's tiles, from the last tokens to the first. Logits and weights
  // beside it: as members they leave ptxas without registers for the products (C7511).
  struct Place {
    KeyRange plain;  // tokens whose logits the warp uses unchanged
    int first_token, tiles_left;
    bool is_last, has_keys;  // whether the item has no other tile, and whether the next keys came
  };

  // Processes an item, and others while they can be overlapped with the one before. On return
  // `item_` is the item to start afresh; a negative request marks the end.
  __device__ __forceinline__ void attend() {
    const WorkItem& item = work(item_).item;
    Rows rows(params_, item, work(item_).kv_head, shared_ + Tile::kOffsetOutput);
    WarpState<Tile> state;
    rows.begin(state);
    Place place;
    place.tiles_left = num_tiles(item);
    if (place.tiles_left == 0) {
      await_query();
      release_query();
    } else {
      Logits logits;
      Weights p;
      float scale[2];
      first_tile(rows, state, logits, p, scale, place, item);
      if constexpr (!kFewForms) return overlap_items(rows, state, logits, p, scale, place);
      other_tiles(rows, state, logits, p, scale, place);
      last_values(state, p);
    }
    finish(item_, state);
    ++item_;
    await_work();
  }

  // While items overlap, the first q k^T of an item runs together with the last p v of the item
  // before.
  __device__ __forceinline__ void overlap_items(Rows& rows, WarpState<Tile>& state, Logits& logits,
                                                Weights& p, float (&scale)[2], Place& place) {
    while (true) {
      other_tiles(rows, state, logits, p, scale, place);
      ++item_;
      // Both tests are issued together: the second need not wait for the first one's answer.
      const bool has_work = test_work();
      const bool has_query = Tile::kPipelinesItems && test_query();
      if (!has_work) await_work();
      const WorkItem& next_item = work(item_).item;
      const int next_tiles = num_tiles(next_item), next_end = next_item.kv_end;
      if (!Tile::kPipelinesItems || next_item.request < 0 || next_tiles == 0) {
        last_values(state, p);
        return finish(item_ - 1, state);
      }
      place.first_token = next_item.kv_begin + (next_tiles - 1) * Tile::kTileKV;
      if (!has_query) await_query();
      if (!place.has_keys) await_keys();
      WarpState<Tile> next_state;
      new (&rows) Rows(params_, next_item, work(item_).kv_head, shared_ + Tile::kOffsetOutput);
      rows.begin(next_state);
      place.plain = plain_range(rows);
      // A copy for each form: products of both in flight where branches meet would make ptxas wait.
      const auto begin_next = [&](auto count) {
        multiply_both<kHalvesProducts ? count.value : Tile::kTokenTiles>(logits, state, p);
        row_scales(rows, scale);
        ptx::wgmma_wait<1>();
        ptx::wgmma_done(logits[0]);
        release_keys(place);
        weigh<true, count.value>(rows, next_state, logits, p, scale, place,
                                 [&] { finish_values(state, p, 2); });
      };
      // If the tile has at most half its tokens, only the first half is multiplied and weighed, and
      // the other weights are 0. The first tile of an item that starts afresh is always multiplied
      // whole.
      if (Tile::kHalvesTiles &&
          FLASHINFER_AGREED(Tile, next_end - place.first_token <= Tile::kTileKV / 2)) {
        begin_next(std::integral_constant<int, kHalfTile>());
#pragma unroll
        for (int step = kSteps / 2; step < kSteps; ++step) {
#pragma unroll
          for (uint32_t& weights : p[step][0]) weights = 0;
        }
      } else {
        begin_next(std::integral_constant<int, Tile::kTokenTiles>());
      }
      finish(item_ - 1, state);
      state = next_state;
    }
  }

  __device__ __forceinline__ void first_tile(Rows& rows, WarpState<Tile>& state, Logits& logits,
                                             Weights& p, float (&scale)[2], Place& place,
                                             const WorkItem& item) {
    place.first_token = item.kv_begin + (place.tiles_left - 1) * Tile::kTileKV;
    row_scales(rows, scale);
    take_query(scale);
    await_keys();
    profile_.begin(AttentionEvent::kKeys);
    const uint64_t q = operands().query(), k = operands().keys(k_ring_.stage);
    await_turn();
    ptx::wgmma_fence();
    Products::template multiply_qk<Tile::kTokenTiles>(logits[0], q, k);
    ptx::wgmma_commit();
    pass_turn();
    place.plain = plain_range(rows);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(logits[0]);
    release_keys(place);
    const int num_visible = kSkipsSteps ? rows.visible_end() - place.first_token : Tile::kTileKV;
    weigh_visible<Tile::kTokenTiles>(rows, state, logits, p, scale, place, num_visible);
  }

  // The weights of the other tiles, and p v of all but the last.
  __device__ __forceinline__ void other_tiles(Rows& rows, WarpState<Tile>& state, Logits& logits,
                                              Weights& p, const float (&scale)[2], Place& place) {
    while (!place.is_last) {
      place.first_token -= Tile::kTileKV;
      if (!place.has_keys) await_keys();
      multiply_both<Tile::kTokenTiles>(logits, state, p);
      ptx::wgmma_wait<1>();
      ptx::wgmma_done(logits[0]);
      release_keys(place);
      weigh<false, Tile::kTokenTiles>(rows, state, logits, p, scale, place, [&] {
        finish_values(state, p, 2);
        test_values();
      });
    }
  }

  __device__ __forceinline__ void last_values(WarpState<Tile>& state, Weights& p) {
    const ptx::Ring<Tile::kStages> values = k_ring_.before(1);
    await_values(values);
    ptx::wgmma_fence();
    Products::multiply_pv(state, p, operands().values(values.stage));
    ptx::wgmma_commit();
    finish_values(state, p, 1);
  }

  __device__ __forceinline__ void await_keys() const {
    const Span span(profile_, AttentionEvent::kLoad);
    ptx::mbarrier_wait(address(control_.k_full[k_ring_.stage]), k_ring_.phase);
  }
  // Tests early, so that nothing waits for the answer later.
  __device__ __forceinline__ bool test_keys() const {
    return ptx::mbarrier_test(address(control_.k_full[k_ring_.stage]), k_ring_.phase);
  }
  // Tests the values of the keys released last: transposed 8-bit values, which arrive late.
  __device__ __forceinline__ void test_values() {
    if constexpr (Tile::kTransposesV) {
      const ptx::Ring<Tile::kStages> values = k_ring_.before(1);
      has_values_ = ptx::mbarrier_test(address(control_.v_full[values.stage]), values.phase);
    }
  }
  __device__ __forceinline__ void await_values(const ptx::Ring<Tile::kStages>& values) const {
    if (Tile::kTransposesV && has_values_) return;
    ptx::mbarrier_wait(address(control_.v_full[values.stage]), values.phase);
  }

  // Issues the next q k^T, and p v of the tile before it.
  template <int kTiles>
  __device__ __forceinline__ void multiply_both(Logits& logits, WarpState<Tile>& state,
                                                const Weights& p) {
    const ptx::Ring<Tile::kStages> values = k_ring_.before(1);
    const auto from = operands().both(k_ring_.stage, values.stage);
    profile_.begin(AttentionEvent::kKeys);
    await_turn();
    ptx::wgmma_fence();
    Products::template multiply_qk<kTiles>(logits[0], from.q, from.k);
    ptx::wgmma_commit();
    await_values(values);
    ptx::wgmma_fence();
    Products::multiply_pv(state, p, from.v);
    ptx::wgmma_commit();
    pass_turn();
  }

  // Waits for p v of the tile that lies `age` tiles before the next keys.
  __device__ __forceinline__ void finish_values(WarpState<Tile>& state, Weights& p, int age) {
    const Span span(profile_, AttentionEvent::kValues);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(state.output[0]);
    ptx::wgmma_done(p);
    arrive(control_.v_empty[k_ring_.before(age).stage]);
  }

  // Writes an item's results and releases its slot.
  __device__ __forceinline__ void finish(uint32_t number, WarpState<Tile>& state) {
    // Otherwise values derived from it occupy registers during the loop.
    asm volatile("" : "+r"(number));
    const Span span(profile_, AttentionEvent::kOutput);
    Rows::end(state);
    const WorkItem& item = work(number).item;
    const int num_packed = item.qo_len * static_cast<int>(params_.group_size.divisor);
    const int num_rows = min(num_packed - item.row_begin, Tile::kTileQ);
    char* const shared = shared_ + Tile::kOffsetOutput;
    // Rebuilt here, so that the loop need not keep them in registers.
    const typename Rows::View view(params_.variant, item.qo_len, item.kv_len);
    Variant variant(view, item.request, reinterpret_cast<uint8_t*>(shared));
    if constexpr (Tile::kOutputOverQ) {
      ptx::named_barrier_sync(kOutputBarrier, Tile::kConsumerThreads);  // all have read q
    }
    HopperOutput<Traits, Params>(params_, tensors_, item, work(number).kv_head, num_rows, variant,
                                 view, shared)
        .write(state, output_map_);
    if constexpr (Tile::kOutputOverQ) {
      ptx::async_proxy_fence();
      arrive(control_.q_empty[0]);
    }
    arrive(control_.work_empty[number % HopperControl::kWorkStages]);
  }

  // Releases the keys, and with an item's last keys its queries. With 8-bit products a counter says
  // that they are the last: the item's begin would come late from memory.
  __device__ __forceinline__ void release_keys(Place& place) {
    profile_.end(AttentionEvent::kKeys);
    arrive(control_.k_empty[k_ring_.stage]);
    k_ring_.advance();
    place.is_last = Tile::kProductsAre8Bit ? --place.tiles_left == 0
                                           : place.first_token <= work(item_).item.kv_begin;
    if (place.is_last) release_query();
  }
  __device__ __forceinline__ void release_query() {
    uint32_t number = item_;
    // Otherwise the barrier's address occupies a register during the loop.
    asm volatile("" : "+r"(number));
    if constexpr (!Tile::kOutputOverQ) arrive(control_.q_empty[number % Tile::kStagesQ]);
  }

  __device__ __forceinline__ HopperOperands<Traits> operands() const {
    return {address(*shared_), item_ % Tile::kStagesQ, group_idx_};
  }

  __device__ __forceinline__ static void row_scales(const Rows& rows, float (&scale)[2]) {
    scale[0] = rows.scale_log2(0, 0);
    scale[1] = rows.scale_log2(0, 1);
  }
  __device__ __forceinline__ bool negates() const {
    return Variant::kNegatesQuery && params_.variant.sm_scale < 0.f;
  }
  // Range of tokens whose logits the warp uses unchanged.
  __device__ __forceinline__ KeyRange plain_range(const Rows& rows) const {
    const KeyRange range = rows.common_range();
    return {range.begin, negates() ? range.begin : range.end};
  }

  // Turns logits into weights. No key is hidden in tiles within `plain`. `finish_values` waits for
  // the p v in flight, which reads the registers of `p`; the output may be rescaled only after it.
  // An item's first tile has no such p v. A half tile gives the same bits as a whole tile whose
  // other half is hidden, so results do not depend on which items the CTA processed before.
  template <bool kFirst, int kTiles, typename FinishValues>
  __device__ __forceinline__ void weigh(Rows& rows, WarpState<Tile>& state, Logits& logits,
                                        Weights& p, const float (&scale)[2], Place& place,
                                        const FinishValues& finish_values) const {
    const Span span(profile_, AttentionEvent::kWeights);
    constexpr int kTileSteps = kTiles * 8 / Tile::kStepTokens;
    const int first_token = place.first_token;
    const KeyRange plain = place.plain;
    float inverse_scale[1][2] = {{1.f, 1.f}};  // inverse scales of the queries
    if constexpr (kUnscalesLogits) {
      const float* const of_rows = control_.inverse_query_scale + first_row<Tile>();
      inverse_scale[0][0] = of_rows[0], inverse_scale[0][1] = of_rows[8];
    }
    using Weighing = HopperWeights<Traits, Params>;
    constexpr bool kCaps = !Rows::kCapsWeights;  // else weigh_capped() does
    const bool is_plain = first_token >= plain.begin && first_token + kTiles * 8 <= plain.end;
    if constexpr (kFewForms) {
      if (negates()) rows.template negate<kTiles>(logits);
      rows.template transform<kTiles, 0, kCaps>(logits, first_token, inverse_scale);
      if (kFirst || Variant::kHasLogitsMask || !is_plain) {
        rows.template hide<kTiles>(logits, first_token);
      }
    } else if (__builtin_expect(!is_plain, kFirst)) {
      if (negates()) rows.template negate<kTiles>(logits);
      if constexpr (kFirst && kSkipsSteps) {
        rows.template transform_steps<kTiles>(logits, first_token, inverse_scale, plain);
      } else {
        rows.template transform<kTiles, 0, kCaps>(logits, first_token, inverse_scale);
        rows.template hide<kTiles>(logits, first_token);
      }
    } else {
      rows.template transform<kTiles, 0, kCaps>(logits, first_token, inverse_scale);
    }
    place.has_keys = test_keys();
    if constexpr (!Variant::use_softmax) {
      finish_values();
#pragma unroll
      for (int step = 0; step < kTileSteps; ++step) Rows::pack(logits, step, p[step]);
    } else if constexpr (kCaps) {
      Weighing::template weigh<kFirst, kTiles>(state, logits, scale, p, finish_values);
    } else {
      Weighing::template weigh_capped<kFirst, kTiles>(
          state, logits, p, math::SoftCap(params_.variant.soft_cap), finish_values);
    }
  }

  // Weighs an item's first tile: only as many steps as its `num_visible` visible tokens take. With
  // a causal mask that is two thirds of the steps on average.
  template <int kTiles>
  __device__ __forceinline__ void weigh_visible(Rows& rows, WarpState<Tile>& state, Logits& logits,
                                                Weights& p, const float (&scale)[2], Place& place,
                                                int num_visible) {
    constexpr int kFewer = kTiles - Tile::kStepTokens / 8;
    if constexpr (kSkipsSteps && kFewer > 0) {
      if (num_visible <= kFewer * 8) {
#pragma unroll
        for (uint32_t& weights : p[kFewer * 8 / Tile::kStepTokens][0]) weights = 0;
        return weigh_visible<kFewer>(rows, state, logits, p, scale, place, num_visible);
      }
    }
    weigh<true, kTiles>(rows, state, logits, p, scale, place, [&] { test_values(); });
  }

  static constexpr int kOutputBarrier = 1 + 1 + Tile::kConsumers;
  static constexpr int kQueryBarrier = kOutputBarrier + 1;  // barrier of the first group

  const Params& params_;
  const TensorMap& output_map_;
  const AttentionTensors& tensors_;
  HopperControl& control_;
  mutable AttentionProfile<Params> profile_;
  char* const shared_;
  int group_idx_;
  uint32_t item_ = 0;
  ptx::Ring<Tile::kStages> k_ring_;  // also finds the values, which are one tile late
  bool has_values_ = false;
};

}  // namespace flashinfer
