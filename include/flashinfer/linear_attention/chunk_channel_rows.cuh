// Tokens of a chunk in the first stage of the delta rule with a decay per key channel
// (chunk_channel_transform.cuh): a warp has 8 tokens, and a lane the same channels of all of them.
// The warp makes the operands of this stage's matrix products and of the next stage's, and it sums
// up the triangle of products among its 8 tokens.
#pragma once

#include <cstdint>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/linear_attention/chunk_transform.cuh>

namespace flashinfer {

template <typename T_, typename StateT_, typename GateT_, typename BetaT_, typename BiasT_,
          int kHeadDimK_>
struct ChunkKdaTraits {
  using T = T_;
  using StateT = StateT_;
  using GateT = GateT_;
  using BetaT = BetaT_;
  using BiasT = BiasT_;
  static constexpr int kHeadDimK = kHeadDimK_;
  static constexpr bool kDelta = true, kChannelGate = true;
};

// The operands of the squares of one size: 64 rows of keys, which stand left of the border or right
// of it, and 32 of queries, which belong to tokens after it.
template <typename Traits>
using SquareTile = Tile<kChunkSize * 3 / 2, Traits::kHeadDimK>;

template <typename Traits>
struct ChannelTransformShared {
  static constexpr int kDim = Traits::kHeadDimK;
  static constexpr int kThreads = 256;
  static constexpr int kRows = 8;  // of a warp
  static constexpr int kLevels = 3;
  static constexpr int kScoreStride = kChunkSize + 8;
  static constexpr int kTileBytes = SquareTile<Traits>::kBytes;
  // A, its inverse and the scores overwrite the tiles after these are multiplied.
  static constexpr int kMatrixBytes = kChunkSize * detail::kStride * 4;
  static constexpr int kResultBytes = 2 * kMatrixBytes + kChunkSize * kScoreStride * 2;
  static constexpr int kOperandBytes =
      kLevels * kTileBytes > kResultBytes ? kLevels * kTileBytes : round_up(kResultBytes, 1024);
  static constexpr int kNumberBytes = 3 * kChunkSize * 4 + kChunkSize / kRows * kDim * 4;
  static constexpr int kBytes = kOperandBytes + kNumberBytes;
  static_assert(kThreads / 32 * kRows == kChunkSize);

  char* memory;
  uint32_t base;  // of memory
  __device__ __forceinline__ SquareTile<Traits> tile(int level) const {
    return {base + level * kTileBytes};
  }
  __device__ __forceinline__ float* A() const { return reinterpret_cast<float*>(memory); }
  __device__ __forceinline__ float* inverse() const {
    return reinterpret_cast<float*>(memory + kMatrixBytes);
  }
  __device__ __forceinline__ typename Traits::T* scores() const {
    return reinterpret_cast<typename Traits::T*>(memory + 2 * kMatrixBytes);
  }
  __device__ __forceinline__ float* betas() const {
    return reinterpret_cast<float*>(memory + kOperandBytes);
  }
  __device__ __forceinline__ float* key_norms() const { return betas() + kChunkSize; }
  __device__ __forceinline__ float* query_norms() const { return betas() + 2 * kChunkSize; }
  // [8, kDim]: products of the decays of 8 tokens.
  __device__ __forceinline__ float* block_decays() const { return betas() + 3 * kChunkSize; }
};

namespace detail {

// The lane keeps the half of its 2 kHalf numbers that bit kHalf of its index says, with those of
// the lane whose bit is the other added, and so on until one is left.
template <int kHalf, int kCount>
__device__ __forceinline__ float scatter_halves(const float (&values)[kCount]) {
  static_assert(kCount == 2 * kHalf);
  const bool is_upper = threadIdx.x & kHalf;
  float kept[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = is_upper ? values[i] : values[i + kHalf];
    kept[i] = is_upper ? values[i + kHalf] : values[i];
    kept[i] += __shfl_xor_sync(0xffffffffu, sent, kHalf);
  }
  if constexpr (kHalf > 1) {
    return scatter_halves<kHalf / 2>(kept);
  } else {
    return kept[0];
  }
}

// Sums of 16 numbers over a warp's lanes: lane l gets that of number l % 16.
__device__ __forceinline__ float scatter_sums(const float (&values)[16]) {
  const float sum = scatter_halves<8>(values);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 16);
}

// A warp's 8 tokens of a chunk; a lane has kPerLane neighbouring channels.
template <typename Traits>
struct ChannelRows {
  using T = typename Traits::T;
  using GateT = typename Traits::GateT;
  using BetaT = typename Traits::BetaT;
  using BiasT = typename Traits::BiasT;
  using Shared = ChannelTransformShared<Traits>;
  static constexpr int kRows = Shared::kRows, kDim = Shared::kDim, kPerLane = kDim / 32;
  using Part = Vector<T, kPerLane>;
  using Channels = float[kPerLane];

  const ChunkDeltaRuleParams& all;
  const Shared& shared;
  int warp, lane;
  Part k[kRows], q[kRows];
  Channels decays[kRows];
  float triangle[4];  // element 16 i + lane % 16 of the triangle's 64

  __device__ __forceinline__ int first_row() const { return warp * kRows; }
  __device__ __forceinline__ int channel() const { return lane * kPerLane; }

  // The rows' keys and queries; those beyond the sequence are zeros.
  __device__ __forceinline__ void load_rows(const Chunk& chunk, int head) {
    const DeltaRuleParams& params = all.recurrence;
    const int count = chunk.num_tokens - first_row();
    const int64_t first = chunk.first_token + first_row();
    const T* from_k =
        token_address<const T>(params.k, 0, first, params.k_group.divide(head)) + channel();
    const T* from_q =
        token_address<const T>(params.q, 0, first, params.q_group.divide(head)) + channel();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      k[row].clear();
      q[row].clear();
      if (row < count) k[row].load(from_k);
      if (row < count) q[row].load(from_q);
      from_k += params.k.token_stride;
      from_q += params.q.token_stride;
    }
  }

  // The rows' decays and learning rates; beyond the sequence 1 and 0.
  __device__ __forceinline__ void load_gates(const Chunk& chunk, int head) {
    const DeltaRuleParams& params = all.recurrence;
    Vector<GateT, kPerLane> gates[kRows];
    const int count = chunk.num_tokens - first_row();
    const int64_t first = chunk.first_token + first_row();
    const GateT* from = token_address<const GateT>(params.gate, 0, first, head) + channel();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      gates[row].clear();
      if (row < count) gates[row].load(from);
      from += params.gate.token_stride;
    }
    if (lane < kRows) {
      float beta = lane < count ? 1.f : 0.f;
      if (lane < count && params.beta.data != nullptr) {
        beta = to_float(*token_address<const BetaT>(params.beta, 0, first + lane, head));
        if (params.beta_is_logit) beta = approximate_sigmoid(beta);
      }
      shared.betas()[first_row() + lane] = beta;
    }
    Channels bias = {};
    if (params.dt_bias != nullptr) {
      Vector<BiasT, kPerLane> biases;
      biases.load(static_cast<const BiasT*>(params.dt_bias) + int64_t{head} * kDim + channel());
      biases.to_floats(bias);
    }
    const float exp_a = params.a_log != nullptr ? expf(params.a_log[head]) : 0.f;
    switch (params.gate_form) {
      case GateForm::kLinear:
        return set_decays(gates, count, [&](float gate, int) { return gate; });
      case GateForm::kLog:
        return set_decays(gates, count, [&](float gate, int) { return approximate_exp(gate); });
      case GateForm::kSoftplus:
        return set_decays(gates, count, [&](float gate, int i) {
          return approximate_exp(-exp_a * approximate_softplus(gate + bias[i]));
        });
      default:
        return set_decays(gates, count, [&](float gate, int i) {
          return approximate_exp(params.lower_bound *
                                 approximate_sigmoid(exp_a * (gate + bias[i])));
        });
    }
  }

  template <typename Decay>
  __device__ __forceinline__ void set_decays(const Vector<GateT, kPerLane> (&gates)[kRows],
                                             int count, const Decay& decay_of) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      Channels inputs;
      gates[row].to_floats(inputs);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const float decay = decay_of(inputs[i], i);
        decays[row][i] = row < count ? decay : 1.f;
      }
    }
  }

  // Reciprocals of the rows' norms, or 1.
  __device__ __forceinline__ void store_norms() const {
    float norm = 1.f;
    if (all.recurrence.normalize_qk) {
      float squares[2 * kRows] = {};
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          squares[row] += k[row][i] * k[row][i];
          squares[kRows + row] += q[row][i] * q[row][i];
        }
      }
      norm = rsqrtf(scatter_sums(squares) + 1e-6f);
    }
    float* const norms = lane < kRows ? shared.key_norms() : shared.query_norms();
    if (lane < 2 * kRows) norms[first_row() + lane % kRows] = norm;
  }

  __device__ __forceinline__ void store_block_decays() const {
    Vector<float, kPerLane> product;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      product.elements[i] = decays[0][i];
#pragma unroll
      for (int row = 1; row < kRows; ++row) product.elements[i] *= decays[row][i];
    }
    product.store(shared.block_decays() + warp * kDim + channel());
  }

  // The products of all pairs of the 8 tokens, row by row: k_i k_j for j < i, then q_i k_j for
  // j <= i, which are elements i i to i i + 2 i. Earlier keys decay from row to row.
  __device__ __forceinline__ void multiply_triangle() {
    Channels keys[kRows];
    float sums[kRows * kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Channels query;
      k[i].to_floats(keys[i]);
      q[i].to_floats(query);
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        float of_key = 0.f, of_query = 0.f;
#pragma unroll
        for (int c = 0; c < kPerLane; ++c) {
          if (j < i) {
            keys[j][c] *= decays[i][c];
            of_key += keys[i][c] * keys[j][c];
          }
          of_query += query[c] * keys[j][c];
        }
        if (j < i) sums[i * i + j] = of_key;
        sums[i * i + i + j] = of_query;
      }
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // as soon as a part's 16 numbers are there
        if (16 * part + 15 < i * i || 16 * part + 15 > i * i + 2 * i) continue;
        float values[16];
#pragma unroll
        for (int m = 0; m < 16; ++m) values[m] = sums[16 * part + m];
        triangle[part] = scatter_sums(values);
      }
    }
  }

  // The product of the decays of blocks `begin` to `end` - 1.
  __device__ __forceinline__ void decay_over(Channels& product, int begin, int end) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) product[i] = 1.f;
#pragma unroll 1
    for (int block = begin; block < end; ++block) {
      Vector<float, kPerLane> factor;
      factor.load(shared.block_decays() + block * kDim + channel());
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) product[i] *= factor.elements[i];
    }
  }

  // Squares of a level have 8 << level tokens; every other block of so many is below its border.
  __device__ __forceinline__ bool is_below(int level) const { return warp >> level & 1; }

  // The decay over the blocks between this one and its border at a level.
  __device__ __forceinline__ void decay_to_border(Channels& product, int level) const {
    const int begin = warp >> level << level;
    if (is_below(level)) {
      decay_over(product, begin, warp);
    } else {
      decay_over(product, warp + 1, begin + (1 << level));
    }
  }

  __device__ __forceinline__ static void store(T* to, const Part& part, const Channels& decay,
                                               const Channels& further, float factor) {
    Channels values;
    part.to_floats(values);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] *= decay[i] * further[i] * factor;
    Part result;
    result.from_floats(values);
    result.store(to);
  }

  // Where a tile has this lane's channels of the first row of a block of 8.
  __device__ __forceinline__ uint32_t offset(int block) const {
    constexpr int kLanes = 8 / kPerLane;  // of a unit
    return swizzled_offset<SquareTile<Traits>::kRows>(block * kRows, lane / kLanes) +
           lane % kLanes * kPerLane * 2;
  }
  // The same of another row of the block: the swizzle is by the row's number in it.
  __device__ __forceinline__ T* place(int level, uint32_t offset, int row) const {
    return reinterpret_cast<T*>(shared.memory + level * Shared::kTileBytes + row * 128 +
                                (offset ^ row * 16));
  }

  // All operands of matrix products: with the decays from the chunk's start or a border to the
  // token, then with those from the token to a border or the chunk's end.
  __device__ __forceinline__ void store_operands(T* operands) const {
    constexpr int kLevels = Shared::kLevels, kBlocks = kChunkSize / kRows;
    constexpr int kSize = kChunkSize * kDim;
    Channels to_start, to_end, to_border[kLevels], decay;
    const uint32_t keys = offset(warp);
    uint32_t queries[kLevels];  // only those below borders have rows
    decay_over(to_start, 0, warp);
    decay_over(to_end, warp + 1, kBlocks);
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      decay_to_border(to_border[level], level);
      queries[level] = offset(kBlocks + (warp >> (level + 1) << level) + warp % (1 << level));
    }
    T* const own = operands + first_row() * kDim + channel();
    const float* const key_norms = shared.key_norms() + first_row();
    const float* const query_norms = shared.query_norms() + first_row();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) decay[i] = 1.f;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) decay[i] *= decays[row][i];
      T* const to = own + row * kDim;
      store(to, k[row], decay, to_start, key_norms[row]);
      store(to + kSize, q[row], decay, to_start, query_norms[row] * all.recurrence.scale);
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        if (!is_below(level)) continue;
        store(place(level, keys, row), k[row], decay, to_border[level], 1.f);
        store(place(level, queries[level], row), q[row], decay, to_border[level], 1.f);
      }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) decay[i] = 1.f;
#pragma unroll
    for (int row = kRows - 1; row >= 0; --row) {
      store(own + 2 * kSize + row * kDim, k[row], decay, to_end, key_norms[row]);
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        if (is_below(level)) continue;
        store(place(level, keys, row), k[row], decay, to_border[level], 1.f);
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) decay[i] *= decays[row][i];
    }
  }
};

}  // namespace detail

}  // namespace flashinfer
