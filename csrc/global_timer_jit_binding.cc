//   global_timer(out)
//
// `out`: one word of 64 bits, int64 or uint64, on a GPU.
#include "ffi.h"
#include "global_timer.h"

namespace flashinfer {
namespace {

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("out");
  args.all_taken();
  ffi::check_dtype(out, {ffi::dtype::int64, DLDataType{kDLUInt, 64, 1}});
  ffi::check_shape(out, {1});
  ffi::check_cuda(out);
  const ffi::DeviceGuard guard(out);
  ffi::check_launch(global_timer(static_cast<uint64_t*>(out.data()), ffi::current_stream(out)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(global_timer, args) { flashinfer::run(args); }
