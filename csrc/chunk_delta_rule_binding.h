// The chunked delta rules take their tensors, check them and make parameters of them alike.
#pragma once
#include <flashinfer/linear_attention/chunk_delta_rule_params.h>

#include "delta_rule_binding.h"

namespace flashinfer::delta_rule_binding {

// Results of the first stage; `operands` is empty where decays are not by channel, and `progress`
// where the stages run one after the other.
struct ChunkTensors {
  ffi::Tensor operands, solve, scores, factors, progress;
};

inline void take_tokens(Call& call, ffi::Args& args) {
  call.out = args.tensor("output");
  call.q = args.tensor("q");
  call.k = args.tensor("k");
  call.v = args.tensor("v");
}

// Takes the tuples of states and snapshots, and how many tokens lie between two of the latter.
inline int64_t take_states(Call& call, ffi::Args& args, const char* read_slots) {
  ffi::Args states = args.group("states", 4);
  call.state = states.optional_tensor("initial_state");
  call.state_out = states.optional_tensor("output_state");
  call.read_slots = states.optional_tensor(read_slots);
  call.write_slots = states.optional_tensor("output_state_indices");
  ffi::Args snapshots = args.group("snapshots", 3);
  call.snapshots = snapshots.optional_tensor("state_checkpoints");
  call.snapshot_starts = snapshots.optional_tensor("checkpoint_cu_starts");
  return snapshots.integer("checkpoint_every_n_tokens");
}

inline void check_prompts(const Call& call) {
  check_tokens(call);
  ffi::check_rows_of_vectors(call.v, 8);
  ffi::check_rows_of_vectors(call.out, 2);
  if (call.v.dim(3) % 64 != 0) {
    ffi::raise("ValueError", "`v` must have a head size that is a multiple of 64, got %lld",
               static_cast<long long>(call.v.dim(3)));
  }
  check_pools(call);
  const int64_t batch = batch_size_of(call);
  check_slots(call.state, call.read_slots, batch);
  check_slots(call.state_out, call.write_slots, batch);
}

// Parameters of a checked call; a head has `factors` numbers of a chunk, and `operands` others.
inline ChunkDeltaRuleParams chunk_params(const Call& call, const ChunkTensors& results,
                                         int64_t factors, int64_t operands, int64_t flags) {
  const int64_t batch = batch_size_of(call), heads = call.out.dim(2);
  const int64_t slots = call.q.dim(1) / kChunkSize + batch;
  check_workspace(results.solve, call.types.dtype, slots, heads, kChunkSize * kChunkSize);
  check_workspace(results.scores, call.types.dtype, slots, heads, kChunkSize * kChunkSize);
  check_workspace(results.factors, ffi::dtype::float32, slots, heads, factors);
  ChunkDeltaRuleParams params = {};
  params.recurrence = make_params(call, batch, flags);
  params.workspace = {results.solve.data(), results.scores.data(),
                      static_cast<float*>(results.factors.data()), nullptr};
  params.num_slots = static_cast<int32_t>(slots);
  if (operands > 0) {
    check_workspace(results.operands, call.types.dtype, slots, heads, operands);
    params.workspace.operands = results.operands.data();
  }
  if (results.progress) {
    ffi::check_dtype(results.progress, ffi::dtype::int32);
    ffi::check_shape(results.progress, {(slots + kSlotsPerCounter - 1) / kSlotsPerCounter, heads});
    ffi::check_last_dim_contiguous(results.progress);
    params.progress = static_cast<uint32_t*>(results.progress.data());
  }
  return params;
}

}  // namespace flashinfer::delta_rule_binding
