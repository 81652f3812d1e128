// Copies the rows of a tile from global to shared memory with cp.async, one warp at a time.
//
// Measurements, also of what lost: docs/tuning/attention_decode.md,
// docs/tuning/attention_decode_options.md.
#pragma once

#include <flashinfer/attention/portable/block_scales.cuh>
#include <flashinfer/attention/portable/tile.cuh>
#include <flashinfer/ptx/cp_async.cuh>

namespace flashinfer {

// Copies `kRows` rows of `kRowBytes` to shared memory: chunk `column` of row `row` goes to
// `target(row, column)`. Lane i gives the `offset` of row i in bytes from `base`; a negative offset
// stands for a row of zeros.
template <int kRows, int kRowBytes, typename Target>
__device__ __forceinline__ void copy_rows_async(const Target& target, const char* base,
                                                int64_t offset, int lane_idx) {
  constexpr int kChunks = kRowBytes / 16;
  constexpr int kTotal = kRows * kChunks;
#pragma unroll
  for (int i = 0; i < ceil_div(kTotal, 32); ++i) {
    const int chunk = i * 32 + lane_idx;
    const int row = chunk / kChunks % kRows, column = chunk % kChunks * 16;
    const int64_t row_offset = __shfl_sync(0xffffffffu, offset, row);
    const bool exists = row_offset >= 0;
    if (kTotal % 32 == 0 || chunk < kTotal) {
      ptx::cp_async_16(target(row, column), base + row_offset + column, exists);
    }
  }
}

// The chunk that a lane copies in each step of `kLanes` lanes, if a step copies whole rows.
template <int kRowBytes, int kLanes>
struct LaneChunk {
  static constexpr int kRowsPerStep = 16 * kLanes / kRowBytes;
  static_assert(16 * kLanes % kRowBytes == 0);
  static __device__ __forceinline__ int row() { return threadIdx.x % kLanes / (kRowBytes / 16); }
  static __device__ __forceinline__ int column() { return threadIdx.x % (kRowBytes / 16) * 16; }
};

// Copies rows that are `stride` bytes apart. The lane's first row begins its chunk at `source`, and
// `num_rows` rows exist from there on. This takes far fewer instructions than copying by offsets,
// and prefill has no instructions to spare.
template <int kRows, int kRowBytes, int kLanes>
__device__ __forceinline__ void copy_even_rows_async(uint32_t shared, const char* source,
                                                     int64_t stride, int num_rows) {
  using Rows = SharedRows<kRowBytes>;
  using Lane = LaneChunk<kRowBytes, kLanes>;
  const uint32_t target = shared + Rows::offset(Lane::row(), Lane::column());
#pragma unroll
  for (int i = 0; i < kRows; i += Lane::kRowsPerStep) {
    ptx::cp_async_16(Rows::move(target, i, 0), source, i < num_rows);
    source += Lane::kRowsPerStep * stride;
  }
}

// The same, of rows that follow each other in memory, whose places are constants of the code.
// `target`: of the lane's first chunk.
template <int kRows, int kRowBytes, int kLanes>
__device__ __forceinline__ void copy_dense_rows_async(uint32_t target, const char* source,
                                                      int num_rows) {
  using Rows = SharedRows<kRowBytes>;
#pragma unroll
  for (int i = 0; i < kRows; i += LaneChunk<kRowBytes, kLanes>::kRowsPerStep) {
    ptx::cp_async_16(Rows::move(target, i, 0), source + i * kRowBytes, i < num_rows);
  }
}

// Streams a warp's share of K and V: its columns of tokens kv_begin + kTokens * tile + 16 * i +
// {0 .. 15}, where i numbers the warps, or the pairs of warps that share columns. It looks up the
// page of the next tile one tile early, so that copies never wait for it.
// `kDense`: the rows of a page follow each other, and those of V lie where those of K do. Copies
// then take half of the instructions: with 4 bits a warp has few to spare.
template <typename Traits, bool kPaged, bool kDense = false>
class TileLoader {
  static constexpr int kSize = static_cast<int>(sizeof(typename Traits::KV));
  static constexpr int kWarpTokens = Traits::kWarpTokens;
  static constexpr int kRowBytesK = Traits::kRowBytesK, kRowBytesV = Traits::kRowBytesV;
  // Tokens that lie in one page, if its size is a multiple of them, and the lanes that copy them.
  static constexpr int kGroup = 16;
  static constexpr int kLanes = 32 * kGroup / kWarpTokens;
  // Whether a step of these lanes copies whole rows.
  static constexpr int kStep = 16 * kLanes;
  static constexpr bool kEvenSteps =
      kStep % kRowBytesK == 0 && kStep % kRowBytesV == 0 && kRowBytesK >= 32 && kRowBytesV >= 32;

  using LaneK = LaneChunk<kEvenSteps ? kRowBytesK : kStep, kLanes>;
  using LaneV = LaneChunk<kEvenSteps ? kRowBytesV : kStep, kLanes>;

  struct NoScales {
    __device__ __forceinline__ NoScales(const AttentionTensors&, uint32_t, uint32_t, uint32_t) {}
  };
  using Scales = std::conditional_t<Traits::kKeysAre4Bit, BlockScaleLoader<Traits>, NoScales>;

 public:
  static constexpr bool kMayBeDense = kPaged && kEvenSteps && Traits::kKeysAre4Bit &&
                                      Traits::kWarpTokens == 32 && Traits::kColumnWarps == 1 &&
                                      Traits::kNumOutputParts == 1 && kRowBytesK == kRowBytesV;
  static_assert(!kDense || kMayBeDense, "there are no such copies");

  // Whether a cache of such tiles is dense.
  __device__ __forceinline__ static bool is_dense(const AttentionTensors& t,
                                                  const FastDivisor& page_size) {
    return page_size.divisor % kGroup == 0 && t.k_stride_token == kRowBytesK &&
           t.v_stride_token == kRowBytesV && t.k_stride_page == t.v_stride_page &&
           BlockScaleLoader<Traits>::are_dense(t);
  }

  __device__ __forceinline__ TileLoader(const AttentionTensors& tensors,
                                        const FastDivisor& page_size, const WorkItem& item,
                                        uint32_t kv_head, uint32_t output_part, uint32_t shared_k,
                                        int num_stages)
      : tensors_(tensors),
        page_size_(page_size),
        kv_end_(item.kv_end),
        kv_base_(item.kv_base),
        scales_(tensors, kv_head, output_part,
                shared_k + num_stages * (Traits::kBytesK + Traits::kBytesV)) {
    lane_idx_ = threadIdx.x % 32;
    const int warp_idx = threadIdx.x / 32;
    const int column_warp = warp_idx % Traits::kColumnWarps;
    // Sixteen tokens that start at a multiple of 16 share a page if the page size is a multiple of
    // 16. Ranges of items begin at multiples of the planner's K/V tile.
    is_even_ = kDense || (kEvenSteps && (!kPaged || page_size.divisor % kGroup == 0));
    group_row_ = lane_idx_ / kLanes * kGroup;
    token_ = item.kv_begin + warp_idx / Traits::kColumnWarps * kWarpTokens +
             (is_even_ ? group_row_ : lane_idx_ % kWarpTokens);
    k_ = static_cast<const char*>(tensors.k) + kv_head * tensors.k_stride_head * kSize +
         column_warp * kRowBytesK;
    v_ = static_cast<const char*>(tensors.v) + kv_head * tensors.v_stride_head * kSize +
         (output_part * Traits::kColumnWarps + column_warp) * kRowBytesV;
    if constexpr (kEvenSteps) {
      k_ += LaneK::column() + (is_even_ ? LaneK::row() * tensors.k_stride_token * kSize : 0);
      v_ += LaneV::column() + (is_even_ ? LaneV::row() * tensors.v_stride_token * kSize : 0);
    }
    shared_k_ = shared_k + warp_idx * kWarpTokens * Traits::RowsK::kPitch;
    shared_v_ =
        shared_k + num_stages * Traits::kBytesK + warp_idx * kWarpTokens * Traits::RowsV::kPitch;
    if constexpr (kDense) {
      num_stages_ = num_stages;
      dense_scales_ = BlockScaleLoader<Traits>::dense_source(tensors, kv_head);
      dense_target_ = shared_k_ + group_row_ * Traits::RowsK::kPitch +
                      Traits::RowsK::offset(LaneK::row(), LaneK::column());
      // Else ptxas would make these anew for each tile.
      asm("" : "+r"(dense_target_), "+l"(dense_scales_));
    }
    look_up();
  }

  // Locates the next tile for copy_tile().
  __device__ __forceinline__ void locate_tile() {
    num_rows_ = kv_end_ - token_;
    if constexpr (kDense) return;
    if constexpr (kPaged) {
      const uint32_t slot = token_ - page_size_.divide(token_) * page_size_.divisor;
      if (page_ >= tensors_.num_pages) num_rows_ = 0;
      k_offset_ = (page_ * tensors_.k_stride_page + slot * tensors_.k_stride_token) * kSize;
      v_offset_ = (page_ * tensors_.v_stride_page + slot * tensors_.v_stride_token) * kSize;
      locate_scales(page_, slot);
    } else {
      const int64_t row = int64_t{kv_base_} + token_;
      k_offset_ = row * tensors_.k_stride_token * kSize;
      v_offset_ = row * tensors_.v_stride_token * kSize;
      locate_scales(0, row);
    }
    token_ += Traits::kTokens;
  }

  // Starts the copies of the tile that locate_tile() found and looks up the next one, either before
  // K or between K and V. In the loop of an 8-bit cache a lookup before K makes ptxas give the page
  // a second register, and each tile then waits for the lookup to move it. For 16-bit tiles, which
  // are located earlier, and for the first tiles, a lookup before K is faster.
  template <bool kLooksAhead>
  __device__ __forceinline__ void copy_tile(int stage) {
    if constexpr (kDense) return copy_dense(stage);
    const uint32_t shared_k = shared_k_ + stage * Traits::kBytesK;
    const uint32_t shared_v = shared_v_ + stage * Traits::kBytesV;
    if constexpr (kLooksAhead) look_up();
    if constexpr (Traits::kKeysAre4Bit) scales_.copy(stage);
    const auto look_up_between = [&] {
      if constexpr (!kLooksAhead) look_up();
    };
    if constexpr (kEvenSteps) {
      if (is_even_) {
        copy_even_rows_async<kGroup, kRowBytesK, kLanes>(
            shared_k + group_row_ * Traits::RowsK::kPitch, k_ + k_offset_,
            tensors_.k_stride_token * kSize, num_rows_ - LaneK::row());
        look_up_between();
        copy_even_rows_async<kGroup, kRowBytesV, kLanes>(
            shared_v + group_row_ * Traits::RowsV::kPitch, v_ + v_offset_,
            tensors_.v_stride_token * kSize, num_rows_ - LaneV::row());
        return;
      }
    }
    if (num_rows_ <= 0) k_offset_ = v_offset_ = -1;
    const auto target_k = [&](int row, int column) {
      return shared_k + Traits::RowsK::offset(row, column);
    };
    const auto target_v = [&](int row, int column) {
      return shared_v + Traits::RowsV::offset(row, column);
    };
    const int column_k = kEvenSteps ? LaneK::column() : 0;
    const int column_v = kEvenSteps ? LaneV::column() : 0;
    copy_rows_async<kWarpTokens, kRowBytesK>(target_k, k_ - column_k, k_offset_, lane_idx_);
    look_up_between();
    copy_rows_async<kWarpTokens, kRowBytesV>(target_v, v_ - column_v, v_offset_, lane_idx_);
  }

 private:
  __device__ __forceinline__ void copy_dense(int stage) {
    constexpr int kScaleBytes = Traits::kScaleBytesK;
    const int num_rows = page_ >= tensors_.num_pages ? 0 : num_rows_;
    const char* const scales =
        dense_scales_ + int64_t{page_} * tensors_.k_sf.stride_page + slot_ * kScaleBytes;
    const char* const k = k_ + int64_t{page_} * tensors_.k_stride_page + slot_ * kRowBytesK;
    const char* const v = v_ - k_ + k;
    token_ += Traits::kTokens;
    look_up();
    const uint32_t target = dense_target_ + stage * Traits::kBytesK;
    copy_dense_rows_async<kGroup, kRowBytesK, kLanes>(target, k, num_rows - LaneK::row());
    copy_dense_rows_async<kGroup, kRowBytesV, kLanes>(target + num_stages_ * Traits::kBytesK, v,
                                                      num_rows - LaneV::row());
    scales_.copy_dense(scales, lane_idx_ % kGroup < num_rows, stage);
  }

  // `slot`: that of this lane's token, or of its group's first.
  __device__ __forceinline__ void locate_scales(uint32_t page, int64_t slot) {
    if constexpr (Traits::kKeysAre4Bit) {
      const int behind = is_even_ ? lane_idx_ % kGroup : 0;
      scales_.locate(page, slot + behind, behind < num_rows_);
    }
  }

  __device__ __forceinline__ void look_up() {
    if constexpr (kPaged) {
      page_ = 0;
      const uint32_t index = page_size_.divide(token_);
      slot_ = token_ - index * page_size_.divisor;
      if (token_ < kv_end_) page_ = static_cast<uint32_t>(tensors_.kv_indices[kv_base_ + index]);
    }
  }

  const AttentionTensors& tensors_;
  const FastDivisor& page_size_;
  const char *k_, *v_;
  int64_t k_offset_, v_offset_;  // of the located tile
  int num_rows_;                 // rows of the located tile from this lane's token on
  uint32_t shared_k_, shared_v_;
  int32_t token_, kv_end_, kv_base_;
  uint32_t page_ = 0, slot_ = 0;  // of the lane's next token
  int lane_idx_, group_row_;
  bool is_even_;
  Scales scales_;
  // Where rows are dense: the lane's chunk in the first stage, and the scales of K of its token in
  // the first page.
  int num_stages_;
  uint32_t dense_target_;
  const char* dense_scales_;
};

}  // namespace flashinfer
