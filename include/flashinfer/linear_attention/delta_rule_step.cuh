// One token of the gated delta rule for batches so small that latency decides:
//   decay = exp(-exp(a_log) softplus(a + dt_bias));  beta = sigmoid(b)
//
// Nothing waits for anything but its own loads: every lane loads its elements of q and k and the
// gates beside its elements of the state, and all sums of the token are taken at once over the
// lanes of a row. With the sums ss = S k, sq = S q, kk, qq, kq of what is loaded and the factors f
// of k and e of q (norms and scale),
//   delta = beta f (v - decay f ss);  out = e (decay sq + delta kq);  S = decay S + delta k^T
// There is no shared memory and no barrier. A cold GPU fetches arguments and instructions as well,
// so the arguments are few and near each other. Larger batches and more tokens: delta_rule.cuh.
//
// Measurements, also of what lost: docs/tuning/linear_attention.md.
#pragma once

#include <flashinfer/linear_attention/delta_rule.cuh>

namespace flashinfer {

// A step needs this much of DeltaRuleParams. Strides count elements and fit in 32 bits; products of
// theirs have 64.
struct DeltaRuleStepParams {
  struct Heads {
    void* data;
    uint32_t batch_stride, head_stride;
  };
  struct Slots {
    const void* data;  // null: entry b is b
    uint32_t batch_stride;
    bool is_int64;
  };
  struct Group {
    uint32_t multiplier, shift;  // of FastDivisor
  };

  Heads state;  // slots in place of batches
  Slots read_slot;
  Heads q, k, v, gate, beta;
  const void* dt_bias;
  const float* a_log;
  Group q_group, k_group, v_group;
  int32_t head_dim_v;
  float scale;
  bool normalize_qk;
  Heads out, state_out;  // state_out.data null: the state is not written
  Slots write_slot;
};

// Rows of a CTA are consecutive. Two rows of 16 bits keep as many bytes in flight as one of 32.
template <typename Traits_>
struct DeltaRuleStepShape {
  using Traits = Traits_;
  using Layout = typename Traits::Layout;
  static constexpr int kRows = sizeof(typename Traits::StateT) == 2 ? 2 : 1;  // of a thread
  static constexpr int kThreads = 256 / kRows;
  static constexpr int kCtaRows = kThreads / Layout::kLanes * kRows;
};

template <typename Shape>
struct DeltaRuleStep {
  using Traits = typename Shape::Traits;
  using Layout = typename Shape::Layout;
  using T = typename Traits::T;
  using StateT = typename Traits::StateT;
  using Params = DeltaRuleStepParams;
  static constexpr int kDim = Traits::kHeadDimK, kRows = Shape::kRows;
  static constexpr int kElements = Layout::kElements, kVecSize = Layout::kVecSize;
  template <typename Element>
  using Row = Vector<Element, kVecSize>[Layout::kVecs];

  const Params& params;
  uint32_t batch, head;
  int first_row, num_rows;  // of the CTA, and from there on

  // As loaded.
  Row<StateT> state[kRows];
  Row<T> q, k;
  T v[kRows];
  typename Traits::GateT gate;
  typename Traits::BetaT beta;
  typename Traits::BiasT bias;
  float a_log;

  template <typename Element>
  __device__ __forceinline__ static Element* address(const Params::Heads& heads, uint64_t batch,
                                                     uint32_t head) {
    return static_cast<Element*>(heads.data) + batch * heads.batch_stride +
           uint64_t{head} * heads.head_stride;
  }

  __device__ __forceinline__ static int64_t slot(const Params::Slots& slots, uint32_t batch) {
    const uint64_t i = uint64_t{batch} * slots.batch_stride;
    return slots.is_int64 ? static_cast<const int64_t*>(slots.data)[i]
                          : static_cast<const int32_t*>(slots.data)[i];
  }

  __device__ __forceinline__ uint32_t group(const Params::Group& by) const {
    return (static_cast<uint32_t>((uint64_t{head} * by.multiplier) >> 32) + head) >> by.shift;
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % Layout::kLanes; }

  // Row i of this thread, from the CTA's first.
  __device__ __forceinline__ static int row_of(int i) {
    return threadIdx.x / Layout::kLanes * kRows + i;
  }

  template <typename Element>
  __device__ __forceinline__ static void load_row(Row<Element>& to, const Element* row) {
#pragma unroll
    for (int i = 0; i < Layout::kVecs; ++i) to[i].load(row + Layout::column(lane(), i));
  }

  __device__ __forceinline__ void load_state(int64_t slot) {
    const StateT* from = address<const StateT>(params.state, slot, head) + first_row * kDim;
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_row(state[i], from + min(row_of(i), num_rows - 1) * kDim);
  }

  __device__ __forceinline__ void load_token() {
    gate = *address<const typename Traits::GateT>(params.gate, batch, head);
    beta = *address<const typename Traits::BetaT>(params.beta, batch, head);
    bias = static_cast<const typename Traits::BiasT*>(params.dt_bias)[head];
    a_log = params.a_log[head];
    load_row(q, address<const T>(params.q, batch, group(params.q_group)));
    load_row(k, address<const T>(params.k, batch, group(params.k_group)));
    const T* values = address<const T>(params.v, batch, group(params.v_group)) + first_row;
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] = values[min(row_of(i), num_rows - 1)];
  }

  // Loads all there is; false: the sequence is padding. The address of a state may need a load.
  __device__ __forceinline__ bool load() {
    const bool has_slots = params.read_slot.data != nullptr;
    if (!has_slots) load_state(batch);
    load_token();
    if (has_slots) {
      const int64_t read_slot = slot(params.read_slot, batch);
      if (read_slot < 0) return false;
      load_state(read_slot);
    }
    __syncwarp();  // keeps loads before it, where the compiler would first use what is there
    return true;
  }

  template <typename Element>
  __device__ __forceinline__ static void unpack(float (&to)[kElements], const Row<Element>& from) {
#pragma unroll
    for (int i = 0; i < Layout::kVecs; ++i) {
      float part[kVecSize];
      from[i].to_floats(part);
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) to[i * kVecSize + j] = part[j];
    }
  }

  // The new rows of the state, and the outputs.
  __device__ __forceinline__ void update(float (&rows)[kRows][kElements],
                                         float (&out)[kRows]) const {
    constexpr int kLanes = Layout::kLanes;
    const float kept =
        expf(-expf(a_log) * softplus_without_branch(to_float(gate) + to_float(bias)));
    float keys[kElements], queries[kElements];
    unpack(keys, k);
    unpack(queries, q);
    float kk = 0.f, qq = 0.f, kq = 0.f, sk[kRows] = {}, sq[kRows] = {};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      kk += keys[i] * keys[i];
      qq += queries[i] * queries[i];
      kq += keys[i] * queries[i];
    }
    kk = row_sum<kLanes>(kk), qq = row_sum<kLanes>(qq), kq = row_sum<kLanes>(kq);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      unpack(rows[r], state[r]);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sk[r] += rows[r][i] * keys[i];
        sq[r] += rows[r][i] * queries[i];
      }
      sk[r] = row_sum<kLanes>(sk[r]);
      sq[r] = row_sum<kLanes>(sq[r]);
    }
    // 1e-6 under the roots keeps a row of zeros at zero.
    const float key_factor = params.normalize_qk ? rsqrtf(kk + 1e-6f) : 1.f;
    const float query_factor = params.scale * (params.normalize_qk ? rsqrtf(qq + 1e-6f) : 1.f);
    const float learned = sigmoid_without_branch(to_float(beta)) * key_factor;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float delta = learned * (to_float(v[r]) - kept * key_factor * sk[r]);
      out[r] = query_factor * (kept * sq[r] + delta * kq);
#pragma unroll
      for (int i = 0; i < kElements; ++i) rows[r][i] = kept * rows[r][i] + delta * keys[i];
    }
  }

  __device__ __forceinline__ void store(const float (&rows)[kRows][kElements]) const {
    if (params.state_out.data == nullptr) return;
    const bool has_slots = params.write_slot.data != nullptr;
    const int64_t write_slot = has_slots ? slot(params.write_slot, batch) : int64_t{batch};
    if (write_slot < 0) return;
    StateT* to = address<StateT>(params.state_out, write_slot, head) + first_row * kDim;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row_of(i);
      if (row < num_rows) store_row<Layout, true>(to + row * kDim, rows[i], lane());
    }
  }

  __device__ __forceinline__ void run() {
    float out[kRows] = {};
    if (load()) {
      float rows[kRows][kElements];
      update(rows, out);
      store(rows);
    }
    T* to = address<T>(params.out, batch, head) + first_row;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row_of(i);
      if (lane() == i && row < num_rows) to[row] = from_float<T>(out[i]);
    }
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    delta_rule_step_kernel(const __grid_constant__ DeltaRuleStepParams params) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int first_row = blockIdx.x * Shape::kCtaRows;
  DeltaRuleStep<Shape> step{params, blockIdx.z, blockIdx.y, first_row,
                            params.head_dim_v - first_row};
  step.run();
}

#ifndef __CUDACC_RTC__

// Whether a call is one step, with strides that fit.
inline bool is_one_step(const DeltaRuleParams& params) {
  if (params.gate_form != GateForm::kSoftplus || !params.beta_is_logit ||
      params.gate.data == nullptr || params.beta.data == nullptr || params.dt_bias == nullptr ||
      params.a_log == nullptr) {
    return false;
  }
  if (params.num_tokens != 1 || params.cu_seqlens != nullptr || params.state.data == nullptr ||
      params.num_accepted != nullptr || params.snapshots.data != nullptr) {
    return false;
  }
  const auto fits = [](int64_t stride) { return stride >= 0 && stride < int64_t{1} << 32; };
  bool fit = true;
  for (const TokenHeads* heads :
       {&params.q, &params.k, &params.v, &params.out, &params.gate, &params.beta}) {
    fit = fit && fits(heads->batch_stride) && fits(heads->head_stride);
  }
  for (const StatePool* pool : {&params.state, &params.state_out}) {
    fit = fit && fits(pool->slot_stride) && fits(pool->head_stride);
  }
  return fit && fits(params.read_slot.batch_stride) && fits(params.write_slot.batch_stride);
}

// Arguments of a call for which is_one_step() holds.
inline DeltaRuleStepParams delta_rule_step_params(const DeltaRuleParams& from) {
  using Params = DeltaRuleStepParams;
  const auto narrow = [](int64_t stride) { return static_cast<uint32_t>(stride); };
  const auto heads = [&](const TokenHeads& of) -> Params::Heads {
    return {of.data, narrow(of.batch_stride), narrow(of.head_stride)};
  };
  const auto pool = [&](const StatePool& of) -> Params::Heads {
    return {of.data, narrow(of.slot_stride), narrow(of.head_stride)};
  };
  const auto slots = [&](const SlotIndices& of) -> Params::Slots {
    return {of.data, narrow(of.batch_stride), of.is_int64};
  };
  const auto group = [](const FastDivisor& of) -> Params::Group {
    return {of.multiplier, of.shift};
  };
  Params to = {};
  to.state = pool(from.state);
  to.state_out = pool(from.state_out);
  to.read_slot = slots(from.read_slot);
  to.write_slot = slots(from.write_slot);
  to.q = heads(from.q), to.k = heads(from.k), to.v = heads(from.v), to.out = heads(from.out);
  to.gate = heads(from.gate), to.beta = heads(from.beta);
  to.dt_bias = from.dt_bias;
  to.a_log = from.a_log;
  to.q_group = group(from.q_group), to.k_group = group(from.k_group);
  to.v_group = group(from.v_group);
  to.head_dim_v = from.head_dim_v;
  to.scale = from.scale, to.normalize_qk = from.normalize_qk;
  return to;
}

// Whether a call takes the kernel of one step. `schedule` 0: by the rows that an SM has; 1:
// wherever the kernel can; others name schedules of launch_delta_rule().
template <typename Traits>
bool takes_delta_rule_step(const DeltaRuleParams& params, int num_sms, int schedule) {
  if (schedule > 1 || !is_one_step(params)) return false;
  const int64_t rows = int64_t{params.batch_size} * params.state_heads * params.head_dim_v;
  // Very many rows of 32 bits share what a CTA of the other kernel prepares.
  const bool few = sizeof(typename Traits::StateT) == 2 || rows <= 2048 * int64_t{num_sms};
  return schedule == 1 || few;
}

template <typename Traits>
cudaError_t launch_delta_rule_step(const DeltaRuleParams& params, bool enable_pdl,
                                   cudaStream_t stream) {
  using Shape = DeltaRuleStepShape<Traits>;
  const dim3 grid(ceil_div(params.head_dim_v, Shape::kCtaRows), params.state_heads,
                  params.batch_size);
  return launch_kernel(delta_rule_step_kernel<Shape>, grid, dim3(Shape::kThreads), 0, stream,
                       enable_pdl, delta_rule_step_params(params));
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
