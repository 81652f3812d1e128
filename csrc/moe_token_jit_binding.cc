//   moe_token(output, hidden, input, fc1_expert_weights, fc2_expert_weights,
//             token_selected_experts, token_final_scales, first_expert, enable_pdl)
// One token; hidden [top_k, intermediate] is memory between the products.
#include "ffi.h"
#include "moe_token.h"

namespace flashinfer {
namespace {

enum class Index { int32, int64 };
constexpr DLDataType kIndexDtype =
    Index::FLASHINFER_CFG_INDEX == Index::int64 ? ffi::dtype::int64 : ffi::dtype::int32;
constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr int64_t kMaxChoices = 32;

void check(const ffi::Tensor& tensor, std::initializer_list<int64_t> shape) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_shape(tensor, shape);
  ffi::check_contiguous(tensor);
  if (!ffi::is_aligned(tensor, 16)) {
    ffi::raise("ValueError", "`%s` must be aligned to 16 bytes", tensor.name);
  }
}

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("output"), hidden = args.tensor("hidden");
  const ffi::Tensor x = args.tensor("input"), fc1 = args.tensor("fc1_expert_weights");
  const ffi::Tensor fc2 = args.tensor("fc2_expert_weights");
  const ffi::Tensor experts = args.tensor("token_selected_experts");
  const ffi::Tensor weights = args.tensor("token_final_scales");
  const int64_t first_expert = args.integer_in("first_expert", 0, INT32_MAX);
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
#if FLASHINFER_CFG_EXPERTS_PER_LANE
  const ffi::Tensor logits = args.tensor("logits");
#endif
  args.all_taken();

  ffi::check_ndim(fc2, 3, 3);
  const int64_t num_experts = fc2.dim(0), size = fc2.dim(1), inner = fc2.dim(2);
  ffi::check_dtype(experts, kIndexDtype);
  ffi::check_ndim(experts, 2, 2);
  ffi::check_contiguous(experts);
  const int64_t top_k = experts.dim(1);
  if (experts.dim(0) != 1 || top_k < 1 || top_k > kMaxChoices) {
    ffi::raise("ValueError", "`%s` must have 1 row with 1 to %lld choices, got shape %s",
               experts.name, static_cast<long long>(kMaxChoices), experts.shape_text().c_str());
  }
  if (size % 8 != 0 || inner % 8 != 0 || size > INT32_MAX || inner > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have multiples of 8 rows and columns, got shape %s",
               fc2.name, fc2.shape_text().c_str());
  }
  check(fc1, {num_experts, 2 * inner, size});
  check(fc2, {num_experts, size, inner});
  check(x, {1, size});
  check(out, {1, size});
  check(hidden, {top_k, inner});
  ffi::check_dtype(weights, ffi::dtype::float32);
  ffi::check_same_shape(weights, experts);
  ffi::check_contiguous(weights);
  for (const ffi::Tensor& tensor : {x, fc1, fc2, experts, weights}) {
    ffi::check_disjoint(out, tensor);
    ffi::check_disjoint(hidden, tensor);
  }
  ffi::check_disjoint(out, hidden);
  ffi::check_cuda(x);
  for (const ffi::Tensor& tensor : {out, hidden, fc1, fc2, experts, weights}) {
    ffi::check_same_device(tensor, x);
  }
  if (size == 0 || inner == 0) return;

  MoeTokenParams params = {};
  params.x = x.data();
  params.fc1 = fc1.data();
  params.fc2 = fc2.data();
  params.experts = experts.data();
  params.weights = static_cast<const float*>(weights.data());
  params.hidden = hidden.data();
  params.out = out.data();
  params.first_expert = first_expert;
  params.num_experts = static_cast<uint32_t>(num_experts);
  params.top_k = static_cast<uint32_t>(top_k);
  params.size = static_cast<uint32_t>(size);
  params.inner = static_cast<uint32_t>(inner);
#if FLASHINFER_CFG_EXPERTS_PER_LANE
  params.route.logits = logits.data();
  params.route.num_tokens = 1;
  params.route.num_experts = static_cast<uint32_t>(logits.dim(1));
  params.route.top_k = params.top_k;
  params.route.num_groups = params.route.top_groups = 1;
  params.route.renormalize = true;
  params.route.scale = 1.f;
#endif
  const ffi::DeviceGuard guard(x);
  ffi::check_launch(moe_token(params, ffi::device_info(x).num_sms,
                              ffi::resolve_pdl(enable_pdl, x), ffi::current_stream(x)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(moe_token, args) { flashinfer::run(args); }
