//   selective_state(out, x, dt, A, B, C, options, pool, sequences, intermediate, flags, schedule)
//
// x, dt, z and out are [batch, tokens, heads, dim], B and C [batch, tokens, groups, dstate]; packed
// sequences are one batch with cu_seqlens. Tuples, whose tensors may be None but for `state`:
//
//   options       (D, z, dt_bias)
//   pool          (state, state_scale, rand_seed, philox_rounds)
//   sequences     (cu_seqlens, state_batch_indices, dst_state_batch_indices, num_accepted_tokens,
//                 pad_slot_id)
//   intermediate  (intermediate_states_buffer, intermediate_state_indices,
//                 intermediate_state_scales, cache_steps)
#include "selective_state.h"
#include "selective_state_binding.h"

FLASHINFER_FFI_EXPORT(selective_state, args) {
  using namespace flashinfer;
  using namespace flashinfer::selective_state_binding;
  Call call;
  const int64_t philox_rounds = take_inputs(call, args);
  ffi::Args sequences = args.group("sequences", 5);
  call.cu_seqlens = sequences.optional_tensor("cu_seqlens");
  call.read_slots = sequences.optional_tensor("state_batch_indices");
  call.write_slots = sequences.optional_tensor("dst_state_batch_indices");
  call.num_accepted = sequences.optional_tensor("num_accepted_tokens");
  const int64_t pad_slot = sequences.integer("pad_slot_id");
  ffi::Args intermediate = args.group("intermediate", 4);
  call.intermediate = intermediate.optional_tensor("intermediate_states_buffer");
  call.intermediate_indices = intermediate.optional_tensor("intermediate_state_indices");
  call.intermediate_scales = intermediate.optional_tensor("intermediate_state_scales");
  const int64_t steps = intermediate.integer("cache_steps");
  const int64_t flags = args.integer("flags");
  const int64_t schedule = args.integer("schedule");
  args.all_taken();

  check_pools(call);
  ffi::check_ndim(call.x, 4, 4);
  check_tokens(call);
  const int64_t batch = batch_size_of(call);
  SelectiveStateParams params = make_params(call, batch, flags);
  params.pad_slot = pad_slot;
  params.steps = steps;
  params.philox_rounds = static_cast<int32_t>(philox_rounds);

  check_devices(call);
  if (batch == 0 || call.out.numel() == 0) return;
  const ffi::DeviceGuard guard(call.x);
  const DeviceInfo& device = ffi::device_info(call.x);
  ffi::check_launch(selective_state(params, device.num_sms, static_cast<int>(schedule),
                                    device.has_pdl(), ffi::current_stream(call.x)));
}
