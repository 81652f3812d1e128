//   mhc_pre(results, dot_mix[, sqrsum], residual, mhc_scale, mhc_base[, k], epsilons,
//           mhc_post_mult_value, sinkhorn_repeat[, num_splits], block_size)
//
// In brackets: what a configuration without prenorm takes. `results`: (post_mix, comb_mix,
// layer_input). `epsilons`: (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps).
#include "mhc_pre.h"

#include "mhc_binding.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE, kFloat = ffi::dtype::float32;
constexpr bool kPrenorm = FLASHINFER_CFG_PRENORM;

struct Call {
  ffi::Tensor post_mix, comb_mix, layer_input, dot_mix, sqrsum, residual, scale, base;
  MhcPreParams params;
};

Call take(ffi::Args& args) {
  Call call = {};
  ffi::Args results = args.group("results", 3);
  call.post_mix = results.tensor("post_mix");
  call.comb_mix = results.tensor("comb_mix");
  call.layer_input = results.tensor("layer_input");
  call.dot_mix = args.tensor("dot_mix");
  if (!kPrenorm) call.sqrsum = args.tensor("sqrsum");
  call.residual = args.tensor("residual");
  call.scale = args.tensor("mhc_scale");
  call.base = args.tensor("mhc_base");
  MhcPreParams& params = call.params;
  if (!kPrenorm) {
    params.inv_k = 1.f / static_cast<float>(args.integer_in("k", 1, INT32_MAX));
  }
  ffi::Args epsilons = args.group("epsilons", 3);
  params.rms_eps = epsilons.float32("rms_eps", ffi::Zero::allowed);
  params.pre_eps = epsilons.float32("mhc_pre_eps", ffi::Zero::allowed);
  params.sinkhorn_eps = epsilons.float32("mhc_sinkhorn_eps", ffi::Zero::allowed);
  params.post_mult = static_cast<float>(args.number_in("mhc_post_mult_value", -3e38, 3e38));
  const auto number = [&](const char* name, int64_t low, int64_t high) {
    return static_cast<uint32_t>(args.integer_in(name, low, high));
  };
  params.sinkhorn_repeat = number("sinkhorn_repeat", 1, 1000);
  params.num_splits = kPrenorm ? 1 : number("num_splits", 1, 1024);
  params.block_size = number("block_size", 0, 1024);
  args.all_taken();
  if (params.block_size % 32 != 0 || params.block_size == 32) {
    ffi::raise("ValueError", "`block_size` must be 0 or a multiple of 32 from 64 to 1024, got %u",
               params.block_size);
  }
  return call;
}

void check(const Call& call) {
  constexpr int64_t n = kMhcStreams;
  const ffi::Tensor& residual = call.residual;
  ffi::check_mhc_streams(residual, kDtype);
  const int64_t hidden_size = residual.dim(-1);
  ffi::check_mhc_tensor(residual, kDtype, residual, {n, hidden_size});
  // One split may do without its dimension.
  const int64_t num_splits = call.params.num_splits;
  const auto splits = [&](bool has_splits) {
    return num_splits > 1 || has_splits ? num_splits : 0;
  };
  const ffi::Tensor &dots = call.dot_mix, &squares = call.sqrsum;
  const int64_t of_dots = splits(dots.ndim() == residual.ndim());
  ffi::check_mhc_tensor(dots, kFloat, residual, {kMhcMixes}, of_dots, false);
  if (!kPrenorm) {
    const int64_t of_squares = splits(squares.ndim() == residual.ndim() - 1);
    ffi::check_mhc_tensor(squares, kFloat, residual, {}, of_squares, false);
  }
  ffi::check_dtype(call.scale, kFloat);
  ffi::check_shape(call.scale, {3});
  ffi::check_dtype(call.base, kFloat);
  ffi::check_shape(call.base, {kMhcMixes});
  for (const ffi::Tensor& tensor : {call.scale, call.base}) ffi::check_contiguous(tensor);
  ffi::check_mhc_tensor(call.post_mix, kFloat, residual, {n, 1});
  ffi::check_mhc_tensor(call.comb_mix, kFloat, residual, {n, n});
  ffi::check_mhc_tensor(call.layer_input, kDtype, residual, {hidden_size});
  ffi::check_cuda(residual);
  for (const ffi::Tensor& tensor : {call.post_mix, call.comb_mix, call.layer_input, call.dot_mix,
                                    call.sqrsum, call.scale, call.base}) {
    if (tensor) ffi::check_same_device(tensor, residual);
  }
}

MhcPreParams params_of(const Call& call) {
  MhcPreParams params = call.params;
  params.dot_mix = static_cast<const float*>(call.dot_mix.data());
  params.residual = call.residual.data();
  params.scale = static_cast<const float*>(call.scale.data());
  params.base = static_cast<const float*>(call.base.data());
  params.post_mix = static_cast<float*>(call.post_mix.data());
  params.comb_mix = static_cast<float*>(call.comb_mix.data());
  params.layer_input = call.layer_input.data();
  params.num_tokens = ffi::mhc_tokens(call.residual);
  params.hidden_size = static_cast<uint32_t>(call.residual.dim(-1));
  if (kPrenorm) {
    params.inv_k = 1.f / static_cast<float>(kMhcStreams * call.residual.dim(-1));
  } else {
    params.sqrsum = static_cast<const float*>(call.sqrsum.data());
  }
  return params;
}

void run(ffi::Args& args) {
  const Call call = take(args);
  check(call);
  if (call.residual.numel() == 0) return;
  const ffi::DeviceGuard guard(call.residual);
  ffi::check_launch(mhc_pre(params_of(call), ffi::device_info(call.residual),
                            ffi::resolve_pdl(ffi::Args::Flag::kNone, call.residual),
                            ffi::current_stream(call.residual)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(mhc_pre, args) { flashinfer::run(args); }
