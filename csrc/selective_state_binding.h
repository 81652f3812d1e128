// Arguments of the bindings of Mamba's states, token by token and with rings: checks, and Params
// from them, for the one configuration that a binding is compiled for.
#pragma once

#include <flashinfer/linear_attention/selective_state_params.h>

#include "ffi.h"
#include "linear_attention_binding.h"

namespace flashinfer::selective_state_binding {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr DLDataType kStateDtype = ffi::dtype::FLASHINFER_CFG_STATE_DTYPE;
constexpr DLDataType kWeightDtype = ffi::dtype::FLASHINFER_CFG_WEIGHT_DTYPE;
constexpr int64_t kDState = FLASHINFER_CFG_DSTATE;
constexpr bool kTied = FLASHINFER_CFG_TIED;
constexpr bool kStochastic = FLASHINFER_CFG_STOCHASTIC;
constexpr bool kScaled = kStateDtype.code == kDLInt || kStateDtype.bits == 8;
constexpr int64_t kVecSize = 16 / (kStateDtype.bits / 8);

// Bits of `flags`.
enum Flag : int64_t { kSoftplus = 1, kWriteState = 2, kWriteEveryToken = 4 };

struct Call {
  ffi::Tensor out, state, x, dt, A, B, C, D, z, dt_bias, read_slots, write_slots, state_scale;
  ffi::Tensor intermediate, intermediate_indices, intermediate_scales, seed, cu_seqlens;
  ffi::Tensor num_accepted;
};

// Takes the tokens, the weights and the pool; gives the rounds of the random generator.
inline int64_t take_inputs(Call& call, ffi::Args& args) {
  call.out = args.tensor("out");
  call.x = args.tensor("x");
  call.dt = args.tensor("dt");
  call.A = args.tensor("A");
  call.B = args.tensor("B");
  call.C = args.tensor("C");
  ffi::Args options = args.group("options", 3);
  call.D = options.optional_tensor("D");
  call.z = options.optional_tensor("z");
  call.dt_bias = options.optional_tensor("dt_bias");
  ffi::Args pool = args.group("pool", 4);
  call.state = pool.tensor("state");
  call.state_scale = pool.optional_tensor("state_scale");
  call.seed = pool.optional_tensor("rand_seed");
  return pool.integer("philox_rounds");
}

inline void check_tokens(const Call& call) {
  const int64_t batch = call.x.dim(0), tokens = call.x.dim(1);
  const int64_t heads = call.state.dim(1), dim = call.state.dim(2);
  for (const ffi::Tensor& tensor : {call.x, call.out, call.z}) {
    if (!tensor) continue;
    ffi::check_dtype(tensor, kDtype);
    ffi::check_shape(tensor, {batch, tokens, heads, dim});
    ffi::check_last_dim_contiguous(tensor);
  }
  ffi::check_no_broadcast(call.out);
  ffi::check_dtype(call.dt, ffi::dtype::FLASHINFER_CFG_DT_DTYPE);
  ffi::check_shape(call.dt, {batch, tokens, heads, dim});
  for (const ffi::Tensor& tensor : {call.B, call.C}) {
    ffi::check_dtype(tensor, kDtype);
    ffi::check_ndim(tensor, 4, 4);
    ffi::check_shape(tensor, {batch, tokens, call.B.dim(2), kDState});
    ffi::check_last_dim_contiguous(tensor);
  }
  if (call.B.dim(2) == 0 || heads % call.B.dim(2) != 0) {
    ffi::raise("ValueError",
               "`B` must have a number of groups that divides %lld heads, got shape %s",
               static_cast<long long>(heads), call.B.shape_text().c_str());
  }
  ffi::check_dtype(call.A, ffi::dtype::FLASHINFER_CFG_A_DTYPE);
  ffi::check_shape(call.A, {heads, dim, kDState});
  for (const ffi::Tensor& tensor : {call.D, call.dt_bias}) {
    if (!tensor) continue;
    ffi::check_dtype(tensor, kWeightDtype);
    ffi::check_shape(tensor, {heads, dim});
  }
}

inline void check_scales(const ffi::Tensor& scales, const ffi::Tensor& pool) {
  if (!pool) return;
  if (kScaled != static_cast<bool>(scales)) {
    ffi::raise("ValueError", "`%s` must be %s for a state of %s", scales.name,
               kScaled ? "given" : "None", ffi::dtype_name(kStateDtype).c_str());
  }
  if (!scales) return;
  ffi::check_dtype(scales, ffi::dtype::float32);
  ffi::check_shape(scales, {pool.dim(0), pool.dim(1), pool.dim(2)});
  ffi::check_last_dim_contiguous(scales);
  ffi::check_no_broadcast(scales);
}

inline void check_pools(const Call& call) {
  ffi::check_dtype(call.state, kStateDtype);
  ffi::check_ndim(call.state, 4, 4);
  ffi::check_state_pool(call.state);
  ffi::check_no_broadcast(call.state);
  ffi::check_shape(call.state, {call.state.dim(0), call.state.dim(1), call.state.dim(2), kDState});
  check_scales(call.state_scale, call.state);
  check_scales(call.intermediate_scales, call.intermediate);
  if (call.intermediate) {
    ffi::check_dtype(call.intermediate, kStateDtype);
    ffi::check_shape(call.intermediate,
                     {call.intermediate.dim(0), call.state.dim(1), call.state.dim(2), kDState});
    ffi::check_state_pool(call.intermediate);
    ffi::check_no_broadcast(call.intermediate);
    ffi::check_disjoint(call.intermediate, call.state);
  }
  for (const ffi::Tensor& tensor : {call.x, call.dt, call.B, call.C, call.out, call.z}) {
    if (!tensor) continue;
    ffi::check_disjoint(call.state, tensor);
    if (call.intermediate) ffi::check_disjoint(call.intermediate, tensor);
  }
  for (const ffi::Tensor& tensor : {call.dt, call.B, call.C}) ffi::check_disjoint(call.out, tensor);
  for (const ffi::Tensor& tensor : {call.x, call.z}) {
    if (tensor) ffi::check_same_view_or_disjoint(call.out, tensor);
  }
}

inline int64_t batch_size_of(const Call& call) {
  ffi::check_sequences_fit_grid(call.x, call.cu_seqlens);
  return ffi::num_sequences(call.x, call.cu_seqlens);
}

inline RowScales row_scales(const ffi::Tensor& scales) {
  if (!scales) return {};
  return {static_cast<float*>(scales.data()), scales.stride(0), scales.stride(1)};
}

inline void fill_weights(SelectiveStateParams& params, const Call& call) {
  params.A = call.A.data();
  params.A_head_stride = call.A.stride(0);
  params.A_dim_stride = call.A.stride(1);
  params.A_state_stride = call.A.stride(2);
  params.dt_dim_stride = call.dt.stride(3);
  if (call.D) {
    params.D = call.D.data();
    params.D_head_stride = call.D.stride(0);
    params.D_dim_stride = call.D.stride(1);
  }
  if (call.dt_bias) {
    params.dt_bias = call.dt_bias.data();
    params.bias_head_stride = call.dt_bias.stride(0);
    params.bias_dim_stride = call.dt_bias.stride(1);
  }
  const int64_t bytes = kVecSize * call.A.itemsize() < 16 ? kVecSize * call.A.itemsize() : 16;
  params.A_rows_are_vectors = params.A_state_stride == 1 && ffi::is_aligned(call.A, bytes) &&
                              params.A_dim_stride * call.A.itemsize() % bytes == 0 &&
                              params.A_head_stride * call.A.itemsize() % bytes == 0;
  if (kTied && (params.A_dim_stride != 0 || params.A_state_stride != 0)) {
    ffi::raise("ValueError", "`A` must be expanded from one number per head");
  }
}

inline void fill_slots(SelectiveStateParams& params, const Call& call, int64_t batch) {
  params.read_slot = ffi::slot_indices(call.read_slots, batch, 1);
  params.write_slot = ffi::slot_indices(call.write_slots, batch, 1);
  params.snapshot_slot = ffi::slot_indices(call.intermediate_indices, batch, 1);
  if (call.num_accepted) {
    ffi::check_dtype(call.num_accepted, ffi::dtype::int32);
    ffi::check_shape(call.num_accepted, {batch});
    ffi::check_last_dim_contiguous(call.num_accepted);
    params.num_accepted = static_cast<const int32_t*>(call.num_accepted.data());
  }
  if (!call.read_slots && call.state.dim(0) < batch) {
    ffi::raise("ValueError", "`state` must have a slot for each of %lld sequences, got shape %s",
               static_cast<long long>(batch), call.state.shape_text().c_str());
  }
}

inline SelectiveStateParams make_params(const Call& call, int64_t batch, int64_t flags) {
  SelectiveStateParams params = {};
  params.x = ffi::token_heads(call.x);
  params.z = ffi::token_heads(call.z);
  params.out = ffi::token_heads(call.out);
  params.dt = ffi::token_heads(call.dt);
  params.B = ffi::token_heads(call.B);
  params.C = ffi::token_heads(call.C);
  fill_weights(params, call);
  fill_slots(params, call, batch);
  params.dt_softplus = flags & kSoftplus;
  params.write_state = flags & kWriteState;
  params.write_every_token = flags & kWriteEveryToken;
  params.state = ffi::state_pool(call.state);
  params.state_scale = row_scales(call.state_scale);
  params.intermediate = ffi::state_pool(call.intermediate);
  params.intermediate_scale = row_scales(call.intermediate_scales);
  if (call.seed) {
    ffi::check_dtype(call.seed, ffi::dtype::int64);
    if (call.seed.numel() != 1) {
      ffi::raise("ValueError", "`rand_seed` must have one element, got shape %s",
                 call.seed.shape_text().c_str());
    }
    params.seed = static_cast<const int64_t*>(call.seed.data());
  }
  params.cu_seqlens = call.cu_seqlens ? call.cu_seqlens.data() : nullptr;
  params.cu_seqlens_is_int64 = ffi::is_int64(call.cu_seqlens);
  params.batch_size = static_cast<int32_t>(batch);
  params.num_tokens = static_cast<int32_t>(call.x.dim(1));
  params.num_heads = static_cast<int32_t>(call.state.dim(1));
  params.heads_per_group = FastDivisor(static_cast<uint32_t>(call.state.dim(1) / call.B.dim(2)));
  params.dim = static_cast<int32_t>(call.state.dim(2));
  return params;
}

// All tensors are on the device of x; this is checked last.
inline void check_devices(const Call& call) {
  ffi::check_cuda(call.x);
  for (const ffi::Tensor& tensor :
       {call.out, call.state, call.dt, call.A, call.B, call.C, call.D, call.z, call.dt_bias,
        call.read_slots, call.write_slots, call.state_scale, call.intermediate,
        call.intermediate_indices, call.intermediate_scales, call.seed, call.cu_seqlens,
        call.num_accepted}) {
    if (tensor) ffi::check_same_device(tensor, call.x);
  }
}

}  // namespace flashinfer::selective_state_binding
