// norm([out, ]input[, residual], weight[, bias][, scale], eps, enable_pdl): the configuration says
// which are there. With a residual and no 8-bit output the result replaces the input. An RMS norm
// also comes as gemma_norm, which adds one to every weight.
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

// [batch, heads, hidden] is one row dimension where the strides allow it, as in a contiguous
// tensor.
bool heads_fold(const ffi::Tensor& tensor) {
  return tensor.dim(0) == 1 || tensor.stride(0) == tensor.dim(1) * tensor.stride(1);
}

void check_rows(const ffi::Tensor& tensor, const ffi::Tensor& input) {
  ffi::check_same_shape(tensor, input);
  ffi::check_last_dim_contiguous(tensor);
  ffi::check_no_broadcast(tensor);
}

void run(ffi::Args& args, float weight_offset) {
  ffi::Tensor out;
  if (!kInPlace) out = args.tensor("out");
  const ffi::Tensor input = args.tensor("input");
  if (kInPlace) out = input;
  const ffi::Tensor residual = kAddResidual ? args.tensor("residual") : ffi::Tensor{};
  const ffi::Tensor weight = args.tensor(kSubtractMean ? "gemma" : "weight");
  const ffi::Tensor bias = kSubtractMean ? args.tensor("beta") : ffi::Tensor{};
  ffi::Tensor scale;
  float scale_value = 1.f;
  if (kScaleOutput) {
    if (args.next_is_tensor()) {
      scale = args.tensor("scale");
    } else {
      scale_value = ffi::check_float("scale", args.number("scale"), false);
    }
  }
  const float eps = ffi::check_float("eps", args.number("eps"), true);
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");

  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 2, 3);
  ffi::check_last_dim_contiguous(input);
  ffi::check_dtype(out, kOutDtype);
  check_rows(out, input);
  const int64_t hidden_size = input.dim(-1);
  ffi::check_dtype(weight, kWeightDtype);
  ffi::check_shape(weight, {hidden_size});
  ffi::check_last_dim_contiguous(weight);
  ffi::check_disjoint(out, weight);
  if (kScaleOutput) {
    ffi::check_disjoint(out, input);
  } else {
    ffi::check_same_view_or_disjoint(out, input);
  }
  if (kAddResidual) {
    ffi::check_dtype(residual, kDtype);
    check_rows(residual, input);
    ffi::check_disjoint(residual, input);
    if (!kInPlace) ffi::check_disjoint(residual, out);
    ffi::check_disjoint(residual, weight);
  }
  if (kSubtractMean) {
    ffi::check_dtype(bias, kWeightDtype);
    ffi::check_shape(bias, {hidden_size});
    ffi::check_last_dim_contiguous(bias);
    ffi::check_disjoint(out, bias);
  }
  if (scale) {
    ffi::check_dtype(scale, ffi::dtype::float32);
    if (scale.numel() != 1) {
      ffi::raise("ValueError", "`scale` must have one element, got shape %s",
                 scale.shape_text().c_str());
    }
    ffi::check_disjoint(out, scale);
  }
  const int64_t num_rows = input.ndim() == 3 ? input.dim(0) * input.dim(1) : input.dim(0);
  if (num_rows > INT32_MAX || hidden_size > INT32_MAX) {
    ffi::raise("ValueError", "`input` must have fewer than 2^31 rows and columns, got shape %s",
               input.shape_text().c_str());
  }

  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : {out, residual, weight, bias, scale}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
  if (num_rows == 0 || hidden_size == 0) return;

  const bool fold = input.ndim() == 3 && heads_fold(input) && heads_fold(out) &&
                    (!residual || heads_fold(residual));
  NormParams params = {};
  params.input = rows_of(input);
  params.out = rows_of(out);
  if (residual) params.residual = rows_of(residual);
  params.num_heads = 1;
  if (fold) {
    for (NormRows* rows : {&params.input, &params.out, &params.residual}) {
      rows->stride_outer = rows->stride_inner;
    }
  } else if (input.ndim() == 3) {
    params.num_heads = static_cast<uint32_t>(input.dim(1));
  }
  params.weight = weight.data();
  params.bias = bias ? bias.data() : nullptr;
  params.out_scale = scale ? static_cast<const float*>(scale.data()) : nullptr;
  params.out_scale_value = scale_value;
  params.eps = eps;
  params.weight_offset = weight_offset;
  params.num_rows = static_cast<uint32_t>(num_rows);
  params.hidden_size = static_cast<uint32_t>(hidden_size);

  bool vectorizable = hidden_size % kVecSize == 0 && rows_are_vectors(input) &&
                      rows_are_vectors(out) && ffi::is_aligned(weight, 16);
  if (residual) vectorizable = vectorizable && rows_are_vectors(residual);
  if (bias) vectorizable = vectorizable && ffi::is_aligned(bias, 16);

  const ffi::DeviceGuard guard(input);
  ffi::check_launch(norm(params, vectorizable, ffi::device_info(input),
                         ffi::resolve_pdl(enable_pdl, input), ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(norm, args) { flashinfer::run(args, 0.f); }

#if !FLASHINFER_CFG_SUBTRACT_MEAN
FLASHINFER_FFI_EXPORT(gemma_norm, args) { flashinfer::run(args, 1.f); }
#endif
