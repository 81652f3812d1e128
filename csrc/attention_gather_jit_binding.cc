//   attention_gather(k_rows, v_rows, k_cache, v_cache, kv_indices, kv_indptr, token_indptr,
//                    page_size, is_hnd, enable_pdl)
//
// Row token_indptr[b] + i of k_rows [tokens, heads, head_dim], contiguous, becomes token i of
// request b. Where v_cache is None, k_cache holds both: [pages, 2, ...]. Pages of one token may
// lack the dimension of slots. A page number outside the cache stands for zeros; the values of the
// other index tensors are the caller's to check.
#include "attention_gather.h"

#include "ffi.h"
#include "index_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr int64_t kUnit = 16;

// `part`: 1 for the values of a cache of both.
GatherOperand operand_of(const Tensor& rows, const Tensor& cache, int slot, int head, int part) {
  const int64_t size = cache.itemsize();
  GatherOperand operand = {};
  operand.cache = static_cast<const char*>(cache.data()) + (part ? cache.stride(1) * size : 0);
  operand.rows = static_cast<char*>(rows.data());
  operand.page_stride = cache.stride(0) * size;
  operand.slot_stride = slot < 0 ? 0 : cache.stride(slot) * size;
  operand.head_stride = cache.stride(head) * size;
  const int64_t units = rows.dim(2) * size / kUnit;
  operand.units_per_row = FastDivisor(static_cast<uint32_t>(units));
  operand.units_per_token = static_cast<uint32_t>(rows.dim(1) * units);
  return operand;
}

const int32_t* index_data(const Tensor& tensor, const Tensor& like) {
  ffi::check_indices(tensor, -1);
  ffi::check_same_device(tensor, like);
  return static_cast<const int32_t*>(tensor.data());
}

void run(ffi::Args& args) {
  const Tensor k_rows = args.tensor("k_rows"), v_rows = args.tensor("v_rows");
  Tensor k = args.tensor("paged_kv_cache");
  const Tensor v = args.optional_tensor("paged_kv_cache[1]");
  const Tensor pages = args.tensor("kv_indices"), page_indptr = args.tensor("kv_indptr");
  const Tensor token_indptr = args.tensor("token_indptr");
  const int64_t page_size = args.integer("page_size");
  const bool is_hnd = args.flag("kv_layout");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  if (v) k.name = "paged_kv_cache[0]";

  for (const Tensor& rows : {k_rows, v_rows}) {
    ffi::check_ndim(rows, 3, 3);
    ffi::check_dtype(rows, k_rows.dtype());
    ffi::check_contiguous(rows);
  }
  const int64_t heads = k_rows.dim(1);
  const int parts = v ? 0 : 1;
  const bool by_token = page_size == 1 && k.ndim() == 3 + parts;
  const ffi::CacheAxes axes = by_token ? ffi::CacheAxes{0, 1} : ffi::cache_axes(is_hnd);
  const int slot = by_token ? -1 : axes.slot + parts, head = axes.head + parts;
  const auto check_cache = [&](const Tensor& cache, const Tensor& rows) {
    int64_t shape[5] = {k.dim(0), 2};
    int ndim = 1 + parts;
    if (!by_token && !is_hnd) shape[ndim++] = page_size;
    shape[ndim++] = heads;
    if (!by_token && is_hnd) shape[ndim++] = page_size;
    shape[ndim++] = rows.dim(2);
    ffi::check_dtype(cache, rows.dtype());
    ffi::check_shape(cache, shape, ndim);
    ffi::check_vector_rows(cache);
    ffi::check_vector_rows(rows);
    ffi::check_disjoint(rows, cache);
  };
  if (!by_token) ffi::check_ndim(k, 4 + parts, 4 + parts);
  check_cache(k, k_rows);
  check_cache(v ? v : k, v_rows);
  ffi::check_cuda(k);
  for (const Tensor& tensor : {k_rows, v_rows}) ffi::check_same_device(tensor, k);
  if (v) ffi::check_same_device(v, k);

  GatherParams params = {};
  params.operands[0] = operand_of(k_rows, k, slot, head, 0);
  params.operands[1] = operand_of(v_rows, v ? v : k, slot, head, parts);
  params.pages = index_data(pages, k);
  params.page_indptr = index_data(page_indptr, k);
  params.token_indptr = index_data(token_indptr, k);
  params.page_size = FastDivisor(static_cast<uint32_t>(page_size));
  params.batch_size = static_cast<int32_t>(token_indptr.dim(0) - 1);
  params.num_tokens = static_cast<int32_t>(k_rows.dim(0));
  params.num_pages = static_cast<int32_t>(k.dim(0));
  if (params.num_tokens == 0) return;
  const ffi::DeviceGuard guard(k);
  ffi::check_launch(gather(params, ffi::resolve_pdl(enable_pdl, k), ffi::current_stream(k)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(attention_gather, args) { flashinfer::run(args); }
