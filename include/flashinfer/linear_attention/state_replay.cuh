// States of Mamba-2 that lack the latest tokens, whose inputs are in rings (selective_state.cuh has
// the recurrence). A step replays those tokens in registers, and then walks the new ones, so that
// the state is read in every step but written only when the rings are full.
//
//   state S ---> replay x, B, dt of the ring ---> new tokens: outputs, appended to the ring
//                        |
//                        +--> written as S if the ring has no room for another step's tokens
//
// Rows of the ring that a step appends are never rows that it reads: a ring has a window and the
// tokens of a step.
#pragma once

#include <cstdint>
#include <flashinfer/linear_attention/selective_state.cuh>
#include <flashinfer/linear_attention/state_replay_params.h>

namespace flashinfer {

namespace detail {

// The rings of one slot, for one head and its group.
template <typename T>
struct SlotRings {
  T *x, *B;
  float* dt;
  int32_t start, rows, dim;

  __device__ __forceinline__ int32_t row_of(int32_t token) const {
    // A start that is no row, too, leads to one of the ring's.
    return static_cast<int32_t>((uint64_t{static_cast<uint32_t>(start)} + token) % rows);
  }
};

// A warp's part in preparing a token of the ring, as SelectiveFetch.
template <typename Traits, int kRows>
struct ReplayFetch {
  using T = typename Traits::T;
  static constexpr int kColumns = ceil_div(Traits::kDState, 32), kValues = ceil_div(kRows, 32);
  T B[kColumns], x[kValues];
  float dt;

  __device__ __forceinline__ void load(const SlotRings<T>& rings, int32_t token, int first_row,
                                       int num_rows) {
    const int lane = threadIdx.x % 32;
    const int64_t row = rings.row_of(token);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      B[i] = rings.B[row * Traits::kDState + min(32 * i + lane, Traits::kDState - 1)];
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = rings.x[row * rings.dim + first_row + min(32 * i + lane, num_rows - 1)];
    }
    dt = rings.dt[row];
  }

  __device__ __forceinline__ void store(SelectiveToken<Traits, kRows>& to, float A) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = 32 * i + lane;
      if (Traits::kDState % 32 == 0 || column < Traits::kDState) to.B[column] = to_float(B[i]);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int row = 32 * i + lane;
      if (kRows % 32 != 0 && row >= kRows) continue;
      to.decay[row] = expf(A * dt);
      to.dt_x[row] = dt * to_float(x[i]);
    }
  }
};

}  // namespace detail

// One CTA: a block of rows of one head's state.
template <typename Traits, int kStep>
struct StateReplayBlock : SelectiveStateBlock<Traits, kStep, 1> {
  using Base = SelectiveStateBlock<Traits, kStep, 1>;
  using T = typename Traits::T;
  using StateT = typename Traits::StateT;
  using Layout = typename Traits::Layout;
  using Fetch = typename Base::Fetch;
  using Rings = detail::SlotRings<T>;
  static constexpr int kDim = Base::kDim, kTokens = Base::kTokens;
  static_assert(Traits::kTied, "a token of the ring has one time step per head");

  __device__ __forceinline__ Rings rings_of(T* x, T* B, float* dt, int32_t start,
                                            int32_t rows) const {
    const int64_t dim = this->params.dim;
    const int64_t group = this->params.heads_per_group.divide(this->head);
    return {x + this->head * rows * dim,
            B + group * rows * kDim,
            dt + int64_t{this->head} * rows,
            start,
            rows,
            this->params.dim};
  }

  // This warp's token of those from `begin` on, of the ring up to `end`.
  __device__ __forceinline__ void prepare_replayed(const Rings& rings, float A, int begin,
                                                   int end) const {
    const int t = begin + threadIdx.x / 32;
    if (t < end) {
      detail::ReplayFetch<Traits, Base::kRows> part;
      part.load(rings, t, this->first_row, this->num_rows);
      part.store(this->tokens[threadIdx.x / 32], A);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void advance(const typename Base::Token& token) {
    float B[Base::kElements];
    load_row<Layout>(B, token.B, this->lane);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int row = Base::Staged::row_of(0, i);
#pragma unroll
      for (int j = 0; j < Base::kElements; ++j) {
        this->rows[i][j] = this->rows[i][j] * token.decay[row] + token.dt_x[row] * B[j];
      }
    }
  }

  // The tokens of the ring, on the rows in registers.
  __device__ __forceinline__ void replay(const Rings& rings, float A, int count) {
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kTokens) {
      if (begin > 0) __syncthreads();  // all have left the tokens before
      prepare_replayed(rings, A, begin, count);
#pragma unroll 1
      for (int t = begin; t < min(begin + kTokens, count); ++t) advance(this->tokens[t - begin]);
    }
  }

  // Appends a new token's inputs: of this CTA's rows, and once per head and group what they share.
  __device__ __forceinline__ void append(const Rings& rings, const Fetch& part, int token) const {
    const int lane = threadIdx.x % 32;
    const int64_t row = rings.row_of(token);
#pragma unroll
    for (int i = 0; i < Fetch::kValues; ++i) {
      const int channel = 32 * i + lane;
      if (channel < min(this->num_rows, Base::kRows)) {
        rings.x[row * rings.dim + this->first_row + channel] = part.x[i];
      }
    }
    if (this->first_row != 0) return;
    if (lane == 0) rings.dt[row] = part.step(this->params, 0);
    const auto& heads_per_group = this->params.heads_per_group;
    const int group = heads_per_group.divide(this->head);
    if (this->head > 0 && heads_per_group.divide(this->head - 1) == group) return;
#pragma unroll
    for (int i = 0; i < Fetch::kColumns; ++i) {
      const int column = 32 * i + lane;
      if (kDim % 32 == 0 || column < kDim) rings.B[row * kDim + column] = part.B[i];
    }
  }

  // The new tokens, the first of which is token `replayed` of the ring.
  __device__ __forceinline__ void walk(const Rings& rings, int replayed) {
#pragma unroll 1
    for (int begin = 0; begin < this->range.count; begin += kTokens) {
      Fetch part;
      const bool has_part = this->fetch(part, begin);
      __syncthreads();
      const int own = threadIdx.x / 32;
      if (has_part) {
        part.store(this->tokens[own], this->params);
        append(rings, part, replayed + begin + own);
      }
      __syncthreads();
#pragma unroll 1
      for (int t = begin; t < min(begin + kTokens, this->range.count); ++t) {
        this->update(this->tokens[t - begin], t, 0);
      }
    }
  }

  __device__ __forceinline__ void run(const CheckpointingStateParams& all, int) {
    const SelectiveStateParams& params = this->params;
    const int64_t slot = params.read_slot.at(this->batch, 0);
    if (this->is_padding(slot)) return this->zero_outputs();
    this->staged.template copy<kDim>(
        static_cast<const StateT*>(params.state.data) + this->matrix(params.state, slot),
        this->num_rows);
    const Rings rings = rings_of(static_cast<T*>(all.rings.x) + slot * all.rings.x_slot_stride,
                                 static_cast<T*>(all.rings.B) + slot * all.rings.B_slot_stride,
                                 all.rings.dt + slot * all.rings.dt_slot_stride,
                                 all.ring_start[slot], all.rings.rows);
    const int room = all.rings.rows - this->range.count;
    const int replayed = max(min(all.num_replayed[slot], room), 0);
    const float A = to_float(
        static_cast<const typename Traits::AT*>(params.A)[this->head * params.A_head_stride]);
    if constexpr (Traits::kStochastic) this->rounding.seed = static_cast<uint64_t>(*params.seed);
    this->staged.wait();
    this->load(params.state_scale, slot, 0);
    replay(rings, A, replayed);
    if (replayed > 0 && replayed + this->range.count > all.window) {
      this->store(params.state, params.state_scale, slot, 0, 0);
    }
    walk(rings, replayed);
  }

  // The state as it is stored, without a rounding.
  __device__ __forceinline__ void copy_rows(const StatePool& pool, const RowScales& scales,
                                            int64_t from, int64_t to) const {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int row = Base::Staged::row_of(0, i);
      if (row >= this->num_rows) continue;
      StateT* target = static_cast<StateT*>(pool.data) + this->matrix(pool, to) +
                       static_cast<int64_t>(row) * kDim;
#pragma unroll
      for (int vec = 0; vec < Layout::kVecs; ++vec) {
        Vector<StateT, Layout::kVecSize> elements;
        elements.load(reinterpret_cast<const StateT*>(this->staged.unit(0, i, vec)));
        elements.store(target + Layout::column(this->lane, vec));
      }
      if constexpr (Traits::kScaled) {
        if (this->lane == 0) {
          *this->scale(scales, to, row) = *this->scale(scales, from, row);
        }
      }
    }
  }

  // The state of one layer's request after the first tokens of its ring.
  __device__ __forceinline__ void run(const MaterializeStateParams& all, int layer) {
    const int32_t request = all.active[this->batch];
    if (request < 0) return;
    const int64_t entry = int64_t{layer} * this->params.batch_size + request;
    const int64_t from = all.source[entry], to = all.target[entry];
    if (from == all.pad_slot || to == all.pad_slot) return;
    const StatePool pool{reinterpret_cast<void*>(all.state[layer]), all.state_slot_stride[layer],
                         int64_t{this->params.dim} * kDim};
    const RowScales scales{reinterpret_cast<float*>(all.scale[layer]), all.scale_slot_stride[layer],
                           this->params.dim};
    this->staged.template copy<kDim>(
        static_cast<const StateT*>(pool.data) + this->matrix(pool, from), this->num_rows);
    const Rings rings =
        rings_of(reinterpret_cast<T*>(all.x[layer]) + from * all.x_slot_stride[layer],
                 reinterpret_cast<T*>(all.B[layer]) + from * all.B_slot_stride[layer],
                 reinterpret_cast<float*>(all.dt[layer]) + from * all.dt_slot_stride[layer],
                 all.ring_start[request], all.rows);
    const float A =
        to_float(reinterpret_cast<const typename Traits::AT*>(all.A[layer])[this->head]);
    if constexpr (Traits::kStochastic) {
      this->rounding.seed = static_cast<uint64_t>(*this->params.seed);
    }
    const int count = all.num_used[request];
    this->staged.wait();
    if (count <= 0) return copy_rows(pool, scales, from, to);
    this->load(scales, from, 0);
    replay(rings, A, count);
    this->store(pool, scales, to, 0, 0);
  }
};

// Params: CheckpointingStateParams or MaterializeStateParams.
template <typename Traits, int kStep, typename Params>
__global__ void __launch_bounds__(Traits::kThreads)
    state_replay_kernel(const __grid_constant__ Params params) {
  using Block = StateReplayBlock<Traits, kStep>;
  extern __shared__ __align__(128) char dynamic_shared[];
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const SelectiveStateParams& step = params.step;
  const int first_row = blockIdx.x * Block::kRows;
  const int32_t head = static_cast<int32_t>(blockIdx.y) % step.num_heads;
  const int64_t batch = blockIdx.z;
  Block block{{step,
               {dynamic_shared},
               reinterpret_cast<typename Block::Token*>(dynamic_shared + Block::Staged::kBytes),
               head,
               first_row,
               step.dim - first_row,
               static_cast<int32_t>(threadIdx.x) % Traits::Layout::kLanes,
               batch,
               step.cu_seqlens != nullptr ? 0 : batch,
               token_range(step.cu_seqlens, step.cu_seqlens_is_int64, batch, step.num_tokens),
               {0, step.philox_rounds}}};
  block.run(params, static_cast<int32_t>(blockIdx.y) / step.num_heads);
}

#ifndef __CUDACC_RTC__

// `num_layers`: of the requests of params.step.
template <typename Traits, typename Params>
cudaError_t launch_state_replay(const Params& params, int num_layers, bool enable_pdl,
                                cudaStream_t stream) {
  using Block = StateReplayBlock<Traits, 2>;
  constexpr size_t kShared = Block::shared_bytes(1, Block::kTokens);
  static_assert(kShared <= 48 << 10);
  const dim3 grid(ceil_div(params.step.dim, Block::kRows), params.step.num_heads * num_layers,
                  params.step.batch_size);
  return launch_kernel(state_replay_kernel<Traits, 2, Params>, grid, dim3(Traits::kThreads),
                       kShared, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
