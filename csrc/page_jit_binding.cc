//   append_paged_kv_cache(append_key, append_value, batch_indices, positions, k_cache, v_cache,
//                         kv_indices, kv_indptr, kv_last_page_len, is_hnd)
//   append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache,
//                             kv_indices, kv_indptr, kv_last_page_len)
//   get_batch_indices_positions(batch_indices, positions, append_indptr, seq_lens, nnz)
//   get_seq_lens(seq_lens, kv_indptr, kv_last_page_len, page_size)
//
// Where v_cache is None, k_cache holds both: [pages, 2, ...].
#include "page.h"

#include "ffi.h"
#include "index_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

struct PageArguments {
  Tensor batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len;
};

// Adds the rows of one tensor to append, and of its cache. If `parts` is not 0, the cache has a
// dimension for K and V after the pages.
void add_operand(AppendOperand& operand, ffi::UnitSize& unit, const Tensor& source,
                 const Tensor& cache, int slot_axis, int head_axis, int part) {
  const int64_t itemsize = source.itemsize();
  operand.source = source.data();
  operand.source_stride_token = source.stride(0) * itemsize;
  operand.source_stride_head = source.ndim() == 3 ? source.stride(1) * itemsize : 0;
  operand.cache = static_cast<char*>(cache.data()) + (part ? cache.stride(1) * itemsize : 0);
  operand.cache_stride_page = cache.stride(0) * itemsize;
  operand.cache_stride_slot = cache.stride(slot_axis) * itemsize;
  operand.cache_stride_head = head_axis >= 0 ? cache.stride(head_axis) * itemsize : 0;
  operand.row_bytes = static_cast<uint32_t>(source.dim(-1) * itemsize);
  unit.divides_rows(source);
  unit.divides_rows(cache);
}

void check_source(const Tensor& source, const Tensor& cache, int64_t num_tokens) {
  ffi::check_dtype(source, cache.dtype());
  ffi::check_last_dim_contiguous(source);
  ffi::check_last_dim_contiguous(cache);
  ffi::check_no_broadcast(cache);
  if (source.dim(0) != num_tokens) {
    ffi::raise("ValueError", "`%s` must have %lld tokens, got shape %s", source.name,
               static_cast<long long>(num_tokens), source.shape_text().c_str());
  }
  ffi::check_disjoint(cache, source);
}

void check_cache_dtype(const Tensor& cache) {
  ffi::check_dtype(cache, {ffi::dtype::float16, ffi::dtype::bfloat16, ffi::dtype::float32,
                           ffi::dtype::float8_e4m3fn, ffi::dtype::float8_e5m2, ffi::dtype::int8,
                           ffi::dtype::uint8});
}

void launch(AppendParams& params, const ffi::UnitSize& unit, const PageArguments& page,
            std::initializer_list<Tensor> tensors, const Tensor& cache, int64_t page_size,
            int64_t num_tokens, int64_t num_heads) {
  ffi::check_count(cache, "pages", cache.dim(0));
  ffi::check_count(cache, "a page size", page_size, 1);
  params.table = ffi::make_page_table(page.batch_indices, page.positions, page.kv_indices,
                                      page.kv_indptr, num_tokens, cache.dim(0), page_size);
  ffi::check_indices(page.kv_last_page_len, params.table.batch_size);
  ffi::check_cuda(cache);
  for (const Tensor& tensor : tensors) {
    if (tensor) ffi::check_same_device(tensor, cache);
  }
  for (const Tensor& tensor : {page.batch_indices, page.positions, page.kv_indices, page.kv_indptr,
                               page.kv_last_page_len}) {
    ffi::check_same_device(tensor, cache);
  }
  params.num_tokens = static_cast<uint32_t>(num_tokens);
  params.heads = FastDivisor(static_cast<uint32_t>(num_heads < 1 ? 1 : num_heads));
  const bool is_empty = params.operands[0].row_bytes + params.operands[1].row_bytes == 0;
  if (num_tokens == 0 || num_heads == 0 || is_empty || cache.dim(0) == 0) return;

  const ffi::DeviceGuard guard(cache);
  ffi::check_launch(append(params, unit.bytes(), ffi::resolve_pdl(ffi::Args::Flag::kNone, cache),
                           ffi::current_stream(cache)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(append_paged_kv_cache, args) {
  using namespace flashinfer;
  const ffi::Tensor key = args.tensor("append_key");
  const ffi::Tensor value = args.tensor("append_value");
  PageArguments page;
  page.batch_indices = args.tensor("batch_indices");
  page.positions = args.tensor("positions");
  ffi::Tensor k_cache = args.tensor("paged_kv_cache");
  const ffi::Tensor v_cache = args.optional_tensor("paged_kv_cache[1]");
  page.kv_indices = args.tensor("kv_indices");
  page.kv_indptr = args.tensor("kv_indptr");
  page.kv_last_page_len = args.tensor("kv_last_page_len");
  const bool is_hnd = args.flag("kv_layout");
  args.all_taken();
  if (v_cache) k_cache.name = "paged_kv_cache[0]";

  const int parts = v_cache ? 0 : 1;  // dimensions between the pages and the slots
  const ffi::CacheAxes axes = ffi::cache_axes(is_hnd);
  check_cache_dtype(k_cache);
  ffi::check_ndim(k_cache, 4 + parts, 4 + parts);
  ffi::check_ndim(key, 3, 3);
  const int64_t num_tokens = key.dim(0), num_heads = key.dim(1), head_dim = key.dim(2);
  ffi::check_count(key, "tokens", num_tokens);
  ffi::check_count(key, "heads", num_heads, 0, ffi::kMaxHeads);
  ffi::check_count(key, "a head size", head_dim);
  ffi::check_same_shape(value, key);
  const int64_t page_size = k_cache.dim(axes.slot + parts);
  const int64_t inner[2] = {is_hnd ? num_heads : page_size, is_hnd ? page_size : num_heads};
  if (v_cache) {
    ffi::check_shape(k_cache, {k_cache.dim(0), inner[0], inner[1], head_dim});
    ffi::check_dtype(v_cache, k_cache.dtype());
    ffi::check_same_shape(v_cache, k_cache);
    ffi::check_disjoint(v_cache, k_cache);
    ffi::check_disjoint(v_cache, key);
    ffi::check_disjoint(k_cache, value);
  } else {
    ffi::check_shape(k_cache, {k_cache.dim(0), 2, inner[0], inner[1], head_dim});
  }
  check_source(key, k_cache, num_tokens);
  check_source(value, v_cache ? v_cache : k_cache, num_tokens);

  AppendParams params = {};
  ffi::UnitSize unit;
  const int slot = axes.slot + parts, head = axes.head + parts;
  add_operand(params.operands[0], unit, key, k_cache, slot, head, 0);
  add_operand(params.operands[1], unit, value, v_cache ? v_cache : k_cache, slot, head, parts);
  launch(params, unit, page, {key, value, v_cache}, k_cache, page_size, num_tokens, num_heads);
}

FLASHINFER_FFI_EXPORT(append_paged_mla_kv_cache, args) {
  using namespace flashinfer;
  const ffi::Tensor ckv = args.tensor("append_ckv");
  const ffi::Tensor kpe = args.tensor("append_kpe");
  PageArguments page;
  page.batch_indices = args.tensor("batch_indices");
  page.positions = args.tensor("positions");
  const ffi::Tensor ckv_cache = args.tensor("ckv_cache");
  const ffi::Tensor kpe_cache = args.tensor("kpe_cache");
  page.kv_indices = args.tensor("kv_indices");
  page.kv_indptr = args.tensor("kv_indptr");
  page.kv_last_page_len = args.tensor("kv_last_page_len");
  args.all_taken();

  check_cache_dtype(ckv_cache);
  check_cache_dtype(kpe_cache);
  ffi::check_ndim(ckv_cache, 3, 3);
  ffi::check_ndim(ckv, 2, 2);
  ffi::check_ndim(kpe, 2, 2);
  const int64_t num_tokens = ckv.dim(0);
  ffi::check_count(ckv, "tokens", num_tokens);
  ffi::check_count(ckv, "columns", ckv.dim(1));
  ffi::check_count(kpe, "columns", kpe.dim(1));
  const int64_t num_pages = ckv_cache.dim(0), page_size = ckv_cache.dim(1);
  if (ckv.dim(1) != ckv_cache.dim(2)) {
    ffi::raise("ValueError", "`append_ckv` must have the columns of `ckv_cache` %s, got shape %s",
               ckv_cache.shape_text().c_str(), ckv.shape_text().c_str());
  }
  ffi::check_shape(kpe_cache, {num_pages, page_size, kpe.dim(1)});
  check_source(ckv, ckv_cache, num_tokens);
  check_source(kpe, kpe_cache, num_tokens);
  ffi::check_disjoint(ckv_cache, kpe_cache);
  ffi::check_disjoint(ckv_cache, kpe);
  ffi::check_disjoint(kpe_cache, ckv);

  AppendParams params = {};
  ffi::UnitSize unit;
  add_operand(params.operands[0], unit, ckv, ckv_cache, 1, -1, 0);
  add_operand(params.operands[1], unit, kpe, kpe_cache, 1, -1, 0);
  launch(params, unit, page, {ckv, kpe, kpe_cache}, ckv_cache, page_size, num_tokens, 1);
}

FLASHINFER_FFI_EXPORT(get_batch_indices_positions, args) {
  using namespace flashinfer;
  const ffi::Tensor batch_indices = args.tensor("batch_indices");
  const ffi::Tensor positions = args.tensor("positions");
  const ffi::Tensor append_indptr = args.tensor("append_indptr");
  const ffi::Tensor seq_lens = args.tensor("seq_lens");
  const int64_t nnz = args.integer_in("nnz", 0, INT32_MAX);
  args.all_taken();

  const int64_t batch_size = ffi::check_indptr(append_indptr);
  ffi::check_indices(seq_lens, batch_size);
  ffi::check_indices(batch_indices, nnz);
  ffi::check_indices(positions, nnz);
  ffi::check_disjoint(batch_indices, positions);
  for (const ffi::Tensor& written : {batch_indices, positions}) {
    ffi::check_no_broadcast(written);
    ffi::check_disjoint(written, append_indptr);
    ffi::check_disjoint(written, seq_lens);
  }
  ffi::check_cuda(append_indptr);
  for (const ffi::Tensor& tensor : {batch_indices, positions, seq_lens}) {
    ffi::check_same_device(tensor, append_indptr);
  }
  if (nnz == 0) return;
  BatchIndicesParams params = {};
  params.append_indptr = static_cast<const int32_t*>(append_indptr.data());
  params.seq_lens = static_cast<const int32_t*>(seq_lens.data());
  params.batch_indices = static_cast<int32_t*>(batch_indices.data());
  params.positions = static_cast<int32_t*>(positions.data());
  params.batch_size = static_cast<uint32_t>(batch_size);
  params.num_tokens = static_cast<uint32_t>(nnz);
  const ffi::DeviceGuard guard(append_indptr);
  ffi::check_launch(
      flashinfer::batch_indices(params, ffi::resolve_pdl(ffi::Args::Flag::kNone, append_indptr),
                                ffi::current_stream(append_indptr)));
}

FLASHINFER_FFI_EXPORT(get_seq_lens, args) {
  using namespace flashinfer;
  const ffi::Tensor seq_lens = args.tensor("seq_lens");
  const ffi::Tensor kv_indptr = args.tensor("kv_indptr");
  const ffi::Tensor kv_last_page_len = args.tensor("kv_last_page_len");
  const int64_t page_size = args.integer_in("page_size", 1, INT32_MAX);
  args.all_taken();

  const int64_t batch_size = ffi::check_indptr(kv_indptr);
  ffi::check_indices(kv_last_page_len, batch_size);
  ffi::check_indices(seq_lens, batch_size);
  ffi::check_cuda(kv_indptr);
  ffi::check_same_device(kv_last_page_len, kv_indptr);
  ffi::check_same_device(seq_lens, kv_indptr);
  if (batch_size == 0) return;
  SeqLensParams params = {};
  params.kv_indptr = static_cast<const int32_t*>(kv_indptr.data());
  params.kv_last_page_len = static_cast<const int32_t*>(kv_last_page_len.data());
  params.seq_lens = static_cast<int32_t*>(seq_lens.data());
  params.batch_size = static_cast<uint32_t>(batch_size);
  params.page_size = static_cast<uint32_t>(page_size);
  const ffi::DeviceGuard guard(kv_indptr);
  ffi::check_launch(flashinfer::seq_lens(
      params, ffi::resolve_pdl(ffi::Args::Flag::kNone, kv_indptr), ffi::current_stream(kv_indptr)));
}
