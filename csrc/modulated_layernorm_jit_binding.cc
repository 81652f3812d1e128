//   modulated_layernorm(residual_out, norm_out, input, residual, input_scale[, gates], scale,
//                       scale_bias, shift, shift_bias, epsilon)
//   modulated_layernorm(residual_out, norm_out, input, residual, input_scale, gates, gamma, beta,
//                       epsilon)
//
// The configuration says which form it is. `gates`: (gate, gate_bias). residual, input_scale and
// the biases may be None.
#include "modulated_layernorm.h"

#include "norm_rows.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr bool kGate = FLASHINFER_CFG_GATE;
constexpr bool kAffine = FLASHINFER_CFG_AFFINE;
constexpr int64_t kMostVecs = 768;

struct Call {
  ffi::Tensor sum, normed, input, residual, input_scale;
  ffi::Tensor gate, scale, shift;                 // rows; those that are absent are empty
  ffi::Tensor gate_bias, scale_bias, shift_bias;  // columns; with affine weights gamma and beta
  float eps;
};

Call take(ffi::Args& args) {
  Call call = {};
  call.sum = args.tensor("residual_out");
  call.normed = args.tensor("norm_out");
  call.input = args.tensor("input");
  call.residual = args.optional_tensor("residual");
  call.input_scale = args.optional_tensor("input_global_scaling_factor");
  if (kGate) {
    ffi::Args gate = args.group("gates", 2);
    call.gate = gate.tensor("gate");
    call.gate_bias = gate.optional_tensor("gate_bias");
  }
  if (kAffine) {
    call.scale_bias = args.tensor("gamma");
    call.shift_bias = args.tensor("beta");
  } else {
    call.scale = args.tensor("scale");
    call.scale_bias = args.optional_tensor("scale_bias");
    call.shift = args.tensor("shift");
    call.shift_bias = args.optional_tensor("shift_bias");
  }
  call.eps = args.float32("epsilon", ffi::Zero::allowed);
  args.all_taken();
  return call;
}

void check(const Call& call) {
  const ffi::Tensor& input = call.input;
  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 3, 3);
  ffi::check_row_vectors(input, kMostVecs);
  if (input.dim(0) * input.dim(1) > INT32_MAX) {
    ffi::raise("ValueError", "`input` must have fewer than 2^31 rows, got shape %s",
               input.shape_text().c_str());
  }
  const ffi::Tensor rows[] = {call.sum,  call.normed, input,     call.residual,
                              call.gate, call.scale,  call.shift};
  for (const ffi::Tensor& tensor : rows) {
    if (!tensor) continue;
    ffi::check_dtype(tensor, kDtype);
    ffi::check_same_shape(tensor, input);
    ffi::check_vector_rows(tensor);
  }
  const ffi::Tensor columns[] = {call.gate_bias, call.scale_bias, call.shift_bias};
  for (const ffi::Tensor& tensor : columns) {
    if (tensor) ffi::check_columns(tensor, ffi::dtype::float32, input.dim(2));
  }
  if (call.input_scale) ffi::check_vector(call.input_scale, ffi::dtype::float32, 1);
  for (const ffi::Tensor& written : {call.sum, call.normed}) {
    ffi::check_no_broadcast(written);
    for (const ffi::Tensor& tensor : {call.gate, call.scale, call.shift, call.gate_bias,
                                      call.scale_bias, call.shift_bias, call.input_scale}) {
      if (tensor) ffi::check_disjoint(written, tensor);
    }
    ffi::check_same_view_or_disjoint(written, input);
    if (call.residual) ffi::check_same_view_or_disjoint(written, call.residual);
  }
  ffi::check_disjoint(call.normed, call.sum);
  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : rows) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
  for (const ffi::Tensor& tensor : columns) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
  if (call.input_scale) ffi::check_same_device(call.input_scale, input);
}

BatchedRows rows_of(const ffi::Tensor& tensor) {
  if (!tensor) return {};
  return {tensor.data(), tensor.stride(0), tensor.stride(1)};
}

const float* floats(const ffi::Tensor& tensor) {
  return tensor ? static_cast<const float*>(tensor.data()) : nullptr;
}

ModulatedLayernormParams params_of(const Call& call) {
  ModulatedLayernormParams params = {};
  params.input = rows_of(call.input);
  params.residual = rows_of(call.residual);
  params.gate = rows_of(call.gate);
  params.scale = rows_of(call.scale);
  params.shift = rows_of(call.shift);
  params.gate_bias = floats(call.gate_bias);
  params.scale_bias = floats(call.scale_bias);
  params.shift_bias = floats(call.shift_bias);
  params.input_scale = floats(call.input_scale);
  params.sum_out = rows_of(call.sum);
  params.normed_out = rows_of(call.normed);
  params.batch_size = static_cast<uint32_t>(call.input.dim(0));
  params.num_rows = static_cast<uint32_t>(call.input.dim(1));
  params.hidden_size = static_cast<uint32_t>(call.input.dim(2));
  params.eps = call.eps;
  return params;
}

void run(ffi::Args& args) {
  const Call call = take(args);
  check(call);
  if (call.input.numel() == 0) return;
  const ffi::DeviceGuard guard(call.input);
  ffi::check_launch(modulated_layernorm(params_of(call), ffi::device_info(call.input),
                                        ffi::current_stream(call.input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(modulated_layernorm, args) { flashinfer::run(args); }
