// Mamba's selective state update, token by token, for each head and channel d:
//   S[d] = exp(A dt[d]) S[d] + (dt[d] x[d]) B;  out[d] = (S[d] C + D[d] x[d]) silu(z[d])
//
// As in delta_rule.cuh, the lanes of a row keep it in registers over all tokens of the call, and
// the state is read once and written once. The grid is (row blocks, heads, batch).
//
// kTied: A is one number per head (Mamba-2), so the decay is one per row. Otherwise A is read and
// its exponential taken for every element of the state (Mamba). A is then as large as a state, so a
// CTA keeps its rows of it in registers while the states of several sequences pass.
//
// Measurements, also of what lost: docs/tuning/linear_attention.md.
#pragma once

#include <cstdint>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/linear_attention/gate.cuh>
#include <flashinfer/linear_attention/scaled_rows.cuh>
#include <flashinfer/linear_attention/selective_state_params.h>
#include <flashinfer/linear_attention/token_range.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename T_, typename StateT_, typename DtT_, typename AT_, typename WeightT_,
          int kDState_, bool kTied_, bool kStochastic_>
struct SelectiveStateTraits {
  using T = T_;  // x, z, B, C, out
  using StateT = StateT_;
  using DtT = DtT_;
  using AT = AT_;
  using WeightT = WeightT_;  // D, dt_bias
  static constexpr int kDState = kDState_;
  static constexpr bool kTied = kTied_;
  static constexpr bool kStochastic = kStochastic_;
  static constexpr bool kScaled = kScaledMax<StateT> > 0.f;
  using Layout = RowLayout<StateT, kDState>;
  static constexpr int kThreads = 128;
  static constexpr int kGroups = kThreads / Layout::kLanes;  // rows that a CTA has at a time
};

namespace detail {

// Operands of a head at one token, in shared memory: B and C for its rows, and a number of each
// kind per row.
template <typename Traits, int kRows>
struct alignas(16) SelectiveToken {
  static constexpr int kDim = Traits::kDState;
  float B[kDim], C[kDim];
  float decay[kRows];  // exp(A dt) where A is tied, else dt log2(e)
  float dt_x[kRows];
  float skip[kRows];  // D x
  float gate[kRows];  // silu(z), or 1
};

// A warp's part in preparing a token, as DeltaRuleFetch: all loads at once.
template <typename Traits, int kRows>
struct SelectiveFetch {
  using T = typename Traits::T;
  using DtT = typename Traits::DtT;
  using AT = typename Traits::AT;
  using WeightT = typename Traits::WeightT;
  static constexpr int kColumns = ceil_div(Traits::kDState, 32), kValues = ceil_div(kRows, 32);

  T B[kColumns], C[kColumns], x[kValues], z[kValues];
  DtT dt[kValues];
  WeightT bias[kValues], D[kValues];
  AT A;

  __device__ __forceinline__ void load(const SelectiveStateParams& params, int64_t batch,
                                       int64_t token, int head, int first_row, int num_rows) {
    const int lane = threadIdx.x % 32, group = params.heads_per_group.divide(head);
    const T* from_B = token_address<const T>(params.B, batch, token, group);
    const T* from_C = token_address<const T>(params.C, batch, token, group);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = min(32 * i + lane, Traits::kDState - 1);
      B[i] = from_B[column];
      C[i] = from_C[column];
    }
    const T* from_x = token_address<const T>(params.x, batch, token, head) + first_row;
    const auto* from_dt = token_address<const DtT>(params.dt, batch, token, head);
    // An absent operand is read from the address of x or A, and not used.
    const bool has_z = params.z.data != nullptr;
    const T* from_z =
        has_z ? token_address<const T>(params.z, batch, token, head) + first_row : from_x;
    const auto* from_bias =
        static_cast<const WeightT*>(params.dt_bias != nullptr ? params.dt_bias : params.state.data);
    const auto* from_D =
        static_cast<const WeightT*>(params.D != nullptr ? params.D : params.state.data);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int row = min(32 * i + lane, num_rows - 1), channel = first_row + row;
      x[i] = from_x[row];
      z[i] = from_z[row];
      dt[i] = from_dt[channel * params.dt_dim_stride];
      bias[i] = from_bias[params.dt_bias == nullptr
                              ? 0
                              : head * params.bias_head_stride + channel * params.bias_dim_stride];
      D[i] =
          from_D[params.D == nullptr ? 0
                                     : head * params.D_head_stride + channel * params.D_dim_stride];
    }
    A = static_cast<const AT*>(params.A)[head * params.A_head_stride];
  }

  // The time step of row 32 i + lane.
  __device__ __forceinline__ float step(const SelectiveStateParams& params, int i) const {
    const float raw = to_float(dt[i]) + (params.dt_bias != nullptr ? to_float(bias[i]) : 0.f);
    return params.dt_softplus ? softplus(raw) : raw;
  }

  __device__ __forceinline__ void store(SelectiveToken<Traits, kRows>& to,
                                        const SelectiveStateParams& params) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = 32 * i + lane;
      if (Traits::kDState % 32 == 0 || column < Traits::kDState) {
        to.B[column] = to_float(B[i]);
        to.C[column] = to_float(C[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int row = 32 * i + lane;
      if (kRows % 32 != 0 && row >= kRows) continue;
      const float dt_of = step(params, i), channel = to_float(x[i]), z_of = to_float(z[i]);
      to.decay[row] = Traits::kTied ? expf(to_float(A) * dt_of) : dt_of * math::log2e;
      to.dt_x[row] = dt_of * channel;
      to.skip[row] = params.D != nullptr ? channel * to_float(D[i]) : 0.f;
      to.gate[row] = params.z.data != nullptr ? z_of * sigmoid(z_of) : 1.f;
    }
  }
};

// Updates one row with one token; returns S C, equal in all lanes of the row. If A is not tied,
// `decay` is the row's time step and `A` the lane's part of A.
template <typename Traits>
__device__ __forceinline__ float update_row(float (&row)[Traits::Layout::kElements],
                                            const float (&A)[Traits::Layout::kElements],
                                            float decay, float dt_x,
                                            const float (&B)[Traits::Layout::kElements],
                                            const float (&C)[Traits::Layout::kElements]) {
  using Layout = typename Traits::Layout;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < Layout::kElements; ++i) {
    row[i] = row[i] * (Traits::kTied ? decay : math::ptx_exp2(A[i] * decay)) + dt_x * B[i];
    sum += row[i] * C[i];
  }
  return warp_reduce_sum(sum, Layout::kLanes);
}

}  // namespace detail

// One CTA: a block of rows of one head's state.
template <typename Traits, int kStep, int kPasses>
struct SelectiveStateBlock {
  using T = typename Traits::T;
  using StateT = typename Traits::StateT;
  using Layout = typename Traits::Layout;
  using Staged = StagedRows<Layout, StateT, Traits::kThreads, kStep, kPasses>;
  static constexpr int kDim = Traits::kDState, kElements = Layout::kElements;
  static constexpr int kRows = Traits::kGroups * kStep * kPasses;
  using Token = detail::SelectiveToken<Traits, kRows>;
  static constexpr int kTokens = Traits::kThreads / 32;
  // Fewer tokens take less, so that more CTAs have rows in flight.
  static constexpr size_t shared_bytes(int batches, int num_tokens) {
    return batches * Staged::kBytes + sizeof(Token) * (num_tokens < kTokens ? num_tokens : kTokens);
  }
  // CTAs that an SM must have registers for, as in delta_rule.cuh. With rows of A of several
  // sequences the compiler takes 122 a thread by itself, which leaves room for four; 96 hold all.
  static constexpr int min_ctas(int batches) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    return 1;
#else
    if (kElements != 16 || Traits::kStochastic) return 1;
    return batches > 1 && sizeof(StateT) == 2 ? 5 : 4;
#endif
  }

  const SelectiveStateParams& params;
  Staged staged;
  Token* tokens;  // kTokens of them
  int32_t head, first_row, num_rows, lane;
  int64_t batch, token_batch;
  TokenRange range;
  StochasticRounding rounding;
  float rows[kStep][kElements];
  float A[Traits::kTied ? 1 : kStep][kElements];  // of these rows; not used if tied

  __device__ __forceinline__ int64_t matrix(const StatePool& pool, int64_t slot) const {
    return slot * pool.slot_stride + head * pool.head_stride +
           static_cast<int64_t>(first_row) * kDim;
  }

  __device__ __forceinline__ float* scale(const RowScales& scales, int64_t slot, int row) const {
    return scales.data + slot * scales.slot_stride + head * scales.head_stride + first_row + row;
  }

  __device__ __forceinline__ void load(const RowScales& scales, int64_t slot, int pass) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      staged.load(rows[i], pass, i);
      if constexpr (Traits::kScaled) {
        const int row = Staged::row_of(pass, i);
        const float factor = row < num_rows ? *scale(scales, slot, row) : 0.f;
#pragma unroll
        for (int j = 0; j < kElements; ++j) rows[i][j] *= factor;
      }
    }
  }

  __device__ __forceinline__ void store(const StatePool& pool, const RowScales& scales,
                                        int64_t slot, int pass, int t) const {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int row = Staged::row_of(pass, i);
      const int64_t at = matrix(pool, slot) + static_cast<int64_t>(row) * kDim;
      StateT* to = static_cast<StateT*>(pool.data) + at;
      if constexpr (Traits::kScaled) {
        store_row_scaled<Layout>(to, scale(scales, slot, row), rows[i], lane, row < num_rows);
      } else if constexpr (Traits::kStochastic) {
        if (row < num_rows) {
          store_row_stochastically<Layout>(to, rows[i], lane, rounding, static_cast<uint64_t>(at),
                                           t);
        }
      } else {
        if (row < num_rows) store_row<Layout, true>(to, rows[i], lane);
      }
    }
  }

  __device__ __forceinline__ void load_A(float (&A)[kElements], int row) const {
    using AT = typename Traits::AT;
    const AT* from = static_cast<const AT*>(params.A) + head * params.A_head_stride +
                     (first_row + row) * params.A_dim_stride;
    if (params.A_rows_are_vectors) {
      load_row<Layout>(A, from, lane);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int column = Layout::column(lane, i / Layout::kVecSize) + i % Layout::kVecSize;
        A[i] = to_float(from[column * params.A_state_stride]);
      }
    }
  }

  __device__ __forceinline__ void load_A(int pass) {
    if constexpr (!Traits::kTied) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) load_A(A[i], min(Staged::row_of(pass, i), num_rows - 1));
    }
  }

  // This warp's part of tokens `begin` to begin + kTokens - 1.
  using Fetch = detail::SelectiveFetch<Traits, kRows>;
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

  __device__ __forceinline__ void update(const Token& token, int t, int pass) {
    T* out = token_address<T>(params.out, token_batch, range.first + t, head) + first_row;
    float B[kElements], C[kElements];
    load_row<Layout>(B, token.B, lane);
    load_row<Layout>(C, token.C, lane);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int row = Staged::row_of(pass, i);
      const float sum = detail::update_row<Traits>(rows[i], A[Traits::kTied ? 0 : i],
                                                   token.decay[row], token.dt_x[row], B, C);
      if (lane == i % Layout::kLanes && row < num_rows) {
        out[row] = from_float<T>((sum + token.skip[row]) * token.gate[row]);
      }
    }
  }

  // Stores the states after token t that the caller wants.
  __device__ __forceinline__ void keep(int t, int pass) const {
    if (params.intermediate.data != nullptr) {
      const int64_t row = params.snapshot_slot.at(batch, 0) * params.steps + t;
      if (t < params.steps && params.intermediate.has(row)) {
        store(params.intermediate, params.intermediate_scale, row, pass, t);
      }
    }
    if (!params.write_state) return;
    if (params.write_every_token || t == range.count - 1) {
      const int64_t slot = params.write_slot.at(batch, params.write_every_token ? t : 0);
      const bool is_slot = slot != params.pad_slot || params.write_slot.data == nullptr;
      if (is_slot && params.state.has(slot)) {
        store(params.state, params.state_scale, slot, pass, t);
      }
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

  __device__ __forceinline__ int64_t slot_to_read(int64_t batch) const {
    int64_t accepted = 0;
    if (params.num_accepted != nullptr) accepted = max(params.num_accepted[batch] - 1, 0);
    return params.read_slot.at(batch, accepted);
  }

  __device__ __forceinline__ bool is_padding(int64_t slot) const {
    const bool is_slot = slot != params.pad_slot || params.read_slot.data == nullptr;
    return !(is_slot && params.state.has(slot));
  }

  __device__ __forceinline__ void run() {
    // Loads of the token first, as in delta_rule.cuh.
    Fetch part;
    const bool has_part = fetch(part, 0);
    const int64_t slot = slot_to_read(batch);
    if (is_padding(slot)) return zero_outputs();
    staged.template copy<kDim>(
        static_cast<const StateT*>(params.state.data) + matrix(params.state, slot), num_rows);
    if constexpr (Traits::kStochastic) rounding.seed = static_cast<uint64_t>(*params.seed);
    if (has_part) part.store(tokens[threadIdx.x / 32], params);
    __syncthreads();
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      load_A(pass);
      staged.wait();
      load(params.state_scale, slot, pass);
#pragma unroll 1
      for (int t = 0; t < range.count; ++t) {
        // As many tokens as fit are prepared once for all passes.
        if (t % kTokens == 0 && range.count > kTokens && pass + t > 0) {
          __syncthreads();
          prepare_tokens(t);
        }
        update(tokens[t % kTokens], t, pass);
        keep(t, pass);
      }
    }
  }

  // One token of each of kBatches sequences, from `batch` on. A warp prepares a sequence's token.
  template <int kBatches>
  __device__ __forceinline__ void run_batches() {
    static_assert(kPasses == 1 && kBatches == kTokens);
    const int64_t first = batch;
    const int count = static_cast<int>(min(int64_t{kBatches}, params.batch_size - first));
    const int own = threadIdx.x / 32;
    Fetch part;
    if (own < count) part.load(params, first + own, 0, head, first_row, num_rows);
    int64_t slots[kBatches];
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      slots[i] = i < count ? slot_to_read(first + i) : 0;
      const bool reads = i < count && !is_padding(slots[i]);
      const int64_t at = reads ? matrix(params.state, slots[i]) : 0;
      Staged{staged.shared + i * Staged::kBytes}.template copy<kDim>(
          static_cast<const StateT*>(params.state.data) + at, reads ? num_rows : 0);
    }
    load_A(0);
    if constexpr (Traits::kStochastic) rounding.seed = static_cast<uint64_t>(*params.seed);
    if (own < count) part.store(tokens[own], params);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      // As Staged::wait, for the copies of several sequences.
      ptx::cp_async_commit();
      ptx::cp_async_wait<kBatches>();
      if (i >= count) continue;
      batch = token_batch = first + i;
      if (is_padding(slots[i])) {
        zero_outputs();
      } else {
        load(params.state_scale, slots[i], 0);
        update(tokens[i], 0, 0);
        keep(0, 0);
      }
      staged.shared += Staged::kBytes;
    }
  }
};

// kBatches > 1: one token of each of so many sequences.
template <typename Traits, int kStep, int kPasses, int kBatches>
__global__ void __launch_bounds__(Traits::kThreads,
                                  SelectiveStateBlock<Traits, kStep, kPasses>::min_ctas(kBatches))
    selective_state_kernel(const __grid_constant__ SelectiveStateParams params) {
  using Block = SelectiveStateBlock<Traits, kStep, kPasses>;
  extern __shared__ __align__(128) char dynamic_shared[];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int first_row = blockIdx.x * Block::kRows;
  const int64_t batch = int64_t{blockIdx.z} * kBatches;
  char* const tokens = dynamic_shared + kBatches * Block::Staged::kBytes;
  Block block{params,
              {dynamic_shared},
              reinterpret_cast<typename Block::Token*>(tokens),
              static_cast<int32_t>(blockIdx.y),
              first_row,
              params.dim - first_row,
              static_cast<int32_t>(threadIdx.x) % Traits::Layout::kLanes,
              batch,
              params.cu_seqlens != nullptr ? 0 : batch,
              token_range(params.cu_seqlens, params.cu_seqlens_is_int64, batch, params.num_tokens),
              {0, params.philox_rounds}};
  if constexpr (kBatches > 1) {
    block.template run_batches<kBatches>();
  } else {
    block.run();
  }
}

#ifndef __CUDACC_RTC__

template <typename Traits, int kStep, int kPasses, int kBatches = 1>
cudaError_t launch_selective_state_block(const SelectiveStateParams& params, bool enable_pdl,
                                         cudaStream_t stream) {
  using Block = SelectiveStateBlock<Traits, kStep, kPasses>;
  constexpr auto kKernel = selective_state_kernel<Traits, kStep, kPasses, kBatches>;
  constexpr size_t kLargest = Block::shared_bytes(kBatches, Block::kTokens);
  if constexpr (kLargest > 48 << 10) {
    const cudaError_t status =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kLargest);
    if (status != cudaSuccess) return status;
  }
  const bool one_size = kBatches == 1 && params.cu_seqlens == nullptr;
  const size_t shared =
      Block::shared_bytes(kBatches, one_size ? params.num_tokens : Block::kTokens);
  const dim3 grid(ceil_div(params.dim, Block::kRows), params.num_heads,
                  ceil_div(params.batch_size, kBatches));
  return launch_kernel(kKernel, grid, dim3(Traits::kThreads), shared, stream, enable_pdl, params);
}

// `schedule`: as for launch_delta_rule, plus 10 times the sequences of a CTA where these share an A
// of every element. That A costs registers, so threads then have fewer rows
// (docs/tuning/linear_attention.md).
template <typename Traits>
cudaError_t launch_selective_state(const SelectiveStateParams& params, int num_sms, int schedule,
                                   bool enable_pdl, cudaStream_t stream) {
  if (schedule == 0) {
    const int64_t rows = int64_t{params.batch_size} * params.num_heads * params.dim;
    const bool several_tokens = params.num_tokens != 1 || params.cu_seqlens != nullptr;
    const bool few = rows / Traits::kGroups <= 4 * num_sms;
    const int with_A = several_tokens || params.batch_size < 4 ? 102 : 142;
    schedule = few ? 101 : Traits::kTied ? 104 : with_A;
  }
  if (schedule == 101) {
    return launch_selective_state_block<Traits, 1, 1>(params, enable_pdl, stream);
  }
  if (schedule == 142) {
    return launch_selective_state_block<Traits, 2, 1, 4>(params, enable_pdl, stream);
  }
  return launch_selective_state_block<Traits, Traits::kTied ? 4 : 2, 1>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
