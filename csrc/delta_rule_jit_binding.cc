//   delta_rule(output, q, k, v, gates, states, snapshots, cu_seqlens, scale, flags, schedule)
//
// q, k, v and output are [batch, tokens, heads, dim]; packed sequences are one batch with
// cu_seqlens, else that is None. Tuples, whose tensors may be None:
//
//   gates      (gate_form, a or g, b or beta, A_log, dt_bias, lower_bound): a and b are logits
//   states     (initial_state, output_state, initial_state_indices, output_state_indices,
//              num_accepted_tokens)
//   snapshots  (intermediate_states_buffer, checkpoint_cu_starts, snapshots_per_batch,
//              checkpoint_every_n_tokens)
#include "delta_rule.h"
#include "delta_rule_binding.h"

namespace flashinfer {
namespace {

constexpr delta_rule_binding::Types kTypes = {ffi::dtype::FLASHINFER_CFG_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_STATE_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_GATE_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_BETA_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_BIAS_DTYPE,
                                              FLASHINFER_CFG_HEAD_DIM_K,
                                              FLASHINFER_CFG_CHANNEL_GATE,
                                              8,
                                              FLASHINFER_CFG_KEY_MAJOR};

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(delta_rule, args) {
  using namespace flashinfer;
  using namespace flashinfer::delta_rule_binding;
  Call call;
  call.types = kTypes;
  call.out = args.tensor("output");
  call.q = args.tensor("q");
  call.k = args.tensor("k");
  call.v = args.tensor("v");
  ffi::Args gates = args.group("gates", 6);
  const auto gate_form = static_cast<GateForm>(gates.integer("gate_form"));
  const bool are_logits = gate_form == GateForm::kSoftplus && !kTypes.channel_gate;
  call.gate = gates.optional_tensor(are_logits ? "a" : "g");
  call.beta = gates.optional_tensor(are_logits ? "b" : "beta");
  call.a_log = gates.optional_tensor("A_log");
  call.dt_bias = gates.optional_tensor("dt_bias");
  const double lower_bound = gates.number("lower_bound");
  ffi::Args states = args.group("states", 5);
  call.state = states.optional_tensor("initial_state");
  call.state_out = states.optional_tensor("output_state");
  call.read_slots = states.optional_tensor("initial_state_indices");
  call.write_slots = states.optional_tensor("output_state_indices");
  call.num_accepted = states.optional_tensor("num_accepted_tokens");
  ffi::Args snapshots = args.group("snapshots", 4);
  call.snapshots = snapshots.optional_tensor("intermediate_states_buffer");
  call.snapshot_starts = snapshots.optional_tensor("checkpoint_cu_starts");
  const int64_t snapshots_per_batch = snapshots.integer("snapshots_per_batch");
  const int64_t snapshot_every = snapshots.integer("checkpoint_every_n_tokens");
  call.cu_seqlens = args.optional_tensor("cu_seqlens");
  const double scale = args.number("scale");
  const int64_t flags = args.integer("flags");
  const int64_t schedule = args.integer("schedule");
  args.all_taken();

  check_tokens(call);
  check_pools(call);
  if (kTypes.key_major && call.v.dim(3) % 8 != 0) {
    ffi::raise("ValueError", "`v` must have a head size that is a multiple of 8, got %lld",
               static_cast<long long>(call.v.dim(3)));
  }
  const int64_t batch = batch_size_of(call);
  ffi::check_sequences_fit_grid(call.q, call.cu_seqlens);
  check_slots(call.state, call.read_slots, batch);
  check_slots(call.state_out, call.write_slots, batch);
  DeltaRuleParams params = make_params(call, batch, flags);
  params.scale = static_cast<float>(scale);
  params.lower_bound = static_cast<float>(lower_bound);
  params.gate_form = gate_form;
  params.snapshots_per_batch = snapshots_per_batch;
  params.snapshot_every = static_cast<int32_t>(snapshot_every);
  if (call.snapshots && !call.snapshot_starts &&
      call.snapshots.dim(0) < batch * snapshots_per_batch) {
    ffi::raise("ValueError", "`%s` must have %lld states, got shape %s", call.snapshots.name,
               static_cast<long long>(batch * snapshots_per_batch),
               call.snapshots.shape_text().c_str());
  }

  check_devices(call);
  // Sequences of no tokens hand their states on.
  if (batch == 0 || call.out.dim(2) == 0 || call.out.dim(3) == 0) return;
  const ffi::DeviceGuard guard(call.q);
  const DeviceInfo& device = ffi::device_info(call.q);
  ffi::check_launch(delta_rule(params, device.num_sms, static_cast<int>(schedule), device.has_pdl(),
                               ffi::current_stream(call.q)));
}
