//   group_quant(names, out, scale, input, global_scale, eps, is_global_scale_inversed, enable_pdl,
//               launches_early)
//
// `names` says what the public function calls its tensors: an index of kNames, for messages.
// `out` may be wider than `input`: what lies beyond counts as zeros. `scale` has one element for
// each row and group of the layout, padding included; column-major ones [groups, at least rows].
#include "ffi.h"
#include "group_quant.h"

#include <flashinfer/quantization/scale_layout.h>

namespace flashinfer {
namespace {

enum class Code { int8, e4m3, e5m2, e2m1 };
enum class Scale { float32, power_of_two_float32, ue8m0, e4m3 };

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr Code kCode = Code::FLASHINFER_CFG_CODE;
using Layout = layout::FLASHINFER_CFG_LAYOUT;
constexpr bool kColumnMajor = std::is_same_v<Layout, layout::column_major>;
constexpr Scale kScale = Scale::FLASHINFER_CFG_SCALE;
constexpr int64_t kGroupSize = FLASHINFER_CFG_GROUP_SIZE;
constexpr bool kSiluAndMul = FLASHINFER_CFG_SILU_AND_MUL;
constexpr DLDataType kOutDtype = kCode == Code::int8   ? ffi::dtype::int8
                                 : kCode == Code::e4m3 ? ffi::dtype::float8_e4m3fn
                                 : kCode == Code::e5m2 ? ffi::dtype::float8_e5m2
                                                       : ffi::dtype::uint8;
constexpr int64_t kCodesPerByte = kCode == Code::e2m1 ? 2 : 1;
constexpr DLDataType kScaleDtype =
    kScale == Scale::ue8m0 || kScale == Scale::e4m3 ? ffi::dtype::uint8 : ffi::dtype::float32;
constexpr int64_t kVecSize = 16 / (kDtype.bits / 8);

int64_t leading_size(const ffi::Tensor& tensor) {
  int64_t rows = 1;
  for (int i = 0; i < tensor.ndim() - 1; ++i) rows *= tensor.dim(i);
  return rows;
}

void check_out(const ffi::Tensor& out, const ffi::Tensor& input, int64_t num_cols) {
  ffi::check_dtype(out, kOutDtype);
  bool fits = out.ndim() == input.ndim();
  for (int i = 0; fits && i < input.ndim() - 1; ++i) fits = out.dim(i) == input.dim(i);
  fits = fits && out.dim(-1) * kCodesPerByte >= num_cols &&
         out.dim(-1) * kCodesPerByte % kGroupSize == 0;
  if (!fits) {
    ffi::raise("ValueError",
               "`out` must have the leading shape %s of the input and whole groups of %lld for at "
               "least %lld values a row, got shape %s",
               input.shape_text().c_str(), static_cast<long long>(kGroupSize),
               static_cast<long long>(num_cols), out.shape_text().c_str());
  }
  ffi::check_contiguous(out);
}

void check_scale(const ffi::Tensor& scale, int64_t rows, int64_t groups) {
  ffi::check_dtype(scale, kScaleDtype);
  ffi::check_contiguous(scale);
  if (kColumnMajor) {
    if (scale.ndim() == 2 && scale.dim(0) == groups && scale.dim(1) >= rows) return;
    ffi::raise("ValueError", "`scale` must have shape [%lld, at least %lld], got %s",
               static_cast<long long>(groups), static_cast<long long>(rows),
               scale.shape_text().c_str());
  }
  const int64_t padded_rows = round_up<int64_t>(rows, Layout::kTileRows);
  const int64_t padded_groups = round_up<int64_t>(groups, Layout::kTileCols);
  if (scale.numel() != padded_rows * padded_groups) {
    ffi::raise("ValueError", "`scale` must have %lld x %lld elements, got shape %s",
               static_cast<long long>(padded_rows), static_cast<long long>(padded_groups),
               scale.shape_text().c_str());
  }
}

struct Names {
  const char* input;
  const char* global_scale;
};
constexpr Names kNames[] = {{"input", "global_scale"}, {"x", ""}, {"a", "a_global_sf"}};

struct Call {
  ffi::Tensor out, scale, input, global_scale;
  double eps;
  bool invert;
  ffi::Args::Flag enable_pdl;
  bool launches_early;

  int64_t num_cols() const { return kSiluAndMul ? input.dim(-1) / 2 : input.dim(-1); }
  int64_t num_rows() const { return leading_size(input); }
  int64_t out_cols() const { return out.dim(-1) * kCodesPerByte; }
  // An empty tensor has no strides worth a check.
  bool is_empty() const { return num_rows() == 0 || out_cols() == 0; }
};

Call take(ffi::Args& args) {
  const Names names = kNames[args.integer_in("names", 0, 2)];
  Call call;
  call.out = args.tensor("out");
  call.scale = args.tensor("scale");
  call.input = args.tensor(names.input);
  call.global_scale = args.optional_tensor(names.global_scale);
  // Quotients stay exact as long as neither the scale nor its reciprocal is subnormal.
  call.eps = args.number_in("eps", 1e-30, 1e30);
  call.invert = args.flag("is_global_scale_inversed");
  call.enable_pdl = args.optional_flag("enable_pdl");
  call.launches_early = args.flag("launches_early");
  args.all_taken();
  return call;
}

void check(const Call& call) {
  const ffi::Tensor &out = call.out, &scale = call.scale, &input = call.input;
  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 1, 8);
  if ((kSiluAndMul && input.dim(-1) % 2 != 0) || call.num_cols() % kGroupSize != 0) {
    ffi::raise("ValueError",
               "`%s` must have a last dimension of whole groups of %lld values%s, got shape %s",
               input.name, static_cast<long long>(kGroupSize),
               kSiluAndMul ? ", twice (gate and up)" : "", input.shape_text().c_str());
  }
  check_out(out, input, call.num_cols());
  check_scale(scale, call.num_rows(), call.out_cols() / kGroupSize);
  if (call.num_rows() > INT32_MAX || call.out_cols() > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have fewer than 2^31 rows and columns, got shape %s",
               input.name, input.shape_text().c_str());
  }
  if (!call.is_empty()) {
    ffi::check_last_dim_contiguous(input);
    ffi::row_stride(input);
  }
  ffi::check_disjoint(out, input);
  ffi::check_disjoint(scale, input);
  ffi::check_disjoint(out, scale);
  if (call.global_scale) {
    ffi::check_dtype(call.global_scale, ffi::dtype::float32);
    if (call.global_scale.numel() != 1) {
      ffi::raise("ValueError", "`%s` must have one element, got shape %s", call.global_scale.name,
                 call.global_scale.shape_text().c_str());
    }
    ffi::check_disjoint(out, call.global_scale);
  }
  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : {out, scale, call.global_scale}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
}

GroupQuantParams params_of(const Call& call) {
  const auto num_groups = static_cast<uint32_t>(call.out_cols() / kGroupSize);
  GroupQuantParams params = {};
  params.input = call.input.data();
  params.out = call.out.data();
  params.scale = call.scale.data();
  params.global_scale =
      call.global_scale ? static_cast<const float*>(call.global_scale.data()) : nullptr;
  params.input_stride = ffi::row_stride(call.input);
  params.num_rows = static_cast<uint32_t>(call.num_rows());
  params.num_cols = static_cast<uint32_t>(call.num_cols());
  params.out_cols = static_cast<uint32_t>(call.out_cols());
  params.scale_rows = round_up(params.num_rows, Layout::kTileRows);
  params.scale_cols = round_up(num_groups, Layout::kTileCols);
  params.scale_stride = kColumnMajor ? call.scale.dim(1) : 0;
  params.eps = static_cast<float>(call.eps);
  params.launches_early = call.launches_early;
  params.invert_global_scale = call.invert;
  params.vectorizable = params.input_stride % kVecSize == 0 && ffi::is_aligned(call.input, 16) &&
                        ffi::is_aligned(call.out, 16);
  return params;
}

void run(ffi::Args& args) {
  const Call call = take(args);
  check(call);
  const ffi::Tensor& input = call.input;
  if (call.is_empty()) return;
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(group_quant(params_of(call), ffi::resolve_pdl(call.enable_pdl, input),
                                ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(group_quant, args) { flashinfer::run(args); }
