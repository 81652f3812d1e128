//   replayssm_materialize(states, x_caches, B_caches, dt_caches, A_ptrs, scales, slots, requests,
//                         sizes, rounding)
//
// Addresses and strides (in elements) of layers are int64 tensors on the device. Tuples:
//
//   states, x_caches, B_caches, dt_caches, scales  (addresses, slot strides)
//   slots     (src_slots, dst_slots, pad_slot_id)
//   requests  (ring_start, replay_prefix_len, active_request_indices)
//   sizes     (dim, num_heads, heads_per_group, ring_buffer_len)
//   rounding  (rand_seed, philox_rounds); the seed may be None
#include "ffi.h"
#include "linear_attention_binding.h"
#include "replayssm_materialize.h"

namespace flashinfer {
namespace {

const int64_t* table(ffi::Args& args, const char* name, int64_t layers, const ffi::Tensor& first) {
  const ffi::Tensor tensor = args.tensor(name);
  ffi::check_dtype(tensor, ffi::dtype::int64);
  ffi::check_shape(tensor, {layers});
  ffi::check_last_dim_contiguous(tensor);
  ffi::check_same_device(tensor, first);
  return static_cast<const int64_t*>(tensor.data());
}

const int32_t* integers(const ffi::Tensor& tensor, int64_t rows, int64_t columns,
                        const ffi::Tensor& first) {
  ffi::check_dtype(tensor, ffi::dtype::int32);
  const int64_t shape[] = {rows, columns};
  if (rows < 0) {
    ffi::check_shape(tensor, {columns});
  } else {
    ffi::check_shape(tensor, shape, 2);
    if (rows > 1 && tensor.stride(0) != columns) {
      ffi::raise("ValueError", "`%s` must be contiguous", tensor.name);
    }
  }
  ffi::check_last_dim_contiguous(tensor);
  ffi::check_same_device(tensor, first);
  return static_cast<const int32_t*>(tensor.data());
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(replayssm_materialize, args) {
  using namespace flashinfer;
  ffi::Args states = args.group("states", 2), x_caches = args.group("x_caches", 2);
  ffi::Args B_caches = args.group("B_caches", 2), dt_caches = args.group("dt_caches", 2);
  const ffi::Tensor rates = args.tensor("A_ptrs");
  ffi::Args scales = args.group("scales", 2), slots = args.group("slots", 3);
  const ffi::Tensor source = slots.tensor("src_slots"), target = slots.tensor("dst_slots");
  const int64_t pad_slot = slots.integer("pad_slot_id");
  ffi::Args requests = args.group("requests", 3), sizes = args.group("sizes", 4);
  const int64_t dim = sizes.integer("dim"), heads = sizes.integer("num_heads");
  const int64_t heads_per_group = sizes.integer("heads_per_group");
  const int64_t rows = sizes.integer("ring_buffer_len");
  ffi::Args rounding = args.group("rounding", 2);
  const ffi::Tensor seed = rounding.optional_tensor("rand_seed");
  const int64_t philox_rounds = rounding.integer("philox_rounds");
  args.all_taken();

  ffi::check_ndim(source, 2, 2);
  const int64_t layers = source.dim(0), batch = source.dim(1);
  ffi::check_fits_grid(source, batch, "requests");
  ffi::check_fits_grid(source, layers * heads, "layers, of `num_heads` each");
  ffi::check_cuda(source);
  MaterializeStateParams params = {};
  params.source = integers(source, layers, batch, source);
  params.target = integers(target, layers, batch, source);
  params.ring_start = integers(requests.tensor("ring_start"), -1, batch, source);
  params.num_used = integers(requests.tensor("replay_prefix_len"), -1, batch, source);
  params.active = integers(requests.tensor("active_request_indices"), -1, batch, source);
  params.state = table(states, "state_ptrs", layers, source);
  params.state_slot_stride = table(states, "state_slot_strides", layers, source);
  params.x = table(x_caches, "x_cache_ptrs", layers, source);
  params.x_slot_stride = table(x_caches, "x_cache_slot_strides", layers, source);
  params.B = table(B_caches, "B_cache_ptrs", layers, source);
  params.B_slot_stride = table(B_caches, "B_cache_slot_strides", layers, source);
  params.dt = table(dt_caches, "dt_cache_ptrs", layers, source);
  params.dt_slot_stride = table(dt_caches, "dt_cache_slot_strides", layers, source);
  params.scale = table(scales, "state_scale_ptrs", layers, source);
  params.scale_slot_stride = table(scales, "state_scale_slot_strides", layers, source);
  ffi::check_dtype(rates, ffi::dtype::int64);
  ffi::check_shape(rates, {layers});
  ffi::check_last_dim_contiguous(rates);
  ffi::check_same_device(rates, source);
  params.A = static_cast<const int64_t*>(rates.data());
  if (seed) {
    ffi::check_dtype(seed, ffi::dtype::int64);
    ffi::check_shape(seed, {1});
    ffi::check_same_device(seed, source);
    params.step.seed = static_cast<const int64_t*>(seed.data());
  }
  params.step.philox_rounds = static_cast<int32_t>(philox_rounds);
  params.step.batch_size = static_cast<int32_t>(batch);
  params.step.num_heads = static_cast<int32_t>(heads);
  params.step.heads_per_group = FastDivisor(static_cast<uint32_t>(heads_per_group));
  params.step.dim = static_cast<int32_t>(dim);
  params.num_layers = static_cast<int32_t>(layers);
  params.rows = static_cast<int32_t>(rows);
  params.pad_slot = pad_slot;
  if (layers * batch == 0) return;
  const ffi::DeviceGuard guard(source);
  ffi::check_launch(replayssm_materialize(params, ffi::device_info(source).has_pdl(),
                                          ffi::current_stream(source)));
}
