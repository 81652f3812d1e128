//   exchange(workspace, anchor, segments, enable_pdl)
//     anchor    a tensor on the device that runs the kernel
//     segments  one or two of (source, target, shape, source_strides, target_strides), in a tuple
//               of two; the second may be None
//       shape           (outer, inner, bytes of a row)
//       source_strides  (outer, inner, rank) in bytes; of the target likewise
//
// `workspace` has the bytes of a CommWorkspace of flashinfer/comm/workspace.h, a CPU tensor. Python
// gives views of contiguous tensors and their strides; what a view spans is checked there.
#include "exchange.h"
#include "comm_binding.h"

namespace flashinfer {
namespace {

ExchangeSide take_side(ffi::Args strides, const ffi::Tensor& tensor, int64_t unit_bytes) {
  ExchangeSide side = {};
  side.data = tensor.data();
  int64_t* const fields[] = {&side.outer_stride, &side.inner_stride, &side.rank_stride};
  for (int64_t* field : fields) {
    const int64_t bytes = strides.integer("stride");
    if (bytes % unit_bytes != 0) {
      ffi::raise("ValueError", "`%s` must have strides of whole %lld bytes, got %lld", tensor.name,
                 static_cast<long long>(unit_bytes), static_cast<long long>(bytes));
    }
    *field = bytes / unit_bytes;
  }
  return side;
}

void add_segment(ffi::Args args, ExchangeParams& params) {
  const ffi::Tensor source = args.tensor("source"), target = args.tensor("target");
  ffi::check_contiguous(source);
  ffi::check_contiguous(target);
  ffi::check_disjoint(target, source);
  ffi::check_cuda(source);
  ffi::check_same_device(target, source);
  ffi::Args shape = args.group("shape", 3);
  const int64_t outer = shape.integer_in("outer", 0, INT32_MAX);
  const int64_t inner = shape.integer_in("inner", 0, INT32_MAX);
  const int64_t bytes = shape.integer_in("row_bytes", 1, INT32_MAX);
  if (bytes % 4 != 0 || !ffi::is_aligned(source, 4) || !ffi::is_aligned(target, 4)) {
    ffi::raise("ValueError", "`%s` must have rows of whole 4 bytes, got %lld", source.name,
               static_cast<long long>(bytes));
  }
  const bool wide = bytes % 16 == 0 && ffi::is_aligned(source, 16) && ffi::is_aligned(target, 16);
  const int64_t unit = wide ? 16 : 4;
  ExchangeSegment& segment = params.segments[params.num_segments];
  segment.is_wide = wide;
  segment.outer = static_cast<uint32_t>(outer);
  segment.inner = static_cast<uint32_t>(inner);
  segment.units = static_cast<uint32_t>(bytes / unit);
  segment.source = take_side(args.group("source_strides", 3), source, unit);
  segment.target = take_side(args.group("target_strides", 3), target, unit);
  const int64_t begin = params.num_segments == 0
                            ? 0
                            : (params.place_units[0] * (params.segments[0].is_wide ? 16 : 4) *
                                   (FLASHINFER_CFG_WORLD_SIZE - 1) +
                               255) /
                                  256 * 256;
  params.place_units[params.num_segments] = outer * inner * segment.units;
  params.offsets[params.num_segments] = begin;
  const int64_t end = begin + outer * inner * bytes * (FLASHINFER_CFG_WORLD_SIZE - 1);
  if (end > params.workspace.half_bytes || outer * inner * segment.units > INT32_MAX) {
    ffi::raise("ValueError",
               "`%s` needs %lld bytes of the workspace's receive buffer, which has %lld",
               source.name, static_cast<long long>(end),
               static_cast<long long>(params.workspace.half_bytes));
  }
  ++params.num_segments;
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(exchange, args) {
  using namespace flashinfer;
  ExchangeParams params = {};
  const ffi::Tensor workspace = args.tensor("workspace");
  const ffi::Tensor anchor = args.tensor("anchor");
  ffi::Args segments = args.group("segments", 2);
  const ffi::Args::Flag pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  params.workspace = workspace_of(workspace, FLASHINFER_CFG_WORLD_SIZE);
  add_segment(segments.group("segment", 5), params);
  const ffi::Args second = segments.optional_group("segment", 5);
  if (second) add_segment(second, params);
  if (params.place_units[0] == 0 && params.place_units[1] == 0) return;
  const ffi::DeviceGuard guard(anchor);
  ffi::check_launch(exchange(params, ffi::resolve_pdl(pdl, anchor), ffi::current_stream(anchor)));
}
