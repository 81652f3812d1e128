// Arguments of the delta rule's bindings, token by token and in chunks: checks, and Params from
// them.
#pragma once

#include <flashinfer/linear_attention/delta_rule_params.h>

#include <utility>

#include "ffi.h"
#include "linear_attention_binding.h"

namespace flashinfer::delta_rule_binding {

// Types and sizes that a module is compiled for.
struct Types {
  DLDataType dtype, state, gate, beta, bias;
  int64_t head_dim_k;
  bool channel_gate;
  int64_t vec_size;  // elements of q and k that are loaded at once
  bool key_major;    // states are [head_dim_k, head_dim_v]
};

// Bits of `flags`.
enum Flag : int64_t { kBetaIsLogit = 1, kNormalize = 2, kWriteEveryToken = 4 };

struct Call {
  Types types;
  ffi::Tensor out, q, k, v, gate, beta, a_log, dt_bias, state, state_out, read_slots, write_slots;
  ffi::Tensor num_accepted, snapshots, snapshot_starts, cu_seqlens;
};

inline void check_heads(const ffi::Tensor& tensor, const Call& call, int64_t heads, int64_t dim) {
  const int64_t shape[] = {call.q.dim(0), call.q.dim(1), heads, dim};
  ffi::check_shape(tensor, shape, dim < 0 ? 3 : 4);
}

inline int32_t group_size(const ffi::Tensor& tensor, int64_t state_heads) {
  const int64_t heads = tensor.dim(2);
  if (heads == 0 || state_heads % heads != 0) {
    ffi::raise("ValueError", "`%s` must have a number of heads that divides %lld, got %lld",
               tensor.name, static_cast<long long>(state_heads), static_cast<long long>(heads));
  }
  return static_cast<int32_t>(state_heads / heads);
}

inline void check_tokens(const Call& call) {
  for (const ffi::Tensor& tensor : {call.q, call.k, call.v, call.out}) {
    ffi::check_dtype(tensor, call.types.dtype);
    ffi::check_ndim(tensor, 4, 4);
    ffi::check_last_dim_contiguous(tensor);
  }
  const int64_t heads = call.out.dim(2), head_dim_v = call.v.dim(3);
  check_heads(call.q, call, call.q.dim(2), call.types.head_dim_k);
  check_heads(call.k, call, call.k.dim(2), call.types.head_dim_k);
  check_heads(call.v, call, call.v.dim(2), head_dim_v);
  check_heads(call.out, call, heads, head_dim_v);
  ffi::check_rows_of_vectors(call.q, call.types.vec_size);
  ffi::check_rows_of_vectors(call.k, call.types.vec_size);
  ffi::check_no_broadcast(call.out);
  if (call.gate) {
    ffi::check_dtype(call.gate, call.types.gate);
    check_heads(call.gate, call, heads, call.types.channel_gate ? call.types.head_dim_k : -1);
    if (call.types.channel_gate) ffi::check_last_dim_contiguous(call.gate);
  }
  if (call.beta) {
    ffi::check_dtype(call.beta, call.types.beta);
    check_heads(call.beta, call, heads, -1);
  }
  if (call.a_log) {
    ffi::check_dtype(call.a_log, ffi::dtype::float32);
    ffi::check_shape(call.a_log, {heads});
    ffi::check_last_dim_contiguous(call.a_log);
  }
  if (call.dt_bias) {
    ffi::check_dtype(call.dt_bias, call.types.bias);
    const int64_t shape[] = {heads, call.types.head_dim_k};
    ffi::check_shape(call.dt_bias, shape, call.types.channel_gate ? 2 : 1);
    if (call.types.channel_gate) {
      ffi::check_last_dim_contiguous(call.dt_bias);
      if (heads > 1 && call.dt_bias.stride(0) != call.types.head_dim_k) {
        ffi::raise("ValueError", "`%s` must be contiguous", call.dt_bias.name);
      }
    } else {
      ffi::check_last_dim_contiguous(call.dt_bias);
    }
  }
}

inline void check_pools(const Call& call) {
  for (const ffi::Tensor& pool : {call.state, call.state_out, call.snapshots}) {
    if (!pool) continue;
    ffi::check_dtype(pool, call.types.state);
    int64_t rows = call.v.dim(3), row = call.types.head_dim_k;
    if (call.types.key_major) std::swap(rows, row);
    ffi::check_shape(pool, {pool.dim(0), call.out.dim(2), rows, row});
    ffi::check_state_pool(pool);
  }
  for (const ffi::Tensor& pool : {call.state_out, call.snapshots}) {
    if (pool) ffi::check_no_broadcast(pool);
    if (!pool) continue;
    for (const ffi::Tensor& tensor : {call.out, call.q, call.k, call.v}) {
      ffi::check_disjoint(pool, tensor);
    }
  }
  if (call.state && call.state_out) {
    ffi::check_same_view_or_disjoint(call.state_out, call.state);
  }
  if (call.snapshots) {
    if (call.state) ffi::check_disjoint(call.snapshots, call.state);
    if (call.state_out) ffi::check_disjoint(call.snapshots, call.state_out);
  }
  for (const ffi::Tensor& tensor : {call.q, call.k, call.v}) ffi::check_disjoint(call.out, tensor);
}

inline int64_t batch_size_of(const Call& call) {
  return ffi::num_sequences(call.q, call.cu_seqlens);
}

// A sequence without an index has its own slot.
inline void check_slots(const ffi::Tensor& pool, const ffi::Tensor& slots, int64_t batch) {
  if (pool && !slots && pool.dim(0) < batch) {
    ffi::raise("ValueError", "`%s` must have a slot for each of %lld sequences, got shape %s",
               pool.name, static_cast<long long>(batch), pool.shape_text().c_str());
  }
}

inline DeltaRuleParams make_params(const Call& call, int64_t batch, int64_t flags) {
  DeltaRuleParams params = {};
  params.q = ffi::token_heads(call.q);
  params.k = ffi::token_heads(call.k);
  params.v = ffi::token_heads(call.v);
  params.out = ffi::token_heads(call.out);
  params.gate = ffi::token_heads(call.gate);
  params.beta = ffi::token_heads(call.beta);
  params.a_log = call.a_log ? static_cast<const float*>(call.a_log.data()) : nullptr;
  params.dt_bias = call.dt_bias ? call.dt_bias.data() : nullptr;
  params.beta_is_logit = flags & kBetaIsLogit;
  params.normalize_qk = flags & kNormalize;
  params.write_every_token = flags & kWriteEveryToken;
  params.state = ffi::state_pool(call.state);
  params.state_out = ffi::state_pool(call.state_out);
  params.snapshots = ffi::state_pool(call.snapshots);
  params.read_slot = ffi::slot_indices(call.read_slots, batch, 1);
  params.write_slot = ffi::slot_indices(call.write_slots, batch, 1);
  if (call.num_accepted) {
    ffi::check_dtype(call.num_accepted, ffi::dtype::int32);
    ffi::check_shape(call.num_accepted, {batch});
    ffi::check_last_dim_contiguous(call.num_accepted);
    params.num_accepted = static_cast<const int32_t*>(call.num_accepted.data());
  }
  if (call.snapshot_starts) {
    ffi::check_dtype(call.snapshot_starts, ffi::dtype::int64);
    ffi::check_shape(call.snapshot_starts, {batch + 1});
    ffi::check_last_dim_contiguous(call.snapshot_starts);
    params.snapshot_starts = static_cast<const int64_t*>(call.snapshot_starts.data());
  }
  params.cu_seqlens = call.cu_seqlens ? call.cu_seqlens.data() : nullptr;
  params.cu_seqlens_is_int64 = ffi::is_int64(call.cu_seqlens);
  params.batch_size = static_cast<int32_t>(batch);
  params.num_tokens = static_cast<int32_t>(call.q.dim(1));
  params.state_heads = static_cast<int32_t>(call.out.dim(2));
  params.q_group = FastDivisor(group_size(call.q, call.out.dim(2)));
  params.k_group = FastDivisor(group_size(call.k, call.out.dim(2)));
  params.v_group = FastDivisor(group_size(call.v, call.out.dim(2)));
  params.head_dim_v = static_cast<int32_t>(call.v.dim(3));
  return params;
}

// All tensors are on the device of q; this is checked last.
inline void check_devices(const Call& call) {
  ffi::check_cuda(call.q);
  for (const ffi::Tensor& tensor :
       {call.out, call.k, call.v, call.gate, call.beta, call.a_log, call.dt_bias, call.state,
        call.state_out, call.read_slots, call.write_slots, call.num_accepted, call.snapshots,
        call.snapshot_starts, call.cu_seqlens}) {
    if (tensor) ffi::check_same_device(tensor, call.q);
  }
}

// Numbers of each chunk and head that the first stage leaves for the second.
inline void check_workspace(const ffi::Tensor& tensor, DLDataType dtype, int64_t slots,
                            int64_t heads, int64_t numbers) {
  ffi::check_dtype(tensor, dtype);
  ffi::check_shape(tensor, {slots, heads, numbers});
  ffi::check_last_dim_contiguous(tensor);
  ffi::check_aligned(tensor, 16);
}

}  // namespace flashinfer::delta_rule_binding
