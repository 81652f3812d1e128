//   rope_quantize(outs, inputs, cos_sin_cache, pos_ids, quant_scale_q, quant_scale_kv, enable_pdl)
//   rope_quantize_append(outs, caches, inputs, v, cos_sin_cache, pos_ids, pages, is_hnd,
//                        quant_scale_q, quant_scale_kv, enable_pdl)
//
// A configuration exports the second if it appends, else the first. Tuples:
//
//   inputs  (q_rope, k_rope, q_nope, k_nope)
//   outs    (q_rope_out, k_rope_out, q_nope_out, k_nope_out), or (q_rope_out, q_nope_out)
//   caches  of K and V; where v is None (latent attention), of k_nope and of k_rope
//   pages   (kv_indices, kv_indptr, batch_indices, positions, page_size)
//
// A nope tensor that is None stands for one without columns.
#include "rope_append_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

// The inputs of a call and what they have in common.
struct Inputs {
  Tensor q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids;
  float scale_q = 1.f, scale_kv = 1.f;
  int64_t num_tokens = 0, rope_dim = 0;

  void take(ffi::Args rows) {
    q_rope = rows.tensor("q_rope");
    k_rope = rows.tensor("k_rope");
    q_nope = rows.optional_tensor("q_nope");
    k_nope = rows.optional_tensor("k_nope");
  }
};

void check_rows(const Tensor& tensor, int64_t num_tokens) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_last_dim_contiguous(tensor);
  if (tensor.dim(0) != num_tokens) {
    ffi::raise("ValueError", "`%s` must have the %lld tokens of `q_rope`, got shape %s",
               tensor.name, static_cast<long long>(num_tokens), tensor.shape_text().c_str());
  }
  ffi::check_count(tensor, "columns", tensor.dim(-1));
}

// Checks that `nope` fits `rope` except for the number of columns; returns that number.
int64_t check_nope(const Tensor& nope, const Tensor& rope, int64_t num_tokens) {
  if (!nope) return 0;
  bool fits = nope.ndim() == rope.ndim();
  for (int i = 0; fits && i < rope.ndim() - 1; ++i) fits = nope.dim(i) == rope.dim(i);
  if (!fits) {
    ffi::raise("ValueError",
               "`%s` must have the shape of `%s` %s but for the last dimension, got %s", nope.name,
               rope.name, rope.shape_text().c_str(), nope.shape_text().c_str());
  }
  check_rows(nope, num_tokens);
  return nope.dim(-1);
}

void check_inputs(Inputs& in, RopeParams& params, RopeAlignment& alignment) {
  ffi::check_ndim(in.q_rope, 3, 3);
  ffi::check_ndim(in.k_rope, 2, 3);
  in.num_tokens = in.q_rope.dim(0);
  ffi::check_count(in.q_rope, "tokens", in.num_tokens);
  ffi::check_count(in.q_rope, "heads", in.q_rope.dim(1), 0, ffi::kMaxHeads / 4);
  check_rows(in.q_rope, in.num_tokens);
  check_rows(in.k_rope, in.num_tokens);
  if (in.k_rope.ndim() == 3) {
    ffi::check_count(in.k_rope, "heads", in.k_rope.dim(1), 0, ffi::kMaxHeads / 4);
  }
  in.rope_dim = check_cos_sin_cache(params, alignment, in.cos_sin_cache);
  for (const Tensor& rope : {in.q_rope, in.k_rope}) {
    if (rope.dim(-1) != in.rope_dim) {
      ffi::raise("ValueError", "`%s` must have the %lld columns of `cos_sin_cache`, got shape %s",
                 rope.name, static_cast<long long>(in.rope_dim), rope.shape_text().c_str());
    }
  }
  check_positions(params, in.pos_ids, in.num_tokens);
  params.num_tokens = static_cast<uint32_t>(in.num_tokens);
  alignment.require(in.rope_dim % (2 * kVecSize) == 0);
}

// Adds the heads of `in` as a segment whose results go to `out`; `in` may be absent.
void add_rows(RopeParams& params, RopeAlignment& alignment, const Tensor& in, const RopeRows& out,
              bool rotates, float scale, bool appends = false) {
  if (!in || in.numel() == 0) return;
  alignment.rows(in);
  alignment.require(in.dim(-1) % kVecSize == 0);
  add_segment(params, rope_rows(in), out, in.ndim() == 3 ? in.dim(1) : 1, in.dim(-1), rotates,
              scale, appends);
}

// An output of the shape of `in`; both may be absent.
RopeRows output_rows(RopeAlignment& alignment, const Tensor& out, const Tensor& in) {
  if (!in) {
    if (out && out.numel() != 0) {
      ffi::raise("ValueError", "`%s` must be None or empty where `%s` is None, got shape %s",
                 out.name, in.name, out.shape_text().c_str());
    }
    return {};
  }
  if (!out)
    ffi::raise("TypeError", "`%s` must be a torch.Tensor where `%s` is one", out.name, in.name);
  ffi::check_dtype(out, kOutDtype);
  ffi::check_same_shape(out, in);
  ffi::check_last_dim_contiguous(out);
  ffi::check_no_broadcast(out);
  if (out.numel() == 0) return {};
  alignment.rows(out);
  return rope_rows(out);
}

}  // namespace
}  // namespace flashinfer

#if !FLASHINFER_CFG_APPEND

FLASHINFER_FFI_EXPORT(rope_quantize, args) {
  using namespace flashinfer;
  ffi::Args outs = args.group("outs", 4);
  const ffi::Tensor q_rope_out = outs.tensor("q_rope_out"), k_rope_out = outs.tensor("k_rope_out");
  const ffi::Tensor q_nope_out = outs.optional_tensor("q_nope_out");
  const ffi::Tensor k_nope_out = outs.optional_tensor("k_nope_out");
  Inputs in;
  in.take(args.group("inputs", 4));
  in.cos_sin_cache = args.tensor("cos_sin_cache");
  in.pos_ids = args.tensor("pos_ids");
  in.scale_q = args.float32("quant_scale_q");
  in.scale_kv = args.float32("quant_scale_kv");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  RopeCallParams params = {};
  RopeAlignment alignment;
  check_inputs(in, params, alignment);
  check_nope(in.q_nope, in.q_rope, in.num_tokens);
  check_nope(in.k_nope, in.k_rope, in.num_tokens);
  const auto out_rows = [&](const ffi::Tensor& out, const ffi::Tensor& of) {
    return output_rows(alignment, out, of);
  };
  add_rows(params, alignment, in.q_rope, out_rows(q_rope_out, in.q_rope), true, in.scale_q);
  add_rows(params, alignment, in.q_nope, out_rows(q_nope_out, in.q_nope), false, in.scale_q);
  add_rows(params, alignment, in.k_rope, out_rows(k_rope_out, in.k_rope), true, in.scale_kv);
  add_rows(params, alignment, in.k_nope, out_rows(k_nope_out, in.k_nope), false, in.scale_kv);
  check_written({q_rope_out, k_rope_out, q_nope_out, k_nope_out},
                {in.q_rope, in.k_rope, in.q_nope, in.k_nope, in.cos_sin_cache, in.pos_ids});
  check_devices(in.q_rope, {in.k_rope, in.q_nope, in.k_nope, in.cos_sin_cache, in.pos_ids,
                            q_rope_out, k_rope_out, q_nope_out, k_nope_out});
  launch_checked(params, alignment, enable_pdl, in.q_rope);
}

#else

namespace flashinfer {
namespace {

// Appends K and V of each head.
void append_heads(RopeParams& params, RopeAlignment& alignment, const Inputs& in, const Tensor& v,
                  const Tensor (&caches)[2], int64_t page_size, bool is_hnd) {
  ffi::check_ndim(v, 3, 3);
  check_rows(v, in.num_tokens);
  ffi::check_ndim(in.k_rope, 3, 3);
  const int64_t nope_dim = in.k_nope ? in.k_nope.dim(-1) : 0;
  const int64_t num_pages = caches[0].dim(0), num_heads = in.k_rope.dim(1);
  ffi::check_shape(v, {in.num_tokens, num_heads, v.dim(2)});
  const int64_t inner[2] = {is_hnd ? num_heads : page_size, is_hnd ? page_size : num_heads};
  check_cache(caches[0], {num_pages, inner[0], inner[1], in.rope_dim + nope_dim});
  check_cache(caches[1], {num_pages, inner[0], inner[1], v.dim(2)});
  const RopeRows k_rope_out = cache_rows(alignment, caches[0], is_hnd, 0);
  const RopeRows k_nope_out = cache_rows(alignment, caches[0], is_hnd, in.rope_dim);
  const RopeRows v_out = cache_rows(alignment, caches[1], is_hnd, 0);
  add_rows(params, alignment, v, v_out, false, in.scale_kv, true);
  add_rows(params, alignment, in.k_rope, k_rope_out, true, in.scale_kv, true);
  add_rows(params, alignment, in.k_nope, k_nope_out, false, in.scale_kv, true);
}

// Appends compressed K and V, and the rotary part of K, of one head.
void append_latent(RopeParams& params, RopeAlignment& alignment, const Inputs& in,
                   const Tensor (&caches)[2], int64_t page_size) {
  if (in.k_rope.ndim() == 3 && in.k_rope.dim(1) != 1) {
    ffi::raise("ValueError", "`k_rope` must have one head where `v` is None, got shape %s",
               in.k_rope.shape_text().c_str());
  }
  const int64_t num_pages = caches[0].dim(0);
  check_cache(caches[0], {num_pages, page_size, in.k_nope ? in.k_nope.dim(-1) : 0});
  check_cache(caches[1], {num_pages, page_size, in.rope_dim});
  const RopeRows k_nope_out = cache_rows(alignment, caches[0], false, 0);
  const RopeRows k_rope_out = cache_rows(alignment, caches[1], false, 0);
  add_rows(params, alignment, in.k_rope, k_rope_out, true, in.scale_kv, true);
  add_rows(params, alignment, in.k_nope, k_nope_out, false, in.scale_kv, true);
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(rope_quantize_append, args) {
  using namespace flashinfer;
  ffi::Args outs = args.group("outs", 2);
  const ffi::Tensor q_rope_out = outs.tensor("q_rope_out");
  const ffi::Tensor q_nope_out = outs.optional_tensor("q_nope_out");
  ffi::Args cache_pair = args.group("paged_kv_cache", 2);
  const ffi::Tensor caches[2] = {cache_pair.tensor("paged_kv_cache[0]"),
                                 cache_pair.tensor("paged_kv_cache[1]")};
  Inputs in;
  in.take(args.group("inputs", 4));
  const ffi::Tensor v = args.optional_tensor("v");
  in.cos_sin_cache = args.tensor("cos_sin_cache");
  in.pos_ids = args.tensor("pos_ids");
  const Pages pages(args.group("pages", 5));
  const bool is_hnd = args.flag("kv_layout");
  in.scale_q = args.float32("quant_scale_q");
  in.scale_kv = args.float32("quant_scale_kv");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  RopeCallParams params = {};
  RopeAlignment alignment;
  check_inputs(in, params, alignment);
  check_nope(in.q_nope, in.q_rope, in.num_tokens);
  check_nope(in.k_nope, in.k_rope, in.num_tokens);
  ffi::check_ndim(caches[0], v ? 4 : 3, v ? 4 : 3);
  const int64_t num_pages =
      check_pages(caches[0], v ? ffi::cache_axes(is_hnd).slot : 1, pages.page_size);
  add_rows(params, alignment, in.q_rope, output_rows(alignment, q_rope_out, in.q_rope), true,
           in.scale_q);
  add_rows(params, alignment, in.q_nope, output_rows(alignment, q_nope_out, in.q_nope), false,
           in.scale_q);
  if (v) {
    append_heads(params, alignment, in, v, caches, pages.page_size, is_hnd);
  } else {
    append_latent(params, alignment, in, caches, pages.page_size);
  }
  params.table = ffi::make_page_table(pages.batch_indices, pages.positions, pages.kv_indices,
                                      pages.kv_indptr, in.num_tokens, num_pages, pages.page_size);
  check_written({q_rope_out, q_nope_out, caches[0], caches[1]},
                {in.q_rope, in.k_rope, in.q_nope, in.k_nope, v, in.cos_sin_cache, in.pos_ids,
                 pages.kv_indices, pages.kv_indptr, pages.batch_indices, pages.positions});
  check_devices(in.q_rope, {in.k_rope, in.q_nope, in.k_nope, v, in.cos_sin_cache, in.pos_ids,
                            q_rope_out, q_nope_out, caches[0], caches[1], pages.kv_indices,
                            pages.kv_indptr, pages.batch_indices, pages.positions});
  launch_checked(params, alignment, enable_pdl, in.q_rope);
}

#endif
