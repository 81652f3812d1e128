//   ssd(out, x, dt, A, B, C, weights, states, cu_seqlens, workspace, limits, flags)
//
// x and out are [1, tokens, heads, dim], B and C [1, tokens, groups, dstate], dt [1, tokens,
// heads]. Tuples, whose tensors may be None but for scores and factors:
//
//   weights    (D, z, dt_bias)
//   states     (initial_states, final_states)
//   workspace  (scores, factors)
//   limits     (lowest_dt, highest_dt)
#include "delta_rule_binding.h"
#include "ssd.h"

namespace flashinfer {
namespace {

constexpr delta_rule_binding::Types kTypes = {ffi::dtype::FLASHINFER_CFG_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_STATE_DTYPE,
                                              ffi::dtype::FLASHINFER_CFG_DT_DTYPE,
                                              ffi::dtype::float32,
                                              ffi::dtype::float32,
                                              FLASHINFER_CFG_DSTATE,
                                              false,
                                              8,
                                              false};

void check_weight(const ffi::Tensor& tensor, int64_t heads) {
  if (!tensor) return;
  ffi::check_dtype(tensor, ffi::dtype::float32);
  ffi::check_shape(tensor, {heads});
  ffi::check_last_dim_contiguous(tensor);
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(ssd, args) {
  using namespace flashinfer;
  using namespace flashinfer::delta_rule_binding;
  Call call;
  call.types = kTypes;
  call.out = args.tensor("out");
  call.v = args.tensor("x");
  call.gate = args.tensor("dt");
  call.a_log = args.tensor("A");
  call.k = args.tensor("B");
  call.q = args.tensor("C");
  ffi::Args weights = args.group("weights", 3);
  const ffi::Tensor skip = weights.optional_tensor("D");
  const ffi::Tensor z = weights.optional_tensor("z");
  call.dt_bias = weights.optional_tensor("dt_bias");
  ffi::Args states = args.group("states", 2);
  call.state = states.optional_tensor("initial_states");
  call.state_out = states.optional_tensor("final_states");
  call.cu_seqlens = args.tensor("cu_seqlens");
  ffi::Args workspace = args.group("workspace", 2);
  const ffi::Tensor scores = workspace.tensor("scores");
  const ffi::Tensor factors = workspace.tensor("factors");
  ffi::Args limits = args.group("limits", 2);
  const double lowest_dt = limits.number("lowest_dt"), highest_dt = limits.number("highest_dt");
  const int64_t flags = args.integer("flags");
  args.all_taken();

  check_tokens(call);
  ffi::check_rows_of_vectors(call.v, 8);
  ffi::check_rows_of_vectors(call.out, 2);
  if (call.v.dim(3) % 64 != 0) {
    ffi::raise("ValueError", "`x` must have a head size that is a multiple of 64, got %lld",
               static_cast<long long>(call.v.dim(3)));
  }
  const int64_t heads = call.out.dim(2);
  check_weight(skip, heads);
  if (z) {
    ffi::check_dtype(z, kTypes.dtype);
    check_heads(z, call, heads, call.v.dim(3));
    ffi::check_rows_of_vectors(z, 2);
    ffi::check_disjoint(call.out, z);
  }
  check_pools(call);
  const int64_t batch = batch_size_of(call);
  check_slots(call.state, {}, batch);
  check_slots(call.state_out, {}, batch);
  const int64_t slots = call.q.dim(1) / kChunkSize + batch;
  check_workspace(scores, kTypes.dtype, slots, heads, kChunkSize * kChunkSize);
  check_workspace(factors, ffi::dtype::float32, slots, heads, 4 * kChunkSize);
  ChunkDeltaRuleParams params = {};
  params.recurrence = make_params(call, batch, 0);
  params.recurrence.scale = 1.f;
  params.recurrence.snapshot_every = kChunkSize;
  params.ssd = {skip ? static_cast<const float*>(skip.data()) : nullptr, ffi::token_heads(z),
                flags != 0, static_cast<float>(lowest_dt), static_cast<float>(highest_dt)};
  params.workspace = {nullptr, scores.data(), static_cast<float*>(factors.data()), nullptr};
  params.num_slots = static_cast<int32_t>(slots);

  check_devices(call);
  for (const ffi::Tensor& tensor : {skip, z}) {
    if (tensor) ffi::check_same_device(tensor, call.q);
  }
  if (batch == 0 || heads == 0) return;
  const ffi::DeviceGuard guard(call.q);
  const DeviceInfo& device = ffi::device_info(call.q);
  ffi::check_launch(ssd(params, device.num_sms, 0, device.has_pdl(), ffi::current_stream(call.q)));
}
