// The delta rule token by token: S = S diag(decay); S += beta (v - S k) k^T; out = scale S q.
//
// A state row belongs to one value channel and rows are independent, so a row's lanes keep it in
// registers over all tokens of the call, and the state is read once and written once. The grid is
// (row blocks, heads, batch). A CTA has kStep rows per group of lanes at a time, kPasses times.
//
// The operands that rows share at a token (q, k, v, gates) are prepared in shared memory while the
// state is loaded: a warp prepares a token, kTokens tokens at a time.
//
// The output follows from the sums before the update, S q + (beta (v - S k)) (k q), so both sums
// of a token are reduced together.
//
// Measurements, also of what lost: docs/tuning/linear_attention.md.
#pragma once

#include <cstdint>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/linear_attention/delta_rule_params.h>
#include <flashinfer/linear_attention/gate.cuh>
#include <flashinfer/linear_attention/state_rows.cuh>
#include <flashinfer/linear_attention/token_range.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename T_, typename StateT_, typename GateT_, typename BetaT_, typename BiasT_,
          int kHeadDimK_, bool kChannelGate_>
struct DeltaRuleTraits {
  using T = T_;
  using StateT = StateT_;
  using GateT = GateT_;
  using BetaT = BetaT_;
  using BiasT = BiasT_;
  static constexpr int kHeadDimK = kHeadDimK_;
  static constexpr bool kChannelGate = kChannelGate_;
  using Layout = RowLayout<StateT, kHeadDimK>;
  static constexpr int kThreads = 128;
  static constexpr int kGroups = kThreads / Layout::kLanes;  // rows that a CTA has at a time
};

namespace detail {

__device__ __forceinline__ float decay_of(const DeltaRuleParams& params, float input, float bias,
                                          float exp_a) {
  switch (params.gate_form) {
    case GateForm::kLinear:
      return input;
    case GateForm::kLog:
      return expf(input);
    case GateForm::kSoftplus:
      return expf(-exp_a * softplus(input + bias));
    default:
      return expf(params.lower_bound * sigmoid(exp_a * (input + bias)));
  }
}

// Operands that the rows of a head share at one token, in shared memory.
template <typename Traits, int kRows>
struct alignas(16) DeltaRuleToken {
  static constexpr int kDim = Traits::kHeadDimK;
  float q[kDim], k[kDim];  // q with its norm and scale
  float decay[Traits::kChannelGate ? kDim : 4];
  float v[kRows];
  float beta;
  float kq;  // the product of k and q
};

// A warp's part in preparing a token. All loads are issued at once, before any result is used:
// while others fill the memory's queues, each wait takes as long as the state itself.
template <typename Traits, int kRows>
struct DeltaRuleFetch {
  using T = typename Traits::T;
  using GateT = typename Traits::GateT;
  using BetaT = typename Traits::BetaT;
  using BiasT = typename Traits::BiasT;
  static constexpr int kDim = Traits::kHeadDimK, kPerLane = kDim / 32;
  static constexpr int kGates = Traits::kChannelGate ? kPerLane : 1;
  static constexpr int kValues = ceil_div(kRows, 32);

  Vector<T, kPerLane> q, k;
  T v[kValues];
  GateT gate[kGates];
  BiasT bias[kGates];
  BetaT beta;
  float a_log;

  __device__ __forceinline__ void load(const DeltaRuleParams& params, int64_t batch, int64_t token,
                                       int32_t head, int32_t first_row, int32_t num_rows) {
    const int lane = threadIdx.x % 32;
    q.load(token_address<const T>(params.q, batch, token, params.q_group.divide(head)) +
           lane * kPerLane);
    k.load(token_address<const T>(params.k, batch, token, params.k_group.divide(head)) +
           lane * kPerLane);
    const T* from_v =
        token_address<const T>(params.v, batch, token, params.v_group.divide(head)) + first_row;
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = from_v[min(32 * i + lane, num_rows - 1)];
    // An absent operand is read from q's address, and not used.
    const auto* some = static_cast<const char*>(params.q.data);
    const auto* from_gate = reinterpret_cast<const GateT*>(some);
    if (params.gate.data != nullptr) {
      from_gate = token_address<const GateT>(params.gate, batch, token, head);
    }
    const bool has_bias = params.dt_bias != nullptr;
    const auto* from_bias = static_cast<const BiasT*>(has_bias ? params.dt_bias : some);
#pragma unroll
    for (int i = 0; i < kGates; ++i) {
      const int at = Traits::kChannelGate ? 32 * i + lane : 0;
      gate[i] = from_gate[params.gate.data != nullptr ? at : 0];
      bias[i] = from_bias[!has_bias ? 0 : Traits::kChannelGate ? head * kDim + at : head];
    }
    const auto* from_beta = reinterpret_cast<const BetaT*>(some);
    if (params.beta.data != nullptr) {
      from_beta = token_address<const BetaT>(params.beta, batch, token, head);
    }
    beta = *from_beta;
    a_log = params.a_log != nullptr ? params.a_log[head] : 0.f;
  }

  // 1e-6 under the roots keeps a row of zeros at zero.
  __device__ __forceinline__ void store(DeltaRuleToken<Traits, kRows>& to,
                                        const DeltaRuleParams& params) const {
    const int lane = threadIdx.x % 32;
    float qq = 0.f, kk = 0.f, kq = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      qq += q[i] * q[i];
      kk += k[i] * k[i];
      kq += k[i] * q[i];
    }
    kq = warp_reduce_sum(kq);
    float q_factor = params.scale, k_factor = 1.f;
    if (params.normalize_qk) {
      q_factor *= rsqrtf(warp_reduce_sum(qq) + 1e-6f);
      k_factor = rsqrtf(warp_reduce_sum(kk) + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      to.q[lane * kPerLane + i] = q[i] * q_factor;
      to.k[lane * kPerLane + i] = k[i] * k_factor;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (kRows % 32 == 0 || 32 * i + lane < kRows) to.v[32 * i + lane] = to_float(v[i]);
    }
    const float exp_a = expf(a_log);
#pragma unroll
    for (int i = 0; i < kGates; ++i) {
      const float offset = params.dt_bias != nullptr ? to_float(bias[i]) : 0.f;
      const float decay =
          params.gate.data != nullptr ? decay_of(params, to_float(gate[i]), offset, exp_a) : 1.f;
      if (Traits::kChannelGate || lane == 0) to.decay[32 * i + lane] = decay;
    }
    if (lane == 0) {
      const float rate = to_float(beta);
      to.beta = params.beta.data == nullptr ? 1.f : params.beta_is_logit ? sigmoid(rate) : rate;
      to.kq = kq * q_factor * k_factor;
    }
  }
};

// A lane's part of a token.
template <typename Traits>
struct DeltaRuleLane {
  using Layout = typename Traits::Layout;
  float q[Layout::kElements], k[Layout::kElements];
  float decay[Traits::kChannelGate ? Layout::kElements : 1];
  float beta, kq;

  template <typename Token>
  __device__ __forceinline__ void load(const Token& token, int lane) {
    load_row<Layout>(q, token.q, lane);
    load_row<Layout>(k, token.k, lane);
    if constexpr (Traits::kChannelGate) {
      load_row<Layout>(decay, token.decay, lane);
    } else {
      decay[0] = token.decay[0];
    }
    beta = token.beta;
    kq = token.kq;
  }
};

// Updates one row with one token; returns the output channel, equal in all lanes of the row.
template <typename Traits>
__device__ __forceinline__ float update_row(float (&row)[Traits::Layout::kElements],
                                            const DeltaRuleLane<Traits>& token, float value) {
  constexpr int kElements = Traits::Layout::kElements, kLanes = Traits::Layout::kLanes;
  float sk = 0.f, sq = 0.f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    row[i] *= token.decay[Traits::kChannelGate ? i : 0];
    sk += row[i] * token.k[i];
    sq += row[i] * token.q[i];
  }
  sk = warp_reduce_sum(sk, kLanes);
  sq = warp_reduce_sum(sq, kLanes);
  const float delta = token.beta * (value - sk);
#pragma unroll
  for (int i = 0; i < kElements; ++i) row[i] += delta * token.k[i];
  return sq + delta * token.kq;
}

}  // namespace detail

// One CTA: a block of rows of one head's state.
template <typename Traits, int kStep, int kPasses>
struct DeltaRuleBlock {
  using T = typename Traits::T;
  using StateT = typename Traits::StateT;
  using Layout = typename Traits::Layout;
  using Staged = StagedRows<Layout, StateT, Traits::kThreads, kStep, kPasses>;
  static constexpr int kDim = Traits::kHeadDimK;
  static constexpr int kRows = Traits::kGroups * kStep * kPasses;
  using Token = detail::DeltaRuleToken<Traits, kRows>;
  static constexpr int kTokens = Traits::kThreads / 32;
  // CTAs that a Hopper SM must have registers for. Left alone, the compiler takes 157 a thread for
  // four rows of 16 elements, which leaves room for three CTAs; 128 hold all, too. With a decay per
  // channel it takes 185, for two CTAs. For some other architectures it would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  static constexpr int kMinCtas = 1;
#else
  static constexpr int kMinCtas = Layout::kElements != 16 ? 1
                                  : kStep < 4             ? (Traits::kChannelGate ? 4 : 6)
                                                          : (Traits::kChannelGate ? 3 : 4);
#endif

  // Shared memory of a CTA. Fewer tokens take less, so that more CTAs have rows in flight.
  static constexpr size_t shared_bytes(int num_tokens) {
    return Staged::kBytes + sizeof(Token) * (num_tokens < kTokens ? num_tokens : kTokens);
  }

  const DeltaRuleParams& params;
  Staged staged;
  Token* tokens;  // kTokens of them
  int32_t head, first_row, num_rows, lane;
  int64_t batch, token_batch;
  TokenRange range;
  float rows[kStep][Layout::kElements];

  __device__ __forceinline__ StateT* matrix(const StatePool& pool, int64_t slot) const {
    return static_cast<StateT*>(pool.data) + slot * pool.slot_stride + head * pool.head_stride +
           static_cast<int64_t>(first_row) * kDim;
  }

  __device__ __forceinline__ void store(const StatePool& pool, int64_t slot, int pass) const {
    StateT* to = matrix(pool, slot);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int row = Staged::row_of(pass, i);
      if (row < num_rows) store_row<Layout, true>(to + row * kDim, rows[i], lane);
    }
  }

  // This warp's part of tokens `begin` to begin + kTokens - 1.
  using Fetch = detail::DeltaRuleFetch<Traits, kRows>;
  __device__ __forceinline__ bool fetch(Fetch& part, int begin) const {
    const int t = begin + threadIdx.x / 32;
    if (t >= range.count) return false;
    part.load(params, token_batch, range.first + t, head, first_row, num_rows);
    return true;
  }

  __device__ __forceinline__ void prepare_tokens(int begin) const {
    Fetch part;
    if (fetch(part, begin)) part.store(tokens[threadIdx.x / 32], params);
    __syncthreads();
  }

  __device__ __forceinline__ void update(const Token& shared_token, int t, int pass) {
    T* out = token_address<T>(params.out, token_batch, range.first + t, head) + first_row;
    detail::DeltaRuleLane<Traits> token;
    token.load(shared_token, lane);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int row = Staged::row_of(pass, i);
      const float result = detail::update_row<Traits>(rows[i], token, shared_token.v[row]);
      if (lane == i % Layout::kLanes && row < num_rows) out[row] = from_float<T>(result);
    }
  }

  // Stores the states after token t that the caller wants.
  __device__ __forceinline__ void keep(int t, int pass, int64_t snapshot) const {
    if (params.snapshots.data != nullptr && (t + 1) % params.snapshot_every == 0) {
      const int64_t row = snapshot + (t + 1) / params.snapshot_every - 1;
      if (params.snapshots.has(row)) store(params.snapshots, row, pass);
    }
    if (params.state_out.data == nullptr) return;
    if (params.write_every_token || t == range.count - 1) {
      const int64_t slot = params.write_slot.at(batch, params.write_every_token ? t : 0);
      if (params.state_out.has(slot)) store(params.state_out, slot, pass);
    }
  }

  __device__ __forceinline__ void zero_outputs() const {
    for (int t = 0; t < range.count; ++t) {
      T* out = token_address<T>(params.out, token_batch, range.first + t, head) + first_row;
      for (int row = threadIdx.x; row < min(num_rows, kRows); row += Traits::kThreads) {
        out[row] = from_float<T>(0.f);
      }
    }
  }

  __device__ __forceinline__ void run() {
    // The token's loads do not need the slot, whose own load delays the state's: they come first,
    // and the token is prepared while the state is under way.
    Fetch part;
    const bool has_part = fetch(part, 0);
    int64_t accepted = 0;
    if (params.num_accepted != nullptr) accepted = max(params.num_accepted[batch] - 1, 0);
    const int64_t read_slot = params.read_slot.at(batch, accepted);
    if (!params.state.has(read_slot)) return zero_outputs();
    const bool has_state = params.state.data != nullptr;
    staged.template copy<kDim>(has_state ? matrix(params.state, read_slot) : nullptr,
                               has_state ? num_rows : 0);
    if (has_part) part.store(tokens[threadIdx.x / 32], params);
    __syncthreads();
    int64_t snapshot = 0;
    if (params.snapshots.data != nullptr) {
      snapshot = params.snapshot_starts != nullptr ? params.snapshot_starts[batch]
                                                   : batch * params.snapshots_per_batch;
    }
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      staged.wait();
#pragma unroll
      for (int i = 0; i < kStep; ++i) staged.load(rows[i], pass, i);
#pragma unroll 1
      for (int t = 0; t < range.count; ++t) {
        // As many tokens as fit are prepared once for all passes.
        if (t % kTokens == 0 && range.count > kTokens && pass + t > 0) {
          __syncthreads();
          prepare_tokens(t);
        }
        update(tokens[t % kTokens], t, pass);
        keep(t, pass, snapshot);
      }
      // A sequence of no tokens hands its state on.
      if (range.count <= 0 && params.state_out.data != nullptr && !params.write_every_token) {
        const int64_t slot = params.write_slot.at(batch, 0);
        if (params.state_out.has(slot)) store(params.state_out, slot, pass);
      }
    }
  }
};

template <typename Traits, int kStep, int kPasses>
__global__ void __launch_bounds__(Traits::kThreads,
                                  DeltaRuleBlock<Traits, kStep, kPasses>::kMinCtas)
    delta_rule_kernel(const __grid_constant__ DeltaRuleParams params) {
  using Block = DeltaRuleBlock<Traits, kStep, kPasses>;
  extern __shared__ __align__(128) char dynamic_shared[];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int first_row = blockIdx.x * Block::kRows;
  const int64_t batch = blockIdx.z;
  Block block{params,
              {dynamic_shared},
              reinterpret_cast<typename Block::Token*>(dynamic_shared + Block::Staged::kBytes),
              static_cast<int32_t>(blockIdx.y),
              first_row,
              params.head_dim_v - first_row,
              static_cast<int32_t>(threadIdx.x) % Traits::Layout::kLanes,
              batch,
              params.cu_seqlens != nullptr ? 0 : batch,
              token_range(params.cu_seqlens, params.cu_seqlens_is_int64, batch, params.num_tokens)};
  block.run();
}

#ifndef __CUDACC_RTC__

template <typename Traits, int kStep, int kPasses>
cudaError_t launch_delta_rule_block(const DeltaRuleParams& params, bool enable_pdl,
                                    cudaStream_t stream) {
  using Block = DeltaRuleBlock<Traits, kStep, kPasses>;
  if constexpr (Block::shared_bytes(Block::kTokens) > 48 << 10) {
    const cudaError_t status = cudaFuncSetAttribute(
        delta_rule_kernel<Traits, kStep, kPasses>, cudaFuncAttributeMaxDynamicSharedMemorySize,
        static_cast<int>(Block::shared_bytes(Block::kTokens)));
    if (status != cudaSuccess) return status;
  }
  const size_t shared =
      Block::shared_bytes(params.cu_seqlens != nullptr ? Block::kTokens : params.num_tokens);
  const dim3 grid(ceil_div(params.head_dim_v, Block::kRows), params.state_heads, params.batch_size);
  return launch_kernel(delta_rule_kernel<Traits, kStep, kPasses>, grid, dim3(Traits::kThreads),
                       shared, stream, enable_pdl, params);
}

// `schedule`: rows per thread at a time, plus 100 times the passes; 0 chooses by the state's size.
// Few rows spread a small batch over all SMs; many rows share what a CTA prepares
// (docs/tuning/linear_attention.md).
template <typename Traits>
cudaError_t launch_delta_rule(const DeltaRuleParams& params, int num_sms, int schedule,
                              bool enable_pdl, cudaStream_t stream) {
  if (schedule == 0) {
    const int64_t rows = int64_t{params.batch_size} * params.state_heads * params.head_dim_v;
    const int64_t steps = rows / Traits::kGroups;
    const bool several_tokens = params.num_tokens != 1 || params.cu_seqlens != nullptr;
    const bool two_passes =
        sizeof(typename Traits::StateT) == 2 && !several_tokens && steps > 128 * num_sms;
    schedule = steps <= 4 * num_sms ? 102 : two_passes ? 204 : 104;
  }
  switch (schedule) {
    case 101:
      return launch_delta_rule_block<Traits, 1, 1>(params, enable_pdl, stream);
    case 102:
      return launch_delta_rule_block<Traits, 2, 1>(params, enable_pdl, stream);
    case 104:
      return launch_delta_rule_block<Traits, 4, 1>(params, enable_pdl, stream);
    default:
      return launch_delta_rule_block<Traits, 4, 2>(params, enable_pdl, stream);
  }
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
