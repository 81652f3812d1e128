//   chain_speculative(output_token_ids, output_accepted_token_num, output_emitted_draft_token_num,
//                     draft_probs, draft_token_ids, target_probs, seed, offset, enable_pdl)
#include "ffi.h"
#include "row_arguments.h"
#include "speculative.h"

namespace flashinfer {
namespace {

struct Call {
  ffi::Tensor token_ids, accepted, emitted, draft_probs, draft_token_ids, target_probs;
  ffi::RowValue<uint64_t> seed, offset;
  ffi::Args::Flag enable_pdl;

  int64_t num_rows() const { return draft_probs.dim(0); }
};

Call take(ffi::Args& args) {
  Call call;
  call.token_ids = args.tensor("output_token_ids");
  call.accepted = args.tensor("maybe_output_accepted_token_num");
  call.emitted = args.tensor("maybe_output_emitted_draft_token_num");
  call.draft_probs = args.tensor("draft_probs");
  call.draft_token_ids = args.tensor("draft_token_ids");
  call.target_probs = args.tensor("target_probs");
  call.seed = ffi::take_row_seed(args, "seed");
  call.offset = ffi::take_row_seed(args, "offset");
  call.enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  return call;
}

void check(const Call& call) {
  const auto& [token_ids, accepted, emitted, draft_probs, draft_token_ids, target_probs, seed,
               offset, enable_pdl] = call;
  ffi::check_dtype(draft_probs, ffi::dtype::float32);
  ffi::check_dtype(target_probs, ffi::dtype::float32);
  ffi::check_dtype(draft_token_ids, ffi::dtype::int32);
  ffi::check_ndim(draft_probs, 3, 3);
  ffi::check_ndim(target_probs, 3, 3);
  const int64_t num_rows = call.num_rows(), num_drafts = draft_probs.dim(1);
  const int64_t vocab_size = draft_probs.dim(2);
  if (vocab_size < 1 || vocab_size > 1 << 19 || num_rows > INT32_MAX / 16 ||
      num_drafts > INT32_MAX / 2) {
    ffi::raise("ValueError", "`draft_probs` must have 1 to 524288 columns, got shape %s",
               draft_probs.shape_text().c_str());
  }
  ffi::check_shape(target_probs, {num_rows, num_drafts + 1, vocab_size});
  ffi::check_shape(draft_token_ids, {num_rows, num_drafts});
  ffi::check_shape(token_ids, {num_rows, num_drafts + 1});
  for (const ffi::Tensor& tensor : {accepted, emitted}) {
    ffi::check_vector(tensor, ffi::dtype::int32, num_rows);
  }
  for (const ffi::Tensor& tensor : {draft_probs, draft_token_ids, target_probs, token_ids}) {
    ffi::check_contiguous(tensor);
  }
  ffi::check_disjoint(accepted, emitted);
  ffi::check_row_seeds(seed, offset, num_rows);
  ffi::check_cuda(draft_probs);
  for (const ffi::Tensor& tensor :
       {draft_token_ids, target_probs, token_ids, accepted, emitted, seed.tensor, offset.tensor}) {
    if (tensor) ffi::check_same_device(tensor, draft_probs);
  }
}

SpeculativeParams params_of(const Call& call) {
  SpeculativeParams params = {};
  params.draft_probs = static_cast<const float*>(call.draft_probs.data());
  params.draft_token_ids = static_cast<const int32_t*>(call.draft_token_ids.data());
  params.target_probs = static_cast<const float*>(call.target_probs.data());
  params.token_ids = static_cast<int32_t*>(call.token_ids.data());
  params.num_accepted = static_cast<int32_t*>(call.accepted.data());
  params.num_emitted = static_cast<int32_t*>(call.emitted.data());
  params.seed = call.seed.per_row();
  params.offset = call.offset.per_row();
  params.num_rows = static_cast<uint32_t>(call.num_rows());
  params.num_drafts = static_cast<uint32_t>(call.draft_probs.dim(1));
  params.vocab_size = static_cast<uint32_t>(call.draft_probs.dim(2));
  params.seed_is_shared = call.seed.is_shared(call.num_rows());
  params.offset_is_shared = call.offset.is_shared(call.num_rows());
  params.rows_have_streams = !call.seed.is_column();
  return params;
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(chain_speculative, args) {
  using namespace flashinfer;
  const Call call = take(args);
  check(call);
  const ffi::Tensor& on = call.draft_probs;
  if (call.num_rows() == 0) return;
  const ffi::DeviceGuard guard(on);
  ffi::check_launch(
      chain_speculative(params_of(call), on.dl->device.device_id, ffi::device_info(on).num_sms,
                        ffi::resolve_pdl(call.enable_pdl, on), ffi::current_stream(on)));
}
