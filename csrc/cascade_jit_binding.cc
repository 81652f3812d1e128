// A configuration for two states exports the first two, one for any number the third. `mask` may be
// None.
//   merge_state(v_out, s_out, v_a, s_a, v_b, s_b)
//   merge_state_in_place(v, s, v_other, s_other, mask)
//   merge_states(v_out, s_out, v, s)
#include "cascade.h"

#include "ffi.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr int64_t kVecSize = 16 / (kDtype.bits / 8);

// Checks that v[..., heads, head_dim] and s[..., heads] describe the same states.
void check_states(const Tensor& v, const Tensor& s, int ndim) {
  ffi::check_dtype(v, kDtype);
  ffi::check_ndim(v, ndim, ndim);
  ffi::check_last_dim_contiguous(v);
  ffi::check_dtype(s, ffi::dtype::float32);
  bool fits = s.ndim() == ndim - 1;
  for (int i = 0; fits && i < ndim - 1; ++i) fits = s.dim(i) == v.dim(i);
  if (!fits) {
    ffi::raise("ValueError",
               "`%s` must have the shape of `%s` %s without its last dimension, got %s", s.name,
               v.name, v.shape_text().c_str(), s.shape_text().c_str());
  }
  if (v.dim(-1) == 0) {
    ffi::raise("ValueError", "`%s` must have a head size of at least 1, got shape %s", v.name,
               v.shape_text().c_str());
  }
  for (int i = 0; i < ndim; ++i) {
    if (v.dim(i) > INT32_MAX) {
      ffi::raise("ValueError", "`%s` must have sizes below 2^31, got shape %s", v.name,
                 v.shape_text().c_str());
    }
  }
}

AttentionStates states_of(const Tensor& v, const Tensor& s) {
  AttentionStates states = {};
  states.v = v.data();
  states.s = static_cast<const float*>(s.data());
  states.v_stride_token = v.stride(0);
  states.v_stride_head = v.stride(-2);
  states.s_stride_token = s.stride(0);
  states.s_stride_head = s.stride(-1);
  if (v.ndim() == 4) {
    states.v_stride_state = v.stride(1);
    states.s_stride_state = s.stride(1);
  }
  return states;
}

bool rows_are_vectors(const Tensor& v) {
  bool aligned = ffi::is_aligned(v, 16) && v.dim(-1) % kVecSize == 0;
  for (int i = 0; i < v.ndim() - 1; ++i) {
    aligned = aligned && (v.dim(i) <= 1 || v.stride(i) % kVecSize == 0);
  }
  return aligned;
}

// Launches a merge. The caller has set the inputs; `tensors` holds every tensor of the call.
void launch(MergeStatesParams& params, const Tensor& v_out, const Tensor& s_out,
            std::initializer_list<Tensor> values, std::initializer_list<Tensor> others) {
  params.v_out = v_out.data();
  params.s_out = static_cast<float*>(s_out.data());
  params.v_out_stride_token = v_out.stride(0);
  params.v_out_stride_head = v_out.stride(1);
  params.s_out_stride_token = s_out.stride(0);
  params.s_out_stride_head = s_out.stride(1);
  params.num_tokens = static_cast<uint32_t>(v_out.dim(0));
  params.num_heads = static_cast<uint32_t>(v_out.dim(1));
  params.head_dim = static_cast<uint32_t>(v_out.dim(2));
  bool vectorizable = rows_are_vectors(v_out);
  for (const Tensor& v : values) {
    vectorizable = vectorizable && (v.numel() == 0 || rows_are_vectors(v));
    ffi::check_same_device(v, *values.begin());
  }
  for (const Tensor& tensor : others) {
    if (tensor) ffi::check_same_device(tensor, *values.begin());
  }
  if (params.num_tokens == 0 || params.num_heads == 0) return;
  const Tensor& on = *values.begin();
  const ffi::DeviceGuard guard(on);
  ffi::check_launch(merge_states(params, vectorizable, ffi::resolve_pdl(ffi::Args::Flag::kNone, on),
                                 ffi::current_stream(on)));
}

}  // namespace
}  // namespace flashinfer

#if FLASHINFER_CFG_PAIR

FLASHINFER_FFI_EXPORT(merge_state, args) {
  using namespace flashinfer;
  const ffi::Tensor v_out = args.tensor("v_out"), s_out = args.tensor("s_out");
  const ffi::Tensor v_a = args.tensor("v_a"), s_a = args.tensor("s_a");
  const ffi::Tensor v_b = args.tensor("v_b"), s_b = args.tensor("s_b");
  args.all_taken();
  check_states(v_a, s_a, 3);
  check_states(v_b, s_b, 3);
  ffi::check_same_shape(v_b, v_a);
  check_states(v_out, s_out, 3);
  ffi::check_same_shape(v_out, v_a);

  MergeStatesParams params = {};
  params.states = states_of(v_a, s_a);
  params.other = states_of(v_b, s_b);
  launch(params, v_out, s_out, {v_a, v_b}, {v_out, s_out, s_a, s_b});
}

FLASHINFER_FFI_EXPORT(merge_state_in_place, args) {
  using namespace flashinfer;
  const ffi::Tensor v = args.tensor("v"), s = args.tensor("s");
  const ffi::Tensor v_other = args.tensor("v_other"), s_other = args.tensor("s_other");
  const ffi::Tensor mask = args.optional_tensor("mask");
  args.all_taken();
  check_states(v, s, 3);
  check_states(v_other, s_other, 3);
  ffi::check_same_shape(v_other, v);
  for (const ffi::Tensor& written : {v, s}) {
    ffi::check_no_broadcast(written);
    ffi::check_disjoint(written, v_other);
    ffi::check_disjoint(written, s_other);
  }
  ffi::check_disjoint(v, s);
  MergeStatesParams params = {};
  if (mask) {
    ffi::check_dtype(mask, {ffi::dtype::boolean, ffi::dtype::uint8});
    ffi::check_shape(mask, {v.dim(0)});
    ffi::check_disjoint(v, mask);
    ffi::check_disjoint(s, mask);
    params.mask = static_cast<const uint8_t*>(mask.data());
    params.mask_stride = mask.stride(0);
  }
  params.states = states_of(v, s);
  params.other = states_of(v_other, s_other);
  launch(params, v, s, {v, v_other}, {s, s_other, mask});
}

#else

FLASHINFER_FFI_EXPORT(merge_states, args) {
  using namespace flashinfer;
  const ffi::Tensor v_out = args.tensor("v_out"), s_out = args.tensor("s_out");
  const ffi::Tensor v = args.tensor("v"), s = args.tensor("s");
  args.all_taken();
  check_states(v, s, 4);
  check_states(v_out, s_out, 3);
  ffi::check_shape(v_out, {v.dim(0), v.dim(2), v.dim(3)});

  MergeStatesParams params = {};
  params.states = states_of(v, s);
  params.num_states = static_cast<uint32_t>(v.dim(1));
  launch(params, v_out, s_out, {v}, {v_out, s_out, s});
}

#endif
