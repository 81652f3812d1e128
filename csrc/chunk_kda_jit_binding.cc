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
#include "chunk_delta_rule_binding.h"
#include "chunk_kda.h"

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
  take_tokens(call, args);
  ffi::Args gates = args.group("gates", 6);
  call.gate = gates.tensor("g");
  call.beta = gates.optional_tensor("beta");
  call.a_log = gates.optional_tensor("A_log");
  call.dt_bias = gates.optional_tensor("dt_bias");
  const double lower_bound = gates.number("lower_bound");
  const int64_t gate_form = gates.integer("gate_form");
  const int64_t snapshot_every = take_states(call, args, "initial_state_indices");
  call.cu_seqlens = args.tensor("cu_seqlens");
  ffi::Args workspace = args.group("workspace", 5);
  const ChunkTensors results = {workspace.tensor("operands"), workspace.tensor("solve"),
                                workspace.tensor("scores"), workspace.tensor("factors"),
                                workspace.optional_tensor("progress")};
  const double scale = args.number("scale");
  const int64_t flags = args.integer("flags");
  const int64_t schedule = args.integer("schedule");
  args.all_taken();

  check_prompts(call);
  ffi::check_rows_of_vectors(call.gate, 8);
  if (call.dt_bias) ffi::check_rows_of_vectors(call.dt_bias, 8);
  ChunkDeltaRuleParams params =
      chunk_params(call, results, kTypes.head_dim_k, 3 * kChunkSize * kTypes.head_dim_k, flags);
  params.recurrence.scale = static_cast<float>(scale);
  params.recurrence.lower_bound = static_cast<float>(lower_bound);
  params.recurrence.gate_form = static_cast<GateForm>(gate_form);
  params.recurrence.snapshot_every = static_cast<int32_t>(snapshot_every);

  check_devices(call);
  if (batch_size_of(call) == 0 || call.out.dim(2) == 0) return;
  const ffi::DeviceGuard guard(call.q);
  const DeviceInfo& device = ffi::device_info(call.q);
  ffi::check_launch(chunk_kda(params, device.num_sms, static_cast<int>(schedule), device.has_pdl(),
                              ffi::current_stream(call.q)));
}
