//   chunk_delta_rule(output, q, k, v, gates, states, snapshots, cu_seqlens, workspace, scale, flags,
//                    schedule)
//
// q, k, v and output are [1, tokens, heads, dim]. Tuples, whose tensors may be None but for those
// of the workspace:
//
//   gates      (g, beta, gate_form)
//   states     (initial_state, output_state, state_indices, output_state_indices)
//   snapshots  (state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens)
//   workspace  (solve, scores, factors, progress): progress may be None too
#include "chunk_delta_rule.h"
#include "delta_rule_binding.h"

namespace flashinfer {
namespace {

constexpr delta_rule_binding::Types kTypes = {ffi::dtype::FLASHINFER_CFG_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_STATE_DTYPE,
                                              ffi::dtype::float32,
                                              ffi::dtype::float32,
                                              ffi::dtype::float32,
                                              FLASHINFER_CFG_HEAD_DIM_K,
                                              false,
                                              8,
                                              false};

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(chunk_delta_rule, args) {
  using namespace flashinfer;
  using namespace flashinfer::delta_rule_binding;
  Call call;
  call.types = kTypes;
  call.out = args.tensor("output");
  call.q = args.tensor("q");
  call.k = args.tensor("k");
  call.v = args.tensor("v");
  ffi::Args gates = args.group("gates", 3);
  call.gate = gates.optional_tensor("g");
  call.beta = gates.optional_tensor("beta");
  const int64_t gate_form = gates.integer("gate_form");
  ffi::Args states = args.group("states", 4);
  call.state = states.optional_tensor("initial_state");
  call.state_out = states.optional_tensor("output_state");
  call.read_slots = states.optional_tensor("state_indices");
  call.write_slots = states.optional_tensor("output_state_indices");
  ffi::Args snapshots = args.group("snapshots", 3);
  call.snapshots = snapshots.optional_tensor("state_checkpoints");
  call.snapshot_starts = snapshots.optional_tensor("checkpoint_cu_starts");
  const int64_t snapshot_every = snapshots.integer("checkpoint_every_n_tokens");
  call.cu_seqlens = args.tensor("cu_seqlens");
  ffi::Args workspace = args.group("workspace", 4);
  const ffi::Tensor solve = workspace.tensor("solve");
  const ffi::Tensor scores = workspace.tensor("scores");
  const ffi::Tensor factors = workspace.tensor("factors");
  const ffi::Tensor progress = workspace.optional_tensor("progress");
  const double scale = args.number("scale");
  const int64_t flags = args.integer("flags");
  const int64_t schedule = args.integer("schedule");
  args.all_taken();

  check_tokens(call);
  ffi::check_vector_rows(call.v, 8);
  ffi::check_vector_rows(call.out, 2);
  if (call.v.dim(3) % 64 != 0) {
    ffi::raise("ValueError", "`v` must have a head size that is a multiple of 64, got %lld",
               static_cast<long long>(call.v.dim(3)));
  }
  check_pools(call);
  const int64_t batch = batch_size_of(call), heads = call.out.dim(2);
  check_slots(call.state, call.read_slots, batch);
  check_slots(call.state_out, call.write_slots, batch);
  const int64_t slots = call.q.dim(1) / kChunkSize + batch;
  check_workspace(solve, kTypes.dtype, slots, heads, kChunkSize * kChunkSize);
  check_workspace(scores, kTypes.dtype, slots, heads, kChunkSize * kChunkSize);
  check_workspace(factors, ffi::dtype::float32, slots, heads, 4 * kChunkSize);
  ChunkDeltaRuleParams params = {};
  params.recurrence = make_params(call, batch, flags);
  params.recurrence.scale = static_cast<float>(scale);
  params.recurrence.gate_form = static_cast<GateForm>(gate_form);
  params.recurrence.snapshot_every = static_cast<int32_t>(snapshot_every);
  params.workspace = {solve.data(), scores.data(), static_cast<float*>(factors.data())};
  params.num_slots = static_cast<int32_t>(slots);
  if (progress) {
    ffi::check_dtype(progress, ffi::dtype::int32);
    ffi::check_shape(progress, {(slots + kSlotsPerCounter - 1) / kSlotsPerCounter, heads});
    ffi::check_last_dim_contiguous(progress);
    params.progress = static_cast<uint32_t*>(progress.data());
  }

  check_devices(call);
  if (batch == 0 || heads == 0) return;
  const ffi::DeviceGuard guard(call.q);
  const DeviceInfo& device = ffi::device_info(call.q);
  ffi::check_launch(chunk_delta_rule(params, device.num_sms, static_cast<int>(schedule),
                                     device.has_pdl(), ffi::current_stream(call.q)));
}
