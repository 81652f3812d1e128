//   concat_mla_k(k, k_nope, k_rope)
#include "concat_ops.h"

#include "ffi.h"
#include "index_binding.h"

FLASHINFER_FFI_EXPORT(concat_mla_k, args) {
  using namespace flashinfer;
  const ffi::Tensor k = args.tensor("k");
  const ffi::Tensor nope = args.tensor("k_nope");
  const ffi::Tensor rope = args.tensor("k_rope");
  args.all_taken();
  ffi::check_dtype(k, {ffi::dtype::float16, ffi::dtype::bfloat16, ffi::dtype::float32,
                       ffi::dtype::float8_e4m3fn, ffi::dtype::float8_e5m2});
  ffi::check_ndim(k, 3, 3);
  for (const ffi::Tensor& part : {nope, rope}) {
    ffi::check_dtype(part, k.dtype());
    ffi::check_ndim(part, 3, 3);
    ffi::check_last_dim_contiguous(part);
    ffi::check_disjoint(k, part);
  }
  const int64_t num_tokens = rope.dim(0), num_heads = nope.dim(1);
  ffi::check_shape(nope, {num_tokens, num_heads, nope.dim(2)});
  ffi::check_shape(rope, {num_tokens, 1, rope.dim(2)});
  ffi::check_shape(k, {num_tokens, num_heads, nope.dim(2) + rope.dim(2)});
  ffi::check_last_dim_contiguous(k);
  ffi::check_no_broadcast(k);
  ffi::check_count(k, "tokens", num_tokens);
  ffi::check_count(k, "heads", num_heads, 0, ffi::kMaxHeads);
  ffi::check_count(k, "a head size", k.dim(2) * k.itemsize());
  ffi::check_cuda(k);
  ffi::check_same_device(nope, k);
  ffi::check_same_device(rope, k);
  if (k.numel() == 0) return;

  const int64_t itemsize = k.itemsize();
  ConcatMlaKParams params = {};
  params.k = k.data();
  params.k_nope = nope.data();
  params.k_rope = rope.data();
  params.k_stride_token = k.stride(0) * itemsize;
  params.k_stride_head = k.stride(1) * itemsize;
  params.k_nope_stride_token = nope.stride(0) * itemsize;
  params.k_nope_stride_head = nope.stride(1) * itemsize;
  params.k_rope_stride_token = rope.stride(0) * itemsize;
  params.nope_bytes = static_cast<uint32_t>(nope.dim(2) * itemsize);
  params.rope_bytes = static_cast<uint32_t>(rope.dim(2) * itemsize);
  params.num_tokens = static_cast<uint32_t>(num_tokens);
  params.num_heads = static_cast<uint32_t>(num_heads);
  ffi::UnitSize unit;
  for (const ffi::Tensor& tensor : {k, nope, rope}) unit.divides_rows(tensor);
  const ffi::DeviceGuard guard(k);
  ffi::check_launch(concat_mla_k(params, unit.bytes(), ffi::resolve_pdl(ffi::Args::Flag::kNone, k),
                                 ffi::current_stream(k)));
}
