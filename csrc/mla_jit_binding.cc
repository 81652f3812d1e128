//   mla_run(plan, workspaces, queries, caches, out, lse, sinks, factors, profile, enable_pdl)
//
// `plan` is the MlaLaunchPlan of mla_plan, whose list is in the first workspace. lse, sinks and
// enable_pdl may be None; so is `profile`, unless the configuration has one. Tuples:
//
//   workspaces  (int_workspace, float_workspace)
//   queries     (q_nope, q_pe or None)
//   caches      (ckv_cache, kpe_cache or None, kv_indices)
//   factors     (sm_scale, o_scale, lse_factor, rope_factor)
#include "index_binding.h"
#include "mla.h"
#include "profile_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr bool kProfiled = FLASHINFER_CFG_PROFILED;
constexpr int64_t kDimCkv = FLASHINFER_CFG_HEAD_DIM_CKV, kDimKpe = FLASHINFER_CFG_HEAD_DIM_KPE;

// Sets the kernel's pointers into the workspaces.
void bind(MlaParams& params, const MlaLaunchPlan& plan, const Tensor& ints, const Tensor& floats) {
  const MlaPlanLayout layout(plan.num_ctas);
  char* base = static_cast<char*>(ints.data());
  params.header = reinterpret_cast<const MlaPlanHeader*>(base);
  params.cta_begin = reinterpret_cast<const int32_t*>(base + layout.cta_begin_offset);
  params.merges = reinterpret_cast<const MlaMerge*>(base + layout.merges_offset);
  params.counters = reinterpret_cast<MlaMergeCounters*>(base + layout.counters_offset);
  params.items = reinterpret_cast<const MlaWorkItem*>(base + layout.items_offset);
  params.partial_lse = static_cast<float*>(floats.data());
  params.partial_o = params.partial_lse + mla_most_slots(plan.num_ctas) * kMlaTileRows;
  params.num_heads = FastDivisor(static_cast<uint32_t>(plan.num_heads));
  params.page_size = FastDivisor(static_cast<uint32_t>(plan.page_size));
  params.num_ctas = static_cast<uint32_t>(plan.num_ctas);
  params.num_items = static_cast<uint32_t>(plan.num_items);
  params.causal = plan.causal;
  params.plan_is_older = !plan.made_on_device;
  params.plans_itself = plan.made_by_ctas;
  params.in_pairs = plan.in_pairs;
  params.merges_itself = plan.few_parts;
  if (plan.made_by_ctas) {
    params.planner = plan.planner;
    params.counters = plan.planner.counters;
  }
}

// Events of the kernel go to `profile`.
void bind_profile(MlaParams& params, const Tensor& profile) {
  if (!profile) {
    if (!kProfiled) return;
    ffi::raise("ValueError", "`profiler_buffer` must be given: plan() was told `use_profiler`");
  }
  if (!kProfiled) {
    ffi::raise("ValueError", "`profiler_buffer` must be None: plan() was not told `use_profiler`");
  }
  const ProfileWords words = profile_words(profile);
  params.profile = words.words;
  params.profile_words = words.count;
}

void check_row_strides(const Tensor& tensor) {
  ffi::check_last_dim_contiguous(tensor);
  bool is_aligned = ffi::is_aligned(tensor, 16);
  for (int i = 0; i < tensor.ndim() - 1; ++i) {
    is_aligned =
        is_aligned && (tensor.dim(i) <= 1 || tensor.stride(i) * tensor.itemsize() % 16 == 0);
  }
  if (!is_aligned) {
    ffi::raise("ValueError", "`%s` must have its rows at multiples of 16 bytes", tensor.name);
  }
}

MlaRows rows_of(const Tensor& tensor, DLDataType type, int64_t num_tokens, int64_t num_heads,
                int64_t dim) {
  ffi::check_dtype(tensor, type);
  ffi::check_ndim(tensor, 3, 3);
  if (tensor.dim(0) < num_tokens || tensor.dim(1) != num_heads || tensor.dim(2) != dim) {
    ffi::raise("ValueError", "`%s` must have shape [%lld, %lld, %lld], got %s", tensor.name,
               static_cast<long long>(num_tokens), static_cast<long long>(num_heads),
               static_cast<long long>(dim), tensor.shape_text().c_str());
  }
  check_row_strides(tensor);
  return {tensor.data(), tensor.stride(0), tensor.stride(1)};
}

MlaCache cache_of(const Tensor& tensor, DLDataType type, int64_t num_pages, int64_t page_size,
                  int64_t dim) {
  ffi::check_dtype(tensor, type);
  ffi::check_shape(tensor, {num_pages, page_size, dim});
  check_row_strides(tensor);
  // The kernel counts units of 16 bytes of a cache of 8 bits in 32 bits.
  if (num_pages * tensor.stride(0) * tensor.itemsize() / 16 > INT32_MAX &&
      ffi::dtype::FLASHINFER_CFG_DTYPE_KV.bits == 8) {
    ffi::raise("ValueError", "`%s` must have less than 32 GiB, got shape %s", tensor.name,
               tensor.shape_text().c_str());
  }
  return {tensor.data(), tensor.stride(0), tensor.stride(1)};
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(mla_run, args) {
  using namespace flashinfer;
  const ffi::Tensor planned = args.tensor("plan");
  ffi::Args workspaces = args.group("workspaces", 2);
  const ffi::Tensor ints = workspaces.tensor("int_workspace_buffer");
  const ffi::Tensor floats = workspaces.tensor("float_workspace_buffer");
  ffi::Args queries = args.group("queries", 2);
  const ffi::Tensor q_nope = queries.tensor("q_nope");
  const ffi::Tensor q_pe = queries.optional_tensor("q_pe");
  ffi::Args caches = args.group("caches", 3);
  const ffi::Tensor ckv = caches.tensor("ckv_cache");
  const ffi::Tensor kpe = caches.optional_tensor("kpe_cache");
  const ffi::Tensor kv_indices = caches.tensor("kv_indices");
  const ffi::Tensor out = args.tensor("out");
  const ffi::Tensor lse = args.optional_tensor("lse");
  const ffi::Tensor sinks = args.optional_tensor("sinks");
  ffi::Args factors = args.group("factors", 4);
  const double sm_scale = factors.float32("sm_scale"), o_scale = factors.number("o_scale");
  const double lse_factor = factors.number("lse_factor");
  const double rope_factor = factors.number("rope_factor");
  const ffi::Tensor profile = args.optional_tensor("profiler_buffer");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  ffi::check_dtype(planned, ffi::dtype::uint8);
  ffi::check_shape(planned, {static_cast<int64_t>(sizeof(MlaLaunchPlan))});
  const MlaLaunchPlan& plan = *static_cast<const MlaLaunchPlan*>(planned.data());
  if (plan.num_ctas == 0) ffi::raise("ValueError", "plan() must be called before run()");

  constexpr DLDataType kQ = ffi::dtype::FLASHINFER_CFG_DTYPE_Q;
  constexpr DLDataType kKv = ffi::dtype::FLASHINFER_CFG_DTYPE_KV;
  constexpr DLDataType kKpe = ffi::dtype::FLASHINFER_CFG_DTYPE_KPE;
  MlaParams params = {};
  bind(params, plan, ints, floats);
  const int64_t num_heads = plan.num_heads, page_size = plan.page_size;
  params.q_nope = rows_of(q_nope, kQ, plan.num_tokens, num_heads, kDimCkv);
  const int64_t num_tokens = q_nope.dim(0);
  params.num_tokens = static_cast<uint32_t>(num_tokens);
  params.o = rows_of(out, ffi::dtype::FLASHINFER_CFG_DTYPE_O, num_tokens, num_heads, kDimCkv);
  ffi::check_no_broadcast(out);
  ffi::check_ndim(ckv, 3, 3);
  params.ckv = cache_of(ckv, kKv, ckv.dim(0), page_size, kDimCkv);
  if (kDimKpe != 0) {
    if (!q_pe || !kpe) ffi::raise("ValueError", "`q_pe` and `kpe_cache` must be tensors, got None");
    params.q_pe = rows_of(q_pe, kQ, num_tokens, num_heads, kDimKpe);
    params.kpe = cache_of(kpe, kKpe, ckv.dim(0), page_size, kDimKpe);
  }
  ffi::check_count(ckv, "pages", ckv.dim(0));
  params.num_pages = static_cast<uint32_t>(ckv.dim(0));
  ffi::check_indices(kv_indices, -1);
  if (kv_indices.dim(0) < plan.num_indices) {
    ffi::raise("ValueError", "`%s` must have at least %lld elements, got shape %s", kv_indices.name,
               static_cast<long long>(plan.num_indices), kv_indices.shape_text().c_str());
  }
  params.kv_indices = static_cast<const int32_t*>(kv_indices.data());
  if (lse) {
    ffi::check_dtype(lse, ffi::dtype::float32);
    ffi::check_shape(lse, {num_tokens, num_heads});
    ffi::check_contiguous(lse);
    ffi::check_disjoint(lse, out);
    params.lse = static_cast<float*>(lse.data());
  }
  if (sinks) {
    ffi::check_dtype(sinks, ffi::dtype::float32);
    ffi::check_shape(sinks, {num_heads});
    ffi::check_last_dim_contiguous(sinks);
    params.sinks = static_cast<const float*>(sinks.data());
  }
  for (const ffi::Tensor& written : {out, lse}) {
    for (const ffi::Tensor& read : {q_nope, q_pe, ckv, kpe, kv_indices, sinks}) {
      if (written && read) ffi::check_disjoint(written, read);
    }
  }
  bind_profile(params, profile);
  params.sm_scale_log2 = static_cast<float>(sm_scale * 1.4426950408889634);
  params.o_scale = static_cast<float>(o_scale);
  params.lse_factor = static_cast<float>(lse_factor);
  params.rope_factor = static_cast<float>(rope_factor);
  for (const ffi::Tensor& workspace : {ints, floats}) ffi::check_aligned(workspace, 16);
  ffi::check_cuda(ints);
  for (const ffi::Tensor& tensor :
       {q_nope, q_pe, ckv, kpe, kv_indices, out, lse, sinks, floats, profile}) {
    if (tensor) ffi::check_same_device(tensor, ints);
  }
  if (num_tokens == 0 || plan.num_tokens == 0) return;
  const ffi::DeviceGuard guard(q_nope);
  ffi::check_launch(
      mla(params, plan.merges, ffi::resolve_pdl(enable_pdl, q_nope), ffi::current_stream(q_nope)));
}
