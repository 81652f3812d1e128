// Of a configuration that does not append:
//   rope_quantize(q_rope_out, k_rope_out, q_nope_out, k_nope_out, q_rope, k_rope, q_nope, k_nope,
//   cos_sin_cache, pos_ids,
//                 quant_scale_q, quant_scale_kv, enable_pdl)
// Of one that does (v None: latent attention, the caches are those of k_nope and of k_rope):
//   rope_quantize_append(q_rope_out, q_nope_out, k_cache, v_cache, q_rope, k_rope, q_nope, k_nope,
//   v, cos_sin_cache,
//                        pos_ids, kv_indices, kv_indptr, batch_indices, positions, quant_scale_q,
//                        quant_scale_kv, page_size, is_hnd, enable_pdl)
// A nope argument that is None stands for one without columns.
#include "rope_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

// The inputs of a call and what they have in common.
struct Inputs {
  Tensor q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids;
  float scale_q = 1.f, scale_kv = 1.f;
  int64_t num_tokens = 0, rope_dim = 0;

  void take(ffi::Args& args) {
    q_rope = args.tensor("q_rope");
    k_rope = args.tensor("k_rope");
    q_nope = args.optional_tensor("q_nope");
    k_nope = args.optional_tensor("k_nope");
  }
};

float positive_scale(ffi::Args& args, const char* name) {
  return ffi::check_float(name, args.number(name), false);
}

void check_rows(const Tensor& tensor, int64_t num_tokens) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_last_dim_contiguous(tensor);
  if (tensor.dim(0) != num_tokens) {
    ffi::raise("ValueError", "`%s` must have the %lld tokens of `q_rope`, got shape %s",
               tensor.name, static_cast<long long>(num_tokens), tensor.shape_text().c_str());
  }
  ffi::check_count(tensor, "columns", tensor.dim(-1));
}

// `nope` fits `rope` but for the number of columns; gives that number.
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

void check_written(std::initializer_list<Tensor> written, std::initializer_list<Tensor> read) {
  for (const Tensor& out : written) {
    if (!out) continue;
    for (const Tensor& in : read) {
      if (in) ffi::check_disjoint(out, in);
    }
    for (const Tensor& other : written) {
      if (other && other.dl != out.dl) ffi::check_disjoint(out, other);
    }
  }
}

void check_devices(const Tensor& on, std::initializer_list<Tensor> tensors) {
  ffi::check_cuda(on);
  for (const Tensor& tensor : tensors) {
    if (tensor) ffi::check_same_device(tensor, on);
  }
}

}  // namespace
}  // namespace flashinfer

#if !FLASHINFER_CFG_APPEND

FLASHINFER_FFI_EXPORT(rope_quantize, args) {
  using namespace flashinfer;
  const ffi::Tensor q_rope_out = args.tensor("q_rope_out"), k_rope_out = args.tensor("k_rope_out");
  const ffi::Tensor q_nope_out = args.optional_tensor("q_nope_out");
  const ffi::Tensor k_nope_out = args.optional_tensor("k_nope_out");
  Inputs in;
  in.take(args);
  in.cos_sin_cache = args.tensor("cos_sin_cache");
  in.pos_ids = args.tensor("pos_ids");
  in.scale_q = positive_scale(args, "quant_scale_q");
  in.scale_kv = positive_scale(args, "quant_scale_kv");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");

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

// Rows of a cache from column `offset` on; dimension 1 or 2 holds the slots, the other one (if any)
// the heads.
RopeRows cache_rows(RopeAlignment& alignment, const Tensor& cache, bool is_hnd, int64_t offset) {
  const ffi::CacheAxes axes = ffi::cache_axes(is_hnd);
  const bool has_heads = cache.ndim() == 4;
  RopeRows rows;
  rows.data = static_cast<char*>(cache.data()) + offset * cache.itemsize();
  rows.stride_page = cache.stride(0);
  rows.stride_token = cache.stride(has_heads ? axes.slot : 1);
  rows.stride_head = has_heads ? cache.stride(axes.head) : 0;
  alignment.rows(cache, offset);
  return rows;
}

void check_cache(const Tensor& cache, std::initializer_list<int64_t> shape) {
  ffi::check_dtype(cache, kOutDtype);
  ffi::check_shape(cache, shape);
  ffi::check_last_dim_contiguous(cache);
  ffi::check_no_broadcast(cache);
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(rope_quantize_append, args) {
  using namespace flashinfer;
  const ffi::Tensor q_rope_out = args.tensor("q_rope_out");
  const ffi::Tensor q_nope_out = args.optional_tensor("q_nope_out");
  const ffi::Tensor first_cache = args.tensor("paged_kv_cache[0]");
  const ffi::Tensor second_cache = args.tensor("paged_kv_cache[1]");
  Inputs in;
  in.take(args);
  const ffi::Tensor v = args.optional_tensor("v");
  in.cos_sin_cache = args.tensor("cos_sin_cache");
  in.pos_ids = args.tensor("pos_ids");
  const ffi::Tensor kv_indices = args.tensor("kv_indices"), kv_indptr = args.tensor("kv_indptr");
  const ffi::Tensor batch_indices = args.tensor("batch_indices");
  const ffi::Tensor positions = args.tensor("positions");
  in.scale_q = positive_scale(args, "quant_scale_q");
  in.scale_kv = positive_scale(args, "quant_scale_kv");
  const int64_t page_size = args.integer("page_size");
  const bool is_hnd = args.optional_flag("kv_layout") == ffi::Args::Flag::kTrue;
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");

  RopeCallParams params = {};
  RopeAlignment alignment;
  check_inputs(in, params, alignment);
  check_nope(in.q_nope, in.q_rope, in.num_tokens);
  const int64_t nope_dim = check_nope(in.k_nope, in.k_rope, in.num_tokens);
  if (page_size < 1 || page_size > INT32_MAX) {
    ffi::raise("ValueError", "`page_size` must be from 1 to 2^31 - 1, got %lld",
               static_cast<long long>(page_size));
  }
  ffi::check_ndim(first_cache, v ? 4 : 3, v ? 4 : 3);
  const int64_t num_pages = first_cache.dim(0);
  const int64_t cache_page_size = first_cache.dim(v ? ffi::cache_axes(is_hnd).slot : 1);
  if (page_size != cache_page_size) {
    ffi::raise("ValueError", "`page_size` must be %lld as in `paged_kv_cache`, got %lld",
               static_cast<long long>(cache_page_size), static_cast<long long>(page_size));
  }
  ffi::check_count(first_cache, "pages", num_pages);
  add_rows(params, alignment, in.q_rope, output_rows(alignment, q_rope_out, in.q_rope), true,
           in.scale_q);
  add_rows(params, alignment, in.q_nope, output_rows(alignment, q_nope_out, in.q_nope), false,
           in.scale_q);
  RopeRows k_rope_out, k_nope_out;
  if (v) {
    ffi::check_ndim(v, 3, 3);
    check_rows(v, in.num_tokens);
    ffi::check_ndim(in.k_rope, 3, 3);
    const int64_t num_heads = in.k_rope.dim(1), k_dim = in.rope_dim + nope_dim;
    ffi::check_shape(v, {in.num_tokens, num_heads, v.dim(2)});
    const int64_t inner[2] = {is_hnd ? num_heads : page_size, is_hnd ? page_size : num_heads};
    check_cache(first_cache, {num_pages, inner[0], inner[1], k_dim});
    check_cache(second_cache, {num_pages, inner[0], inner[1], v.dim(2)});
    k_rope_out = cache_rows(alignment, first_cache, is_hnd, 0);
    k_nope_out = cache_rows(alignment, first_cache, is_hnd, in.rope_dim);
    add_rows(params, alignment, v, cache_rows(alignment, second_cache, is_hnd, 0), false,
             in.scale_kv, true);
  } else {
    if (in.k_rope.ndim() == 3 && in.k_rope.dim(1) != 1) {
      ffi::raise("ValueError", "`k_rope` must have one head where `v` is None, got shape %s",
                 in.k_rope.shape_text().c_str());
    }
    check_cache(first_cache, {num_pages, page_size, nope_dim});
    check_cache(second_cache, {num_pages, page_size, in.rope_dim});
    k_nope_out = cache_rows(alignment, first_cache, false, 0);
    k_rope_out = cache_rows(alignment, second_cache, false, 0);
  }
  add_rows(params, alignment, in.k_rope, k_rope_out, true, in.scale_kv, true);
  add_rows(params, alignment, in.k_nope, k_nope_out, false, in.scale_kv, true);
  params.table = ffi::make_page_table(batch_indices, positions, kv_indices, kv_indptr,
                                      in.num_tokens, num_pages, page_size);
  check_written({q_rope_out, q_nope_out, first_cache, second_cache},
                {in.q_rope, in.k_rope, in.q_nope, in.k_nope, v, in.cos_sin_cache, in.pos_ids,
                 kv_indices, kv_indptr, batch_indices, positions});
  check_devices(in.q_rope, {in.k_rope, in.q_nope, in.k_nope, v, in.cos_sin_cache, in.pos_ids,
                            q_rope_out, q_nope_out, first_cache, second_cache, kv_indices,
                            kv_indptr, batch_indices, positions});
  launch_checked(params, alignment, enable_pdl, in.q_rope);
}

#endif
