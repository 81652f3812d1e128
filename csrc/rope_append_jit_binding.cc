//   rope_append(q, k, v, q_weight, k_weight, eps, cos_sin_cache, pos_ids, caches, pages, options,
//               enable_pdl)
//
// Turns q in place, and writes turned k, and v, to their slots. Tuples:
//
//   caches   of K and V
//   pages    (kv_indices, kv_indptr, batch_indices, positions, page_size)
//   options  (is_hnd, quant_scale_k, quant_scale_v)
//
// A weight that is None stands for no norm.
#include "rope_append_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

void check_rows(const Tensor& tensor, const Tensor& q) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_ndim(tensor, 3, 3);
  ffi::check_last_dim_contiguous(tensor);
  ffi::check_count(tensor, "tokens", tensor.dim(0));
  ffi::check_count(tensor, "heads", tensor.dim(1), 0, ffi::kMaxHeads / 4);
  if (tensor.dim(0) != q.dim(0)) {
    ffi::raise("ValueError", "`%s` must have the %lld tokens of `q`, got shape %s", tensor.name,
               static_cast<long long>(q.dim(0)), tensor.shape_text().c_str());
  }
}

// Adds heads that are turned, with a norm before if there is a weight.
void add_turned(RopeParams& params, RopeAlignment& alignment, const Tensor& in, const RopeRows& out,
                const Tensor& weight, float scale, bool appends) {
  const int64_t dim = params.rope_dim;
  if (in.dim(2) != dim) {
    ffi::raise("ValueError", "`%s` must have the %lld columns of `cos_sin_cache`, got shape %s",
               in.name, static_cast<long long>(dim), in.shape_text().c_str());
  }
  alignment.rows(in);
  alignment.require(dim % (2 * kVecSize) == 0);
  const uint32_t before = params.num_segments;
  add_segment(params, rope_rows(in), out, in.dim(1), dim, true, scale, appends);
  if (!weight) return;
  ffi::check_vector(weight, kDtype, dim);
  alignment.rows(weight);
  alignment.require(ffi::is_aligned(weight, 16));
  if (params.num_segments != before) params.segments[before].norm_weight = weight.data();
}

// Threads of a head exchange their sums within a warp.
void check_norm(const Tensor& weight, int64_t dim, const RopeAlignment& alignment) {
  if (!weight) return;
  const int64_t units = dim / (2 * kVecSize);
  if (units < 1 || units > 32 || (units & (units - 1)) != 0 || dim % (2 * kVecSize) != 0) {
    ffi::raise("ValueError",
               "`%s` must be None or have %lld times a power of two up to 32 elements, got %lld",
               weight.name, static_cast<long long>(2 * kVecSize), static_cast<long long>(dim));
  }
  if (!alignment.vectorizable()) {
    ffi::raise("ValueError",
               "`%s` must be None unless all rows, and itself, are aligned to 16 bytes",
               weight.name);
  }
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(rope_append, args) {
  using namespace flashinfer;
  const ffi::Tensor q = args.tensor("q"), k = args.tensor("k"), v = args.tensor("v");
  const ffi::Tensor q_weight = args.optional_tensor("q_weight");
  const ffi::Tensor k_weight = args.optional_tensor("k_weight");
  RopeCallParams params = {};
  params.norm_eps = args.float32("eps", ffi::Zero::allowed);
  const ffi::Tensor cos_sin_cache = args.tensor("cos_sin_cache");
  const ffi::Tensor pos_ids = args.tensor("pos_ids");
  ffi::Args cache_pair = args.group("paged_kv_cache", 2);
  const ffi::Tensor caches[2] = {cache_pair.tensor("paged_kv_cache[0]"),
                                 cache_pair.tensor("paged_kv_cache[1]")};
  const Pages pages(args.group("pages", 5));
  ffi::Args options = args.group("options", 3);
  const bool is_hnd = options.flag("kv_layout");
  const float scale_k = options.float32("quant_scale_k");
  const float scale_v = options.float32("quant_scale_v");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  RopeAlignment alignment;
  for (const ffi::Tensor& tensor : {q, k, v}) check_rows(tensor, q);
  const int64_t num_tokens = q.dim(0),
                rope_dim = check_cos_sin_cache(params, alignment, cos_sin_cache);
  ffi::check_no_broadcast(q);
  ffi::check_shape(v, {num_tokens, k.dim(1), v.dim(2)});
  check_positions(params, pos_ids, num_tokens);
  params.num_tokens = static_cast<uint32_t>(num_tokens);
  ffi::check_ndim(caches[0], 4, 4);
  const int64_t num_pages = check_pages(caches[0], ffi::cache_axes(is_hnd).slot, pages.page_size);
  const int64_t heads = k.dim(1);
  const int64_t inner[2] = {is_hnd ? heads : pages.page_size, is_hnd ? pages.page_size : heads};
  check_cache(caches[0], {num_pages, inner[0], inner[1], rope_dim});
  check_cache(caches[1], {num_pages, inner[0], inner[1], v.dim(2)});
  add_turned(params, alignment, q, rope_rows(q), q_weight, 1.f, false);
  add_turned(params, alignment, k, cache_rows(alignment, caches[0], is_hnd, 0), k_weight, scale_k,
             true);
  alignment.rows(v);
  alignment.require(v.dim(2) % kVecSize == 0);
  add_segment(params, rope_rows(v), cache_rows(alignment, caches[1], is_hnd, 0), heads, v.dim(2),
              false, scale_v, true);
  check_norm(q_weight, rope_dim, alignment);
  check_norm(k_weight, rope_dim, alignment);
  params.table = ffi::make_page_table(pages.batch_indices, pages.positions, pages.kv_indices,
                                      pages.kv_indptr, num_tokens, num_pages, pages.page_size);
  check_written({q, caches[0], caches[1]},
                {k, v, q_weight, k_weight, cos_sin_cache, pos_ids, pages.kv_indices,
                 pages.kv_indptr, pages.batch_indices, pages.positions});
  check_devices(q, {k, v, q_weight, k_weight, cos_sin_cache, pos_ids, caches[0], caches[1],
                    pages.kv_indices, pages.kv_indptr, pages.batch_indices, pages.positions});
  launch_checked(params, alignment, enable_pdl, q);
}
