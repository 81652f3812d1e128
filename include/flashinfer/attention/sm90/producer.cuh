// The producer warpgroup: it takes items and loads q, K and V for the other warpgroups. Each of its
// warps has one of these tasks, so that no task waits for what only another one needs.
//
// The copy engine loads boxes. Where a page is not a whole number of groups of eight rows, all four
// warps copy 16 bytes per thread instead. Rows after a request's last token may hold NaN. Masking
// replaces their logits, but their rows of v must be zero, since 0 * NaN is not 0. Threads do not
// copy such rows. In boxes they are cleared before the product; for 8-bit values the code that
// transposes or widens them does it.
//
// Measurements, also of what lost: docs/tuning/attention_sm90_items.md.
#pragma once

#include <flashinfer/attention/events.cuh>
#include <flashinfer/attention/sm90/tile.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tensor_map.h>
#include <flashinfer/ptx/tma_boxes.cuh>

namespace flashinfer {

// How the copy engine reads a tensor; `box_rows` is 0 if it cannot.
struct TensorMap {
  ptx::EncodedTensorMap map;
  uint32_t box_rows;
  uint32_t page_units;  // distance between pages, in heads, if a page is one box
};

template <typename Params_>
struct HopperParams {
  using Params = Params_;
  Params attention;
  TensorMap q, k, v, o;
  bool heads_first;         // deals all heads' first lists, then all heads' second lists, ...
  uint32_t heads_together;  // 8-bit operands: deals the lists of so many heads at a time
};

// Groups of a profile: the consumers, the warp that loads keys, the one that loads values.
template <typename Tile>
inline constexpr uint32_t kHopperProfileGroups = Tile::kConsumers + 2;

template <typename Traits, typename Params>
class HopperProducer {
  using Tile = typename Traits::Tile;
  static constexpr int kElement = sizeof(typename Tile::Q), kElementKV = sizeof(typename Tile::KV);
  static constexpr int kBarrier = 1;          // joins the producer's warps
  static constexpr uint32_t kEarlyLists = 3;  // per CTA; with fewer left, lists are taken late
  enum Warp { kKeyWarp, kValueWarp, kQueryWarp, kListWarp };

 public:
  __device__ __forceinline__ HopperProducer(const HopperParams<Params>& params, char* shared,
                                            HopperControl& control)
      : params_(params.attention),
        maps_(params),
        tensors_(params.attention.tensors[0]),
        control_(control),
        profile_(params_, Tile::kConsumers + threadIdx.x / 32 % 2, kHopperProfileGroups<Tile>,
                 threadIdx.x % 32 == 0 && threadIdx.x % 128 < 64),
        shared_(ptx::shared_address(shared)) {
    thread_idx_ = threadIdx.x - Tile::kConsumerThreads;
    lane_idx_ = thread_idx_ % 32;
    warp_idx_ = thread_idx_ / 32;
  }

  __device__ __forceinline__ void run() {
    if (warp_idx_ == kListWarp && lane_idx_ == 0) publish(-1, 0);
    while (true) {
      const auto& slot = control_.work[work_.stage];
      ptx::mbarrier_wait(address(control_.work_full[work_.stage]), work_.phase);
      if (slot.item.request < 0) return;
      load_item(slot.item, slot.kv_head);
      // Published after the item's loads, some of which need all warps.
      if (warp_idx_ == kListWarp && lane_idx_ == 0) publish(slot.item.next, slot.kv_head);
      __syncwarp();
      if (lane_idx_ == 0) ptx::mbarrier_arrive(address(control_.work_empty[work_.stage]));
      work_.advance();
    }
  }

 private:
  template <typename T>
  __device__ __forceinline__ static uint32_t address(T& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  // Publishes the item that follows: `next` of the current list, else the first item of a list that
  // no CTA has taken. A negative request says that there is none.
  __device__ __forceinline__ void publish(int next, uint32_t kv_head) {
    if (next < 0) {
      // One of the last lists is taken only after the item before the current one has ended, since
      // another CTA may be free to start it sooner.
      if (taken_late_) {
        const auto done = published_.before(2);
        ptx::mbarrier_wait(address(control_.work_empty[done.stage]), done.phase);
      }
      next = take_list(kv_head);
    }
    auto& slot = control_.work[published_.stage];
    ptx::mbarrier_wait(address(control_.work_empty[published_.stage]), published_.phase ^ 1);
    while (next >= 0) {
      slot.item = params_.items[next];
      slot.kv_head = kv_head;
      if (slot.item.request >= 0) break;
      next = take_list(kv_head);  // a captured graph may have lists without items
    }
    if (next < 0) slot.item.request = -1;
    ptx::mbarrier_arrive(address(control_.work_full[published_.stage]));
    published_.advance();
  }

  // Takes the next list. The order either groups the lists of one KV head, so that CTAs share K and
  // V in L2, or deals the longest lists of some or all heads first, so that CTAs end together. A
  // CTA starts with the list of its own number, which needs no wait. Each CTA asks once in vain,
  // and the last one resets the counter for the next launch.
  __device__ __forceinline__ int take_list(uint32_t& kv_head) {
    int32_t* const counter = const_cast<int32_t*>(&params_.items[0].merge_or_taken);
    const uint32_t num_lists = params_.num_ctas.divisor * params_.num_kv_heads.divisor;
    const uint32_t list =
        is_first_ ? blockIdx.x : gridDim.x + static_cast<uint32_t>(atomicAdd(counter, 1));
    is_first_ = false;
    if (list == num_lists + gridDim.x - 1) atomicExch(counter, 0);
    taken_late_ = list + kEarlyLists * gridDim.x >= num_lists;
    if (list >= num_lists) return -1;
    uint32_t first;
    if (Tile::kProductsAre8Bit) {
      const uint32_t together = maps_.heads_together;
      const uint32_t first_head = params_.num_ctas.divide(list) / together * together;
      const uint32_t heads = min(together, params_.num_kv_heads.divisor - first_head);
      const uint32_t place = list - first_head * params_.num_ctas.divisor;
      first = place / heads;
      kv_head = first_head + place - first * heads;
    } else if (maps_.heads_first) {
      first = params_.num_kv_heads.divide(list);
      kv_head = list - first * params_.num_kv_heads.divisor;
    } else {
      kv_head = params_.num_ctas.divide(list);
      first = list - kv_head * params_.num_ctas.divisor;
    }
    return static_cast<int>(first);
  }

  __device__ __forceinline__ void load_item(const WorkItem& item, uint32_t kv_head) {
    const int num_tiles = ceil_div(max(item.kv_end - item.kv_begin, 0), Tile::kTileKV);
    // Consumers read the tiles in this order, from the last keys to the first. An item without keys
    // still loads a query, so that consumers always have one to release.
    for (int tile = num_tiles - 1; tile >= -1; --tile) {
      if (tile >= 0) load_tile<true>(item, kv_head, tile);
      if (tile == num_tiles - 1) load_query(item, kv_head);
      const int value_tile = Tile::kTransposesV ? tile : tile + 1;
      if (value_tile >= 0 && value_tile < num_tiles) load_tile<false>(item, kv_head, value_tile);
      if constexpr (Tile::kTransposesV) {
        if (tile < num_tiles - 1) {
          transpose_values(item.kv_len - item.kv_begin - (tile + 1) * Tile::kTileKV);
        }
      }
    }
    announce();
  }

  // ---- Queries ----

  __device__ __forceinline__ void load_query(const WorkItem& item, uint32_t kv_head) {
    const uint32_t full = address(control_.q_full[q_ring_.stage]);
    const uint32_t empty = address(control_.q_empty[q_ring_.stage]);
    const uint32_t parity = q_ring_.phase ^ 1;
    const uint32_t target = shared_ + q_ring_.stage * Tile::kBytesQ;
    q_ring_.advance();
    const uint32_t group_size = params_.group_size.divisor;
    if (maps_.q.box_rows != 0) {
      announce();
      if (warp_idx_ != kQueryWarp) return;
      ptx::mbarrier_wait(empty, parity);
      if (lane_idx_ == 0) ptx::mbarrier_arrive_expect(full, Tile::kBytesQ);
      __syncwarp();
      if (lane_idx_ < Tile::kChunksQK) {
        ptx::tma_load(target + lane_idx_ * Tile::kTileQ * 128, &maps_.q.map, full,
                      lane_idx_ * Tile::kChunkColumns, kv_head * group_size,
                      item.qo_begin + params_.group_size.divide(item.row_begin));
      }
      return;
    }
    // Lane i holds the offset of row i. There are two halves, since a warp may have more than 32
    // rows.
    constexpr int kRows = Tile::kTileQ / 8;
    await_all(kQueryWarp, empty, parity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first_row = (warp_idx_ * 2 + half) * kRows;
      const uint32_t packed = item.row_begin + first_row + min(lane_idx_, kRows - 1);
      int64_t offset = -1;
      if (packed < item.qo_len * group_size) {
        const uint32_t token = params_.group_size.divide(packed);
        const uint32_t head = kv_head * group_size + packed - token * group_size;
        offset = ((item.qo_begin + int64_t{token}) * tensors_.q_stride_token +
                  head * tensors_.q_stride_head) *
                 kElement;
      }
      struct Rows {
        __device__ __forceinline__ static uint32_t offset(int row, int column) {
          return swizzled_offset<Tile::kTileQ>(row, column);
        }
      };
      copy_rows<kRows, Rows, Tile::kHeadDimQK * kElement>(target, tensors_.q, first_row, offset);
    }
    complete_later(full);
  }

  // ---- Keys and values ----

  template <bool kKeys>
  __device__ __forceinline__ void load_tile(const WorkItem& item, uint32_t kv_head, int tile) {
    if (warp_idx_ == (kKeys ? kKeyWarp : kValueWarp)) profile_.begin(AttentionEvent::kLoad);
    ptx::Ring<Tile::kLoadedStages>& ring = kKeys ? k_ring_ : v_ring_;
    constexpr bool kChanges = Tile::kWidens || (Tile::kTransposesV && !kKeys);
    auto& fulls = kKeys ? (kChanges ? control_.loaded_k_full : control_.k_full)
                        : (kChanges ? control_.loaded_v_full : control_.v_full);
    auto& empties = kKeys ? (kChanges ? control_.loaded_k_empty : control_.k_empty)
                          : (kChanges ? control_.loaded_v_empty : control_.v_empty);
    const uint32_t full = address(fulls[ring.stage]), empty = address(empties[ring.stage]);
    const TensorMap& map = kKeys ? maps_.k : maps_.v;
    const uint32_t target =
        shared_ + (kKeys ? Tile::kOffsetLoadedK + ring.stage * Tile::kBytesLoadedK
                         : Tile::kOffsetLoadedV + ring.stage * Tile::kBytesLoadedV);
    const int first_token = item.kv_begin + tile * Tile::kTileKV;
    constexpr int kDim = kKeys ? Tile::kHeadDimQK : Tile::kHeadDimVO;
    if (map.box_rows != 0) {
      constexpr int kBytes = kKeys ? Tile::kBytesLoadedK : Tile::kBytesLoadedV;
      announce();
      // Keys are needed first, so the query warp, which otherwise only waits for the next query,
      // loads half of their boxes.
      constexpr int kParts = kKeys && Traits::kPaged ? 2 : 1;
      if (warp_idx_ == (kKeys ? kKeyWarp : kValueWarp)) {
        const int num_rows = item.kv_len - first_token;
        const bool clears =
            !kKeys && !kChanges && num_rows < Tile::kTileKV && num_rows % map.box_rows != 0;
        load_boxes<kDim, kBytes, 0, kParts>(item, kv_head, first_token, map, target,
                                            clears ? to_be_cleared() : full, empty, ring.phase);
        if (clears) clear_values(target, num_rows, map.box_rows, full);
      } else if (kParts == 2 && warp_idx_ == kQueryWarp) {
        load_boxes<kDim, kBytes, 1, kParts>(item, kv_head, first_token, map, target, full, empty,
                                            ring.phase);
      }
    } else {
      constexpr int kRows = Tile::kTileKV / 4;
      const int64_t offset = token_offset<kKeys>(
          item, kv_head, first_token + warp_idx_ * kRows + min(lane_idx_, kRows - 1));
      if (pending_ == full) announce();  // a ring of one stage must be announced first
      await_all(kKeys ? kKeyWarp : kValueWarp, empty, ring.phase ^ 1);
      copy_rows<kRows, HopperRows<Traits, kDim>, kDim * kElementKV>(
          target, kKeys ? tensors_.k : tensors_.v, warp_idx_ * kRows, offset * kElementKV);
      complete_later(full);
    }
    ring.advance();
    if (warp_idx_ == (kKeys ? kKeyWarp : kValueWarp)) profile_.end(AttentionEvent::kLoad);
  }

  // One warp loads boxes: a lane per page of every `kParts` pages, or one lane for the whole tile.
  // The first part announces the bytes of all parts. A page after the request's last is addressed
  // outside the tensor, so that its rows arrive as zeros.
  template <int kDim, int kBytes, int kPart, int kParts>
  __device__ __forceinline__ void load_boxes(const WorkItem& item, uint32_t kv_head,
                                             int first_token, const TensorMap& map, uint32_t target,
                                             uint32_t full, uint32_t empty, uint32_t phase) {
    static_assert(Tile::kTileKV / 8 <= 32, "a lane per page");
    // A warp without a box must not wait: the barrier does not wait for this warp, which could miss
    // two phases and then wait forever.
    if (kPart * map.box_rows >= Tile::kTileKV) return;
    const int row = (lane_idx_ * kParts + kPart) * map.box_rows;
    const bool has_box = row < Tile::kTileKV;
    uint32_t page = 0, slot = 0;
    if (Traits::kPaged && has_box) {
      const uint32_t number = params_.page_size.divide(first_token + row);
      slot = first_token + row - number * params_.page_size.divisor;
      page = tensors_.num_pages;
      if (first_token + row < item.kv_len) {
        const int32_t index = tensors_.kv_indices[item.kv_base + number];
        page = min(static_cast<uint32_t>(index), page);
      }
    }
    ptx::mbarrier_wait(empty, phase ^ 1);
    if (kPart == 0 && lane_idx_ == 0) ptx::mbarrier_arrive_expect(full, kBytes);
    __syncwarp();
    if (!has_box) return;
    using Rows = HopperRows<Traits, kDim>;
    if constexpr (Rows::kByPage) {
      ptx::tma_load(target + row / 8 * Rows::kGroupBytes, &map.map, full, 0, 0, 0, slot / 8,
                    page * map.page_units + kv_head);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < ceil_div(kDim, Tile::kLoadedColumns); ++chunk) {
        const uint32_t box = target + chunk * Tile::kTileKV * 128 + row * 128;
        const int column = chunk * Tile::kLoadedColumns;
        if constexpr (Traits::kPaged) {
          ptx::tma_load(box, &map.map, full, column, slot, kv_head, page);
        } else {
          ptx::tma_load(box, &map.map, full, column, item.kv_base + first_token, kv_head);
        }
      }
    }
  }

  // Barrier of a 16-bit tile of v that needs some rows cleared before use. It reuses a barrier of
  // 8-bit keys, because with one more barrier ptxas serializes the products for heads of 96
  // (C7511).
  __device__ __forceinline__ uint32_t to_be_cleared() const {
    return address(control_.loaded_k_full[1]);
  }

  // The warp that loaded the tile waits for it and clears the rows that are not the request's. The
  // warp loads the next tile of v only afterwards, but still long before its turn.
  __device__ __forceinline__ void clear_values(uint32_t target, int num_rows, int box_rows,
                                               uint32_t full) {
    using Rows = HopperRows<Traits, Tile::kHeadDimVO>;
    ptx::mbarrier_wait(to_be_cleared(), 0);
    const int end = ceil_div(num_rows, box_rows) * box_rows;
#pragma unroll 1
    for (int row = num_rows + lane_idx_ / 8; row < end; row += 4) {
      const uint32_t line =
          target + row / 8 * Rows::kGroupBytes + row % 8 * 128 + lane_idx_ % 8 * 16;
#pragma unroll 1
      for (int chunk = 0; chunk < Tile::kLoadedChunksVO; ++chunk) {
        ptx::store_shared_16(line + chunk * Rows::kChunkBytes, uint4{0, 0, 0, 0});
      }
    }
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ == 0) {
      ptx::mbarrier_arrive(full);
      ptx::mbarrier_arrive(to_be_cleared());  // flips the barrier back, as if it were new
    }
  }

  // Transposes the next tile of 8-bit values from a row per token to a row per column, as the
  // tensor cores read it. The order is the cheapest one: tokens 2t, 2t + 1, 2t + 8, 2t + 9 of each
  // 16 are adjacent, as a lane holds their weights (HopperWeights), and of 16 columns the even ones
  // precede the odd ones (output_column<2>). `num_rows` is the number of the request's rows from
  // the tile's first on; later rows that a warp reads are cleared first.
  __device__ __forceinline__ void transpose_values(int num_rows) {
    ptx::Ring<Tile::kStages>& ring = transposed_ring_;
    const uint32_t full = address(control_.loaded_v_full[ring.stage]);
    if (pending_ == full) announce();
    ptx::mbarrier_wait(full, ring.phase);
    ptx::mbarrier_wait(address(control_.v_empty[ring.stage]), ring.phase ^ 1);
    // A warp handles two groups of 8 tokens by two chunks of 16 columns at a time. Each warp has
    // its own columns, so that an address is the first one plus an offset.
    constexpr int kBlocks = Tile::kHeadDimVO / 32, kTokenGroups = Tile::kTileKV / 16;
    constexpr int kColumnWarps = kBlocks % 4 == 0 ? 4 : kBlocks % 2 == 0 ? 2 : 1;
    constexpr int kTokenWarps = 4 / kColumnWarps;
    // Rows whose addresses this lane gives.
    const uint32_t token = lane_idx_ % 16, column = lane_idx_;
    const uint32_t source =
        shared_ + Tile::kOffsetLoadedV + ring.stage * Tile::kBytesLoadedV + token * 128;
    const uint32_t target = shared_ + Tile::kOffsetV + ring.stage * Tile::kBytesV + column * 128;
    if (num_rows < Tile::kTileKV) {
#pragma unroll 1
      for (int i = 0; i < kBlocks / kColumnWarps; ++i) {
        const uint32_t chunk = (i * kColumnWarps + warp_idx_ % kColumnWarps) * 2 + lane_idx_ / 16;
        const uint32_t from = source + chunk / 8 * (Tile::kTileKV * 128) + (chunk ^ token) % 8 * 16;
#pragma unroll 1
        for (int row = warp_idx_ / kColumnWarps * 16; row < Tile::kTileKV;
             row += kTokenWarps * 16) {
          if (row + static_cast<int>(token) >= num_rows) {
            ptx::store_shared_16(from + row * 128, uint4{0, 0, 0, 0});
          }
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kBlocks / kColumnWarps; ++i) {
      const uint32_t block = i * kColumnWarps + warp_idx_ % kColumnWarps;
      const uint32_t chunk = block * 2 + lane_idx_ / 16;
      const uint32_t from = source + chunk / 8 * (Tile::kTileKV * 128) + (chunk ^ token) % 8 * 16;
#pragma unroll
      for (int j = 0; j < ceil_div(kTokenGroups, kTokenWarps); ++j) {
        const uint32_t tokens = j * kTokenWarps + warp_idx_ / kColumnWarps;
        if (kTokenGroups % kTokenWarps != 0 && tokens >= kTokenGroups) break;
        uint32_t pairs[4], rows[4];
        ptx::ldmatrix_x4_trans(pairs, from + tokens * 16 * 128);
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          rows[c] = __byte_perm(pairs[c], pairs[c + 1], 0x6420);
          rows[c + 1] = __byte_perm(pairs[c], pairs[c + 1], 0x7531);
        }
        ptx::stmatrix_x4(target + block * 32 * 128 + tokens / 8 * (Tile::kHeadDimVO * 128) +
                             (tokens ^ column) % 8 * 16,
                         rows);
      }
    }
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ == 0) {
      ptx::mbarrier_arrive(address(control_.v_full[ring.stage]));
      ptx::mbarrier_arrive(address(control_.loaded_v_empty[ring.stage]));
    }
    ring.advance();
  }

  // Offset of a token's row in elements; negative if the request has no such token.
  template <bool kKeys>
  __device__ __forceinline__ int64_t token_offset(const WorkItem& item, uint32_t kv_head,
                                                  int token) const {
    const int64_t stride_token = kKeys ? tensors_.k_stride_token : tensors_.v_stride_token;
    const int64_t head = kv_head * (kKeys ? tensors_.k_stride_head : tensors_.v_stride_head);
    if (token >= item.kv_len) return -1;
    if constexpr (!Traits::kPaged) return (int64_t{item.kv_base} + token) * stride_token + head;
    const uint32_t number = params_.page_size.divide(token);
    const uint32_t page = static_cast<uint32_t>(tensors_.kv_indices[item.kv_base + number]);
    if (page >= tensors_.num_pages) return -1;
    const int64_t stride_page = kKeys ? tensors_.k_stride_page : tensors_.v_stride_page;
    return page * stride_page + (token - number * params_.page_size.divisor) * stride_token + head;
  }

  // Copies `kRows` rows of an operand; lane i gives the byte offset of row `first_row` + i.
  template <int kRows, typename Rows, int kRowBytes>
  __device__ __forceinline__ void copy_rows(uint32_t target, const void* base, int first_row,
                                            int64_t offset) {
    static_assert(kRows <= 32, "a lane per row");
    constexpr int kColumns = kRowBytes / 16, kChunks = kRows * kColumns;  // chunks have 16 bytes
#pragma unroll(hopper_has_few_forms<Traits>() ? 2 : 4)
    for (int i = 0; i < ceil_div(kChunks, 32); ++i) {
      const int index = i * 32 + lane_idx_;
      const int row = index / kColumns, column = index % kColumns;
      const int64_t row_offset = __shfl_sync(0xffffffffu, offset, row);
      const bool exists = row_offset >= 0;
      const char* source = static_cast<const char*>(base);
      if (exists) source += row_offset + column * 16;
      if (kChunks % 32 != 0 && index >= kChunks) break;
      ptx::cp_async_16(target + Rows::offset(first_row + row, column), source, exists);
    }
  }

  // Only the warp that loads an operand waits on its barrier in every phase, because parity tells
  // only the last two phases apart.
  __device__ __forceinline__ void await_all(Warp owner, uint32_t empty, uint32_t parity) const {
    if (warp_idx_ == owner) ptx::mbarrier_wait(empty, parity);
    ptx::named_barrier_sync(kBarrier, 128);
  }

  // Completion of a copy by threads is announced one copy late, so that two are in flight.
  // announce() catches up before any wait that depends on a later copy.
  __device__ __forceinline__ void complete_later(uint32_t full) {
    ptx::cp_async_commit();
    const uint32_t earlier = pending_;
    pending_ = full;
    if (earlier != 0) {
      ptx::cp_async_wait<1>();
      announce(earlier);
    }
  }

  __device__ __forceinline__ void announce() {
    if (pending_ == 0) return;
    ptx::cp_async_wait<0>();
    announce(pending_);
    pending_ = 0;
  }

  __device__ __forceinline__ void announce(uint32_t full) {
    ptx::async_proxy_fence();
    ptx::named_barrier_sync(kBarrier, 128);
    if (thread_idx_ == 0) ptx::mbarrier_arrive(full);
  }

  const Params& params_;
  const HopperParams<Params>& maps_;
  const AttentionTensors& tensors_;
  HopperControl& control_;
  AttentionProfile<Params> profile_;
  const uint32_t shared_;
  int thread_idx_, warp_idx_, lane_idx_;
  ptx::Ring<HopperControl::kWorkStages> work_, published_;
  ptx::Ring<Tile::kStagesQ> q_ring_;
  ptx::Ring<Tile::kLoadedStages> k_ring_, v_ring_;
  ptx::Ring<Tile::kStages> transposed_ring_;
  bool is_first_ = true, taken_late_ = true;
  uint32_t pending_ = 0;  // barrier of a copy that is not announced yet
};

}  // namespace flashinfer
