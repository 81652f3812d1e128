//   chain_speculative(output_token_ids, output_accepted_token_num, output_emitted_draft_token_num,
//                     draft_probs, draft_token_ids, target_probs, seed, offset, enable_pdl)
#include "ffi.h"
#include "row_arguments.h"
#include "speculative.h"

FLASHINFER_FFI_EXPORT(chain_speculative, args) {
  using namespace flashinfer;
  const ffi::Tensor token_ids = args.tensor("output_token_ids");
  const ffi::Tensor accepted = args.tensor("maybe_output_accepted_token_num");
  const ffi::Tensor emitted = args.tensor("maybe_output_emitted_draft_token_num");
  const ffi::Tensor draft_probs = args.tensor("draft_probs");
  const ffi::Tensor draft_token_ids = args.tensor("draft_token_ids");
  const ffi::Tensor target_probs = args.tensor("target_probs");
  const ffi::RowValue<uint64_t> seed = ffi::take_row_seed(args, "seed");
  const ffi::RowValue<uint64_t> offset = ffi::take_row_seed(args, "offset");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  ffi::check_dtype(draft_probs, ffi::dtype::float32);
  ffi::check_dtype(target_probs, ffi::dtype::float32);
  ffi::check_dtype(draft_token_ids, ffi::dtype::int32);
  ffi::check_ndim(draft_probs, 3, 3);
  ffi::check_ndim(target_probs, 3, 3);
  const int64_t num_rows = draft_probs.dim(0), num_drafts = draft_probs.dim(1);
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
    ffi::check_dtype(tensor, ffi::dtype::int32);
    ffi::check_shape(tensor, {num_rows});
  }
  for (const ffi::Tensor& tensor :
       {draft_probs, draft_token_ids, target_probs, token_ids, accepted, emitted}) {
    ffi::check_contiguous(tensor);
  }
  ffi::check_disjoint(accepted, emitted);
  for (const ffi::RowValue<uint64_t>& value : {seed, offset}) {
    if (value.tensor) ffi::check_row_vector(value.tensor, value.tensor.numel() == 1 ? 1 : num_rows);
  }
  ffi::check_cuda(draft_probs);
  for (const ffi::Tensor& tensor :
       {draft_token_ids, target_probs, token_ids, accepted, emitted, seed.tensor, offset.tensor}) {
    if (tensor) ffi::check_same_device(tensor, draft_probs);
  }
  if (num_rows == 0) return;

  SpeculativeParams params = {};
  params.draft_probs = static_cast<const float*>(draft_probs.data());
  params.draft_token_ids = static_cast<const int32_t*>(draft_token_ids.data());
  params.target_probs = static_cast<const float*>(target_probs.data());
  params.token_ids = static_cast<int32_t*>(token_ids.data());
  params.num_accepted = static_cast<int32_t*>(accepted.data());
  params.num_emitted = static_cast<int32_t*>(emitted.data());
  params.seed = seed.per_row();
  params.offset = offset.per_row();
  params.num_rows = static_cast<uint32_t>(num_rows);
  params.num_drafts = static_cast<uint32_t>(num_drafts);
  params.vocab_size = static_cast<uint32_t>(vocab_size);
  params.seed_is_shared = seed.is_shared(num_rows);
  params.offset_is_shared = offset.is_shared(num_rows);
  const ffi::DeviceGuard guard(draft_probs);
  ffi::check_launch(chain_speculative(
      params, draft_probs.dl->device.device_id, ffi::device_info(draft_probs).num_sms,
      ffi::resolve_pdl(enable_pdl, draft_probs), ffi::current_stream(draft_probs)));
}
