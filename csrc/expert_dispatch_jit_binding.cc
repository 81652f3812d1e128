//   expert_dispatch(workspace, experts, payloads, offsets, active, stats, sizes, enable_pdl)
//     experts   [tokens, top_k] int32
//     payloads  eight of [tokens, ...], the surplus ones None; offsets: eight, where each goes
//     active    ranks that take part: a number with a bit for each, or int64 [1] on the device
//     stats     int32 [n], or None
//     sizes     (slots, gathered_stats, max_tokens, num_experts)
//   expert_sanitize(workspace, experts, invalid, enable_pdl)
//     experts   [ranks, max_tokens, top_k] int32
//
// `workspace` has the bytes of a CommWorkspace of flashinfer/comm/workspace.h, a CPU tensor. Python
// checks that everything fits the buffer.
#include "expert_dispatch.h"
#include "expert_binding.h"

namespace flashinfer {
namespace {

using Payload = ExpertDispatchParams::Payload;

Payload take_payload(const ffi::Tensor& tensor, int64_t offset, const ffi::Tensor& experts) {
  ffi::check_contiguous(tensor);
  ffi::check_same_device(tensor, experts);
  const int64_t tokens = experts.dim(0);
  if (tensor.dl->ndim < 1 || tensor.dim(0) != tokens) {
    ffi::raise("ValueError", "`%s` must have %lld rows, got shape %s", tensor.name,
               static_cast<long long>(tokens), tensor.shape_text().c_str());
  }
  Payload payload = {};
  payload.data = tensor.data();
  payload.row_bytes = tensor.itemsize();
  for (int i = 1; i < tensor.dl->ndim; ++i) payload.row_bytes *= tensor.dim(i);
  payload.offset = offset;
  payload.unit = 1;
  for (const uint32_t unit : {4u, 16u}) {
    if (payload.row_bytes % unit == 0 && ffi::is_aligned(tensor, unit)) payload.unit = unit;
  }
  return payload;
}

void take_payloads(ffi::Args tensors, ffi::Args offsets, const ffi::Tensor& experts,
                   ExpertDispatchParams& params) {
  for (int i = 0; i < ExpertDispatchParams::kMaxPayloads; ++i) {
    const ffi::Tensor tensor = tensors.optional_tensor("input_payloads");
    const int64_t offset = offsets.integer("offset");
    if (!tensor) continue;
    params.payloads[params.num_payloads++] = take_payload(tensor, offset, experts);
  }
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(expert_dispatch, args) {
  using namespace flashinfer;
  ExpertDispatchParams params = {};
  const ffi::Tensor workspace = args.tensor("workspace");
  const ffi::Tensor experts = args.tensor("token_selected_experts");
  const ffi::Args payloads = args.group("input_payloads", ExpertDispatchParams::kMaxPayloads);
  const ffi::Args offsets = args.group("offsets", ExpertDispatchParams::kMaxPayloads);
  params.active = take_active_ranks(args, experts);
  const ffi::Tensor stats = args.optional_tensor("eplb_local_stats");
  ffi::Args sizes = args.group("sizes", 4);
  const ffi::Args::Flag pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  params.workspace = workspace_of(workspace, FLASHINFER_CFG_WORLD_SIZE);
  ffi::check_dtype(experts, ffi::dtype::int32);
  ffi::check_ndim(experts, 2, 2);
  ffi::check_contiguous(experts);
  ffi::check_cuda(experts);
  params.experts = static_cast<const int32_t*>(experts.data());
  params.slots = sizes.integer("slots");
  params.gathered_stats = sizes.integer("gathered_stats");
  params.max_tokens = static_cast<uint32_t>(sizes.integer_in("max_tokens", 1, INT32_MAX));
  const int64_t num_experts = sizes.integer_in("num_experts", 1, INT32_MAX);
  if (num_experts % FLASHINFER_CFG_WORLD_SIZE != 0) {
    ffi::raise("ValueError", "`num_experts` must be a multiple of %d, got %lld",
               FLASHINFER_CFG_WORLD_SIZE, static_cast<long long>(num_experts));
  }
  if (experts.dim(0) > params.max_tokens) {
    ffi::raise("ValueError", "`token_selected_experts` must have at most %u rows, got %lld",
               params.max_tokens, static_cast<long long>(experts.dim(0)));
  }
  params.experts_per_rank = static_cast<uint32_t>(num_experts / FLASHINFER_CFG_WORLD_SIZE);
  params.num_tokens = static_cast<uint32_t>(experts.dim(0));
  params.top_k = static_cast<uint32_t>(experts.dim(1));
  if (stats) {
    ffi::check_dtype(stats, ffi::dtype::int32);
    ffi::check_ndim(stats, 1, 1);
    ffi::check_contiguous(stats);
    ffi::check_same_device(stats, experts);
    params.stats = static_cast<const int32_t*>(stats.data());
    params.num_stats = static_cast<uint32_t>(stats.dim(0));
  }
  take_payloads(payloads, offsets, experts, params);
  const ffi::DeviceGuard guard(experts);
  ffi::check_launch(
      expert_dispatch(params, ffi::resolve_pdl(pdl, experts), ffi::current_stream(experts)));
}

FLASHINFER_FFI_EXPORT(expert_sanitize, args) {
  using namespace flashinfer;
  ExpertSanitizeParams params = {};
  const ffi::Tensor workspace = args.tensor("workspace");
  const ffi::Tensor experts = args.tensor("expert_ids");
  const int64_t invalid = args.integer_in("invalid_expert_id", INT32_MIN, INT32_MAX);
  const ffi::Args::Flag pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  params.workspace = workspace_of(workspace, FLASHINFER_CFG_WORLD_SIZE);
  ffi::check_dtype(experts, ffi::dtype::int32);
  ffi::check_ndim(experts, 3, 3);
  ffi::check_shape(experts, {FLASHINFER_CFG_WORLD_SIZE, experts.dim(1), experts.dim(2)});
  ffi::check_contiguous(experts);
  ffi::check_cuda(experts);
  params.experts = static_cast<int32_t*>(experts.data());
  params.max_tokens = static_cast<uint32_t>(experts.dim(1));
  params.top_k = static_cast<uint32_t>(experts.dim(2));
  params.invalid = static_cast<int32_t>(invalid);
  const ffi::DeviceGuard guard(experts);
  ffi::check_launch(
      expert_sanitize(params, ffi::resolve_pdl(pdl, experts), ffi::current_stream(experts)));
}
