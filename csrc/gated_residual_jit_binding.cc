//   gated_residual(out[, normed_out], branch, residual, gates, post_weight[, next_weight], post
//                  [, next], enable_pdl)
//
// The configuration says whether there is a next norm. `gates`: (alpha, beta), of which alpha may
// be a number; `post` and `next`: (center, eps). post_weight may be None.
#include "gated_residual.h"

#include "norm_rows.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr bool kNext = FLASHINFER_CFG_NEXT;
constexpr int64_t kMostVecs = 1024;

struct Call {
  ffi::Tensor out, normed, branch, residual, alpha, beta, post_weight, next_weight;
  float alpha_value, post_center, post_eps, next_center, next_eps;
  ffi::Args::Flag enable_pdl;
};

float finite(ffi::Args& args, const char* name) {
  return static_cast<float>(args.number_in(name, -3e38, 3e38));
}

Call take(ffi::Args& args) {
  Call call = {};
  call.out = args.tensor(kNext ? "residual_out" : "out");
  if (kNext) call.normed = args.tensor("ffn_input");
  call.branch = args.tensor("branch");
  call.residual = args.tensor("residual");
  ffi::Args gates = args.group("gates", 2);
  if (gates.next_is_tensor()) {
    call.alpha = gates.tensor("alpha");
  } else {
    call.alpha_value = finite(gates, "alpha");
  }
  call.beta = gates.tensor("beta");
  call.post_weight = args.optional_tensor(kNext ? "post_weight" : "weight");
  if (kNext) call.next_weight = args.tensor("next_weight");
  ffi::Args post = args.group("post", 2);
  call.post_center = finite(post, kNext ? "post_gain_center" : "gain_center");
  call.post_eps = post.float32(kNext ? "post_eps" : "eps", ffi::Zero::allowed);
  if (kNext) {
    ffi::Args next = args.group("next", 2);
    call.next_center = finite(next, "next_gain_center");
    call.next_eps = next.float32("next_eps", ffi::Zero::allowed);
  }
  call.enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  return call;
}

void check_rows(const ffi::Tensor& tensor, DLDataType dtype, const ffi::Tensor& like) {
  ffi::check_dtype(tensor, dtype);
  ffi::check_shape(tensor, {like.dim(0), like.dim(1)});
  ffi::check_vector_rows(tensor);
}

void check(const Call& call) {
  const ffi::Tensor& branch = call.branch;
  ffi::check_dtype(branch, kDtype);
  ffi::check_ndim(branch, 2, 2);
  ffi::check_row_vectors(branch, kMostVecs);
  ffi::check_vector_rows(branch);
  if (branch.dim(0) > INT32_MAX) {
    ffi::raise("ValueError", "`branch` must have fewer than 2^31 rows, got shape %s",
               branch.shape_text().c_str());
  }
  check_rows(call.residual, ffi::dtype::float32, branch);
  check_rows(call.out, ffi::dtype::float32, branch);
  if (kNext) check_rows(call.normed, kDtype, branch);
  const int64_t hidden_size = branch.dim(1);
  if (call.alpha) ffi::check_columns(call.alpha, ffi::dtype::float32, hidden_size);
  ffi::check_columns(call.beta, ffi::dtype::float32, hidden_size);
  if (call.post_weight) ffi::check_columns(call.post_weight, kDtype, hidden_size);
  if (kNext) ffi::check_columns(call.next_weight, kDtype, hidden_size);

  const ffi::Tensor columns[] = {call.alpha, call.beta, call.post_weight, call.next_weight};
  for (const ffi::Tensor& written : {call.out, call.normed}) {
    if (!written) continue;
    ffi::check_no_broadcast(written);
    for (const ffi::Tensor& tensor : columns) {
      if (tensor) ffi::check_disjoint(written, tensor);
    }
    ffi::check_same_view_or_disjoint(written, branch);
    ffi::check_same_view_or_disjoint(written, call.residual);
  }
  if (kNext) ffi::check_disjoint(call.normed, call.out);
  ffi::check_cuda(branch);
  for (const ffi::Tensor& tensor : {call.out, call.normed, call.residual, call.alpha, call.beta,
                                    call.post_weight, call.next_weight}) {
    if (tensor) ffi::check_same_device(tensor, branch);
  }
}

const float* floats(const ffi::Tensor& tensor) {
  return tensor ? static_cast<const float*>(tensor.data()) : nullptr;
}

GatedResidualParams params_of(const Call& call) {
  GatedResidualParams params = {};
  params.branch = call.branch.data();
  params.residual = floats(call.residual);
  params.post_weight = call.post_weight ? call.post_weight.data() : nullptr;
  params.alpha = floats(call.alpha);
  params.beta = floats(call.beta);
  params.out = static_cast<float*>(call.out.data());
  params.branch_stride = call.branch.stride(0);
  params.residual_stride = call.residual.stride(0);
  params.out_stride = call.out.stride(0);
  if (kNext) {
    params.next_weight = call.next_weight.data();
    params.normed_out = call.normed.data();
    params.normed_stride = call.normed.stride(0);
  }
  params.num_rows = static_cast<uint32_t>(call.branch.dim(0));
  params.hidden_size = static_cast<uint32_t>(call.branch.dim(1));
  params.alpha_value = call.alpha_value;
  params.post_center = call.post_center;
  params.next_center = call.next_center;
  params.post_eps = call.post_eps;
  params.next_eps = call.next_eps;
  return params;
}

void run(ffi::Args& args) {
  const Call call = take(args);
  check(call);
  if (call.branch.numel() == 0) return;
  const ffi::DeviceGuard guard(call.branch);
  ffi::check_launch(gated_residual(params_of(call), ffi::device_info(call.branch),
                                   ffi::resolve_pdl(call.enable_pdl, call.branch),
                                   ffi::current_stream(call.branch)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(gated_residual, args) { flashinfer::run(args); }
