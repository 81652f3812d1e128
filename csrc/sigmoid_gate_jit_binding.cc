//   sigmoid_gate(input, gate, eps, enable_pdl)
#include "sigmoid_gate.h"

#include "norm_rows.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr int64_t kVecSize = 16 / (kDtype.bits / 8);

void check_heads(const ffi::Tensor& tensor) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_vector_rows(tensor);
  if (tensor.ndim() == 3 && tensor.dim(1) > 1 && tensor.stride(1) != tensor.dim(2)) {
    ffi::raise("ValueError", "`%s` must have adjacent heads, got strides %s", tensor.name,
               ffi::list_text(tensor.dl->strides, tensor.ndim()).c_str());
  }
}

void check(const ffi::Tensor& input, const ffi::Tensor& gate) {
  ffi::check_ndim(input, 2, 3);
  ffi::check_same_shape(gate, input);
  const int64_t lanes = input.dim(-1) / kVecSize;
  const bool fits = lanes >= 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0;
  if (!fits || input.dim(-1) % kVecSize != 0) {
    ffi::raise("ValueError",
               "`input` must have heads of a power of two of elements from %lld to %lld, got shape "
               "%s",
               static_cast<long long>(kVecSize), static_cast<long long>(32 * kVecSize),
               input.shape_text().c_str());
  }
  check_heads(input);
  check_heads(gate);
  if (input.dim(0) > INT32_MAX || input.numel() / kVecSize > int64_t{256} * INT32_MAX) {
    ffi::raise("ValueError",
               "`input` must have fewer than 2^31 rows and 2^42 elements, got shape %s",
               input.shape_text().c_str());
  }
  ffi::check_no_broadcast(input);
  ffi::check_disjoint(input, gate);
  ffi::check_cuda(input);
  ffi::check_same_device(gate, input);
}

void run(ffi::Args& args) {
  const ffi::Tensor input = args.tensor("input"), gate = args.tensor("gate");
  SigmoidGateParams params = {};
  params.eps = args.float32("eps", ffi::Zero::allowed);
  const auto enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  check(input, gate);
  if (input.numel() == 0) return;
  params.input = input.data();
  params.gate = gate.data();
  params.input_stride = input.stride(0);
  params.gate_stride = gate.stride(0);
  params.num_rows = static_cast<uint32_t>(input.dim(0));
  params.row_vecs = static_cast<uint32_t>(input.numel() / input.dim(0) / kVecSize);
  params.lanes_per_head = static_cast<uint32_t>(input.dim(-1) / kVecSize);
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(
      sigmoid_gate(params, ffi::resolve_pdl(enable_pdl, input), ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(sigmoid_gate, args) { flashinfer::run(args); }
