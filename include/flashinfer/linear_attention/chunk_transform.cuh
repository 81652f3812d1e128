// First stage of the gated delta rule in chunks: computes what does not depend on the state, for
// every chunk of every head at once. docs/linear_attention.md derives it. With c_i the logarithm of
// the decay from the chunk's start to token i,
//   A_ij = beta_i exp(c_i - c_j) k_i k_j          (j < i)
//   solve = (I + A)^-1 diag(beta)
//   scores_ij = scale exp(c_i - c_j) q_i k_j      (j <= i)
// A CTA has one chunk of one head at a time. The inverse is formed in float32: four triangles of 16
// by substitution, a thread per column, then the squares below the diagonal from them.
#pragma once

#include <cstdint>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/linear_attention/chunk_delta_rule_params.h>
#include <flashinfer/linear_attention/gate.cuh>
#include <flashinfer/linear_attention/tile.cuh>
#include <flashinfer/linear_attention/token_range.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/progress.cuh>

namespace flashinfer {

template <typename T_, typename StateT_, int kHeadDimK_>
struct ChunkDeltaRuleTraits {
  using T = T_;
  using StateT = StateT_;
  using GateT = dtype::float32;
  static constexpr int kHeadDimK = kHeadDimK_;
  static constexpr bool kDelta = true;  // updates are differences to what the state says
  static constexpr bool kChannelGate = false;
};

// Mamba-2 has no differences: A is zero, and the updates are dt x.
template <typename T_, typename StateT_, typename GateT_, int kHeadDimK_>
struct SsdTraits {
  using T = T_;
  using StateT = StateT_;
  using GateT = GateT_;
  static constexpr int kHeadDimK = kHeadDimK_;
  static constexpr bool kDelta = false, kChannelGate = false;
};

// A chunk of a sequence: slots of consecutive sequences begin at cu_seqlens[s] / C + s, which
// leaves room for every sequence's last, partial chunk.
struct Chunk {
  int64_t sequence;  // negative: the slot has no chunk
  int64_t first_token;
  int32_t num_tokens;

  __device__ __forceinline__ static TokenRange range(const DeltaRuleParams& params,
                                                     int64_t sequence) {
    return token_range(params.cu_seqlens, params.cu_seqlens_is_int64, sequence, params.num_tokens);
  }

  __device__ __forceinline__ static int64_t first_slot(const DeltaRuleParams& params,
                                                       int64_t sequence) {
    return range(params, sequence).first / kChunkSize + sequence;
  }

  __device__ __forceinline__ static Chunk of_slot(const DeltaRuleParams& params, int64_t slot) {
    int64_t low = 0, high = params.batch_size - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_slot(params, middle) <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const TokenRange range = Chunk::range(params, low);
    const int64_t before = (slot - (range.first / kChunkSize + low)) * kChunkSize;
    if (before >= range.count) return {-1, 0, 0};
    return {low, range.first + before,
            static_cast<int32_t>(min(range.count - before, int64_t{kChunkSize}))};
  }
};

template <typename Traits>
struct ChunkTransformShared {
  static constexpr int kDim = Traits::kHeadDimK;
  using KeyTile = Tile<kChunkSize, kDim>;
  // A and its inverse overwrite the tiles after these are multiplied.
  static constexpr int kMatrixBytes = round_up(kChunkSize * (kChunkSize + 4) * 4, 1024);
  static constexpr int kTileBytes = KeyTile::kBytes > kMatrixBytes ? KeyTile::kBytes : kMatrixBytes;
  static constexpr int kBytes = 2 * kTileBytes + 6 * kChunkSize * 4;
};

namespace detail {

inline constexpr int kTransformThreads = 128;
inline constexpr int kStride = kChunkSize + 4;  // of float matrices: rows in different banks

// The decay's logarithm to base 2. A decay of zero becomes 2^-140: its logarithm may be subtracted.
__device__ __forceinline__ float log2_decay(const DeltaRuleParams& params, float gate) {
  constexpr float kLowest = -140.f;
  if (params.gate_form == GateForm::kLog) return fmaxf(gate * math::log2e, kLowest);
  return gate > 0x1p-140f ? log2f(gate) : kLowest;
}

// Sum over this lane and the lanes before it.
__device__ __forceinline__ float prefix_sum(float x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float before = __shfl_sync(0xffffffffu, x, lane < offset ? lane : lane - offset);
    if (lane >= offset) x += before;
  }
  return x;
}

// Sums the squares of a tile's rows, a pair of threads per row; returns 1 / norm, or 1.
template <typename T, typename TileType>
__device__ __forceinline__ void row_norms(float* factors, const TileType& tile, const char* shared,
                                          uint32_t shared_base, bool normalize) {
  const int row = threadIdx.x / 2, part = threadIdx.x % 2;
  if (!normalize) {
    if (part == 0) factors[row] = 1.f;
    return;
  }
  float sum = 0.f;
#pragma unroll
  for (int unit = part; unit < TileType::kColumns / 8; unit += 2) {
    const T* elements =
        reinterpret_cast<const T*>(shared + (tile.address(row, unit) - shared_base));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = to_float(elements[i]);
      sum += x * x;
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (part == 0) factors[row] = rsqrtf(sum + 1e-6f);
}

// Column `column` of the inverse of the unit triangle I + A in the kSize rows and columns from
// `begin` on.
template <int kSize>
__device__ __forceinline__ void invert_triangle(float* inverse, const float* A, int begin,
                                                int column) {
  float x[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float4* row = reinterpret_cast<const float4*>(A + (begin + i) * kStride + begin);
    float sums[4] = {};
#pragma unroll
    for (int m = 0; m < (i + 3) / 4; ++m) {
      const float4 a = row[m];
      if (4 * m < i) sums[0] += a.x * x[4 * m];
      if (4 * m + 1 < i) sums[1] += a.y * x[4 * m + 1];
      if (4 * m + 2 < i) sums[2] += a.z * x[4 * m + 2];
      if (4 * m + 3 < i) sums[3] += a.w * x[4 * m + 3];
    }
    x[i] = (i == column ? 1.f : 0.f) - ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) inverse[(begin + i) * kStride + begin + column] = x[i];
}

// out = sign left right, squares of kSize within matrices of rows of kStride; by 4 kSize threads.
template <int kSize>
__device__ __forceinline__ void multiply_squares(float* out, const float* left, const float* right,
                                                 float sign, int thread) {
  constexpr int kColumns = kSize / 4;  // of a thread
  const int row = thread / 4, column = thread % 4 * kColumns;
  float sums[kColumns] = {};
#pragma unroll 8
  for (int m = 0; m < kSize; ++m) {
    const float a = left[row * kStride + m];
    const float4* b = reinterpret_cast<const float4*>(right + m * kStride + column);
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const float4 part = b[i / 4];
      sums[i] += a * part.x, sums[i + 1] += a * part.y;
      sums[i + 2] += a * part.z, sums[i + 3] += a * part.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) out[row * kStride + column + i] = sign * sums[i];
}

// The inverse of the unit triangle I + A of a chunk; zeros above the diagonal but for the square
// of the last 32 columns in the first 32 rows, which is left out. A triangle of twice the size has
// the two inverses on its diagonal, and below them -(lower inverse) (A's square) (upper inverse),
// whose last two are multiplied into what A has above the diagonal. The CTA's first 128 threads do.
template <int kThreads>
__device__ __forceinline__ void invert_chunk(float* inverse, float* A) {
  const bool has_part = kThreads == kTransformThreads || threadIdx.x < kTransformThreads;
  const int lane = threadIdx.x % 32, begin = threadIdx.x / 32 * 16;
  if (!has_part) {
  } else if (lane < 16) {
    invert_triangle<16>(inverse, A, begin, lane);
  } else if (begin % 32 == 0) {
#pragma unroll
    for (int i = 0; i < 16; ++i) inverse[(begin + i) * kStride + begin + lane] = 0.f;
  }
  __syncthreads();
  const int pair = threadIdx.x / 64 * 32, thread = threadIdx.x % 64;
  float* const upper = inverse + pair * kStride + pair;
  float* const above = A + pair * kStride + pair + 16;
  if (has_part) multiply_squares<16>(above, A + (pair + 16) * kStride + pair, upper, 1.f, thread);
  __syncthreads();
  if (has_part)
    multiply_squares<16>(upper + 16 * kStride, upper + 16 * kStride + 16, above, -1.f, thread);
  __syncthreads();
  if (has_part) multiply_squares<32>(A + 32, A + 32 * kStride, inverse, 1.f, threadIdx.x);
  __syncthreads();
  if (has_part)
    multiply_squares<32>(inverse + 32 * kStride, inverse + 32 * kStride + 32, A + 32, -1.f,
                         threadIdx.x);
  __syncthreads();
}

// A chunk's numbers per token.
struct ChunkTokens {
  float* log2_decays;  // from the chunk's start, the token included
  float* betas;
  float* key_norms;    // reciprocals
  float* query_norms;  // reciprocals
  float* first_half;   // [1]: sum of the first 32 logarithms
};

// The decay's logarithm and the learning rate of a token.
struct TokenGates {
  float log2_decay, beta;
};

template <typename Traits>
__device__ __forceinline__ TokenGates token_gates(const ChunkDeltaRuleParams& all, int64_t token,
                                                  int head) {
  const DeltaRuleParams& params = all.recurrence;
  if constexpr (Traits::kDelta) {
    TokenGates gates = {0.f, 1.f};
    if (params.gate.data != nullptr) {
      gates.log2_decay = log2_decay(params, *token_address<float>(params.gate, 0, token, head));
    }
    if (params.beta.data != nullptr) {
      gates.beta = *token_address<float>(params.beta, 0, token, head);
    }
    if (params.beta_is_logit) gates.beta = sigmoid(gates.beta);
    return gates;
  } else {
    using GateT = typename Traits::GateT;
    float dt = to_float(*token_address<GateT>(params.gate, 0, token, head));
    if (params.dt_bias != nullptr) dt += static_cast<const float*>(params.dt_bias)[head];
    if (all.ssd.softplus) dt = softplus(dt);
    dt = fminf(fmaxf(dt, all.ssd.lowest_dt), all.ssd.highest_dt);
    return {params.a_log[head] * dt * math::log2e, dt};
  }
}

template <typename Traits>
__device__ __forceinline__ void load_gates(const ChunkTokens& tokens,
                                           const ChunkDeltaRuleParams& all, const Chunk& chunk,
                                           int head) {
  const int i = threadIdx.x;
  float log_of = 0.f;
  if (i < kChunkSize) {
    TokenGates gates = {0.f, 0.f};
    if (i < chunk.num_tokens) gates = token_gates<Traits>(all, chunk.first_token + i, head);
    log_of = gates.log2_decay;
    tokens.betas[i] = gates.beta;
    if constexpr (!Traits::kDelta) {
      tokens.key_norms[i] = gates.beta;  // updates are dt x, here a factor of B
      tokens.query_norms[i] = 1.f;
    }
  }
  log_of = prefix_sum(log_of);
  if (i == 31) tokens.first_half[0] = log_of;
  __syncthreads();
  if (i < kChunkSize) tokens.log2_decays[i] = log_of + (i < 32 ? 0.f : tokens.first_half[0]);
}

// The chunk's factors for the second stage.
__device__ __forceinline__ void store_factors(float* factors, const ChunkTokens& tokens,
                                              float scale) {
  const int i = threadIdx.x;
  if (i >= kChunkSize) return;
  const float last = tokens.log2_decays[kChunkSize - 1], own = tokens.log2_decays[i];
  factors[kKeyFactor * kChunkSize + i] = exp2f(own) * tokens.key_norms[i];
  factors[kQueryFactor * kChunkSize + i] = scale * exp2f(own) * tokens.query_norms[i];
  factors[kUpdateFactor * kChunkSize + i] = exp2f(last - own) * tokens.key_norms[i];
  if (i == 0) factors[kChunkDecay * kChunkSize] = exp2f(last);
}

}  // namespace detail

// Products of a warp's 16 rows with all keys: rows of keys for A, rows of queries for the scores.
template <typename Traits>
struct ChunkProducts {
  using T = typename Traits::T;
  using KeyTile = Tile<kChunkSize, Traits::kHeadDimK>;
  float keys[kChunkSize / 8][4] = {}, queries[kChunkSize / 8][4] = {};

  __device__ __forceinline__ void compute(const KeyTile& k, const KeyTile& q) {
    constexpr int kSteps = Traits::kHeadDimK / 16;
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
    const auto load = [&](uint32_t (&a)[kSteps][4], const KeyTile& tile) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::ldmatrix_x4(a[step], tile.address(first_row + lane % 16, 2 * step + lane / 16));
      }
    };
    uint32_t a[kSteps][4];
    if constexpr (Traits::kDelta) {
      load(a, k);
      multiply(keys, a, k, first_row);
    }
    load(a, q);
    multiply(queries, a, k, first_row);
  }

  // Skips blocks above the diagonal.
  template <int kSteps>
  __device__ __forceinline__ static void multiply(float (&sums)[kChunkSize / 8][4],
                                                  const uint32_t (&a)[kSteps][4], const KeyTile& k,
                                                  int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kChunkSize / 8; j += 2) {
      if (8 * j > first_row) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k.address(8 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
        ptx::mma_m16n8k16<T>(sums[j], a[step], b[0], b[1]);
        ptx::mma_m16n8k16<T>(sums[j + 1], a[step], b[2], b[3]);
      }
    }
  }

  // Weights the products by decays, norms and beta. Stores A below the diagonal and in the blocks
  // on it, and all scores, with zeros above the diagonal. `skip` is added on it.
  __device__ __forceinline__ void store(float* A, T* scores, const detail::ChunkTokens& tokens,
                                        float scale, float skip) const {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
    float log2_decay[2], query_weight[2], key_weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + 8 * half;
      log2_decay[half] = tokens.log2_decays[row];
      query_weight[half] = scale * tokens.query_norms[row];
      key_weight[half] = tokens.key_norms[row] * tokens.betas[row];
    }
#pragma unroll
    for (int j = 0; j < kChunkSize / 8; ++j) {
      const int column = 8 * j + lane % 4 * 2;
      const bool is_above = 8 * j > first_row + 8;  // the whole block
      const float2 log2_decays = reinterpret_cast<const float2*>(tokens.log2_decays)[column / 2];
      const float2 norms = reinterpret_cast<const float2*>(tokens.key_norms)[column / 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + lane / 4 + 8 * half;
        auto* to = reinterpret_cast<uint32_t*>(scores + row * kChunkSize + column);
        if (is_above) {
          *to = 0;
          continue;
        }
        const float low = exp2f(fminf(log2_decay[half] - log2_decays.x, 0.f)) * norms.x;
        const float high = exp2f(fminf(log2_decay[half] - log2_decays.y, 0.f)) * norms.y;
        if constexpr (Traits::kDelta) {
          *reinterpret_cast<float2*>(A + row * detail::kStride + column) = {
              low * key_weight[half] * keys[j][2 * half],
              high * key_weight[half] * keys[j][2 * half + 1]};
        }
        float first = column <= row ? low * query_weight[half] * queries[j][2 * half] : 0.f;
        float second = column < row ? high * query_weight[half] * queries[j][2 * half + 1] : 0.f;
        if constexpr (!Traits::kDelta) {
          if (column == row) first += skip;
          if (column + 1 == row) second += skip;
        }
        *to = PackedPair<T>::pack(first, second);
      }
    }
  }
};

// The CTA computes one chunk of one head.
template <typename Traits>
__device__ __forceinline__ void transform_chunk(const ChunkDeltaRuleParams& all, char* memory,
                                                const Chunk& chunk, int64_t slot, int head) {
  using T = typename Traits::T;
  using Shared = ChunkTransformShared<Traits>;
  constexpr int kThreads = detail::kTransformThreads, kSquare = kChunkSize * kChunkSize;
  constexpr int kStride = detail::kStride;
  const DeltaRuleParams& params = all.recurrence;
  const uint32_t shared = ptx::shared_address(memory);
  const Tile<kChunkSize, Traits::kHeadDimK> k{shared}, q{shared + Shared::kTileBytes};
  copy_tile<kThreads>(
      k, token_address<const T>(params.k, 0, chunk.first_token, params.k_group.divide(head)),
      params.k.token_stride, chunk.num_tokens);
  copy_tile<kThreads>(
      q, token_address<const T>(params.q, 0, chunk.first_token, params.q_group.divide(head)),
      params.q.token_stride, chunk.num_tokens);
  ptx::cp_async_commit();

  float* numbers = reinterpret_cast<float*>(memory + 2 * Shared::kTileBytes);
  const detail::ChunkTokens tokens{numbers, numbers + kChunkSize, numbers + 2 * kChunkSize,
                                   numbers + 3 * kChunkSize, numbers + 4 * kChunkSize};
  detail::load_gates<Traits>(tokens, all, chunk, head);
  ptx::cp_async_wait<0>();
  __syncthreads();
  if constexpr (Traits::kDelta) {
    detail::row_norms<T>(tokens.key_norms, k, memory, shared, params.normalize_qk);
    detail::row_norms<T>(tokens.query_norms, q, memory, shared, params.normalize_qk);
  }
  ChunkProducts<Traits> products;
  products.compute(k, q);
  __syncthreads();

  const int64_t index = slot * params.state_heads + head;
  float* A = reinterpret_cast<float*>(memory);
  float* inverse = reinterpret_cast<float*>(memory + Shared::kTileBytes);
  const float skip = all.ssd.skip != nullptr ? all.ssd.skip[head] : 0.f;
  products.store(A, static_cast<T*>(all.workspace.scores) + index * kSquare, tokens, params.scale,
                 skip);
  detail::store_factors(all.workspace.factors + index * 4 * kChunkSize, tokens, params.scale);
  if constexpr (!Traits::kDelta) return;
  __syncthreads();
  detail::invert_chunk<kThreads>(inverse, A);
  T* solve = static_cast<T*>(all.workspace.solve) + index * kSquare;
#pragma unroll
  for (int i = 0; i < kSquare / (4 * kThreads); ++i) {
    const int at = 4 * (i * kThreads + threadIdx.x), row = at / kChunkSize,
              column = at % kChunkSize;
    float4 values = *reinterpret_cast<const float4*>(inverse + row * kStride + column);
    const float4 betas = *reinterpret_cast<const float4*>(tokens.betas + column);
    if (row < 32 && column >= 32) values = {};
    *reinterpret_cast<uint2*>(solve + at) = {
        PackedPair<T>::pack(values.x * betas.x, values.y * betas.y),
        PackedPair<T>::pack(values.z * betas.z, values.w * betas.w)};
  }
}

// Calls transform(chunk, slot, head) for the CTA's chunks: slots in order, all heads of a slot
// before the next, because the second stage reads them so.
template <typename Transform>
__device__ __forceinline__ void transform_chunks(const ChunkDeltaRuleParams& all,
                                                 const Transform& transform) {
  const DeltaRuleParams& params = all.recurrence;
  ptx::grid_dependency_wait();
  // The second stage may begin with the tensors of earlier kernels, so this comes after the wait.
  ptx::grid_launch_dependents();
  const int64_t num_items = int64_t{all.num_slots} * params.state_heads;
  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int head = item % params.state_heads;
    const int64_t slot = item / params.state_heads;
    const Chunk chunk = Chunk::of_slot(params, slot);
    if (chunk.sequence >= 0) transform(chunk, slot, head);
    if (all.progress == nullptr) continue;
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::count_done(all.progress + slot / kSlotsPerCounter * params.state_heads + head);
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(detail::kTransformThreads, 4)
    chunk_transform_kernel(const __grid_constant__ ChunkDeltaRuleParams all) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  transform_chunks(all, [&](const Chunk& chunk, int64_t slot, int head) {
    transform_chunk<Traits>(all, dynamic_shared, chunk, slot, head);
  });
}

}  // namespace flashinfer
