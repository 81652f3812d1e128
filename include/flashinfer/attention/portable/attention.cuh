// Attention over paged or ragged K and V:
//
//   o = softmax(q k^T * sm_scale) v  per row,
//
// with the online softmax of M. Milakov and N. Gimelshein, "Online normalizer calculation for
// softmax", 2018, tiled as in T. Dao, "FlashAttention-2", 2023.
//
// The grid is (num_kv_heads * num_ctas, output parts) with 128 threads. With long query tiles,
// lists vary fastest, so that concurrent CTAs share few heads, whose K and V stay in L2. Decode
// reads each key once, so heads vary fastest and neighbours in memory are read at the same time. A
// CTA processes its list of items, each a tile of packed query rows against a range of K/V
// (scheduler/work.h). tile.cuh says what tiles and warps hold. Sums run in a fixed order: results
// repeat bit for bit.
//
// Measurements, also of what lost: docs/tuning/attention_decode.md.
#pragma once

#include <flashinfer/attention/attention_params.h>
#include <flashinfer/attention/events.cuh>
#include <flashinfer/attention/portable/output.cuh>
#include <flashinfer/attention/portable/products.cuh>
#include <flashinfer/attention/portable/query.cuh>
#include <flashinfer/attention/rows.cuh>
#include <flashinfer/attention/tile_row.cuh>
#include <flashinfer/attention/portable/tile.cuh>
#include <flashinfer/attention/variant.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/prefetch.cuh>

namespace flashinfer {

// Compile-time parameters of one tile shape of a launch, that of items of kind `kKind`.
template <typename Tile_, typename Variant_, bool kPaged_, MaskMode kMask_, bool kWindow_,
          bool kRotate_, int kKind_ = 0>
struct AttentionTraits {
  using Tile = Tile_;
  using Variant = Variant_;
  static constexpr bool kPaged = kPaged_;
  static constexpr MaskMode kMask = kMask_;
  static constexpr bool kWindow = kWindow_;
  static constexpr bool kRotate = kRotate_;
  static constexpr int kKind = kKind_;
  static constexpr bool kTransformK = kRotate || Variant::kHasKeyTransform;
  static_assert(!kTransformK || !Tile::kKeysAre4Bit, "there is no place for wider keys of 4 bits");
};

// Computes one work item in one CTA.
template <typename Traits, typename Params>
class TileWorker {
  using Tile = typename Traits::Tile;
  using Variant = typename Traits::Variant;
  using Profile = AttentionProfile<Params>;

 public:
  __device__ __forceinline__ TileWorker(const Params& params, const AttentionTensors& tensors,
                                        const WorkItem& item, uint32_t kv_head, char* shared,
                                        Profile& profile)
      : params_(params),
        tensors_(tensors),
        item_(item),
        kv_head_(kv_head),
        profile_(profile),
        rows_(params, item, kv_head, shared),
        shared_(shared) {
    const uint32_t num_packed = item.qo_len * params.group_size.divisor;
    num_rows_ = min(static_cast<int>(num_packed) - item.row_begin, Tile::kTileQ);
    num_tiles_ = ceil_div(max(item.kv_end - item.kv_begin, 0), Tile::kTokens);
    row_scale_ = reinterpret_cast<float*>(shared + Tile::kBytesQ);
    shared_logits_ = reinterpret_cast<float4*>(shared + Tile::kBytesQ + Tile::kBytesScale);
    stages_ = shared + Tile::kPlaceOfStages;
  }

  __device__ __forceinline__ void run() {
    rows_.begin(state_);
    stream_by<Traits::kPaged>();
    // Triggered only now: CTAs of the merge would otherwise wait in the place of further items.
    ptx::grid_launch_dependents();
    const typename Profile::Span span(profile_, AttentionEvent::kOutput);
    rows_.end(state_);
    OutputWriter<Traits, Params> writer(params_, tensors_, item_, kv_head_, num_rows_,
                                        rows_.variant, rows_.view, shared_, stages_);
    writer.write(state_);
    writer.merge_if_last();
  }

 private:
  static constexpr bool kConvertQuery =
      Traits::kRotate || Variant::kHasQueryTransform || Tile::kConvertsKeys;

  // Starts to load q. It comes before K and V, so that its copies belong to the first group.
  __device__ __forceinline__ void begin_query() {
    copy_query<Tile>(tensors_, item_, params_.group_size, kv_head_, num_rows_,
                     ptx::shared_address(shared_));
  }

  // Finishes loading q when the first group of copies has arrived.
  __device__ __forceinline__ void end_query(QueryFragments<Tile>& query) {
    const auto synchronize = [] {
      if constexpr (Tile::kSplitKV) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    };
    if constexpr (kConvertQuery) {
      synchronize();
      convert_query<Tile, Traits::kRotate>(item_, params_.group_size, rows_.variant, rows_.view,
                                           shared_, row_scale_);
    } else if (Variant::kNegatesQuery && options_of<Traits::kKind>(params_).sm_scale < 0.f) {
      constexpr int kRows = Tile::kTileQ / kAttentionWarps;
      __syncwarp();
      negate_query<Tile, kRows>(shared_ + threadIdx.x / 32 * kRows * Tile::kPitchQ);
    }
    synchronize();
    if constexpr (Tile::kQInRegisters) query.load(shared_q());
    if constexpr (Tile::kScalesQuery) {
#pragma unroll
      for (int i = 0; i < Tile::kRowTiles; ++i) {
        for (int h = 0; h < 2; ++h) inverse_scale_[i][h] = row_scale_[thread_row<Tile>(i, h)];
      }
    }
  }

  // Address of the warp's first query row and column.
  __device__ __forceinline__ uint32_t shared_q() const {
    const int warp_idx = threadIdx.x / 32;
    const int row = Tile::kSplitKV ? 0 : warp_idx * Tile::kWarpRows;
    return ptx::shared_address(shared_) + row * Tile::kPitchQ +
           warp_idx % Tile::kColumnWarps * (Tile::kWarpDimQK * 2);
  }

  // One loop for each loader: registers of both would not fit.
  template <bool kPaged>
  __device__ __forceinline__ void stream_by() {
    using Loader = TileLoader<Tile, kPaged>;
    if constexpr (Loader::kMayBeDense) {
      if (Loader::is_dense(tensors_, params_.page_size)) {
        return stream<TileLoader<Tile, kPaged, true>>();
      }
    }
    stream<Loader>();
  }

  // Streams K and V and processes them tile by tile. In decode each warp has its own tokens: no
  // warp waits for another, and all stages are in flight. Otherwise one barrier per tile both shows
  // the tile to all warps and frees the other stage; the next tile's copies start after it and
  // overlap with a whole tile's products.
  template <typename Loader>
  __device__ __forceinline__ void stream() {
#if defined(__CUDA_ARCH__)
    constexpr int kStages = Tile::num_stages(__CUDA_ARCH__ / 10);
    constexpr int kAhead = Tile::kSplitKV || kStages == 1 ? kStages : kStages - 1;
    // Computes addresses while products run. It costs time with a cache of few bits, whose copies
    // wait for products.
    constexpr bool kLocatesEarly = kAhead == kStages && !Tile::kConvertsKeys;
    const uint32_t shared_k = ptx::shared_address(stages_);
    Loader loader(tensors_, params_.page_size, item_, kv_head_, blockIdx.y, shared_k, kStages);
    const auto fetch = [&](int tile, int stage, auto looks_ahead) {
      if (tile < num_tiles_) {
        if constexpr (!kLocatesEarly) loader.locate_tile();
        loader.template copy_tile<looks_ahead>(stage);
      }
      ptx::cp_async_commit();
    };
    constexpr std::bool_constant<!Tile::kConvertsKeys || !Tile::kSplitKV> kLooksAhead;
    const auto synchronize = [] {
      if constexpr (Tile::kSplitKV) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    };
    begin_query();
#pragma unroll 1
    for (int tile = 0; tile < kAhead; ++tile) {
      if constexpr (kLocatesEarly) loader.locate_tile();
      fetch(tile, tile, std::true_type());
    }
    if constexpr (Params::kReadsLengths) {
      // CTAs of the merge divide the work, too, meanwhile, if no further CTA waits for their place;
      // not before the first keys are on their way.
      if (Tile::kNumOutputParts == 1 && params_.lengths.run_at_once) ptx::grid_launch_dependents();
    }
    QueryFragments<Tile> query;
    profile_.begin(AttentionEvent::kQuery);
    ptx::cp_async_wait<kAhead - 1>();
    end_query(query);
    profile_.end(AttentionEvent::kQuery);

    const int warp_row = Tile::kSplitKV ? threadIdx.x / 32 * Tile::kWarpTokens : 0;
    const int warp_token = warp_row / Tile::kWarpTokens / Tile::kColumnWarps * Tile::kWarpTokens;
    char* const wide_k =
        shared_ + Tile::kPlaceOfWideK + warp_row * Tile::ProductRowsK::kPitch;  // one tile's
    const uint32_t warp_k =
        Tile::kWidensKeys ? ptx::shared_address(wide_k) : shared_k + warp_row * Tile::RowsK::kPitch;
    const uint32_t warp_v = shared_k + kStages * Tile::kBytesK + warp_row * Tile::RowsV::kPitch;
    const char* const scales = stages_ + kStages * (Tile::kBytesK + Tile::kBytesV);
    int stage = 0;
    for (int tile = 0; tile < num_tiles_; ++tile) {
      profile_.begin(AttentionEvent::kLoad);
      ptx::cp_async_wait<kAhead - 1>();
      synchronize();
      if constexpr (kAhead < kStages) fetch(tile + 1, stage ^ 1, kLooksAhead);
      profile_.end(AttentionEvent::kLoad);
      const int first_token = item_.kv_begin + tile * Tile::kTokens + warp_token;
      if constexpr (Traits::kTransformK) {
        constexpr int kThreads = Tile::kSplitKV ? 32 : kAttentionThreads;
        char* const rows_k = stages_ + stage * Tile::kBytesK + warp_row * Tile::RowsK::kPitch;
        transform_keys<Tile, Traits::kRotate>(rows_k, Tile::kWidensKeys ? wide_k : rows_k,
                                              first_token, Tile::kWarpKV, threadIdx.x % kThreads,
                                              kThreads, rows_.variant, rows_.view);
        synchronize();
      }
      if constexpr (kLocatesEarly) loader.locate_tile();
      const uint32_t tile_k = warp_k + (Tile::kWidensKeys ? 0 : stage * Tile::kBytesK);
      const uint32_t tile_v = warp_v + stage * Tile::kBytesV;
      const char* const stage_scales = scales + stage * Tile::kBytesBlockScales;
      attend(query, tile_k, tile_v, first_token, stage_scales + warp_row * Tile::kScaleBytesK,
             stage_scales + Tile::kRows * Tile::kScaleBytesK + warp_row * Tile::kScaleBytesV);
      if constexpr (kAhead == kStages) {
        const typename Profile::Span span(profile_, AttentionEvent::kLoad);
        synchronize();
        fetch(tile + kStages, stage, kLooksAhead);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    ptx::cp_async_wait<0>();
#endif
  }

  // Adds the logits of the warp that has the other columns. Two buffers take turns: when both warps
  // meet to exchange one, both have read what was in the other.
  __device__ __forceinline__ void add_partner_logits(float (&logits)[Tile::kTokenTiles][4]) {
    float4* const buffer = shared_logits_ + turn_ * kAttentionThreads * Tile::kTokenTiles;
    turn_ ^= 1;
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
      const float (&own)[4] = logits[j];
      buffer[j * kAttentionThreads + threadIdx.x] = float4{own[0], own[1], own[2], own[3]};
    }
    ptx::named_barrier_sync(1 + threadIdx.x / 64, 64);
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
      const float4 other = buffer[j * kAttentionThreads + (threadIdx.x ^ 32)];
      logits[j][0] += other.x, logits[j][1] += other.y;
      logits[j][2] += other.z, logits[j][3] += other.w;
    }
  }

  // Processes one tile: logits, a step of the online softmax, output. After the maximum only the
  // rare rescaling branches, so that exponentials and products overlap. Masking is a branch rather
  // than a second copy of the code: a CTA of a short prompt masks one of its few tiles, and code
  // that runs once has to pass through the instruction cache.
  __device__ __forceinline__ void attend(const QueryFragments<Tile>& query, uint32_t tile_k,
                                         uint32_t tile_v, int first_token, const char* scales_k,
                                         const char* scales_v) {
    float logits[Tile::kRowTiles][Tile::kTokenTiles][4];
    // If the item ends in the first half of its last tile, only that half is computed. In a causal
    // prompt with groups of four heads every other tile does.
    constexpr bool kHalves = !Tile::kSplitKV;
    const bool half = kHalves && item_.kv_end - first_token <= Tile::kWarpKV / 2;
    profile_.begin(AttentionEvent::kKeys);
    if constexpr (Tile::kNarrow) {
#pragma unroll
      for (int j = 0; j < Tile::kTokenTiles; ++j) {
        multiply_kq<Tile>(logits[0][j], query, tile_k, j, scales_k);
      }
      if constexpr (Tile::kPairsWarps) add_partner_logits(logits[0]);
    } else if (half) {
      multiply_qk<Tile, Tile::kWarpKV / 2>(logits, shared_q(), query, tile_k, scales_k);
    } else {
      multiply_qk<Tile, Tile::kWarpKV>(logits, shared_q(), query, tile_k, scales_k);
    }
    profile_.end(AttentionEvent::kKeys);
    profile_.begin(AttentionEvent::kWeights);
    rows_.transform(logits, first_token, inverse_scale_);
    if (rows_.has_hidden_keys(first_token)) rows_.hide(logits, first_token);
    float scale[Tile::kRowTiles][2];
    rows_.scales_log2(scale, inverse_scale_);
    if constexpr (Variant::use_softmax) {
      float shrink[Tile::kRowTiles][2];
      if (rows_.update_largest(state_, logits, scale, shrink)) {
        rows_.shrink_sums(state_, shrink);
        rows_.shrink_output(state_, shrink);
      }
    }
    profile_.end(AttentionEvent::kWeights);
    profile_.begin(AttentionEvent::kValues);
#pragma unroll
    for (int step = 0; step < Tile::kWarpKV / 16; ++step) {
      if (kHalves && step == Tile::kTokenTiles / 4 && half) break;
      uint32_t p[Tile::kRowTiles][4];
      rows_.weigh(state_, logits, step, scale);
      rows_.pack(logits, step, p);
      multiply_pv<Tile>(state_, p, tile_v, step, scales_v);
    }
    profile_.end(AttentionEvent::kValues);
  }

  const Params& params_;
  const AttentionTensors& tensors_;
  const WorkItem& item_;
  const uint32_t kv_head_;
  Profile& profile_;
  char* const shared_;
  char* stages_;
  float4* shared_logits_;
  int turn_ = 0;  // which buffer of logits is written next
  float* row_scale_;
  int num_rows_, num_tiles_;
  WarpState<Tile> state_;
  TileRows<Traits, Params> rows_;
  float inverse_scale_[Tile::kRowTiles][2];
};

// Brings lengths and the page numbers of a small table to L2, a line per thread of the grid, while
// an earlier grid may still write them. The first keys wait for one after the other.
template <typename Params>
__device__ __forceinline__ void prefetch_tables(const Params& params) {
  constexpr int kLine = 32, kMostPages = 32 << 10;  // numbers of 4 bytes
  const DevicePlanParams& lengths = params.lengths;
  const int32_t* const pages = params.tensors[0].kv_indices;
  const int first = (blockIdx.x * kAttentionThreads + threadIdx.x) * kLine;
  if (lengths.kv_len != nullptr && first < lengths.batch_size) {
    ptx::prefetch_l2(lengths.kv_len + first);
  }
  if (pages != nullptr && first < min(lengths.kv_entries, kMostPages)) {
    ptx::prefetch_l2(pages + first);
  }
}

// A warp's profile. The buffer may be written by an earlier grid: after the wait for it alone.
template <typename Params>
__device__ __forceinline__ AttentionProfile<Params> warp_profile(const Params& params) {
  return {params, threadIdx.x / 32, kAttentionWarps, threadIdx.x % 32 == 0};
}

// Processes the items of a column by lengths in device memory. The first warp's view of
// them counts, so that barriers do not depend on what several warps read.
template <typename Traits, typename Params>
__device__ __forceinline__ void process_column(const Params& params, int column, uint32_t kv_head,
                                               char* shared) {
  WorkItem& shared_item = *reinterpret_cast<WorkItem*>(shared + Traits::Tile::kPlaceOfItem);
  ptx::grid_dependency_wait();
  ColumnItems items(params.lengths, TileRow(params.lengths, 0), column);
  AttentionProfile<Params> profile = warp_profile(params);
  while (true) {
    if (threadIdx.x < 32) {
      WorkItem item;
      int number;
      if (!items.next(item, number)) item.request = -1;
      item.next = items.may_have_next() ? 0 : -1;
      if (threadIdx.x == items.owner()) shared_item = item;
    }
    __syncthreads();
    const WorkItem item = shared_item;
    if (item.request < 0) return;
    TileWorker<Traits, Params>(params, params.tensors[0], item, kv_head, shared, profile).run();
    if (item.next < 0) return;
    __syncthreads();  // the next item reuses the shared memory
  }
}

// The same, of few plain requests. They are divided before the wait for earlier grids, by the
// lengths that there are: these seldom change between launches. If they did, the work is divided
// again.
template <typename Traits, typename Params>
__device__ __forceinline__ void process_column_of_few(const Params& params, int column,
                                                      uint32_t kv_head, char* shared) {
  WorkItem& shared_item = *reinterpret_cast<WorkItem*>(shared + Traits::Tile::kPlaceOfItem);
  const DevicePlanParams& lengths = params.lengths;
  uint32_t left = 0xffffffffu;  // lanes whose requests follow, in the first warp
  // Puts the next item where all warps find it. Little is kept from item to item: most columns have
  // one.
  const auto find = [&](int length, bool waits) {
    while (true) {
      ColumnItems items(lengths, TileRow(lengths, length), column);
      WorkItem item;
      int number;
      if (!items.next_of(left, item, number)) item.request = -1;
      const bool is_owner = threadIdx.x == items.owner();
      if (waits) {
        const int32_t* const pages = params.tensors[0].kv_indices;
        if (is_owner && item.request >= 0 && pages != nullptr && item.kv_begin < item.kv_end) {
          ptx::prefetch_l2(pages + item.kv_base + params.page_size.divide(item.kv_begin));
        }
        ptx::grid_dependency_wait();
        waits = false;
        const int now = lane_length(lengths);
        if (__any_sync(0xffffffffu, now != length)) {
          length = now;
          continue;
        }
      }
      left = items.lanes_left();
      item.next = left != 0 ? 0 : -1;
      if (is_owner) shared_item = item;
      return;
    }
  };
  if (threadIdx.x < 32) {
    find(lane_length(lengths), true);
  } else {
    ptx::grid_dependency_wait();
  }
  AttentionProfile<Params> profile = warp_profile(params);
  while (true) {
    __syncthreads();
    const WorkItem item = shared_item;
    if (item.request < 0) return;
    TileWorker<Traits, Params>(params, params.tensors[0], item, kv_head, shared, profile).run();
    if (item.next < 0) return;
    __syncthreads();  // the next item reuses the shared memory
    if (threadIdx.x < 32) find(lane_length(lengths), false);
  }
}

// Dividing a batch by lengths takes more registers than a tile does: they leave room for four CTAs
// where shared memory does.
template <typename Tile, typename Params>
inline constexpr int kLeastCtas =
    Params::kReadsLengths && 4 * Tile::shared_bytes(90) <= max_shared_bytes(90) ? 4
                                                                                : Tile::kLeastCtas;

// `Second` holds the traits of items of kind 1, or is void if there are none.
template <typename First, typename Second, typename Params>
__global__ void __launch_bounds__(kAttentionThreads, kLeastCtas<typename First::Tile, Params>)
    attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char shared[];
  constexpr bool kHeadsFastest = First::Tile::kSplitKV;
  const uint32_t outer = (kHeadsFastest ? params.num_kv_heads : params.num_ctas).divide(blockIdx.x);
  const uint32_t inner =
      blockIdx.x - outer * (kHeadsFastest ? params.num_kv_heads : params.num_ctas).divisor;
  const uint32_t kv_head = kHeadsFastest ? inner : outer;
  if constexpr (Params::kReadsLengths) {
    prefetch_tables(params);
    if (all_by_lanes(params.lengths)) {
      return process_column_of_few<First>(params, outer, kv_head, shared);
    }
    return process_column<First>(params, outer, kv_head, shared);
  }
  // The plan was written by a copy, which every later grid waits for, with or without PDL. An
  // earlier grid may still write page numbers, so they are only prefetched here and read after the
  // wait.
  WorkItem item = params.items[kHeadsFastest ? outer : inner];
  if (kHeadsFastest && threadIdx.x == 0 && item.kv_begin < item.kv_end) {
    const int32_t* const pages = params.tensors[item.kind].kv_indices;
    if (pages != nullptr) {
      ptx::prefetch_l2(pages + item.kv_base + params.page_size.divide(item.kv_begin));
    }
  }
  ptx::grid_dependency_wait();
  AttentionProfile<Params> profile = warp_profile(params);
  while (true) {
    if (item.request < 0) return;
    if constexpr (std::is_void_v<Second>) {
      TileWorker<First, Params>(params, params.tensors[0], item, kv_head, shared, profile).run();
    } else if (item.kind == 0) {
      TileWorker<First, Params>(params, params.tensors[0], item, kv_head, shared, profile).run();
    } else {
      TileWorker<Second, Params>(params, params.tensors[1], item, kv_head, shared, profile).run();
    }
    if (item.next < 0) return;
    item = params.items[item.next];
    __syncthreads();  // the next item reuses the shared memory
  }
}

}  // namespace flashinfer
