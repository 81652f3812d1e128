//   moe_token(output, hidden, input, fc1_expert_weights, fc2_expert_weights,
//             token_selected_experts, token_final_scales, first_expert, enable_pdl)
//
// One token; hidden [top_k, intermediate] is memory between the products.
#include "ffi.h"
#include "moe_token.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;

void check(const ffi::Tensor& tensor, std::initializer_list<int64_t> shape) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_shape(tensor, shape);
  ffi::check_contiguous(tensor);
  ffi::check_aligned(tensor, 16);
}

enum class Index { int32, int64 };
constexpr DLDataType kIndexDtype =
    Index::FLASHINFER_CFG_INDEX == Index::int64 ? ffi::dtype::int64 : ffi::dtype::int32;

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("output"), hidden = args.tensor("hidden");
  const ffi::Tensor x = args.tensor("input"), fc1 = args.tensor("fc1_expert_weights");
  const ffi::Tensor fc2 = args.tensor("fc2_expert_weights");
  const ffi::Tensor experts = args.tensor("token_selected_experts");
  const ffi::Tensor weights = args.tensor("token_final_scales");
  const int64_t first_expert = args.integer_in("first_expert", 0, INT32_MAX);
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  ffi::check_ndim(fc2, 3, 3);
  const int64_t num_experts = fc2.dim(0), size = fc2.dim(1), inner = fc2.dim(2);
  if (size % 8 != 0 || inner % 8 != 0 || size > INT32_MAX || inner > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have multiples of 8 rows and columns, got shape %s",
               fc2.name, fc2.shape_text().c_str());
  }
  ffi::check_ndim(hidden, 2, 2);
  const int64_t top_k = hidden.dim(0);
  if (top_k < 1 || top_k > kMoeMaxChoices) {
    ffi::raise("ValueError", "`%s` must have 1 to %d rows, got shape %s", hidden.name,
               kMoeMaxChoices, hidden.shape_text().c_str());
  }
  check(fc1, {num_experts, 2 * inner, size});
  check(fc2, {num_experts, size, inner});
  check(x, {1, size});
  check(out, {1, size});
  check(hidden, {top_k, inner});
  ffi::check_dtype(experts, kIndexDtype);
  ffi::check_dtype(weights, ffi::dtype::float32);
  for (const ffi::Tensor& tensor : {experts, weights}) {
    ffi::check_shape(tensor, {1, top_k});
    ffi::check_contiguous(tensor);
  }
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
  const ffi::DeviceGuard guard(x);
  ffi::check_launch(moe_token(params, ffi::device_info(x).num_sms, ffi::resolve_pdl(enable_pdl, x),
                              ffi::current_stream(x)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(moe_token, args) { flashinfer::run(args); }
