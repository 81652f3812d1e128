//   mhc_post(out, x, residual, post_layer_mix, comb_res_mix)
//
// post_layer_mix may have a last dimension of 1.
#include "mhc_post.h"

#include "mhc_binding.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("out"), x = args.tensor("x");
  const ffi::Tensor residual = args.tensor("residual"), post = args.tensor("post_layer_mix");
  const ffi::Tensor comb = args.tensor("comb_res_mix");
  args.all_taken();

  constexpr int64_t n = kMhcStreams;
  ffi::check_mhc_streams(residual, kDtype);
  const int64_t hidden_size = residual.dim(-1);
  ffi::check_mhc_tensor(residual, kDtype, residual, {n, hidden_size});
  ffi::check_mhc_tensor(out, kDtype, residual, {n, hidden_size});
  ffi::check_mhc_tensor(x, kDtype, residual, {hidden_size});
  if (post.ndim() == residual.ndim()) {
    ffi::check_mhc_tensor(post, ffi::dtype::float32, residual, {n, 1});
  } else {
    ffi::check_mhc_tensor(post, ffi::dtype::float32, residual, {n});
  }
  ffi::check_mhc_tensor(comb, ffi::dtype::float32, residual, {n, n});
  ffi::check_cuda(residual);
  for (const ffi::Tensor& tensor : {out, x, post, comb}) ffi::check_same_device(tensor, residual);
  if (residual.numel() == 0) return;

  MhcPostParams params = {};
  params.x = x.data();
  params.residual = residual.data();
  params.post_mix = static_cast<const float*>(post.data());
  params.comb_mix = static_cast<const float*>(comb.data());
  params.out = out.data();
  params.num_tokens = ffi::mhc_tokens(residual);
  params.hidden_size = static_cast<uint32_t>(hidden_size);
  const ffi::DeviceGuard guard(residual);
  const bool enable_pdl = ffi::resolve_pdl(ffi::Args::Flag::kNone, residual);
  ffi::check_launch(mhc_post(params, enable_pdl, ffi::current_stream(residual)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(mhc_post, args) { flashinfer::run(args); }
