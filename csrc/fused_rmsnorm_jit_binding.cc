//   fused_rmsnorm(out[, block_scale, normed_out], input[, residual], weight, eps, enable_pdl)
//
// The configuration says which arguments are there. normed_out may be None.
#include "fused_rmsnorm.h"

#include "ffi.h"

namespace flashinfer {
namespace {

enum class Output { float32, float16, bfloat16, float8_e4m3fn, e4m3_blocks };
constexpr Output kOutput = Output::FLASHINFER_CFG_OUTPUT;
constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr bool kAddResidual = FLASHINFER_CFG_ADD_RESIDUAL;
constexpr bool kGroups = kOutput == Output::e4m3_blocks;
constexpr int64_t kGroupSize = kGroups ? 128 : 1;
constexpr DLDataType kOutDtype =
    kGroups || kOutput == Output::float8_e4m3fn ? ffi::dtype::float8_e4m3fn : kDtype;
constexpr int64_t kVecSize = 16 / (kDtype.bits / 8);

bool rows_are_aligned(const ffi::Tensor& tensor, int64_t bytes) {
  return ffi::is_aligned(tensor, bytes) &&
         (tensor.dim(0) <= 1 || tensor.stride(0) * tensor.itemsize() % bytes == 0);
}

void check_rows(const ffi::Tensor& tensor, DLDataType dtype, int64_t rows, int64_t cols) {
  ffi::check_dtype(tensor, dtype);
  ffi::check_shape(tensor, {rows, cols});
  ffi::check_last_dim_contiguous(tensor);
  ffi::check_no_broadcast(tensor);
}

void check_block_scale(const ffi::Tensor& scale, int64_t rows, int64_t hidden_size) {
  ffi::check_dtype(scale, ffi::dtype::float32);
  ffi::check_shape(scale, {hidden_size / kGroupSize, (rows + 3) / 4 * 4});
  ffi::check_contiguous(scale);
}

struct Call {
  ffi::Tensor out, scale, normed, input, residual, weight;
  float eps;
  ffi::Args::Flag enable_pdl;
};

Call take(ffi::Args& args) {
  Call call;
  call.out = args.tensor("out");
  if (kGroups) call.scale = args.tensor("block_scale");
  if (kGroups) call.normed = args.optional_tensor("normed_out");
  call.input = args.tensor("input");
  if (kAddResidual) call.residual = args.tensor("residual");
  call.weight = args.tensor("weight");
  call.eps = args.float32("eps", ffi::Zero::allowed);
  call.enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  return call;
}

void check_optional(const Call& call, int64_t rows, int64_t hidden_size) {
  const auto& [out, scale, normed, input, residual, weight, eps, enable_pdl] = call;
  if (scale) {
    check_block_scale(scale, rows, hidden_size);
    for (const ffi::Tensor& other : {out, input, weight}) ffi::check_disjoint(scale, other);
  }
  if (normed) {
    check_rows(normed, kDtype, rows, hidden_size);
    ffi::check_same_view_or_disjoint(normed, input);
    for (const ffi::Tensor& other : {out, scale, weight}) ffi::check_disjoint(normed, other);
  }
  if (residual) {
    check_rows(residual, kDtype, rows, hidden_size);
    for (const ffi::Tensor& other : {input, out, weight}) ffi::check_disjoint(residual, other);
    if (normed) ffi::check_disjoint(residual, normed);
    if (scale) ffi::check_disjoint(residual, scale);
  }
}

void check(const Call& call) {
  const ffi::Tensor &out = call.out, &input = call.input, &weight = call.weight;
  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 2, 2);
  ffi::check_last_dim_contiguous(input);
  const int64_t rows = input.dim(0), hidden_size = input.dim(1);
  if (hidden_size % kGroupSize != 0) {
    ffi::raise("ValueError", "`input` must have rows of whole blocks of %lld, got shape %s",
               static_cast<long long>(kGroupSize), input.shape_text().c_str());
  }
  check_rows(out, kOutDtype, rows, hidden_size);
  if (kOutDtype.bits == kDtype.bits) {
    ffi::check_same_view_or_disjoint(out, input);
  } else {
    ffi::check_disjoint(out, input);
  }
  ffi::check_vector(weight, kDtype, hidden_size);
  ffi::check_disjoint(out, weight);
  check_optional(call, rows, hidden_size);
  if (rows > INT32_MAX - 4 || hidden_size > INT32_MAX) {
    ffi::raise("ValueError", "`input` must have fewer than 2^31 rows and columns, got shape %s",
               input.shape_text().c_str());
  }
  if (kGroups) {
    for (const ffi::Tensor& tensor : {input, call.residual, call.normed, out}) {
      if (tensor) ffi::check_vector_rows(tensor);
    }
    ffi::check_aligned(weight, 16);
  }
  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : {out, call.scale, call.normed, call.residual, weight}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
}

FusedRmsnormParams params_of(const Call& call) {
  const auto& [out, scale, normed, input, residual, weight, eps, enable_pdl] = call;
  FusedRmsnormParams params = {};
  params.input = input.data();
  params.residual = residual ? residual.data() : nullptr;
  params.weight = weight.data();
  params.normed_out = normed ? normed.data() : nullptr;
  params.out = out.data();
  params.scale = scale ? scale.data() : nullptr;
  params.input_stride = input.stride(0);
  params.residual_stride = residual ? residual.stride(0) : 0;
  params.normed_stride = normed ? normed.stride(0) : 0;
  params.out_stride = out.stride(0) * out.itemsize();
  params.scale_stride = kGroups ? scale.dim(1) : 0;
  params.num_rows = static_cast<uint32_t>(input.dim(0));
  params.scale_rows = kGroups ? static_cast<uint32_t>(scale.dim(1)) : params.num_rows;
  params.hidden_size = static_cast<uint32_t>(input.dim(1));
  params.eps = eps;
  const int64_t out_vec_bytes = kVecSize * out.itemsize();
  params.vectorizable = input.dim(1) % kVecSize == 0 && rows_are_aligned(input, 16) &&
                        (!residual || rows_are_aligned(residual, 16)) &&
                        rows_are_aligned(out, out_vec_bytes < 16 ? out_vec_bytes : 16) &&
                        ffi::is_aligned(weight, 16);
  return params;
}

void run(ffi::Args& args) {
  const Call call = take(args);
  check(call);
  const ffi::Tensor& input = call.input;
  if (input.numel() == 0) return;
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(fused_rmsnorm(params_of(call), ffi::device_info(input),
                                  ffi::resolve_pdl(call.enable_pdl, input),
                                  ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(fused_rmsnorm, args) { flashinfer::run(args); }
