// One token of Mamba-2, whose decay is one number per row of the state: see selective_state.cuh.
//
// As in delta_rule_step.cuh, nothing waits for anything but its own loads, and there is no shared
// memory and no barrier: every lane loads its elements of B and C beside its elements of the state.
// The numbers of a row (x, z, dt, ..) are loaded and computed once, by the lanes that get the row's
// sum in the end, and the others get them from there.
//
// Measurements, also of what lost: docs/tuning/linear_attention.md.
#pragma once

#include <flashinfer/linear_attention/selective_state.cuh>
#include <flashinfer/linear_attention/step_tensors.cuh>

namespace flashinfer {

// A step needs this much of SelectiveStateParams.
struct SelectiveStateStepParams {
  StepHeads state;
  StepSlots read_slot;
  StepHeads B, C, x, dt, z;     // z.data null: no gate
  const void *A, *D, *dt_bias;  // D, dt_bias null: 0
  uint32_t A_head_stride, dt_dim_stride;
  uint32_t D_head_stride, D_dim_stride;
  uint32_t bias_head_stride, bias_dim_stride;
  StepGroup group;
  int32_t dim;
  bool dt_softplus, write_state;
  uint32_t num_slots, pad_slot;  // a pad_slot that is none of the slots: num_slots
  StepSlots write_slot;
  StepHeads out;
};

// Rows of a thread's lanes are consecutive, and so are rows of a CTA.
template <typename Traits_, int kMostLanes, int kMostRows, int kThreads_>
struct SelectiveStateStepShape {
  using Traits = Traits_;
  using Layout = RowLayout<typename Traits::StateT, Traits::kDState, kMostLanes>;
  static constexpr int kRows = kMostRows < Layout::kLanes ? kMostRows : Layout::kLanes;
  static constexpr int kThreads = kThreads_;
  static constexpr int kCtaRows = kThreads / Layout::kLanes * kRows;
};

template <typename Shape>
struct SelectiveStateStep {
  using Traits = typename Shape::Traits;
  using Layout = typename Shape::Layout;
  using T = typename Traits::T;
  using StateT = typename Traits::StateT;
  using WeightT = typename Traits::WeightT;
  static constexpr int kDim = Traits::kDState, kRows = Shape::kRows, kLanes = Layout::kLanes;
  static constexpr int kElements = Layout::kElements, kVecSize = Layout::kVecSize;
  static constexpr int kOwners = kLanes / kRows;  // lanes that get a row's sum
  template <typename Element>
  using Row = Vector<Element, kVecSize>[Layout::kVecs];

  const SelectiveStateStepParams& params;
  uint32_t batch, head;
  int first_row, num_rows;  // of the CTA, and from there on

  // As loaded. One number each of the row that this lane owns.
  Row<StateT> state[kRows];
  Row<T> B, C;
  T x, z;
  typename Traits::DtT dt;
  typename Traits::AT A;
  WeightT bias, D;
  int64_t write_slot;

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }

  // Row i of this thread, from the CTA's first.
  __device__ __forceinline__ static int row_of(int i) { return threadIdx.x / kLanes * kRows + i; }

  __device__ __forceinline__ static int own_row() { return row_of(lane() / kOwners); }

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
    const uint32_t group = params.group.of(head), row = first_row + min(own_row(), num_rows - 1);
    load_row(B, params.B.address<const T>(batch, group));
    load_row(C, params.C.address<const T>(batch, group));
    x = params.x.address<const T>(batch, head)[row];
    dt = params.dt.address<const typename Traits::DtT>(batch,
                                                       head)[uint64_t{row} * params.dt_dim_stride];
    A = static_cast<const typename Traits::AT*>(params.A)[uint64_t{head} * params.A_head_stride];
    z = from_float<T>(0.f);
    if (params.z.data != nullptr) z = params.z.address<const T>(batch, head)[row];
    bias = D = from_float<WeightT>(0.f);
    if (params.dt_bias != nullptr) {
      bias = static_cast<const WeightT*>(params.dt_bias)[uint64_t{head} * params.bias_head_stride +
                                                         uint64_t{row} * params.bias_dim_stride];
    }
    if (params.D != nullptr) {
      D = static_cast<const WeightT*>(
          params.D)[uint64_t{head} * params.D_head_stride + uint64_t{row} * params.D_dim_stride];
    }
  }

  // Whether a slot that an index gives is one, and no padding.
  __device__ __forceinline__ bool is_slot(int64_t slot) const {
    const uint64_t index = static_cast<uint64_t>(slot);
    return index < params.num_slots && index != params.pad_slot;
  }

  // Loads all there is; false: the sequence is padding. The address of a state may need a load.
  __device__ __forceinline__ bool load() {
    const bool has_slots = params.read_slot.data != nullptr;
    if (!has_slots) load_state(batch);
    load_token();
    write_slot = params.write_slot.data != nullptr ? params.write_slot.at(batch) : int64_t{batch};
    if (has_slots) {
      const int64_t read_slot = params.read_slot.at(batch);
      if (!is_slot(read_slot)) return false;
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

  __device__ __forceinline__ StateT* destination() const {
    if (!params.write_state) return nullptr;
    if (params.write_slot.data != nullptr && !is_slot(write_slot)) return nullptr;
    return params.state.address<StateT>(write_slot, head) + first_row * kDim;
  }

  // Updates and stores the rows; returns the output of the row that this lane owns.
  __device__ __forceinline__ float update() const {
    const float raw = to_float(dt) + to_float(bias), channel = to_float(x), z_of = to_float(z);
    const float time = params.dt_softplus ? softplus_without_branch(raw) : raw;
    const float own_decay = expf(to_float(A) * time), own_dt_x = time * channel;
    const int first_lane = threadIdx.x % 32 / kLanes * kLanes;
    StateT* const to = destination();
    float columns[kElements], queries[kElements], sums[kRows];
    unpack(columns, B);
    unpack(queries, C);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float decay = __shfl_sync(0xffffffffu, own_decay, first_lane + i * kOwners);
      const float dt_x = __shfl_sync(0xffffffffu, own_dt_x, first_lane + i * kOwners);
      float row[kElements];
      unpack(row, state[i]);
      sums[i] = 0.f;
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        row[j] = row[j] * decay + dt_x * columns[j];
        sums[i] += row[j] * queries[j];
      }
      const int at = row_of(i);
      if (to != nullptr && at < num_rows) store_row<Layout>(to + at * kDim, row, lane());
    }
    const float sum = row_sums<kLanes>(sums, lane()) + to_float(D) * channel;
    return params.z.data != nullptr ? sum * (z_of * sigmoid_without_branch(z_of)) : sum;
  }

  // What load() returned is `loaded`.
  __device__ __forceinline__ void finish(bool loaded) const {
    const float result = loaded ? update() : 0.f;
    if (lane() % kOwners == 0 && own_row() < num_rows) {
      (params.out.address<T>(batch, head) + first_row)[own_row()] = from_float<T>(result);
    }
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    selective_state_step_kernel(const __grid_constant__ SelectiveStateStepParams params) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int first_row = blockIdx.x * Shape::kCtaRows;
  SelectiveStateStep<Shape> step{params, blockIdx.z, blockIdx.y, first_row, params.dim - first_row};
  step.finish(step.load());
}

#ifndef __CUDACC_RTC__

// Whether rows of B or C can be read by the vectors of a state's layout.
template <typename Traits>
bool are_step_vectors(const TokenHeads& heads) {
  using T = typename Traits::T;
  constexpr uint64_t kBytes = Vector<T, Traits::Layout::kVecSize>::kAccessBytes;
  const auto whole = [](int64_t elements) { return elements * sizeof(T) % kBytes == 0; };
  return reinterpret_cast<uintptr_t>(heads.data) % kBytes == 0 && whole(heads.batch_stride) &&
         whole(heads.head_stride);
}

// Whether a call is one step, with strides that fit.
template <typename Traits>
bool is_one_selective_step(const SelectiveStateParams& params) {
  if (params.num_tokens != 1 || params.cu_seqlens != nullptr || params.num_accepted != nullptr ||
      params.intermediate.data != nullptr || params.batch_size < 1) {
    return false;
  }
  for (const TokenHeads* heads :
       {&params.x, &params.z, &params.out, &params.dt, &params.B, &params.C}) {
    if (!step_strides_fit(*heads)) return false;
  }
  for (const int64_t stride : {params.dt_dim_stride, params.A_head_stride, params.D_head_stride,
                               params.D_dim_stride, params.bias_head_stride, params.bias_dim_stride,
                               params.read_slot.batch_stride, params.write_slot.batch_stride}) {
    if (!step_stride_fits(stride)) return false;
  }
  return step_strides_fit(params.state) && are_step_vectors<Traits>(params.B) &&
         are_step_vectors<Traits>(params.C);
}

// Arguments of a call for which is_one_selective_step() holds.
inline SelectiveStateStepParams selective_state_step_params(const SelectiveStateParams& from) {
  const auto narrow = [](int64_t stride) { return static_cast<uint32_t>(stride); };
  SelectiveStateStepParams to = {};
  to.state = step_heads(from.state);
  to.read_slot = step_slots(from.read_slot), to.write_slot = step_slots(from.write_slot);
  to.B = step_heads(from.B), to.C = step_heads(from.C);
  to.x = step_heads(from.x), to.dt = step_heads(from.dt), to.z = step_heads(from.z);
  to.out = step_heads(from.out);
  to.A = from.A, to.D = from.D, to.dt_bias = from.dt_bias;
  to.A_head_stride = narrow(from.A_head_stride), to.dt_dim_stride = narrow(from.dt_dim_stride);
  to.D_head_stride = narrow(from.D_head_stride), to.D_dim_stride = narrow(from.D_dim_stride);
  to.bias_head_stride = narrow(from.bias_head_stride);
  to.bias_dim_stride = narrow(from.bias_dim_stride);
  to.group = step_group(from.heads_per_group);
  to.dim = from.dim;
  to.dt_softplus = from.dt_softplus, to.write_state = from.write_state;
  to.num_slots = narrow(from.state.num_slots);
  const bool pads = from.pad_slot >= 0 && from.pad_slot < from.state.num_slots;
  to.pad_slot = narrow(pads ? from.pad_slot : from.state.num_slots);
  return to;
}

// Whether states of these types have a kernel of one step: neither scaled nor rounded at random.
template <typename Traits>
inline constexpr bool kHasSelectiveStep = Traits::kTied && !Traits::kScaled && !Traits::kStochastic;

// Whether a call takes that kernel. `schedule` 0 or 1: wherever the kernel can; others name
// schedules of launch_selective_state().
template <typename Traits>
bool takes_selective_state_step(const SelectiveStateParams& params, int schedule) {
  return schedule <= 1 && is_one_selective_step<Traits>(params);
}

template <typename Shape>
cudaError_t launch_selective_state_step_shape(const SelectiveStateParams& params, bool enable_pdl,
                                              cudaStream_t stream) {
  const dim3 grid(ceil_div(params.dim, Shape::kCtaRows), params.num_heads, params.batch_size);
  return launch_kernel(selective_state_step_kernel<Shape>, grid, dim3(Shape::kThreads), 0, stream,
                       enable_pdl, selective_state_step_params(params));
}

// Threads have 128 bytes of the state in flight; where that leaves SMs with little to do, they have
// a quarter of it.
template <typename Traits>
cudaError_t launch_selective_state_step(const SelectiveStateParams& params, int num_sms,
                                        bool enable_pdl, cudaStream_t stream) {
  constexpr int kLanes = 32, kThreads = 128;
  constexpr int kRows = 8 / RowLayout<typename Traits::StateT, Traits::kDState, kLanes>::kVecs;
  using Shape = SelectiveStateStepShape<Traits, kLanes, kRows, kThreads>;
  using Small = SelectiveStateStepShape<Traits, kLanes, kRows / 4, kThreads>;
  const int64_t rows = int64_t{params.batch_size} * params.num_heads * params.dim;
  if (rows <= 4 * Shape::kCtaRows * int64_t{num_sms}) {
    return launch_selective_state_step_shape<Small>(params, enable_pdl, stream);
  }
  return launch_selective_state_step_shape<Shape>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
