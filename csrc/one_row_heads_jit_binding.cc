//   one_row_heads(q_out, a, b, bias, splits, enable_pdl, weight_ready, norm, heads, caches, pages,
//                 options)
//
// The product of one_row() with a norm; its columns are heads of q, k and v, one after the other.
// They are normed and turned, q is stored, k and v go to their slots. Tuples:
//
//   norm     (residual_out, normed_out, residual, norm_weight, eps)
//   heads    (q_weight, k_weight, eps, cos_sin_cache, pos_ids); no weight, no norm
//   caches   of K and V
//   pages    (kv_indices, kv_indptr, batch_indices, positions, page_size)
//   options  (is_hnd, quant_scale_k, quant_scale_v)
#include "one_row_heads.h"

#include "one_row_binding.h"
#include "rope_append_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr int64_t kDim = FLASHINFER_CFG_HEAD_DIM;

void add_heads(RopeParams& params, const RopeRows& out, int64_t count, const Tensor& weight,
               bool turns, float scale, bool appends) {
  add_segment(params, RopeRows(), out, count, kDim, turns, scale, appends);
  if (!weight) return;
  ffi::check_vector(weight, kDtype, kDim);
  params.segments[params.num_segments - 1].norm_weight = weight.data();
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(one_row_heads, args) {
  using namespace flashinfer;
  const Tensor q = args.tensor("q_out"), a = args.tensor("input"), b = args.tensor("b");
  const Tensor bias = args.optional_tensor("bias");
  const int64_t splits = args.integer_in("splits", 1, 8);
  const bool enable_pdl = args.flag("enable_pdl");
  const bool weight_ready = args.flag("weight_ready");
  const ffi::Args norm = args.group("norm", 5);
  ffi::Args turned = args.group("heads", 5);
  const Tensor q_weight = turned.optional_tensor("q_weight");
  const Tensor k_weight = turned.optional_tensor("k_weight");
  OneRowHeadsParams params = {};
  RopeParams& rope = params.rope;
  rope.norm_eps = turned.float32("head_eps", ffi::Zero::allowed);
  const Tensor cos_sin_cache = turned.tensor("cos_sin_cache"), pos_ids = turned.tensor("pos_ids");
  ffi::Args pair = args.group("paged_kv_cache", 2);
  const Tensor caches[2] = {pair.tensor("paged_kv_cache[0]"), pair.tensor("paged_kv_cache[1]")};
  const Pages pages(args.group("pages", 5));
  ffi::Args options = args.group("options", 3);
  const bool is_hnd = options.flag("kv_layout");
  const float scale_k = options.float32("quant_scale_k");
  const float scale_v = options.float32("quant_scale_v");
  args.all_taken();

  static_cast<OneRowParams&>(params) = take_product(a, b, bias, weight_ready, kDtype);
  RopeAlignment alignment;
  ffi::check_ndim(caches[0], 4, 4);
  const ffi::CacheAxes axes = ffi::cache_axes(is_hnd);
  const int64_t num_pages = check_pages(caches[0], axes.slot, pages.page_size);
  const int64_t heads = caches[0].dim(axes.head), queries = b.dim(1) / kDim - 2 * heads;
  const int64_t inner[2] = {is_hnd ? heads : pages.page_size, is_hnd ? pages.page_size : heads};
  for (const Tensor& cache : caches) check_cache(cache, {num_pages, inner[0], inner[1], kDim});
  if (heads < 1 || queries < 1 || b.dim(1) % kDim != 0) {
    ffi::raise("ValueError",
               "`b` must have columns for queries and %lld heads of keys and of values, %lld each, "
               "got shape %s",
               static_cast<long long>(heads), static_cast<long long>(kDim), b.shape_text().c_str());
  }
  ffi::check_dtype(q, kDtype);
  ffi::check_shape(q, {1, queries, kDim});
  ffi::check_contiguous(q);
  if (check_cos_sin_cache(rope, alignment, cos_sin_cache) != kDim) {
    ffi::raise("ValueError", "`cos_sin_cache` must have %lld columns, got shape %s",
               static_cast<long long>(kDim), cos_sin_cache.shape_text().c_str());
  }
  check_positions(rope, pos_ids, 1);
  rope.num_tokens = 1;
  add_heads(rope, rope_rows(q), queries, q_weight, true, 1.f, false);
  add_heads(rope, cache_rows(alignment, caches[0], is_hnd, 0), heads, k_weight, true, scale_k,
            true);
  add_heads(rope, cache_rows(alignment, caches[1], is_hnd, 0), heads, Tensor(), false, scale_v,
            true);
  for (const Tensor& tensor : {q, q_weight, k_weight}) {
    if (tensor) alignment.rows(tensor);
  }
  if (!alignment.vectorizable()) {
    ffi::raise("ValueError",
               "rows of `q_out`, `q_weight`, `k_weight`, `cos_sin_cache` and "
               "`paged_kv_cache` must be aligned to 16 bytes");
  }
  rope.table = ffi::make_page_table(pages.batch_indices, pages.positions, pages.kv_indices,
                                    pages.kv_indptr, 1, num_pages, pages.page_size);
  check_written({q, caches[0], caches[1]},
                {a, b, bias, q_weight, k_weight, cos_sin_cache, pos_ids, pages.kv_indices,
                 pages.kv_indptr, pages.batch_indices, pages.positions});
  check_devices(a, {q, b, bias, q_weight, k_weight, cos_sin_cache, pos_ids, caches[0], caches[1],
                    pages.kv_indices, pages.kv_indptr, pages.batch_indices, pages.positions});
  take_norm(norm, params, a, b, bias, {q, caches[0], caches[1]});
  const ffi::DeviceGuard guard(a);
  ffi::check_launch(
      one_row_heads(params, static_cast<uint32_t>(splits), enable_pdl, ffi::current_stream(a)));
}
