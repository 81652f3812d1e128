//   mqa_logits(logits, q, weights, keys, scales, sequences, max_length, enable_pdl)
//   mqa_logits_check(logits, q, weights, keys, scales, sequences, max_length, enable_pdl)
//
// The second refuses what the first refuses, and launches nothing.
//
// If keys are paged, `keys` is uint8 [num_pages, page_size, 1, 132]. A page has rows of 128 e4m3
// columns first, then its float32 scales. `scales` is None, and `sequences` is (block_tables,
// seq_lens, schedule_meta, next_n). Otherwise `keys` is e4m3 [num_keys, 128], `scales` is
// [num_keys], and `sequences` is (ks, ke).
#include "ffi.h"
#include "mqa_logits.h"

namespace flashinfer {
namespace {

constexpr bool kPaged = FLASHINFER_CFG_PAGED;
constexpr int64_t kHeads = FLASHINFER_CFG_HEADS, kQueries = FLASHINFER_CFG_QUERIES;
constexpr int64_t kDim = 128, kKeyBytes = kDim + 4;
// Columns of the right operand that a CTA has room for, and those of one product.
constexpr int64_t kMaxColumns = 256, kColumns = kHeads * kQueries;

void check_rows(const ffi::Tensor& tensor, const char* what) {
  if (!ffi::is_aligned(tensor, 16) || tensor.stride(0) * tensor.itemsize() % 16 != 0) {
    ffi::raise("ValueError",
               "`%s` must have %s that begin at multiples of 16 bytes, got strides %s", tensor.name,
               what, ffi::list_text(tensor.dl->strides, tensor.ndim()).c_str());
  }
}

// [num_queries, heads, 128] and [num_queries, heads].
void fill_queries(MqaLogitsParams& params, const ffi::Tensor& q, const ffi::Tensor& weights) {
  ffi::check_dtype(q, ffi::dtype::float8_e4m3fn);
  ffi::check_ndim(q, 3, 3);
  ffi::check_shape(q, {q.dim(0), kHeads, kDim});
  if (q.stride(2) != 1 || q.stride(1) != kDim) {
    ffi::raise("ValueError", "`%s` must be contiguous in its last two dimensions, got strides %s",
               q.name, ffi::list_text(q.dl->strides, q.ndim()).c_str());
  }
  check_rows(q, "queries");
  ffi::check_dtype(weights, ffi::dtype::float32);
  ffi::check_shape(weights, {q.dim(0), kHeads});
  ffi::check_last_dim_contiguous(weights);
  check_rows(weights, "rows");
  params.q = q.data();
  params.q_stride = q.stride(0);
  params.weights = static_cast<const float*>(weights.data());
  params.weights_stride = weights.stride(0);
  params.num_queries = static_cast<int32_t>(q.dim(0));
}

void fill_logits(MqaLogitsParams& params, const ffi::Tensor& logits, int64_t max_length) {
  ffi::check_dtype(logits, ffi::dtype::FLASHINFER_CFG_DTYPE_OUT);
  ffi::check_ndim(logits, 2, 2);
  ffi::check_shape(logits, {params.num_queries, logits.dim(1)});
  ffi::check_last_dim_contiguous(logits);
  ffi::check_no_broadcast(logits);
  if (logits.dim(1) < max_length) {
    ffi::raise("ValueError", "`%s` must have at least %lld columns, got shape %s", logits.name,
               static_cast<long long>(max_length), logits.shape_text().c_str());
  }
  params.logits = logits.data();
  params.logits_stride = logits.stride(0);
  params.max_length = static_cast<int32_t>(max_length);
}

int fill_pages(MqaLogitsParams& params, const ffi::Tensor& keys, ffi::Args& sequences,
               ffi::Tensor (&indices)[3]) {
  const ffi::Tensor table = sequences.tensor("block_tables"),
                    lengths = sequences.tensor("seq_lens");
  const ffi::Tensor schedule = sequences.tensor("schedule_meta");
  const int64_t next_n = sequences.integer_in("next_n", 1, kMaxColumns / kColumns * kQueries);
  ffi::check_dtype(keys, ffi::dtype::uint8);
  ffi::check_ndim(keys, 4, 4);
  const int64_t page_size = keys.dim(1);
  ffi::check_shape(keys, {keys.dim(0), page_size, 1, kKeyBytes});
  if (keys.stride(3) != 1 || (page_size > 1 && keys.stride(1) != kKeyBytes)) {
    ffi::raise("ValueError", "`%s` must have contiguous pages, got strides %s", keys.name,
               ffi::list_text(keys.dl->strides, keys.ndim()).c_str());
  }
  check_rows(keys, "pages");
  if (page_size < 1 || keys.dim(0) > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have pages of at least one token, got shape %s", keys.name,
               keys.shape_text().c_str());
  }
  ffi::check_dtype(lengths, ffi::dtype::int32);
  ffi::check_ndim(lengths, 1, 1);
  const int64_t batch = lengths.dim(0);
  ffi::check_dtype(table, ffi::dtype::int32);
  ffi::check_ndim(table, 2, 2);
  ffi::check_shape(table, {batch, table.dim(1)});
  ffi::check_last_dim_contiguous(table);
  if (params.num_queries != batch * next_n) {
    ffi::raise("ValueError", "`%s` must have an element for each of %lld requests, got shape %s",
               lengths.name, static_cast<long long>(params.num_queries / next_n),
               lengths.shape_text().c_str());
  }
  ffi::check_dtype(schedule, ffi::dtype::int32);
  ffi::check_ndim(schedule, 2, 2);
  ffi::check_shape(schedule, {schedule.dim(0), 2});
  ffi::check_contiguous(schedule);
  if (schedule.dim(0) < 2 || schedule.dim(0) > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have shape [parts + 1, 2], got %s", schedule.name,
               schedule.shape_text().c_str());
  }
  // Positions that the table has no pages for are not scored.
  const int64_t columns = table.dim(1);
  if (columns < (params.max_length + page_size - 1) / page_size) {
    params.max_length = static_cast<int32_t>(columns * page_size);
  }
  params.keys = static_cast<const char*>(keys.data());
  params.key_stride = keys.stride(0);
  params.page_size = FastDivisor(static_cast<uint32_t>(page_size));
  params.num_pages = static_cast<int32_t>(keys.dim(0));
  params.block_table = static_cast<const int32_t*>(table.data());
  params.block_table_stride = table.stride(0);
  params.seq_lens = static_cast<const int32_t*>(lengths.data());
  params.seq_lens_stride = lengths.stride(0);
  params.schedule = static_cast<const int32_t*>(schedule.data());
  params.batch_size = static_cast<int32_t>(batch);
  params.next_n = static_cast<int32_t>(next_n);
  params.groups = static_cast<int32_t>((next_n + kQueries - 1) / kQueries);
  indices[0] = table;
  indices[1] = lengths;
  indices[2] = schedule;
  return static_cast<int>(schedule.dim(0) - 1);
}

void fill_ranges(MqaLogitsParams& params, const ffi::Tensor& keys, const ffi::Tensor& scales,
                 ffi::Args& sequences, ffi::Tensor (&indices)[3]) {
  ffi::check_dtype(keys, ffi::dtype::float8_e4m3fn);
  ffi::check_ndim(keys, 2, 2);
  ffi::check_shape(keys, {keys.dim(0), kDim});
  ffi::check_last_dim_contiguous(keys);
  check_rows(keys, "rows");
  ffi::check_dtype(scales, ffi::dtype::float32);
  ffi::check_shape(scales, {keys.dim(0)});
  ffi::check_last_dim_contiguous(scales);
  indices[0] = sequences.tensor("ks");
  indices[1] = sequences.tensor("ke");
  indices[2] = indices[1];
  for (const ffi::Tensor& tensor : indices) {
    ffi::check_dtype(tensor, ffi::dtype::int32);
    ffi::check_shape(tensor, {params.num_queries});
    ffi::check_last_dim_contiguous(tensor);
  }
  if (params.max_length > keys.dim(0)) {
    ffi::raise("ValueError", "`max_length` must be at most the %lld keys of `%s`, got %d",
               static_cast<long long>(keys.dim(0)), keys.name, params.max_length);
  }
  params.keys = static_cast<const char*>(keys.data());
  params.key_stride = keys.stride(0);
  params.scales = static_cast<const float*>(scales.data());
  params.starts = static_cast<const int32_t*>(indices[0].data());
  params.ends = static_cast<const int32_t*>(indices[1].data());
  params.groups = kMaxColumns / kColumns;
}

// CTAs: several for a block of queries if there are few blocks.
int cut_blocks(MqaLogitsParams& params, int num_sms) {
  const int queries = params.groups * static_cast<int>(kQueries);
  const int blocks = (params.num_queries + queries - 1) / queries;
  constexpr int kWaves = 4, kMaxSplits = 32;
  const int wanted = (kWaves * num_sms + blocks - 1) / blocks;
  params.splits = wanted < 1 ? 1 : wanted > kMaxSplits ? kMaxSplits : wanted;
  return blocks * params.splits;
}

void run(ffi::Args& args, bool launches) {
  const ffi::Tensor logits = args.tensor("logits"), q = args.tensor("q");
  const ffi::Tensor weights = args.tensor("weights"), keys = args.tensor("keys");
  const ffi::Tensor scales = args.optional_tensor("scales");
  ffi::Args sequences = args.group("sequences", kPaged ? 4 : 2);
  const int64_t max_length = args.integer_in("max_length", 0, INT32_MAX - kMqaUnit);
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  MqaLogitsParams params = {};
  fill_queries(params, q, weights);
  fill_logits(params, logits, max_length);
  ffi::Tensor indices[3] = {q, q, q};
  int num_ctas = 0;
  if constexpr (kPaged) {
    num_ctas = fill_pages(params, keys, sequences, indices);
  } else {
    fill_ranges(params, keys, scales, sequences, indices);
  }
  for (const ffi::Tensor& tensor : {q, weights, keys, scales, indices[0], indices[1], indices[2]}) {
    if (tensor) ffi::check_disjoint(logits, tensor);
  }
  ffi::check_cuda(q);
  for (const ffi::Tensor& tensor :
       {logits, weights, keys, scales, indices[0], indices[1], indices[2]}) {
    if (tensor) ffi::check_same_device(tensor, q);
  }
  if (!launches || params.num_queries == 0 || params.max_length == 0) return;
  const ffi::DeviceGuard guard(q);
  if (!kPaged) num_ctas = cut_blocks(params, ffi::device_info(q).num_sms);
  ffi::check_launch(
      mqa_logits(params, num_ctas, ffi::resolve_pdl(enable_pdl, q), ffi::current_stream(q)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(mqa_logits, args) { flashinfer::run(args, true); }

FLASHINFER_FFI_EXPORT(mqa_logits_check, args) { flashinfer::run(args, false); }
