// D = A W^T with weights of 4, 8 or 16 bits, for few tokens (mma.sync, sm_80): the weights stream
// through the SMs once, and so the time is that of reading them.
//
// Each warp copies its own weight rows with cp.async, kStages ahead, and unpacks them in registers
// (gemm/weight_codes.cuh). The CTA shares the activations, which get the codes' order once they are
// in shared memory. CTAs of a cluster sum a part of k each and add up their sums in the order of k,
// so that results repeat bit for bit.
#pragma once

#include <flashinfer/gemm/portable/epilogue.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mma.cuh>
#include <flashinfer/ptx/opaque.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

template <typename Tile>
class WeightGemm {
  using A = typename Tile::A;
  using Codes = typename Tile::Codes;
  using Scale = typename Tile::Scale;
  static constexpr int kStages = Tile::kStages, kTokenTiles = Tile::kTokenTiles;
  static constexpr int kChunkStages = Tile::kChunkStages;
  static constexpr int kRowPieces = Tile::kChunkRowBytes / 16;  // of a token's activations
  static constexpr int kPieces = Tile::kTokens * kRowPieces;
  static constexpr int kOwnPieces = kPieces / Tile::kThreads;  // of a thread
  static_assert(kOwnPieces * Tile::kThreads == kPieces);
  static constexpr uint32_t kNoRow = 0xffffffffu;
  using Sums = float[kTokenTiles][4];

 public:
  __device__ __forceinline__ WeightGemm(const WeightGemmParams& params, const WeightGemmWork& work,
                                        uint32_t shared)
      : params_(params), work_(work), shared_(shared) {
    warp_idx_ = threadIdx.x / 32;
    lane_idx_ = threadIdx.x % 32;
    if constexpr (Codes::kIsInt4) {
      factor_ = ptx::resident(Codes::factor(1.f), params.m == 0);
      signs_ = ptx::resident(Codes::kSigns, params.m == 0);
    }
    ring_ = shared + warp_idx_ * kStages * Tile::kStageBytes;
    const uint32_t stages = ceil_div<uint32_t>(params.k, Tile::kTileK);
    const uint32_t split = Tile::kSplits > 1 ? ptx::cluster_rank() : 0;
    first_ = stages * split / Tile::kSplits;
    count_ = stages * (split + 1) / Tile::kSplits - first_;
    find_weights();
  }

  __device__ __forceinline__ void run(Sums& sums) {
    find_rows();
    __syncthreads();
    copy_activations(0);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) copy_weights(stage);
    load_scales(0);
#pragma unroll 1
    for (uint32_t i = 0; i < count_; ++i) {
      ptx::cp_async_wait<kStages - 2>();
      if (i % kChunkStages == 0) {
        const uint32_t chunk = i / kChunkStages;
        pair_own_activations(chunk);
        __syncthreads();
        copy_activations(chunk + 1);
      } else {
        __syncwarp();
      }
      copy_weights(i + kStages - 1);
#pragma unroll
      for (int j = 0; j < 2 * Tile::kLaneScales; ++j) {
        scales_[j] = scale_of_bits<Scale>(next_scales_[j]);
      }
      load_scales(i + 1);
      multiply(i, sums);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  // Where this lane's pieces of the warp's 16 rows begin; null for rows that do not exist.
  __device__ __forceinline__ void find_weights() {
    const auto* weights = static_cast<const char*>(params_.weights) +
                          work_.group * params_.weight_group_stride +
                          static_cast<uint64_t>(first_) * Tile::kRowBytes + lane_idx_ % 8 * 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t row =
          weight_row<Tile>(params_, work_.column, warp_idx_ * 16 + step * 4 + lane_idx_ / 8);
      weights_[step] = row < params_.n ? weights + row * params_.weight_stride : nullptr;
    }
    const uint32_t row_bytes = static_cast<uint64_t>(params_.k) * Codes::kBits / 8;
    const uint32_t first = first_ * Tile::kRowBytes + lane_idx_ % 8 * 16;
    pieces_ = row_bytes > first ? ceil_div<uint32_t>(row_bytes - first, Tile::kRowBytes) : 0;
    if (pieces_ > count_) pieces_ = count_;
  }

  // Copies a warp's 16 rows, 128 bytes of each. The order of a row's pieces keeps the lanes that
  // read together in different banks.
  __device__ __forceinline__ void copy_weights(uint32_t i) {
    const uint32_t target = ring_ + i % kStages * Tile::kStageBytes;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t local = step * 4 + lane_idx_ / 8;
      const uint32_t place = lane_idx_ % 8 ^ (local * Codes::kWords & 7);
      ptx::cp_async_16(target + local * Tile::kRowBytes + place * 16,
                       weights_[step] + i * Tile::kRowBytes,
                       i < pieces_ && weights_[step] != nullptr);
    }
    ptx::cp_async_commit();
  }

  // Writes down which row of the activations each token of the tile is.
  __device__ __forceinline__ void find_rows() const {
    for (uint32_t token = threadIdx.x; token < Tile::kTokens; token += Tile::kThreads) {
      uint32_t row = work_.row + token;
      if (row >= work_.row_end) {
        row = kNoRow;
      } else if (params_.row_index != nullptr) {
        row = __ldg(params_.row_index + row);
        if (row >= params_.num_input_rows) row = kNoRow;
      }
      ptx::store_shared_4(shared_ + Tile::kOffsetRows + token * 4, row);
    }
  }

  // Copies the tokens' activations of kChunkStages stages.
  __device__ __forceinline__ void copy_activations(uint32_t chunk) const {
    if (chunk * kChunkStages >= count_) return;
    const uint32_t target = shared_ + Tile::kOffsetActivations + chunk % 2 * Tile::kActivationBytes;
    const uint32_t first = (first_ + chunk * kChunkStages) * Tile::kTileK;
    constexpr int kBatch = kOwnPieces < 4 ? kOwnPieces : 4;
    static_assert(kOwnPieces % kBatch == 0);
#pragma unroll 1
    for (int done = 0; done < kOwnPieces; done += kBatch) {
      uint32_t rows[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const uint32_t token = (threadIdx.x + (done + j) * Tile::kThreads) / kRowPieces;
        rows[j] = ptx::load_shared_4(shared_ + Tile::kOffsetRows + token * 4);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const uint32_t index = threadIdx.x + (done + j) * Tile::kThreads;
        const uint32_t token = index / kRowPieces, piece = index % kRowPieces;
        const uint32_t column = first + piece * 8;
        const bool exists = rows[j] != kNoRow && column < params_.k;
        const A* source = static_cast<const A*>(params_.a);
        if (exists) source += rows[j] * params_.a_stride + column;
        ptx::cp_async_16(target + place_of(token, piece), source, exists);
      }
    }
  }

  // Gives the activations that this thread copied the order of the codes.
  __device__ __forceinline__ void pair_own_activations(uint32_t chunk) const {
    if constexpr (Codes::kPairsNeighbours) return;
    const uint32_t target = shared_ + Tile::kOffsetActivations + chunk % 2 * Tile::kActivationBytes;
#pragma unroll 4
    for (int j = 0; j < kOwnPieces; ++j) {
      const uint32_t index = threadIdx.x + j * Tile::kThreads;
      const uint32_t address = target + place_of(index / kRowPieces, index % kRowPieces);
      const uint4 x = ptx::load_shared_16(address);
      ptx::store_shared_16(address, pair_activations<Codes>(x));
    }
  }

  // Offset of 16 bytes of a token; tokens of different parity are in different banks.
  __device__ __forceinline__ static uint32_t place_of(uint32_t token, uint32_t piece) {
    return token * Tile::kChunkRowBytes + (piece ^ (token & 1) * 4) * 16;
  }

  // Loads the scales of this lane's two rows for stage `i`; lane t of four loads its share of each
  // row's. Indices stay inside, so that no branch keeps the loads from being overtaken: a scale
  // that does not belong here meets sums of zero, or rows that are not stored.
  __device__ __forceinline__ void load_scales(uint32_t i) {
    if constexpr (Tile::kStageScales == 0) return;
    constexpr int kLaneScales = Tile::kLaneScales;
    constexpr uint32_t kGroup = Tile::kGroup == 0 ? 1 : Tile::kGroup;
    const uint32_t last = ceil_div(params_.k, kGroup) - 1;
    const uint32_t first = (first_ + i) * Tile::kTileK / kGroup + lane_idx_ % 4 * kLaneScales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t local = warp_idx_ * 16 + lane_idx_ / 4 + half * 8;
      const uint32_t row = min(weight_row<Tile>(params_, work_.column, local), params_.n - 1);
      const Scale* scales = static_cast<const Scale*>(params_.scales) +
                            work_.group * params_.scale_group_stride + row * params_.scale_stride;
#pragma unroll
      for (int j = 0; j < kLaneScales; ++j) {
        next_scales_[half * kLaneScales + j] = scale_bits(scales + min(first + j, last));
      }
    }
  }

  // Scale `index` of the stage, for row lane / 4 + 8 half.
  __device__ __forceinline__ float scale(int index, int half) const {
    constexpr int kLaneScales = Tile::kLaneScales;
    const float mine = scales_[half * kLaneScales + index % kLaneScales];
    return __shfl_sync(0xffffffffu, mine, (lane_idx_ & ~3) + index / kLaneScales);
  }

  __device__ __forceinline__ void multiply(uint32_t i, Sums& sums) const {
    const uint32_t weights = ring_ + i % kStages * Tile::kStageBytes;
    const uint32_t activations = shared_ + Tile::kOffsetActivations +
                                 i / kChunkStages % 2 * Tile::kActivationBytes +
                                 i % kChunkStages * Tile::kTileK * 2;
    const uint32_t row = lane_idx_ / 4, t = lane_idx_ % 4;
    // Sums whose scale is the same wait for it.
    constexpr int kSpan = Tile::kScalesSums && Tile::kGroup < Tile::kTileK
                              ? Tile::kGroup / Tile::kBlockK
                              : Tile::kBlocks;
    Sums products;
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      uint32_t low[4], high[4];
      unpack(weights, block, 0, low);
      unpack(weights, block, 1, high);
      if (Tile::kScalesSums && block % kSpan == 0) clear(products);
      Sums& target = Tile::kScalesSums ? products : sums;
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        const uint4 x = ptx::load_shared_16(activations + place_of(j * 8 + row, block * 4 + t));
        ptx::mma_m16n8k16<A>(target[j], {low[0], high[0], low[1], high[1]}, x.x, x.y);
        ptx::mma_m16n8k16<A>(target[j], {low[2], high[2], low[3], high[3]}, x.z, x.w);
      }
      if (Tile::kScalesSums && block % kSpan == kSpan - 1) {
        add_scaled(sums, products, scale(block / kSpan, 0), scale(block / kSpan, 1));
      }
    }
  }

  // This lane's eight weights of a block, of row lane / 4 + 8 half.
  __device__ __forceinline__ void unpack(uint32_t weights, int block, int half,
                                         uint32_t (&pairs)[4]) const {
    constexpr int kWords = Codes::kWords;
    const uint32_t row = lane_idx_ / 4, t = lane_idx_ % 4;
    const uint32_t bytes = (block * 4 + t) * kWords * 4;
    const uint32_t place = bytes / 16 ^ (row * kWords & 7);
    const uint32_t address = weights + (row + half * 8) * Tile::kRowBytes + place * 16 + bytes % 16;
    uint32_t words[kWords];
    if constexpr (kWords == 1) {
      words[0] = ptx::load_shared_4(address);
    } else if constexpr (kWords == 2) {
      const uint2 both = ptx::load_shared_8(address);
      words[0] = both.x, words[1] = both.y;
    } else {
      const uint4 all = ptx::load_shared_16(address);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    }
    float factor = 1.f;
    if constexpr (Codes::kScalesPairs) {
      // Lanes 0 and 1 of four hold the first 16 elements of a block, lanes 2 and 3 the others.
      const float first = scale(2 * block, half), second = scale(2 * block + 1, half);
      factor = t < 2 ? first : second;
    }
    Codes::unpack(words, Codes::kIsInt4 ? factor_ : Codes::factor(factor), signs_, pairs);
  }

  __device__ __forceinline__ static void clear(Sums& sums) {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = 0.f;
    }
  }

  __device__ __forceinline__ static void add_scaled(Sums& sums, const Sums& products, float low,
                                                    float high) {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] += products[j][i] * (i < 2 ? low : high);
    }
  }

  const WeightGemmParams& params_;
  const WeightGemmWork& work_;
  const uint32_t shared_;
  uint32_t ring_, first_, count_;
  uint32_t factor_ = 0, signs_ = 0;  // of integers of four bits
  const char* weights_[4];
  uint32_t pieces_;  // of 16 bytes that this lane copies of a row
  int warp_idx_, lane_idx_;
  float scales_[2 * Tile::kLaneScales] = {};
  uint32_t next_scales_[2 * Tile::kLaneScales] = {};  // as they are stored
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kLeastCtas)
    weight_gemm_kernel(const __grid_constant__ WeightGemmParams params) {
  extern __shared__ __align__(128) char memory[];
  // In this order, because a dependent that starts early (weight_gemm_params.h) reads offsets at
  // once.
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  WeightGemmWork work;
  if (!find_tokens<Tile>(params, blockIdx.y, work)) return;
  work.column = blockIdx.z * Tile::kOutColumns;
  float sums[Tile::kTokenTiles][4] = {};
  WeightGemm<Tile>(params, work, ptx::shared_address(memory)).run(sums);
  finish_weight_gemm<Tile>(params, work, reinterpret_cast<float*>(memory), sums);
}

}  // namespace flashinfer
