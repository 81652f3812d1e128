// The delta rule token by token on states whose value channels are contiguous: [head_dim_k,
// head_dim_v]. A CTA has 32 value channels of a head; a thread has one 16-byte vector of them in
// every kGroups-th key's row. Sums over keys cross lanes by shuffles and warps by shared memory.
// Tokens are prepared as in delta_rule.cuh.
#pragma once

#include <flashinfer/linear_attention/delta_rule.cuh>

namespace flashinfer {

template <typename Traits>
struct KeyMajorBlock {
  using T = typename Traits::T;
  using StateT = typename Traits::StateT;
  static constexpr int kDim = Traits::kHeadDimK, kThreads = Traits::kThreads;
  static constexpr int kColumns = 32, kWarps = kThreads / 32;
  static constexpr int kVecSize = 16 / static_cast<int>(sizeof(StateT));
  static constexpr int kLanes = kColumns / kVecSize;  // of a key's row
  static constexpr int kGroups = kThreads / kLanes;   // keys at a time
  static constexpr int kKeys = kDim / kGroups;        // of a thread
  static_assert(kKeys * kGroups == kDim);
  using Token = detail::DeltaRuleToken<Traits, kColumns>;
  using Fetch = detail::DeltaRuleFetch<Traits, kColumns>;
  static constexpr int kSumBytes = 2 * kWarps * kColumns * 4;
  static constexpr int kSharedBytes = kWarps * static_cast<int>(sizeof(Token)) + kSumBytes;

  const DeltaRuleParams& params;
  Token* tokens;  // kWarps of them
  float* sums;    // [2, kWarps, kColumns]: of S k and S q
  int32_t head, first_column, num_columns;
  int64_t batch;
  float state[kKeys][kVecSize];

  __device__ __forceinline__ static int column() { return threadIdx.x % kLanes * kVecSize; }
  __device__ __forceinline__ static int key(int i) { return i * kGroups + threadIdx.x / kLanes; }

  __device__ __forceinline__ StateT* address(const StatePool& pool, int64_t slot, int i) const {
    return static_cast<StateT*>(pool.data) + slot * pool.slot_stride + head * pool.head_stride +
           int64_t{key(i)} * params.head_dim_v + first_column + column();
  }

  __device__ __forceinline__ void load(int64_t slot) {
    Vector<StateT, kVecSize> rows[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (column() < num_columns) rows[i].load(address(params.state, slot, i));
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) rows[i].to_floats(state[i]);
  }

  __device__ __forceinline__ void store(int64_t slot) const {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      Vector<StateT, kVecSize> row;
      row.from_floats(state[i]);
      if (column() < num_columns) row.store(address(params.state_out, slot, i));
    }
  }

  // Sums over the keys of all threads; `which`: 0 or 1, the place of the sums.
  __device__ __forceinline__ void add_up(float (&parts)[kVecSize], int which) const {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
#pragma unroll
      for (int offset = 16; offset >= kLanes; offset /= 2) {
        parts[j] += __shfl_xor_sync(0xffffffffu, parts[j], offset);
      }
      if (threadIdx.x % 32 < kLanes) {
        sums[(which * kWarps + threadIdx.x / 32) * kColumns + column() + j] = parts[j];
      }
    }
  }

  __device__ __forceinline__ float sum_of(int which, int j) const {
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += sums[(which * kWarps + warp) * kColumns + column() + j];
    }
    return sum;
  }

  __device__ __forceinline__ void update(const Token& token, T* out) {
    float sk[kVecSize] = {}, sq[kVecSize] = {};
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float decay = token.decay[Traits::kChannelGate ? key(i) : 0];
      const float k = token.k[key(i)], q = token.q[key(i)];
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        state[i][j] *= decay;
        sk[j] += state[i][j] * k;
        sq[j] += state[i][j] * q;
      }
    }
    add_up(sk, 0);
    add_up(sq, 1);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      const float delta = token.beta * (token.v[column() + j] - sum_of(0, j));
#pragma unroll
      for (int i = 0; i < kKeys; ++i) state[i][j] += delta * token.k[key(i)];
      if (threadIdx.x < kLanes && column() + j < num_columns) {
        out[column() + j] = from_float<T>(sum_of(1, j) + delta * token.kq);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run(const TokenRange& range, int64_t token_batch) {
    const int64_t read_slot = params.read_slot.at(batch, 0);
    const auto out_of = [&](int t) {
      return token_address<T>(params.out, token_batch, range.first + t, head) + first_column;
    };
    if (!params.state.has(read_slot)) {
      for (int t = 0; t < range.count; ++t) {
        const int i = threadIdx.x;
        if (i < min(num_columns, kColumns)) out_of(t)[i] = from_float<T>(0.f);
      }
      return;
    }
    load(read_slot);
    for (int begin = 0; begin < range.count; begin += kWarps) {
      const int own = begin + threadIdx.x / 32;
      if (own < range.count) {
        Fetch part;
        part.load(params, token_batch, range.first + own, head, first_column, num_columns);
        part.store(tokens[threadIdx.x / 32], params);
      }
      __syncthreads();
      for (int t = begin; t < min(begin + kWarps, range.count); ++t) {
        update(tokens[t - begin], out_of(t));
      }
    }
    const int64_t write_slot = params.write_slot.at(batch, 0);
    if (params.state_out.data != nullptr && params.state_out.has(write_slot)) store(write_slot);
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    delta_rule_key_major_kernel(const __grid_constant__ DeltaRuleParams params) {
  using Block = KeyMajorBlock<Traits>;
  extern __shared__ __align__(128) char dynamic_shared[];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int first_column = blockIdx.x * Block::kColumns;
  const int64_t batch = blockIdx.z;
  auto* tokens = reinterpret_cast<typename Block::Token*>(dynamic_shared);
  Block block{params,
              tokens,
              reinterpret_cast<float*>(tokens + Block::kWarps),
              static_cast<int32_t>(blockIdx.y),
              first_column,
              params.head_dim_v - first_column,
              batch};
  block.run(token_range(params.cu_seqlens, params.cu_seqlens_is_int64, batch, params.num_tokens),
            params.cu_seqlens != nullptr ? 0 : batch);
}

#ifndef __CUDACC_RTC__

// One state per sequence: no state per token and no snapshots.
template <typename Traits>
cudaError_t launch_delta_rule_key_major(const DeltaRuleParams& params, bool enable_pdl,
                                        cudaStream_t stream) {
  using Block = KeyMajorBlock<Traits>;
  const dim3 grid(ceil_div(params.head_dim_v, Block::kColumns), params.state_heads,
                  params.batch_size);
  return launch_kernel(delta_rule_key_major_kernel<Traits>, grid, dim3(Traits::kThreads),
                       Block::kSharedBytes, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
