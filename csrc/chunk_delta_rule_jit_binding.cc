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
#include "chunk_delta_rule_binding.h"

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
  take_tokens(call, args);
  ffi::Args gates = args.group("gates", 3);
  call.gate = gates.optional_tensor("g");
  call.beta = gates.optional_tensor("beta");
  const int64_t gate_form = gates.integer("gate_form");
  const int64_t snapshot_every = take_states(call, args, "state_indices");
  call.cu_seqlens = args.tensor("cu_seqlens");
  ffi::Args workspace = args.group("workspace", 4);
  const ChunkTensors results = {{},
                                workspace.tensor("solve"),
                                workspace.tensor("scores"),
                                workspace.tensor("factors"),
                                workspace.optional_tensor("progress")};
  const double scale = args.number("scale");
  const int64_t flags = args.integer("flags");
  const int64_t schedule = args.integer("schedule");
  args.all_taken();

  check_prompts(call);
  ChunkDeltaRuleParams params = chunk_params(call, results, 4 * kChunkSize, 0, flags);
  params.recurrence.scale = static_cast<float>(scale);
  params.recurrence.gate_form = static_cast<GateForm>(gate_form);
  params.recurrence.snapshot_every = static_cast<int32_t>(snapshot_every);

  check_devices(call);
  if (batch_size_of(call) == 0 || call.out.dim(2) == 0) return;
  const ffi::DeviceGuard guard(call.q);
  const DeviceInfo& device = ffi::device_info(call.q);
  ffi::check_launch(chunk_delta_rule(params, device.num_sms, static_cast<int>(schedule),
                                     device.has_pdl(), ffi::current_stream(call.q)));
}
