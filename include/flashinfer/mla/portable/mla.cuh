// MLA for every GPU from sm_80 on, with mma.sync: persistent CTAs, one per SM, each walks its share
// of the plan's items. Sums run in a fixed order: results repeat bit for bit.
//
// Eight warps have the 64 rows of a tile, four of them 32 rows each. For logits a warp of the four
// takes half of the tokens and half of the columns, gives what belongs to 16 of its rows to its
// neighbour and gets the rest of the others: 32 rows by 32 tokens read the fewest bytes of shared
// memory for a product. For the output it takes a quarter of the columns. In between the four tell
// each other their rows' largest logits and, through shared memory, their weights.
#pragma once

#include <flashinfer/common/math.cuh>
#include <flashinfer/common/shared_limit.h>
#include <flashinfer/mla/events.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/merge.cuh>
#include <flashinfer/mla/output.cuh>
#include <flashinfer/mla/portable/tile.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mma.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename Tile>
class MlaPortable {
  using T = typename Tile::T;
  using Row = typename Tile::Row;
  using WeightRow = typename Tile::WeightRow;
  using Logits = float[Tile::kLogitTiles][4];  // of 16 rows
  using Output = float[Tile::kOutputTiles][4];
  using Rows = float[2];          // numbers of the thread's two rows of 16
  static_assert(Row::kPermuted);  // whole lines
  static constexpr int kRowChunks = Tile::kDim / 8, kCkvChunks = Tile::kDimCkv / 8;

 public:
  __device__ __forceinline__ MlaPortable(const MlaParams& params, char* shared)
      : params_(params),
        memory_(shared),
        profile_(params, 0, 1, threadIdx.x == 0),
        shared_(ptx::shared_address(shared)) {
    team_ = threadIdx.x / Tile::kTeamThreads;
    part_ = threadIdx.x / 32 % Tile::kTeamWarps;
    token_half_ = part_ % 2;
    column_half_ = part_ / 2;
    lane_idx_ = threadIdx.x % 32;
    first_row_ = team_ * Tile::kTeamRows;
  }

  __device__ __forceinline__ void run() {
    const int* const begin = params_.cta_begin + blockIdx.x;
    for (int i = begin[0]; i < begin[1]; ++i) attend(params_.items[i]);  // no register for the end
  }

 private:
  __device__ __forceinline__ void attend(const MlaWorkItem& item) {
    Output output[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < Tile::kOutputTiles; ++j) {
        output[m][j][0] = output[m][j][1] = output[m][j][2] = output[m][j][3] = 0.f;
      }
      largest_[m][0] = largest_[m][1] = -math::inf;
      sum_[m] = 0.f;
    }
    set_limits(item);
    page_ = page_of(item, 0);
    const int num_tiles = ceil_div(item.kv_end - item.kv_begin, Tile::kTokens);
    // Nobody would wait for these copies before those of the next item go to the same place.
    if (num_tiles > 0) load_queries(item);
    constexpr int kAhead = Tile::kStages - 1;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      tile_copy(item, i).all();
      ptx::cp_async_commit();
    }
    const int num_rows = item.qo_len * static_cast<int>(params_.num_heads.divisor);
    const bool has_rows = item.row_begin + first_row_ < num_rows;
    for (int i = 0; i < num_tiles; ++i) {
      profile_.begin(MlaEvent::kLoad);
      if constexpr (kAhead == 0) {
        __syncthreads();  // the last tile has been read
        tile_copy(item, i).all();
        ptx::cp_async_commit();
      }
      ptx::cp_async_wait<kAhead == 0 ? 0 : kAhead - 1>();
      __syncthreads();  // this tile is there, and the last one has been read
      profile_.end(MlaEvent::kLoad);
      const uint32_t kv = shared_ + Tile::kOffsetKv + i % Tile::kStages * Tile::kStageBytes;
      const int token = item.kv_begin + i * Tile::kTokens;
      TileCopy next = kAhead == 0 ? TileCopy() : tile_copy(item, i + kAhead);
      if (has_rows) {
        add_tile(output, kv, token, next);
      } else {
        next.all();
      }
      if constexpr (kAhead > 0) ptx::cp_async_commit();
    }
    profile_.begin(MlaEvent::kOutput);
    finish(output, item);
    profile_.end(MlaEvent::kOutput);
  }

  // ---- Copies ----

  // Copies of a row of [ckv, kpe] by neighbouring threads, 16 bytes of each at a time.
  template <int kThreadsOfRow>
  struct RowCopy {
    static constexpr int kCopies = ceil_div(kRowChunks, kThreadsOfRow);
    static constexpr int kCopiesOfLine = kThreadsOfRow < 8 ? 8 / kThreadsOfRow : 1;

    __device__ __forceinline__ RowCopy() = default;
    __device__ __forceinline__ RowCopy(uint32_t target, int row, const T* ckv_row, const T* kpe_row,
                                       bool row_exists)
        : ckv(ckv_row + thread() * 8),
          kpe(kpe_row + thread() * 8),
          exists(row_exists),
          wanted(true) {
#pragma unroll
      for (int i = 0; i < kCopiesOfLine; ++i) {
        at[i] = target + Row::offset(row, (i * kThreadsOfRow + thread()) * 16);
      }
    }

    __device__ __forceinline__ static int thread() { return threadIdx.x % kThreadsOfRow; }

    __device__ __forceinline__ void copy(int i) const {
      if (!wanted) return;
      const int first = i * kThreadsOfRow;
      if (kRowChunks % kThreadsOfRow != 0 && first + thread() >= kRowChunks) return;
      const T* const source =
          first + thread() < kCkvChunks ? ckv + first * 8 : kpe + (first - kCkvChunks) * 8;
      const int lines = i / kCopiesOfLine * kCopiesOfLine * kThreadsOfRow * 16;
      ptx::cp_async_16(at[i % kCopiesOfLine] + lines, source, exists);
    }

    __device__ __forceinline__ void all() const {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) copy(i);
    }

    const T *ckv, *kpe;           // the thread's first chunk
    uint32_t at[kCopiesOfLine];   // its places in a line; the next lines' are a constant away
    bool exists, wanted = false;  // a row that does not exist becomes zero
  };

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
    RowCopy<kThreadsOfRow>(shared_, row, source(params_.q_nope), source(params_.q_pe), exists)
        .all();
  }

  static constexpr int kThreadsOfToken = Tile::kThreads / Tile::kTokens;
  using TileCopy = RowCopy<kThreadsOfToken>;

  __device__ __forceinline__ static int token_of(const MlaWorkItem& item, int tile) {
    return item.kv_begin + tile * Tile::kTokens + threadIdx.x / kThreadsOfToken;
  }

  // The page of the thread's token in a tile, or -1.
  __device__ __forceinline__ int page_of(const MlaWorkItem& item, int tile) const {
    const int token = token_of(item, tile);
    return token < item.kv_end ? params_.kv_indices[item.kv_base + params_.page_size.divide(token)]
                               : -1;
  }

  // Copies of tile number `i` of the item; none after the last one. Asks for the next tile's page
  // already, for which it would have to wait then.
  __device__ __forceinline__ TileCopy tile_copy(const MlaWorkItem& item, int i) {
    if (item.kv_begin + i * Tile::kTokens >= item.kv_end) return TileCopy();
    const int token = token_of(item, i);
    const bool exists = page_ >= 0 && page_ < params_.num_pages;
    const int64_t page = exists ? page_ : 0;
    const int64_t slot =
        exists ? token - params_.page_size.divide(token) * params_.page_size.divisor : 0;
    page_ = page_of(item, i + 1);
    const auto source = [&](const MlaCache& cache) {
      return static_cast<const T*>(cache.data) + page * cache.stride_page +
             slot * cache.stride_token;
    };
    const uint32_t kv = shared_ + Tile::kOffsetKv + i % Tile::kStages * Tile::kStageBytes;
    return TileCopy(kv, threadIdx.x / kThreadsOfToken, source(params_.ckv), source(params_.kpe),
                    exists);
  }

  // ---- A tile of KV ----

  __device__ __forceinline__ void add_tile(Output (&output)[2], uint32_t kv, int token,
                                           const TileCopy& next) {
    Logits logits[2];
    profile_.begin(MlaEvent::kKeys);
    multiply_keys(logits, kv, next);
    Logits own;
    exchange(logits, own);
    profile_.end(MlaEvent::kKeys);
    profile_.begin(MlaEvent::kWeights);
    const int own_token = token + token_half_ * (Tile::kTokens / 2);
    if (own_token + Tile::kTokens / 2 > least_limit_) hide(own, own_token);
    Rows shrink[2];
    const bool moves = find_largest(own, shrink);
    weigh(own, shrink);
    if (moves) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int j = 0; j < Tile::kOutputTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) output[m][j][e] *= shrink[m][e / 2];
        }
      }
    }
    team_sync();  // the weights are there
    profile_.end(MlaEvent::kWeights);
    profile_.begin(MlaEvent::kValues);
    add_values(output, kv);
    profile_.end(MlaEvent::kValues);
  }

  __device__ __forceinline__ void team_sync() const {
    ptx::named_barrier_sync(1 + team_, Tile::kTeamThreads);
  }

  // The team's 32 rows by half of the tile's tokens, over half of the columns. Copies of the next
  // tile, which would wait for each other, are asked for one by one between the products.
  __device__ __forceinline__ void multiply_keys(Logits (&logits)[2], uint32_t kv,
                                                const TileCopy& next) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < Tile::kLogitTiles; ++j) {
        logits[m][j][0] = logits[m][j][1] = logits[m][j][2] = logits[m][j][3] = 0.f;
      }
    }
    // Four steps of 16 columns are a line, so that addresses of the next line are a constant away.
    const uint32_t first_byte = column_half_ * Tile::kDim;  // of 2 bytes a column, half of them
    const int token = token_half_ * (Tile::kTokens / 2) + lane_idx_ / 16 * 8 + lane_idx_ % 8;
    uint32_t q_at[4], k_at[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t byte = first_byte + 32 * t;
      q_at[t] = shared_ + Row::offset(first_row_ + lane_idx_ % 16, byte + lane_idx_ / 16 * 16);
      k_at[t] = kv + Row::offset(token % Tile::kTokens, byte + lane_idx_ / 8 % 2 * 16);
    }
    constexpr int kSteps = Tile::kDim / 32, kPairs = ceil_div(Tile::kLogitTiles, 2);
    uint32_t q[2][2][4], k[2][kPairs][4];  // of a step and the next one
    const auto load = [&](int step) {
      const uint32_t line = step / 4 * 128;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::ldmatrix_x4(q[step % 2][m], q_at[step % 4] + m * 16 * Row::kPitch + line);
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        ptx::ldmatrix_x4(k[step % 2][j], k_at[step % 4] + j * 16 * Row::kPitch + line);
      }
    };
    load(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) load(step + 1);
#pragma unroll
      for (int i = 0; i < TileCopy::kCopies; ++i) {
        if (i * kSteps / TileCopy::kCopies == step) next.copy(i);
      }
#pragma unroll
      for (int j = 0; j < Tile::kLogitTiles; ++j) {
        const uint32_t* const of_tile = k[step % 2][j / 2] + j % 2 * 2;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          ptx::mma_m16n8k16<T>(logits[m][j], q[step % 2][m], of_tile[0], of_tile[1]);
        }
      }
    }
  }

  // Adds up the products of both halves of the columns: `own` are the logits of the 16 rows that
  // the warp keeps, the other 16 go to the warp with the other half. The place of the weights,
  // which nobody reads now, has room for half of them at a time.
  __device__ __forceinline__ void exchange(const Logits (&logits)[2], Logits& own) const {
    constexpr int kPairs = Tile::kLogitTiles;  // of a lane, at a time
    float2* const team_pairs = reinterpret_cast<float2*>(team_weights());
    float2* const sent = team_pairs + part_ * (kPairs * 32) + lane_idx_;
    const float2* const got = team_pairs + (part_ ^ 2) * (kPairs * 32) + lane_idx_;
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      if (round > 0) team_sync();  // the first half has been read
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int pair = round * kPairs + i, j = pair / 2, e = pair % 2 * 2;
        sent[i * 32] = column_half_ == 0 ? float2{logits[1][j][e], logits[1][j][e + 1]}
                                         : float2{logits[0][j][e], logits[0][j][e + 1]};
      }
      team_sync();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int pair = round * kPairs + i, j = pair / 2, e = pair % 2 * 2;
        const float2 other = got[i * 32];
        own[j][e] = (column_half_ == 0 ? logits[0][j][e] : logits[1][j][e]) + other.x;
        own[j][e + 1] = (column_half_ == 0 ? logits[0][j][e + 1] : logits[1][j][e + 1]) + other.y;
      }
    }
  }

  __device__ __forceinline__ char* team_weights() const {
    return memory_ + Tile::kOffsetWeights + first_row_ * WeightRow::kPitch;
  }

  // The thread's rows are this one and the one 8 further on.
  __device__ __forceinline__ int row_of(int m) const { return first_row_ + 16 * m + lane_idx_ / 4; }

  // How many tokens the thread's two rows see, and the fewest that any row of the tile sees.
  __device__ __forceinline__ void set_limits(const MlaWorkItem& item) {
    limits_[0] = mla_visible_tokens(params_, item, row_of(column_half_));
    limits_[1] = mla_visible_tokens(params_, item, row_of(column_half_) + 8);
    least_limit_ = mla_visible_tokens(params_, item, 0);
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

  // [2, kRows] numbers, of the tokens' halves, of each row.
  __device__ __forceinline__ float& told(int half, int row) const {
    return reinterpret_cast<float*>(memory_ + Tile::kOffsetShared)[half * Tile::kRows + row];
  }

  // The rows' largest logits so far, scaled. `shrink`: what sums and outputs are to be multiplied
  // by; returns whether that is not 1 in some row of the warp.
  __device__ __forceinline__ bool find_largest(const Logits& own, Rows (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = fmaxf(own[0][2 * h], own[0][2 * h + 1]);
#pragma unroll
      for (int j = 1; j < Tile::kLogitTiles; ++j) {
        largest = fmaxf(largest, fmaxf(own[j][2 * h], own[j][2 * h + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      if (lane_idx_ % 4 == 0) {
        told(token_half_, row_of(column_half_) + 8 * h) = largest * params_.sm_scale_log2;
      }
    }
    team_sync();
    bool moves = false;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row_of(m) + 8 * h;
        const float largest = fmaxf(fmaxf(told(0, row), told(1, row)), largest_[m][h]);
        const bool stays = largest == largest_[m][h];
        shrink[m][h] = stays ? 1.f : math::ptx_exp2(largest_[m][h] - largest);
        moves = moves || !stays;
        largest_[m][h] = largest;
      }
    }
    return __any_sync(0xffffffffu, moves);
  }

  // Makes weights of the warp's logits, for the team.
  __device__ __forceinline__ void weigh(const Logits& own, const Rows (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = column_half_ == 0 ? largest_[0][h] : largest_[1][h];
      const float reference = largest == -math::inf ? 0.f : largest;
      const int row = row_of(column_half_) + 8 * h;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < Tile::kLogitTiles; ++j) {
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          pair[e] = math::ptx_exp2(fmaf(own[j][2 * h + e], params_.sm_scale_log2, -reference));
          sum += pair[e];
        }
        const int chunk = token_half_ * Tile::kLogitTiles + j;
        char* const weights = memory_ + Tile::kOffsetWeights + WeightRow::offset(row, chunk * 16);
        reinterpret_cast<uint32_t*>(weights)[lane_idx_ % 4] = PackedPair<T>::pack(pair[0], pair[1]);
      }
      sum_[h] = fmaf(sum_[h], column_half_ == 0 ? shrink[0][h] : shrink[1][h], sum);
    }
  }

  // The team's 32 rows by a quarter of the columns, over all tokens of the tile.
  __device__ __forceinline__ void add_values(Output (&output)[2], uint32_t kv) const {
    const uint32_t first_byte = part_ * (Tile::kOutputTiles * 16);
    uint32_t v_at[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      v_at[t] = kv + Row::offset(lane_idx_ % 16, first_byte + 32 * t + lane_idx_ / 16 * 16);
    }
#pragma unroll
    for (int token = 0; token < Tile::kTokens; token += 16) {
      const uint32_t weights_at =
          shared_ + Tile::kOffsetWeights +
          WeightRow::offset(first_row_ + lane_idx_ % 16, (token / 8 + lane_idx_ / 16) * 16);
      uint32_t weights[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::ldmatrix_x4(weights[m], weights_at + m * 16 * WeightRow::kPitch);
      }
#pragma unroll
      for (int j = 0; j < Tile::kOutputTiles; j += 2) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, v_at[j / 2 % 4] + token * Row::kPitch + j / 8 * 128);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          ptx::mma_m16n8k16<T>(output[m][j], weights[m], v[0], v[1]);
          ptx::mma_m16n8k16<T>(output[m][j + 1], weights[m], v[2], v[3]);
        }
      }
    }
  }

  // ---- The item's end ----

  __device__ __forceinline__ void finish(const Output (&output)[2], const MlaWorkItem& item) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 2);
      if (lane_idx_ % 4 == 0) told(token_half_, row_of(column_half_) + 8 * h) = sum_[h];
    }
    __syncthreads();  // the sums are there, and all that was copied has been read
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = row_of(m);
      const Rows sum = {told(0, row) + told(1, row), told(0, row + 8) + told(1, row + 8)};
      write_output<Tile>(params_, item, output[m], largest_[m], sum, part_, row, lane_idx_);
    }
  }

  const MlaParams& params_;
  char* const memory_;
  MlaProfile<Tile::kProfiled> profile_;
  const uint32_t shared_;
  // A team of four warps has 32 rows from `first_row_` on; `part_` of it is this warp.
  int team_, part_, token_half_, column_half_, lane_idx_, first_row_;
  int limits_[2], least_limit_;
  int page_;         // of the thread's token in the next tile that is loaded
  Rows largest_[2];  // of the team's rows
  Rows sum_;         // of the warp's own rows: of its own weights
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
