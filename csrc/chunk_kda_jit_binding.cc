//   chunk_kda(output, q, k, v, gates, states, snapshots, cu_seqlens, workspace, scale, flags,
//             schedule)
//
// q, k, v and output are [1, tokens, heads, dim]. Tuples, whose tensors may be None but for g and
// those of the workspace:
//
//   gates      (g, beta, A_log, dt_bias, lower_bound, gate_form)
//   states     (initial_state, output_state, initial_state_indices, output_state_indices)
//   snapshots  (state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens)
//   workspace  (operands, solve, scores, factors, progress): progress may be None too
#include "chunk_kda.h"
#include "delta_rule_binding.h"

namespace flashinfer {
namespace {

constexpr delta_rule_binding::Types kTypes = {ffi::dtype::FLASHINFER_CFG_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_STATE_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_GATE_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_BETA_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_BIAS_DTYPE,
                                              FLASHINFER_CFG_HEAD_DIM_K,
                                              true,
                                              8,
                                              false};

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(chunk_kda, args) {
  using namespace flashinfer;
  using namespace flashinfer::delta_rule_binding;
  Call call;
  call.types = kTypes;
  call.out = args.tensor("output");
  call.q = args.tensor("q");
  call.k = args.tensor("k");
  call.v = args.tensor("v");
  ffi::Args gates = args.group("gates", 6);
  call.gate = gates.tensor("g");
  call.beta = gates.optional_tensor("beta");
  call.a_log = gates.optional_tensor("A_log");
  call.dt_bias = gates.optional_tensor("dt_bias");
  const double lower_bound = gates.number("lower_bound");
  const int64_t gate_form = gates.integer("gate_form");
  ffi::Args states = args.group("states", 4);
  call.state = states.optional_tensor("initial_state");
  call.state_out = states.optional_tensor("output_state");
  call.read_slots = states.optional_tensor("initial_state_indices");
  call.write_slots = states.optional_tensor("output_state_indices");
  ffi::Args snapshots = args.group("snapshots", 3);
  call.snapshots = snapshots.optional_tensor("state_checkpoints");
  call.snapshot_starts = snapshots.optional_tensor("checkpoint_cu_starts");
  const int64_t snapshot_every = snapshots.integer("checkpoint_every_n_tokens");
  call.cu_seqlens = args.tensor("cu_seqlens");
  ffi::Args workspace = args.group("workspace", 5);
  const ffi::Tensor operands = workspace.tensor("operands");
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
  ffi::check_vector_rows(call.gate, 8);
  if (call.dt_bias) ffi::check_vector_rows(call.dt_bias, 8);
  if (call.v.dim(3) % 64 != 0) {
    ffi::raise("ValueError", "`v` must have a head size that is a multiple of 64, got %lld",
               static_cast<long long>(call.v.dim(3)));
  }
  check_pools(call);
  const int64_t batch = batch_size_of(call), heads = call.out.dim(2);
  check_slots(call.state, call.read_slots, batch);
  check_slots(call.state_out, call.write_slots, batch);
  const int64_t slots = call.q.dim(1) / kChunkSize + batch;
  check_workspace(operands, kTypes.dtype, slots, heads, 3 * kChunkSize * kTypes.head_dim_k);
  check_workspace(solve, kTypes.dtype, slots, heads, kChunkSize * kChunkSize);
  check_workspace(scores, kTypes.dtype, slots, heads, kChunkSize * kChunkSize);
  check_workspace(factors, ffi::dtype::float32, slots, heads, kTypes.head_dim_k);
  ChunkDeltaRuleParams params = {};
  params.recurrence = make_params(call, batch, flags);
  params.recurrence.scale = static_cast<float>(scale);
  params.recurrence.lower_bound = static_cast<float>(lower_bound);
  params.recurrence.gate_form = static_cast<GateForm>(gate_form);
  params.recurrence.snapshot_every = static_cast<int32_t>(snapshot_every);
  params.workspace = {solve.data(), scores.data(), static_cast<float*>(factors.data()),
                      operands.data()};
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
  ffi::check_launch(chunk_kda(params, device.num_sms, static_cast<int>(schedule), device.has_pdl(),
                              ffi::current_stream(call.q)));
}
