//   group_quant(names, out, scale, input, global_scale, eps, is_global_scale_inversed, enable_pdl)
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

void run(ffi::Args& args) {
  const Names names = kNames[args.integer_in("names", 0, 2)];
  const ffi::Tensor out = args.tensor("out"), scale = args.tensor("scale");
  const ffi::Tensor input = args.tensor(names.input);
  const ffi::Tensor global_scale = args.optional_tensor(names.global_scale);
  // Quotients stay exact as long as neither the scale nor its reciprocal is subnormal.
  const double eps = args.number_in("eps", 1e-30, 1e30);
  const bool invert = args.flag("is_global_scale_inversed");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 1, 8);
  const int64_t num_cols = kSiluAndMul ? input.dim(-1) / 2 : input.dim(-1);
  if ((kSiluAndMul && input.dim(-1) % 2 != 0) || num_cols % kGroupSize != 0) {
    ffi::raise("ValueError",
               "`%s` must have a last dimension of whole groups of %lld values%s, got shape %s",
               input.name, static_cast<long long>(kGroupSize),
               kSiluAndMul ? ", twice (gate and up)" : "", input.shape_text().c_str());
  }
  check_out(out, input, num_cols);
  const int64_t num_rows = leading_size(input), out_cols = out.dim(-1) * kCodesPerByte;
  check_scale(scale, num_rows, out_cols / kGroupSize);
  if (num_rows > INT32_MAX || out_cols > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have fewer than 2^31 rows and columns, got shape %s",
               input.name, input.shape_text().c_str());
  }
  // An empty tensor has no strides worth a check.
  const bool is_empty = num_rows == 0 || out_cols == 0;
  if (!is_empty) ffi::check_last_dim_contiguous(input);
  const int64_t input_stride = is_empty ? 0 : ffi::row_stride(input);
  ffi::check_disjoint(out, input);
  ffi::check_disjoint(scale, input);
  ffi::check_disjoint(out, scale);
  if (global_scale) {
    ffi::check_dtype(global_scale, ffi::dtype::float32);
    if (global_scale.numel() != 1) {
      ffi::raise("ValueError", "`%s` must have one element, got shape %s", global_scale.name,
                 global_scale.shape_text().c_str());
    }
    ffi::check_disjoint(out, global_scale);
  }

  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : {out, scale, global_scale}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
  if (is_empty) return;

  GroupQuantParams params = {};
  params.input = input.data();
  params.out = out.data();
  params.scale = scale.data();
  params.global_scale = global_scale ? static_cast<const float*>(global_scale.data()) : nullptr;
  params.input_stride = input_stride;
  params.num_rows = static_cast<uint32_t>(num_rows);
  params.num_cols = static_cast<uint32_t>(num_cols);
  params.out_cols = static_cast<uint32_t>(out_cols);
  params.scale_rows = round_up(params.num_rows, Layout::kTileRows);
  params.scale_cols = round_up(static_cast<uint32_t>(out_cols / kGroupSize), Layout::kTileCols);
  params.scale_stride = kColumnMajor ? scale.dim(1) : 0;
  params.eps = static_cast<float>(eps);
  params.invert_global_scale = invert;
  params.vectorizable =
      input_stride % kVecSize == 0 && ffi::is_aligned(input, 16) && ffi::is_aligned(out, 16);

  const ffi::DeviceGuard guard(input);
  ffi::check_launch(
      group_quant(params, ffi::resolve_pdl(enable_pdl, input), ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(group_quant, args) { flashinfer::run(args); }
