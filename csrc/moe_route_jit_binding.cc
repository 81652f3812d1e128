//   moe_route(topk_values, topk_indices, scores, bias, groups, renormalize,
//             routed_scaling_factor, enable_pdl)
//
// `bias` may be None. `groups`: (n_group, topk_group), (1, 1) without groups.
#include "ffi.h"
#include "moe_route.h"

#include <cmath>

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr int64_t kMaxExperts = 32 * FLASHINFER_CFG_EXPERTS_PER_LANE;

void check_groups(const ffi::Tensor& scores, int64_t top_k, int64_t groups, int64_t top_groups) {
  const int64_t experts = scores.dim(1);
  if (experts % groups != 0) {
    ffi::raise("ValueError", "`n_group` must divide the %lld experts of `%s`, got %lld",
               static_cast<long long>(experts), scores.name, static_cast<long long>(groups));
  }
  if (top_groups > groups) {
    ffi::raise("ValueError", "`topk_group` must be at most `n_group` %lld, got %lld",
               static_cast<long long>(groups), static_cast<long long>(top_groups));
  }
  if (top_k < 1 || top_k > kMoeMaxChoices || top_k > experts / groups * top_groups) {
    ffi::raise("ValueError",
               "`topk` must be from 1 to %d and at most the %lld experts of `topk_group` groups, "
               "got %lld",
               kMoeMaxChoices, static_cast<long long>(experts / groups * top_groups),
               static_cast<long long>(top_k));
  }
}

void run(ffi::Args& args) {
  const ffi::Tensor weights = args.tensor("topk_values"), experts = args.tensor("topk_indices");
  const ffi::Tensor scores = args.tensor("scores"), bias = args.optional_tensor("bias");
  ffi::Args groups = args.group("groups", 2);
  const int64_t num_groups = groups.integer_in("n_group", 1, kMoeMaxGroups);
  const int64_t top_groups = groups.integer_in("topk_group", 1, kMoeMaxGroups);
  const bool renormalize = args.flag("renormalize");
  const auto scale = static_cast<float>(args.number("routed_scaling_factor"));
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  if (!std::isfinite(scale)) {
    ffi::raise("ValueError", "`routed_scaling_factor` must be finite in float32, got %g",
               static_cast<double>(scale));
  }
  ffi::check_dtype(scores, kDtype);
  ffi::check_ndim(scores, 2, 2);
  ffi::check_last_dim_contiguous(scores);
  if (scores.dim(1) < 1 || scores.dim(1) > kMaxExperts || scores.dim(0) > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have 1 to %lld experts, got shape %s", scores.name,
               static_cast<long long>(kMaxExperts), scores.shape_text().c_str());
  }
  ffi::check_dtype(weights, ffi::dtype::float32);
  ffi::check_dtype(experts, ffi::dtype::int32);
  ffi::check_ndim(weights, 2, 2);
  check_groups(scores, weights.dim(1), num_groups, top_groups);
  ffi::check_shape(weights, {scores.dim(0), weights.dim(1)});
  ffi::check_same_shape(experts, weights);
  for (const ffi::Tensor& written : {weights, experts}) {
    ffi::check_contiguous(written);
    ffi::check_disjoint(written, scores);
  }
  ffi::check_disjoint(weights, experts);
  if (bias) {
    ffi::check_dtype(bias, ffi::dtype::float32);
    ffi::check_shape(bias, {scores.dim(1)});
    ffi::check_contiguous(bias);
    ffi::check_disjoint(weights, bias);
    ffi::check_disjoint(experts, bias);
  }
  ffi::check_cuda(scores);
  for (const ffi::Tensor& tensor : {weights, experts, bias}) {
    if (tensor) ffi::check_same_device(tensor, scores);
  }
  if (scores.dim(0) == 0) return;

  MoeRouteParams params = {};
  params.logits = scores.data();
  params.logits_stride = scores.stride(0);
  params.bias = bias ? static_cast<const float*>(bias.data()) : nullptr;
  params.weights = static_cast<float*>(weights.data());
  params.experts = static_cast<int32_t*>(experts.data());
  params.num_tokens = static_cast<uint32_t>(scores.dim(0));
  params.num_experts = static_cast<uint32_t>(scores.dim(1));
  params.top_k = static_cast<uint32_t>(weights.dim(1));
  params.num_groups = static_cast<uint32_t>(num_groups);
  params.top_groups = static_cast<uint32_t>(top_groups);
  params.renormalize = renormalize;
  params.scale = scale;
  const ffi::DeviceGuard guard(scores);
  ffi::check_launch(
      moe_route(params, ffi::resolve_pdl(enable_pdl, scores), ffi::current_stream(scores)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(moe_route, args) { flashinfer::run(args); }
