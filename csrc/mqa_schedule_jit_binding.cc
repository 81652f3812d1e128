//   mqa_schedule(schedule, seq_lens, enable_pdl)
//
// `schedule` is [parts + 1, 2]: the request and the unit of 256 tokens where each part begins.
#include "ffi.h"
#include "mqa_schedule.h"

FLASHINFER_FFI_EXPORT(mqa_schedule, args) {
  using namespace flashinfer;
  const ffi::Tensor schedule = args.tensor("schedule"), seq_lens = args.tensor("seq_lens");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  ffi::check_dtype(seq_lens, ffi::dtype::int32);
  ffi::check_ndim(seq_lens, 1, 1);
  ffi::check_dtype(schedule, ffi::dtype::int32);
  ffi::check_ndim(schedule, 2, 2);
  ffi::check_contiguous(schedule);
  if (schedule.dim(0) < 2 || schedule.dim(1) != 2 || schedule.dim(0) > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have shape [parts + 1, 2], got %s", schedule.name,
               schedule.shape_text().c_str());
  }
  ffi::check_disjoint(schedule, seq_lens);
  ffi::check_cuda(seq_lens);
  ffi::check_same_device(schedule, seq_lens);

  MqaScheduleParams params = {};
  params.seq_lens = static_cast<const int32_t*>(seq_lens.data());
  params.seq_lens_stride = seq_lens.stride(0);
  params.batch_size = static_cast<int32_t>(seq_lens.dim(0));
  params.parts = static_cast<int32_t>(schedule.dim(0) - 1);
  params.schedule = static_cast<int32_t*>(schedule.data());
  const ffi::DeviceGuard guard(seq_lens);
  ffi::check_launch(
      mqa_schedule(params, ffi::resolve_pdl(enable_pdl, seq_lens), ffi::current_stream(seq_lens)));
}
