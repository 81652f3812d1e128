//   checkpointing_ssu(out, x, dt, A, B, C, options, pool, sequences, rings, flags)
//
// As selective_state, with one A, dt and dt_bias per head. Tuples, whose tensors may be None but
// for `state` and the rings:
//
//   options    (D, z, dt_bias)
//   pool       (state, state_scale, rand_seed, philox_rounds)
//   sequences  (cu_seqlens, state_batch_indices, pad_slot_id)
//   rings      (x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, window)
#include "checkpointing_ssu.h"
#include "selective_state_binding.h"

namespace flashinfer {
namespace {

using namespace selective_state_binding;

static_assert(kTied, "the rings have one time step per head");

// A ring [slots, heads, rows, dim] (or without dim), each slot contiguous.
void check_ring(const ffi::Tensor& ring, DLDataType dtype, int64_t slots, int64_t heads,
                int64_t rows, int64_t dim) {
  ffi::check_dtype(ring, dtype);
  const int64_t shape[] = {slots, heads, rows, dim};
  const int ndim = dim < 0 ? 3 : 4;
  ffi::check_shape(ring, shape, ndim);
  int64_t expected = 1;
  for (int i = ndim - 1; i > 0; --i) {
    if (ring.dim(i) > 1 && ring.stride(i) != expected) {
      ffi::raise("ValueError", "`%s` must have contiguous slots, got strides %s", ring.name,
                 ffi::list_text(ring.dl->strides, ndim).c_str());
    }
    expected *= ring.dim(i);
  }
  ffi::check_no_broadcast(ring);
}

const int32_t* per_slot(const ffi::Tensor& tensor, int64_t slots) {
  ffi::check_dtype(tensor, ffi::dtype::int32);
  ffi::check_shape(tensor, {slots});
  ffi::check_last_dim_contiguous(tensor);
  return static_cast<const int32_t*>(tensor.data());
}

void check_one_step_per_head(const Call& call) {
  const bool bias = call.dt_bias && call.dt_bias.stride(1) != 0 && call.dt_bias.dim(1) > 1;
  if (bias || (call.dt.stride(3) != 0 && call.dt.dim(3) > 1)) {
    ffi::raise("ValueError", "`%s` must be expanded from one number per head",
               bias ? "dt_bias" : "dt");
  }
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(checkpointing_ssu, args) {
  using namespace flashinfer;
  Call call;
  const int64_t philox_rounds = take_inputs(call, args);
  ffi::Args sequences = args.group("sequences", 3);
  call.cu_seqlens = sequences.optional_tensor("cu_seqlens");
  call.read_slots = sequences.optional_tensor("state_batch_indices");
  const int64_t pad_slot = sequences.integer("pad_slot_id");
  ffi::Args rings = args.group("rings", 6);
  const ffi::Tensor x_ring = rings.tensor("x_cache"), B_ring = rings.tensor("B_cache");
  const ffi::Tensor dt_ring = rings.tensor("dt_cache"), start = rings.tensor("ring_start");
  const ffi::Tensor replayed = rings.tensor("prev_num_accepted_tokens");
  const int64_t window = rings.integer("window");
  const int64_t flags = args.integer("flags");
  args.all_taken();

  check_pools(call);
  ffi::check_ndim(call.x, 4, 4);
  check_tokens(call);
  check_one_step_per_head(call);
  const int64_t batch = batch_size_of(call), slots = call.state.dim(0);
  CheckpointingStateParams params = {};
  params.step = make_params(call, batch, flags);
  params.step.pad_slot = pad_slot;
  params.step.philox_rounds = static_cast<int32_t>(philox_rounds);
  ffi::check_ndim(x_ring, 4, 4);
  const int64_t heads = call.state.dim(1), rows = x_ring.dim(2);
  check_ring(x_ring, kDtype, slots, heads, rows, call.state.dim(2));
  check_ring(B_ring, kDtype, slots, call.B.dim(2), rows, kDState);
  check_ring(dt_ring, ffi::dtype::float32, slots, heads, rows, -1);
  params.rings = {
      x_ring.data(),    B_ring.data(),     static_cast<float*>(dt_ring.data()), x_ring.stride(0),
      B_ring.stride(0), dt_ring.stride(0), static_cast<int32_t>(rows)};
  params.ring_start = per_slot(start, slots);
  params.num_replayed = per_slot(replayed, slots);
  params.window = static_cast<int32_t>(window);
  for (const ffi::Tensor& ring : {x_ring, B_ring, dt_ring}) {
    for (const ffi::Tensor& tensor : {call.state, call.x, call.dt, call.B, call.C, call.out}) {
      ffi::check_disjoint(ring, tensor);
    }
  }

  check_devices(call);
  for (const ffi::Tensor& tensor : {x_ring, B_ring, dt_ring, start, replayed}) {
    ffi::check_same_device(tensor, call.x);
  }
  if (batch == 0 || call.out.numel() == 0) return;
  const ffi::DeviceGuard guard(call.x);
  ffi::check_launch(
      checkpointing_ssu(params, ffi::device_info(call.x).has_pdl(), ffi::current_stream(call.x)));
}
