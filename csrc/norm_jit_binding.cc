//   norm([out, ]input[, residual], weight[, bias][, scale], eps, enable_pdl)
//   gemma_norm([out, ]input[, residual], weight[, scale], eps, enable_pdl)
//
// The configuration says which arguments are there. With a residual and no 8-bit output the result
// replaces the input. gemma_norm, which an RMS norm also has, adds one to every weight. `scale` is
// a number or a tensor of one element.
#include "ffi.h"
#include "norm.h"

namespace flashinfer {
namespace {

constexpr bool kSubtractMean = FLASHINFER_CFG_SUBTRACT_MEAN;
constexpr bool kAddResidual = FLASHINFER_CFG_ADD_RESIDUAL;
constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr DLDataType kWeightDtype = kSubtractMean ? ffi::dtype::float32 : kDtype;
constexpr DLDataType kOutDtype = ffi::dtype::FLASHINFER_CFG_OUT_DTYPE;
constexpr bool kScaleOutput = kOutDtype.bits == 8;
constexpr bool kInPlace = kAddResidual && !kScaleOutput;
// A vector is 16 bytes of the input; its counterparts in the other tensors have as many elements.
constexpr int kVecSize = 16 / (kDtype.bits / 8);

NormRows rows_of(const ffi::Tensor& tensor) {
  const bool has_heads = tensor.ndim() == 3;
  return {tensor.data(), tensor.stride(0), has_heads ? tensor.stride(1) : 0};
}

bool rows_are_vectors(const ffi::Tensor& tensor) {
  const int64_t vec_bytes = kVecSize * tensor.itemsize();
  bool aligned = ffi::is_aligned(tensor, vec_bytes < 16 ? vec_bytes : 16);
  for (int i = 0; i < tensor.ndim() - 1; ++i) {
    aligned = aligned && (tensor.dim(i) == 1 || tensor.stride(i) % kVecSize == 0);
  }
  return aligned;
}

// Whether [batch, heads, hidden] folds into one row dimension, as in a contiguous tensor.
bool heads_fold(const ffi::Tensor& tensor) {
  return tensor.dim(0) == 1 || tensor.stride(0) == tensor.dim(1) * tensor.stride(1);
}

int64_t num_rows(const ffi::Tensor& tensor) {
  return tensor.ndim() == 3 ? tensor.dim(0) * tensor.dim(1) : tensor.dim(0);
}

void check_rows(const ffi::Tensor& tensor, const ffi::Tensor& input) {
  ffi::check_same_shape(tensor, input);
  ffi::check_last_dim_contiguous(tensor);
  ffi::check_no_broadcast(tensor);
}

struct Call {
  ffi::Tensor out, input, residual, weight, bias, scale;
  float scale_value = 1.f;
  float eps;
  ffi::Args::Flag enable_pdl;
};

Call take(ffi::Args& args) {
  Call call;
  if (!kInPlace) call.out = args.tensor("out");
  call.input = args.tensor("input");
  if (kInPlace) call.out = call.input;
  if (kAddResidual) call.residual = args.tensor("residual");
  call.weight = args.tensor(kSubtractMean ? "gemma" : "weight");
  if (kSubtractMean) call.bias = args.tensor("beta");
  if (kScaleOutput && args.next_is_tensor()) {
    call.scale = args.tensor("scale");
  } else if (kScaleOutput) {
    call.scale_value = args.float32("scale");
  }
  call.eps = args.float32("eps", ffi::Zero::allowed);
  call.enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  return call;
}

// Checks a vector of one value per column.
void check_columns(const ffi::Tensor& tensor, int64_t hidden_size, const ffi::Tensor& out) {
  ffi::check_vector(tensor, kWeightDtype, hidden_size);
  ffi::check_disjoint(out, tensor);
}

void check(const Call& call) {
  const ffi::Tensor &out = call.out, &input = call.input;
  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 2, 3);
  ffi::check_last_dim_contiguous(input);
  ffi::check_dtype(out, kOutDtype);
  check_rows(out, input);
  check_columns(call.weight, input.dim(-1), out);
  if (kScaleOutput) {
    ffi::check_disjoint(out, input);
  } else {
    ffi::check_same_view_or_disjoint(out, input);
  }
  if (kAddResidual) {
    ffi::check_dtype(call.residual, kDtype);
    check_rows(call.residual, input);
    ffi::check_disjoint(call.residual, input);
    if (!kInPlace) ffi::check_disjoint(call.residual, out);
    ffi::check_disjoint(call.residual, call.weight);
  }
  if (kSubtractMean) check_columns(call.bias, input.dim(-1), out);
  if (call.scale) {
    ffi::check_dtype(call.scale, ffi::dtype::float32);
    if (call.scale.numel() != 1) {
      ffi::raise("ValueError", "`scale` must have one element, got shape %s",
                 call.scale.shape_text().c_str());
    }
    ffi::check_disjoint(out, call.scale);
  }
  if (num_rows(input) > INT32_MAX || input.dim(-1) > INT32_MAX) {
    ffi::raise("ValueError", "`input` must have fewer than 2^31 rows and columns, got shape %s",
               input.shape_text().c_str());
  }
  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : {out, call.residual, call.weight, call.bias, call.scale}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
}

NormParams params_of(const Call& call, float weight_offset) {
  const ffi::Tensor &out = call.out, &input = call.input, &residual = call.residual;
  NormParams params = {};
  params.input = rows_of(input);
  params.out = rows_of(out);
  if (residual) params.residual = rows_of(residual);
  params.num_heads = 1;
  const bool fold = input.ndim() == 3 && heads_fold(input) && heads_fold(out) &&
                    (!residual || heads_fold(residual));
  if (fold) {
    for (NormRows* rows : {&params.input, &params.out, &params.residual}) {
      rows->stride_outer = rows->stride_inner;
    }
  } else if (input.ndim() == 3) {
    params.num_heads = static_cast<uint32_t>(input.dim(1));
  }
  params.weight = call.weight.data();
  params.bias = call.bias ? call.bias.data() : nullptr;
  params.out_scale = call.scale ? static_cast<const float*>(call.scale.data()) : nullptr;
  params.out_scale_value = call.scale_value;
  params.eps = call.eps;
  params.weight_offset = weight_offset;
  params.num_rows = static_cast<uint32_t>(num_rows(input));
  params.hidden_size = static_cast<uint32_t>(input.dim(-1));
  return params;
}

bool is_vectorizable(const Call& call) {
  return call.input.dim(-1) % kVecSize == 0 && rows_are_vectors(call.input) &&
         rows_are_vectors(call.out) && ffi::is_aligned(call.weight, 16) &&
         (!call.residual || rows_are_vectors(call.residual)) &&
         (!call.bias || ffi::is_aligned(call.bias, 16));
}

void run(ffi::Args& args, float weight_offset) {
  const Call call = take(args);
  check(call);
  const ffi::Tensor& input = call.input;
  if (input.numel() == 0) return;
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(norm(params_of(call, weight_offset), is_vectorizable(call),
                         ffi::device_info(input), ffi::resolve_pdl(call.enable_pdl, input),
                         ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(norm, args) { flashinfer::run(args, 0.f); }

#if !FLASHINFER_CFG_SUBTRACT_MEAN
FLASHINFER_FFI_EXPORT(gemma_norm, args) { flashinfer::run(args, 1.f); }
#endif
