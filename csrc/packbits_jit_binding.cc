//   packbits(out, x[, indptr, out_indptr], big_endian)
//
// A configuration with segments takes indptr and out_indptr.
// The values of the indptr arrays are the caller's to check: it has them on the host, to know the
// size of `out`.
#include "ffi.h"
#include "packbits.h"

namespace flashinfer {
namespace {

enum class Index { none, int32, int64 };
constexpr Index kIndex = Index::FLASHINFER_CFG_INDEX;
constexpr DLDataType kIndexDtype = kIndex == Index::int64 ? ffi::dtype::int64 : ffi::dtype::int32;

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("out"), x = args.tensor("x");
  ffi::Tensor indptr, out_indptr;
  if (kIndex != Index::none) {
    indptr = args.tensor("indptr");
    out_indptr = args.tensor("out_indptr");
  }
  const bool big_endian = args.flag("bitorder");
  args.all_taken();

  ffi::check_dtype(x, {ffi::dtype::boolean, ffi::dtype::uint8, ffi::dtype::int8});
  ffi::check_ndim(x, 1, 1);
  ffi::check_contiguous(x);
  ffi::check_dtype(out, ffi::dtype::uint8);
  ffi::check_ndim(out, 1, 1);
  ffi::check_contiguous(out);
  if (kIndex == Index::none) {
    ffi::check_shape(out, {(x.dim(0) + 7) / 8});
  } else {
    for (const ffi::Tensor& tensor : {indptr, out_indptr}) {
      ffi::check_dtype(tensor, kIndexDtype);
      ffi::check_ndim(tensor, 1, 1);
      ffi::check_contiguous(tensor);
      ffi::check_disjoint(out, tensor);
    }
    ffi::check_same_shape(out_indptr, indptr);
    if (indptr.dim(0) < 1 || indptr.dim(0) > INT32_MAX) {
      ffi::raise("ValueError", "`indptr` must have 1 to 2^31 elements, got shape %s",
                 indptr.shape_text().c_str());
    }
  }
  ffi::check_aligned(out, 4);
  ffi::check_disjoint(out, x);
  ffi::check_cuda(x);
  for (const ffi::Tensor& tensor : {out, indptr, out_indptr}) {
    if (tensor) ffi::check_same_device(tensor, x);
  }
  if (out.dim(0) == 0) return;

  PackBitsParams params = {};
  params.x = static_cast<const uint8_t*>(x.data());
  params.out = static_cast<uint8_t*>(out.data());
  params.num_x = x.dim(0);
  params.num_out = out.dim(0);
  if (indptr) {
    params.indptr = indptr.data();
    params.out_indptr = out_indptr.data();
    params.num_segments = static_cast<uint32_t>(indptr.dim(0) - 1);
  }
  params.big_endian = big_endian;
  const ffi::DeviceGuard guard(x);
  ffi::check_launch(
      packbits(params, ffi::resolve_pdl(ffi::Args::Flag::kNone, x), ffi::current_stream(x)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(packbits, args) { flashinfer::run(args); }
