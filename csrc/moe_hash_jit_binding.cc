//   moe_hash(topk_weights, topk_ids, router_logits, input_ids, tid2eid, enable_pdl)
#include "ffi.h"
#include "moe_hash.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
enum class Index { int32, int64 };
constexpr DLDataType kIds =
    Index::FLASHINFER_CFG_IDS == Index::int64 ? ffi::dtype::int64 : ffi::dtype::int32;
constexpr DLDataType kTable =
    Index::FLASHINFER_CFG_TABLE == Index::int64 ? ffi::dtype::int64 : ffi::dtype::int32;

void run(ffi::Args& args) {
  const ffi::Tensor weights = args.tensor("topk_weights"), experts = args.tensor("topk_ids");
  const ffi::Tensor logits = args.tensor("router_logits"), ids = args.tensor("input_ids");
  const ffi::Tensor table = args.tensor("tid2eid");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  ffi::check_dtype(logits, kDtype);
  ffi::check_ndim(logits, 2, 2);
  ffi::check_last_dim_contiguous(logits);
  ffi::check_dtype(ids, kIds);
  ffi::check_shape(ids, {logits.dim(0)});
  ffi::check_contiguous(ids);
  ffi::check_dtype(table, kTable);
  ffi::check_ndim(table, 2, 2);
  ffi::check_contiguous(table);
  if (table.dim(1) < 1 || table.dim(1) > kMoeMaxChoices) {
    ffi::raise("ValueError", "`%s` must have 1 to %d experts for each id, got shape %s", table.name,
               kMoeMaxChoices, table.shape_text().c_str());
  }
  if (logits.numel() > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have less than 2^31 elements, got shape %s", logits.name,
               logits.shape_text().c_str());
  }
  ffi::check_dtype(weights, ffi::dtype::float32);
  ffi::check_dtype(experts, ffi::dtype::int32);
  for (const ffi::Tensor& written : {weights, experts}) {
    ffi::check_shape(written, {logits.dim(0), table.dim(1)});
    ffi::check_contiguous(written);
    for (const ffi::Tensor& read : {logits, ids, table}) ffi::check_disjoint(written, read);
  }
  ffi::check_disjoint(weights, experts);
  ffi::check_cuda(logits);
  for (const ffi::Tensor& tensor : {weights, experts, ids, table}) {
    ffi::check_same_device(tensor, logits);
  }
  if (logits.dim(0) == 0) return;

  MoeHashParams params = {};
  params.logits = logits.data();
  params.logits_stride = logits.stride(0);
  params.ids = ids.data();
  params.table = table.data();
  params.num_ids = table.dim(0);
  params.weights = static_cast<float*>(weights.data());
  params.experts = static_cast<int32_t*>(experts.data());
  params.num_tokens = static_cast<uint32_t>(logits.dim(0));
  params.num_experts = static_cast<uint32_t>(logits.dim(1));
  params.top_k = static_cast<uint32_t>(table.dim(1));
  const ffi::DeviceGuard guard(logits);
  ffi::check_launch(
      moe_hash(params, ffi::resolve_pdl(enable_pdl, logits), ffi::current_stream(logits)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(moe_hash, args) { flashinfer::run(args); }
