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
#include <flashinfer/linear_attention/step_tensors.cuh>

namespace flashinfer {

// A step needs this much of DeltaRuleParams.
struct DeltaRuleStepParams {
  StepHeads state;
  StepSlots read_slot;
  StepHeads q, k, v, gate, beta;
  const void* dt_bias;
  const float* a_log;
  StepGroup q_group, k_group, v_group;
  int32_t head_dim_v;
  float scale;
  bool normalize_qk;
  uint32_t num_slots;        // of `state`; others are not read
  StepHeads out, state_out;  // state_out.data null: the state is not written
  StepSlots write_slot;
  uint32_t num_slots_out;
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
  static constexpr int kDim = Traits::kHeadDimK, kRows = Shape::kRows;
  static constexpr int kElements = Layout::kElements, kVecSize = Layout::kVecSize;
  template <typename Element>
  using Row = Vector<Element, kVecSize>[Layout::kVecs];

  const DeltaRuleStepParams& params;
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
    const StateT* from = params.state.address<const StateT>(slot, head) + first_row * kDim;
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_row(state[i], from + min(row_of(i), num_rows - 1) * kDim);
  }

  __device__ __forceinline__ void load_token() {
    gate = *params.gate.address<const typename Traits::GateT>(batch, head);
    beta = *params.beta.address<const typename Traits::BetaT>(batch, head);
    bias = static_cast<const typename Traits::BiasT*>(params.dt_bias)[head];
    a_log = params.a_log[head];
    load_row(q, params.q.address<const T>(batch, params.q_group.of(head)));
    load_row(k, params.k.address<const T>(batch, params.k_group.of(head)));
    const T* values = params.v.address<const T>(batch, params.v_group.of(head)) + first_row;
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] = values[min(row_of(i), num_rows - 1)];
  }

  // Loads all there is; false: the sequence is padding. The address of a state may need a load.
  __device__ __forceinline__ bool load() {
    const bool has_slots = params.read_slot.data != nullptr;
    if (!has_slots) load_state(batch);
    load_token();
    if (has_slots) {
      const int64_t read_slot = params.read_slot.at(batch);
      if (static_cast<uint64_t>(read_slot) >= params.num_slots) return false;
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
    kk = warp_reduce_sum(kk, kLanes), qq = warp_reduce_sum(qq, kLanes),
    kq = warp_reduce_sum(kq, kLanes);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      unpack(rows[r], state[r]);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sk[r] += rows[r][i] * keys[i];
        sq[r] += rows[r][i] * queries[i];
      }
      sk[r] = warp_reduce_sum(sk[r], kLanes);
      sq[r] = warp_reduce_sum(sq[r], kLanes);
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
    const int64_t write_slot = has_slots ? params.write_slot.at(batch) : int64_t{batch};
    if (static_cast<uint64_t>(write_slot) >= params.num_slots_out) return;
    StateT* to = params.state_out.address<StateT>(write_slot, head) + first_row * kDim;
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
    T* to = params.out.address<T>(batch, head) + first_row;
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
  for (const TokenHeads* heads :
       {&params.q, &params.k, &params.v, &params.out, &params.gate, &params.beta}) {
    if (!step_strides_fit(*heads)) return false;
  }
  return step_strides_fit(params.state) && step_strides_fit(params.state_out) &&
         step_stride_fits(params.read_slot.batch_stride) &&
         step_stride_fits(params.write_slot.batch_stride);
}

// Arguments of a call for which is_one_step() holds.
inline DeltaRuleStepParams delta_rule_step_params(const DeltaRuleParams& from) {
  DeltaRuleStepParams to = {};
  to.state = step_heads(from.state);
  to.state_out = step_heads(from.state_out);
  to.read_slot = step_slots(from.read_slot);
  to.write_slot = step_slots(from.write_slot);
  to.q = step_heads(from.q), to.k = step_heads(from.k), to.v = step_heads(from.v);
  to.out = step_heads(from.out);
  to.gate = step_heads(from.gate), to.beta = step_heads(from.beta);
  to.dt_bias = from.dt_bias;
  to.a_log = from.a_log;
  to.q_group = step_group(from.q_group), to.k_group = step_group(from.k_group);
  to.v_group = step_group(from.v_group);
  to.head_dim_v = from.head_dim_v;
  to.scale = from.scale, to.normalize_qk = from.normalize_qk;
  to.num_slots = static_cast<uint32_t>(from.state.num_slots);
  to.num_slots_out = static_cast<uint32_t>(from.state_out.num_slots);
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
