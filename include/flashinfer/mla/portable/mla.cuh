// MLA for every GPU from sm_80 on, with mma.sync: persistent CTAs, one per SM, each walks its share
// of the plan's items. Sums run in a fixed order: results repeat bit for bit.
//
// Eight warps have the 64 rows of a tile. The two warps of 16 rows share the work of a tile of KV:
// for logits each takes half of the tokens, for the output half of the columns. In between they
// tell each other their rows' largest logits and, through shared memory, their weights.
#pragma once

#include <flashinfer/common/math.cuh>
#include <flashinfer/common/shared_limit.h>
#include <flashinfer/mla/events.cuh>
#include <flashinfer/mla/merge.cuh>
#include <flashinfer/mla/output.cuh>
#include <flashinfer/mla/portable/tile.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mma.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename Tile>
class MlaPortable {
  using T = typename Tile::T;
  using Row = typename Tile::Row;
  using WeightRow = typename Tile::WeightRow;
  using Logits = float[Tile::kLogitTiles][4];
  using Output = float[Tile::kOutputTiles][4];
  static constexpr int kRowChunks = Tile::kDim / 8, kCkvChunks = Tile::kDimCkv / 8;

 public:
  __device__ __forceinline__ MlaPortable(const MlaParams& params, char* shared)
      : params_(params),
        memory_(shared),
        profile_(params, 0, 1, threadIdx.x == 0),
        shared_(ptx::shared_address(shared)) {
    warp_row_ = threadIdx.x / 32 % 4 * 16;
    half_ = threadIdx.x / 128;
    lane_idx_ = threadIdx.x % 32;
    row_ = warp_row_ + lane_idx_ / 4;
  }

  __device__ __forceinline__ void run() {
    const int end = params_.cta_begin[blockIdx.x + 1];
    for (int i = params_.cta_begin[blockIdx.x]; i < end; ++i) attend(params_.items[i]);
  }

 private:
  __device__ __forceinline__ void attend(const MlaWorkItem& item) {
    Output output;
#pragma unroll
    for (int j = 0; j < Tile::kOutputTiles; ++j) {
      output[j][0] = output[j][1] = output[j][2] = output[j][3] = 0.f;
    }
    largest_[0] = largest_[1] = -math::inf;
    sum_[0] = sum_[1] = 0.f;
    set_limits(item);
    load_queries(item);
    constexpr int kAhead = Tile::kStages - 1;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_tile(item, i);
    const int num_tiles = ceil_div(item.kv_end - item.kv_begin, Tile::kTokens);
    for (int i = 0; i < num_tiles; ++i) {
      profile_.begin(MlaEvent::kLoad);
      load_tile(item, i + kAhead);
      ptx::cp_async_wait<kAhead>();
      __syncthreads();
      profile_.end(MlaEvent::kLoad);
      const uint32_t kv = shared_ + Tile::kOffsetKv + i % Tile::kStages * Tile::kStageBytes;
      const int token = item.kv_begin + i * Tile::kTokens;
      add_tile(output, kv, token);
      __syncthreads();  // the tile and the weights have been read
    }
    ptx::cp_async_wait<0>();
    profile_.begin(MlaEvent::kOutput);
    finish(output, item);
    profile_.end(MlaEvent::kOutput);
  }

  // ---- Copies ----

  // Packed rows of the tile; those that the request does not have become zero.
  __device__ __forceinline__ void load_queries(const MlaWorkItem& item) const {
    constexpr int kThreadsOfRow = Tile::kThreads / Tile::kRows;
    const int row = threadIdx.x / kThreadsOfRow;
    const int num_rows = item.qo_len * static_cast<int>(params_.num_heads.divisor);
    const uint32_t packed = item.row_begin + row;
    const bool exists = static_cast<int>(packed) < num_rows;
    const uint32_t in_request = params_.num_heads.divide(packed);
    const int64_t token = exists ? item.qo_begin + int64_t{in_request} : 0;
    const int64_t head = exists ? packed - in_request * params_.num_heads.divisor : 0;
    const auto source = [&](const MlaRows& rows) {
      return static_cast<const T*>(rows.data) + token * rows.stride_token + head * rows.stride_head;
    };
    copy_row<kThreadsOfRow>(shared_, row, source(params_.q_nope), source(params_.q_pe), exists);
  }

  // Tile number `i` of the item; nothing after the last one. Always closes a group of copies.
  __device__ __forceinline__ void load_tile(const MlaWorkItem& item, int i) const {
    constexpr int kThreadsOfRow = Tile::kThreads / Tile::kTokens;
    const int row = threadIdx.x / kThreadsOfRow;
    const int token = item.kv_begin + i * Tile::kTokens + row;
    if (item.kv_begin + i * Tile::kTokens < item.kv_end) {
      int64_t page = 0, slot = 0;
      bool exists = token < item.kv_end;
      if (exists) {
        const uint32_t number = params_.page_size.divide(token);
        page = params_.kv_indices[item.kv_base + number];
        slot = token - number * params_.page_size.divisor;
        exists = page >= 0 && page < params_.num_pages;
        if (!exists) page = slot = 0;
      }
      const auto source = [&](const MlaCache& cache) {
        return static_cast<const T*>(cache.data) + page * cache.stride_page +
               slot * cache.stride_token;
      };
      const uint32_t kv = shared_ + Tile::kOffsetKv + i % Tile::kStages * Tile::kStageBytes;
      copy_row<kThreadsOfRow>(kv, row, source(params_.ckv), source(params_.kpe), exists);
    }
    ptx::cp_async_commit();
  }

  // A row of [ckv, kpe] by neighbouring threads, 16 bytes at a time.
  template <int kThreadsOfRow>
  __device__ __forceinline__ static void copy_row(uint32_t target, int row, const T* ckv,
                                                  const T* kpe, bool exists) {
#pragma unroll
    for (int i = 0; i < ceil_div(kRowChunks, kThreadsOfRow); ++i) {
      const int chunk = i * kThreadsOfRow + threadIdx.x % kThreadsOfRow;
      if (kRowChunks % kThreadsOfRow != 0 && chunk >= kRowChunks) break;
      const T* source = chunk < kCkvChunks ? ckv + chunk * 8 : kpe + (chunk - kCkvChunks) * 8;
      ptx::cp_async_16(target + Row::offset(row, chunk * 16), source, exists);
    }
  }

  // ---- A tile of KV ----

  __device__ __forceinline__ void add_tile(Output& output, uint32_t kv, int token) {
    Logits logits;
    profile_.begin(MlaEvent::kKeys);
    multiply_keys(logits, kv);
    profile_.end(MlaEvent::kKeys);
    profile_.begin(MlaEvent::kWeights);
    const int own_token = token + half_ * (Tile::kTokens / 2);
    if (own_token + Tile::kTokens / 2 > least_limit_) hide(logits, own_token);
    float shrink[2];
    const bool moves = find_largest(logits, shrink);
    weigh(logits, shrink);
    if (moves) {
#pragma unroll
      for (int j = 0; j < Tile::kOutputTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) output[j][e] *= shrink[e / 2];
      }
    }
    __syncthreads();  // the weights are there
    profile_.end(MlaEvent::kWeights);
    profile_.begin(MlaEvent::kValues);
    add_values(output, kv);
    profile_.end(MlaEvent::kValues);
  }

  // The warp's 16 rows by half of the tile's tokens.
  __device__ __forceinline__ void multiply_keys(Logits& logits, uint32_t kv) const {
#pragma unroll
    for (int j = 0; j < Tile::kLogitTiles; ++j) {
      logits[j][0] = logits[j][1] = logits[j][2] = logits[j][3] = 0.f;
    }
    const int first_token = half_ * (Tile::kTokens / 2);
#pragma unroll 2
    for (int column = 0; column < Tile::kDim; column += 32) {
      uint32_t q[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int chunk = column / 8 + 2 * k + lane_idx_ / 16;
        ptx::ldmatrix_x4(q[k], shared_ + Row::offset(warp_row_ + lane_idx_ % 16, chunk * 16));
      }
#pragma unroll
      for (int j = 0; j < Tile::kLogitTiles; ++j) {
        uint32_t k[4];
        const int chunk = column / 8 + lane_idx_ / 8;
        ptx::ldmatrix_x4(k, kv + Row::offset(first_token + j * 8 + lane_idx_ % 8, chunk * 16));
        ptx::mma_m16n8k16<T>(logits[j], q[0], k[0], k[1]);
        ptx::mma_m16n8k16<T>(logits[j], q[1], k[2], k[3]);
      }
    }
  }

  // How many tokens the thread's two rows see, and the fewest that any row of the tile sees.
  __device__ __forceinline__ void set_limits(const MlaWorkItem& item) {
    const auto limit = [&](int row) {
      if (!params_.causal) return item.kv_end;
      const int token = params_.num_heads.divide(item.row_begin + row);
      return min(item.kv_end, item.kv_len - item.qo_len + token + 1);
    };
    limits_[0] = limit(row_);
    limits_[1] = limit(row_ + 8);
    least_limit_ = limit(0);
  }

  __device__ __forceinline__ void hide(Logits& logits, int token) const {
#pragma unroll
    for (int j = 0; j < Tile::kLogitTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (token + j * 8 + lane_idx_ % 4 * 2 + e % 2 >= limits_[e / 2]) logits[j][e] = -math::inf;
      }
    }
  }

  // [2, kRows] numbers of the two warps of each row.
  __device__ __forceinline__ float& told(int half, int row) const {
    return reinterpret_cast<float*>(memory_ + Tile::kOffsetShared)[half * Tile::kRows + row];
  }

  // The rows' largest logits so far, scaled. `shrink`: what sums and outputs are to be multiplied
  // by; returns whether that is not 1 in some row of the warp.
  __device__ __forceinline__ bool find_largest(const Logits& logits, float (&shrink)[2]) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(logits[0][2 * h], logits[0][2 * h + 1]);
#pragma unroll
      for (int j = 1; j < Tile::kLogitTiles; ++j) {
        largest[h] = fmaxf(largest[h], fmaxf(logits[j][2 * h], logits[j][2 * h + 1]));
      }
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
      largest[h] *= params_.sm_scale_log2;
      if (lane_idx_ % 4 == 0) told(half_, row_ + 8 * h) = largest[h];
    }
    __syncthreads();
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(fmaxf(largest[h], told(1 - half_, row_ + 8 * h)), largest_[h]);
      shrink[h] = largest[h] == largest_[h] ? 1.f : math::ptx_exp2(largest_[h] - largest[h]);
      moves = moves || largest[h] != largest_[h];
      largest_[h] = largest[h];
    }
    return __any_sync(0xffffffffu, moves);
  }

  // Makes weights of the warp's logits, for both warps of its rows.
  __device__ __forceinline__ void weigh(const Logits& logits, const float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float reference = largest_[h] == -math::inf ? 0.f : largest_[h];
      const int row = row_ + 8 * h;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < Tile::kLogitTiles; ++j) {
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          pair[e] = math::ptx_exp2(fmaf(logits[j][2 * h + e], params_.sm_scale_log2, -reference));
          sum += pair[e];
        }
        const int chunk = half_ * Tile::kLogitTiles + j;
        char* const weights = memory_ + Tile::kOffsetWeights + WeightRow::offset(row, chunk * 16);
        reinterpret_cast<uint32_t*>(weights)[lane_idx_ % 4] = PackedPair<T>::pack(pair[0], pair[1]);
      }
      sum_[h] = fmaf(sum_[h], shrink[h], sum);
    }
  }

  // The warp's 16 rows by half of the columns, over all tokens of the tile.
  __device__ __forceinline__ void add_values(Output& output, uint32_t kv) const {
    const int first_chunk = half_ * (kCkvChunks / 2);
#pragma unroll
    for (int token = 0; token < Tile::kTokens; token += 16) {
      uint32_t weights[4];
      ptx::ldmatrix_x4(weights, shared_ + Tile::kOffsetWeights +
                                    WeightRow::offset(warp_row_ + lane_idx_ % 16,
                                                      (token / 8 + lane_idx_ / 16) * 16));
#pragma unroll
      for (int j = 0; j < Tile::kOutputTiles; j += 2) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(
            v, kv + Row::offset(token + lane_idx_ % 16, (first_chunk + j + lane_idx_ / 16) * 16));
        ptx::mma_m16n8k16<T>(output[j], weights, v[0], v[1]);
        ptx::mma_m16n8k16<T>(output[j + 1], weights, v[2], v[3]);
      }
    }
  }

  // ---- The item's end ----

  __device__ __forceinline__ void finish(Output& output, const MlaWorkItem& item) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 2);
      if (lane_idx_ % 4 == 0) told(half_, row_ + 8 * h) = sum_[h];
    }
    __syncthreads();
    float sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = told(0, row_ + 8 * h) + told(1, row_ + 8 * h);
    write_output<Tile>(params_, item, output, largest_, sum, half_, row_, lane_idx_);
    __syncthreads();  // the sums have been read
  }

  const MlaParams& params_;
  char* const memory_;
  MlaProfile<Tile::kProfiled> profile_;
  const uint32_t shared_;
  int warp_row_, half_, lane_idx_, row_;
  int limits_[2], least_limit_;
  float largest_[2], sum_[2];  // of the thread's rows; sums of its own weights
};

// The tile follows from the shared memory of the architecture that the code is compiled for.
template <typename T, typename O, int kDimCkv, int kDimKpe, bool kProfiled>
__global__ void __launch_bounds__(256, 1)
    mla_portable_kernel(const __grid_constant__ MlaParams params) {
#if defined(__CUDA_ARCH__)
  using Tile =
      MlaPortableTile<T, O, kDimCkv, kDimKpe, max_shared_bytes(__CUDA_ARCH__ / 10), kProfiled>;
  static_assert(Tile::kThreads == 256);
  extern __shared__ __align__(128) char shared[];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  MlaPortable<Tile>(params, shared).run();
#endif
}

}  // namespace flashinfer
