//   moe_activation(out, out_scale, input, masked_m, eps, enable_pdl)
//
// The launcher of flashinfer/cute_dsl/moe_activation_kernel.py, too. input [groups, rows, 2 width]
// and out [groups, rows, width]; out_scale [width / 128, groups rows]; masked_m [groups].
#include <moe_activation_kernel.h>

#include <algorithm>

#include "cute_dsl_library.h"
#include "ffi.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr int64_t kBlock = 128, kBlocksOfCta = 16;
// Of four warps: twice what an SM runs at a time, for groups that have more rows than others.
constexpr int64_t kCtasOfSm = 16;
constexpr int64_t kMaxGrid = 65535;

cute_dsl::Library library(_mlir_moe_activation_kernel_cuda_init,
                          _mlir_moe_activation_kernel_cuda_load_to_device);

void check_shapes(const ffi::Tensor& out, const ffi::Tensor& scale, const ffi::Tensor& input,
                  int64_t groups, int64_t rows) {
  if (input.dim(-1) % (2 * kBlock) != 0) {
    ffi::raise("ValueError", "`input` must have a multiple of %lld columns, got shape %s",
               static_cast<long long>(2 * kBlock), input.shape_text().c_str());
  }
  const int64_t width = input.dim(-1) / 2;
  ffi::check_shape(out, {groups, rows, width});
  ffi::check_shape(scale, {width / kBlock, groups * rows});
  if (groups > kMaxGrid || rows > INT32_MAX || width > INT32_MAX / 2) {
    ffi::raise("ValueError",
               "`input` must have at most %lld groups and fewer than 2^31 rows and "
               "2^30 columns, got shape %s",
               static_cast<long long>(kMaxGrid), input.shape_text().c_str());
  }
}

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("out"), scale = args.tensor("out_scale");
  const ffi::Tensor input = args.tensor("input"), counts = args.tensor("masked_m");
  const double eps = args.number_in("eps", 1e-30, 1e30);
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  ffi::check_dtype(input, kDtype);
  ffi::check_dtype(out, ffi::dtype::float8_e4m3fn);
  ffi::check_dtype(scale, ffi::dtype::float32);
  ffi::check_ndim(input, 3, 3);
  const int64_t groups = input.dim(0), rows = input.dim(1);
  check_shapes(out, scale, input, groups, rows);
  for (const ffi::Tensor& tensor : {input, out, scale}) ffi::check_contiguous(tensor);
  if (!ffi::is_aligned(input, 16) || !ffi::is_aligned(out, 16)) {
    ffi::raise("ValueError", "`input` and `out` must begin at multiples of 16 bytes");
  }
  ffi::check_dtype(counts, ffi::dtype::int32);
  ffi::check_shape(counts, {groups});
  ffi::check_contiguous(counts);
  for (const ffi::Tensor& tensor : {out, scale}) {
    ffi::check_disjoint(tensor, input);
    ffi::check_disjoint(tensor, counts);
  }
  ffi::check_disjoint(out, scale);
  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : {out, scale, counts}) ffi::check_same_device(tensor, input);
  if (input.numel() == 0) return;

  const int64_t width = input.dim(-1) / 2;
  const int64_t wanted = ffi::device_info(input).num_sms * kCtasOfSm;
  const int64_t most = (rows * (width / kBlock) + kBlocksOfCta - 1) / kBlocksOfCta;
  const int64_t ctas = std::min((wanted + groups - 1) / groups, most);
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(library.load());
  ffi::check_launch(static_cast<cudaError_t>(cute_dsl_moe_activation_kernel_wrapper(
      nullptr, input.data(), out.data(), scale.data(), counts.data(), static_cast<int32_t>(groups),
      static_cast<int32_t>(rows), static_cast<int32_t>(width), static_cast<int32_t>(ctas),
      static_cast<float>(eps), ffi::resolve_pdl(enable_pdl, input), ffi::current_stream(input))));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(moe_activation, args) { flashinfer::run(args); }
