//   attention_launch_size()
//   attention_ctas_per_sm(float_workspace)
//   attention_bind(launch, plan, int_workspace, float_workspace, kv_indices, num_qo_heads,
//                  num_kv_heads, page_size, is_hnd, is_graph)
//   attention_bind_second(launch, plan, kv_indices, is_hnd, rows)
//   attention_options(launch, kind, logits_soft_cap, rope_scale, rope_theta, alibi_slopes)
//   attention_mask(launch, custom_mask, mask_indptr)
//   attention_items(launch, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len,
//                   max_item_len_ptr)
//   attention_lengths(launch, plan, config, qo_indptr, kv_indptr, kv_len, last_page_len, page_size,
//                     qo_len, causal, window_left)
//   attention_second(launch, q, k, v, o, lse, sm_scale, v_scale, window_left)
//   attention_head_scales(launch, kind, logits_scale, q_scale, k_scale, v_scale)
//   attention_block_scales(launch, k_sf, v_sf, o, lse)
//   attention_output_scale(launch, out_scale, q, o, lse)
//   attention_profile(launch, profiler_buffer, o, lse)
//   attention_run(launch, q, k, v, o, lse, sm_scale, v_scale, window_left, sinks, enable_pdl)
//
// `launch` holds the bytes of an AttentionLaunch (attention_binding.h), whose size is
// attention_launch_size(): attention_bind fills it and attention_run launches it. `plan` holds the
// bytes of a PlanLayout. The additional tensors and scalars of a user's variant follow the
// arguments of attention_run.
//
// attention_lengths serves modules that read lengths on the device at each run, in place of a work
// list: its arguments are those of attention_device_plan(), and the caller keeps the tensors.
//
// The `second` functions serve launches whose items of kind 1 have separate tensors, and options of
// their own: those of attention_options() for kind 1, a scale and a window. If `rows` is not
// negative, the tensors of kind 0 have that many rows of k and v, which are read as pages;
// otherwise they are in pages. If v is None, k is a cache that holds both. kv_indices,
// alibi_slopes, lse, sinks, enable_pdl, scales and, for masks of drafts, mask_indptr may be None.
// The caller has moved a plan's tensors to the device: only a run checks the device of its tensors.
// Scales of 4-bit keys and values, and of heads, are set for the next run, and so are the place of
// the outputs' scales and the buffer of a profile's events.
#include "attention_binding.h"
#include "device_plan_binding.h"
#include "profile_binding.h"

#include <cmath>

using namespace flashinfer;

namespace {

const int32_t* page_numbers(const Tensor& kv_indices, const PlannedTensors& planned) {
  ffi::check_indices(kv_indices, -1);
  if (kv_indices.dim(0) < planned.kv_entries) {
    ffi::raise("ValueError", "`%s` must have at least the %lld pages of the indptr, got shape %s",
               kv_indices.name, static_cast<long long>(planned.kv_entries),
               kv_indices.shape_text().c_str());
  }
  return static_cast<const int32_t*>(kv_indices.data());
}

}  // namespace

FLASHINFER_FFI_EXPORT_INT(attention_launch_size, args) {
  args.all_taken();
  return sizeof(AttentionLaunch);
}

FLASHINFER_FFI_EXPORT_INT(attention_ctas_per_sm, args) {
  const Tensor workspace = args.tensor("float_workspace_buffer");
  args.all_taken();
  ffi::check_cuda(workspace);
  const ffi::DeviceGuard guard(workspace);
  int ctas = 0;
  const cudaError_t status = flashinfer::attention_ctas_per_sm(&ctas);
  if (status == cudaErrorInvalidValue) {
    cudaGetLastError();  // reported here, not at the next call of another module
    const int cc = ffi::device_info(workspace).compute_capability;
    ffi::raise(
        "ValueError",
        "`head_dim_qk` %d and `head_dim_vo` %d take more shared memory than a GPU of compute "
        "capability %d.%d has",
        FLASHINFER_CFG_HEAD_DIM_QK, FLASHINFER_CFG_HEAD_DIM_VO, cc / 10, cc % 10);
  }
  ffi::check_launch(status);
  return ctas;
}

FLASHINFER_FFI_EXPORT(attention_bind, args) {
  AttentionLaunch& launch = struct_in<AttentionLaunch>(args.tensor("launch"));
  const PlanLayout& plan = exact_struct_in<PlanLayout>(args.tensor("plan"));
  const Tensor int_workspace = args.tensor("int_workspace_buffer");
  const Tensor float_workspace = args.tensor("float_workspace_buffer");
  const Tensor kv_indices = args.optional_tensor("paged_kv_indices");
  launch = {};
  launch.num_scale_rows = -1;
  auto& params = launch.params;
  params.variant.num_qo_heads = static_cast<uint32_t>(args.integer("num_qo_heads"));
  params.variant.num_kv_heads = static_cast<uint32_t>(args.integer("num_kv_heads"));
  const auto page_size = static_cast<uint32_t>(args.integer("page_size"));
  PlannedTensors& planned = launch.planned[0];
  planned.is_hnd = args.flag("kv_layout");
  planned.exact_tokens = !args.flag("use_cuda_graph");

  const auto num_ctas = static_cast<uint32_t>(plan.num_ctas);
  params.num_ctas = FastDivisor(num_ctas == 0 ? 1 : num_ctas);
  params.num_ctas.divisor = num_ctas;
  params.num_merges = static_cast<uint32_t>(plan.num_merges);
  params.rows_per_slot = static_cast<uint32_t>(plan.rows_per_slot);
  params.merged_rows = static_cast<uint32_t>(plan.merged_rows);
  params.num_kv_heads = FastDivisor(params.variant.num_kv_heads);
  params.group_size = FastDivisor(params.variant.num_qo_heads / params.variant.num_kv_heads);
  params.page_size = FastDivisor(page_size == 0 ? 1 : page_size);
  params.variant.window_left = -1;
  planned.qo_tokens = plan.groups[0].qo_tokens;
  planned.kv_entries = plan.groups[0].kv_entries;
  planned.paged_rows = -1;

  char* ints = static_cast<char*>(int_workspace.data());
  params.items = reinterpret_cast<const WorkItem*>(ints + plan.items_offset);
  params.merges = reinterpret_cast<const MergeItem*>(ints + plan.merges_offset);
  if (plan.counters_offset >= 0 && !FLASHINFER_CFG_DEVICE_LENGTHS) {
    params.counters = reinterpret_cast<uint32_t*>(ints + plan.counters_offset);
  }
  char* floats = static_cast<char*>(float_workspace.data());
  params.partial_o = reinterpret_cast<float*>(floats);
  params.partial_sums = reinterpret_cast<float2*>(floats + plan.sums_offset);

  // Whether this is a GPU is checked when it is used.
  launch.device_id = float_workspace.dl->device.device_id;
  if (kv_indices) params.tensors[0].kv_indices = page_numbers(kv_indices, planned);
  launch.tag = AttentionLaunch::kTag;
}

FLASHINFER_FFI_EXPORT(attention_bind_second, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  const PlanLayout& plan = exact_struct_in<PlanLayout>(args.tensor("plan"));
  const Tensor kv_indices = args.tensor("paged_kv_indices");
  PlannedTensors& planned = launch.planned[1];
  planned.is_hnd = args.flag("kv_layout");
  planned.exact_tokens = launch.planned[0].exact_tokens;
  planned.qo_tokens = plan.groups[1].qo_tokens;
  planned.kv_entries = plan.groups[1].kv_entries;
  planned.paged_rows = -1;
  launch.planned[0].paged_rows = args.integer("k_p");
  launch.params.tensors[1].kv_indices = page_numbers(kv_indices, planned);
  launch.has_second = true;
}

FLASHINFER_FFI_EXPORT(attention_options, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  VariantParams& variant = launch.params.variant;
  const bool is_second = args.integer_in("kind", 0, 1) == 1;
  const auto set = [&](auto& options) {
    options.logits_soft_cap = static_cast<float>(args.number("logits_soft_cap"));
    const double rope_scale = args.number("rope_scale");
    const double rope_theta = args.number("rope_theta");
    const Tensor alibi_slopes = args.optional_tensor("alibi_slopes");
    options.rope_scale_rcp = static_cast<float>(1. / rope_scale);
    options.rope_theta_rcp_log2 =
        static_cast<float>(-std::log2(rope_theta) * 2. / FLASHINFER_CFG_HEAD_DIM_QK);
    options.alibi_slopes =
        option_data<float>(alibi_slopes, ffi::dtype::float32, variant.num_qo_heads);
  };
  is_second ? set(launch.second) : set(variant);
}

FLASHINFER_FFI_EXPORT(attention_mask, args) {
  // Taken as the base class, since a user's variant may have members of the same names.
  VariantParams& variant = bound_launch_of(args).params.variant;
  const Tensor mask = args.tensor("custom_mask");
  const Tensor indptr = args.optional_tensor("mask_indptr");
  if (!indptr) ffi::check_aligned_rows(mask, 4);  // a word for each query
  variant.custom_mask = option_data<uint8_t>(mask, ffi::dtype::uint8, 0);
  variant.mask_indptr = option_data<int32_t>(indptr, ffi::dtype::int32, 1);
}

FLASHINFER_FFI_EXPORT(attention_items, args) {
  constexpr DLDataType kUint16{kDLUInt, 16, 1}, kUint32{kDLUInt, 32, 1};
  AttentionLaunch& launch = bound_launch_of(args);
  VariantParams& variant = launch.params.variant;
  const Tensor prefix = args.tensor("prefix_len_ptr");
  const Tensor positions = args.tensor("token_pos_in_items_ptr");
  variant.token_pos_in_items_len = static_cast<uint32_t>(args.integer("token_pos_in_items_len"));
  const Tensor longest = args.tensor("max_item_len_ptr");
  variant.prefix_len_ptr = option_data<uint32_t>(prefix, kUint32, 0);
  variant.token_pos_in_items_ptr = option_data<uint16_t>(positions, kUint16, 0);
  variant.max_item_len_ptr = option_data<uint16_t>(longest, kUint16, 0);
}

FLASHINFER_FFI_EXPORT(attention_lengths, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  const PlanLayout& plan = exact_struct_in<PlanLayout>(args.tensor("plan"));
  const PlanConfig& config = exact_struct_in<PlanConfig>(args.tensor("config"));
  const DLTensor device{nullptr, {kDLCUDA, launch.device_id}, 0, {}, nullptr, nullptr, 0};
  const Tensor place{&device, "float_workspace_buffer"};
#if FLASHINFER_CFG_DEVICE_LENGTHS
  launch.params.lengths = read_device_plan(args, plan, config, place);
  if (launch.params.lengths.batch_size == 0) launch.params.num_ctas.divisor = 0;
#else
  read_device_plan(args, plan, config, place);
  ffi::raise("RuntimeError", "the module reads work lists");
#endif
}

FLASHINFER_FFI_EXPORT(attention_second, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  AttentionTensors& tensors = launch.params.tensors[1];
  const RunTensors given = read_tensors(args, launch, 1, true, tensors);
  launch.second.sm_scale = static_cast<float>(args.number("sm_scale"));
  tensors.v_scale = static_cast<float>(args.number("v_scale"));
  launch.second.window_left = static_cast<int32_t>(args.integer("window_left"));
  given.check_device(launch.device_id);
}

FLASHINFER_FFI_EXPORT(attention_head_scales, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  const VariantParams& variant = launch.params.variant;
  HeadScales& scales = launch.params.tensors[args.integer_in("kind", 0, 1)].head_scales;
  scales.logits = static_cast<float>(args.number("logits_scale"));
  scales.q = read_head_scale(args, "q_scale", variant.num_qo_heads, launch.device_id);
  scales.k = read_head_scale(args, "k_scale", variant.num_kv_heads, launch.device_id);
  scales.v = read_head_scale(args, "v_scale", variant.num_kv_heads, launch.device_id);
}

FLASHINFER_FFI_EXPORT(attention_block_scales, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  Tensor k = args.tensor("kv_cache_sf");
  const Tensor v = args.optional_tensor("kv_cache_sf[1]");
  if (v) k.name = "kv_cache_sf[0]";
  const Tensor o = args.tensor("out"), lse = args.optional_tensor("lse");
  set_block_scales(launch, k, v);
  for (const Tensor& scales : {k, v}) {
    if (!scales) continue;
    ffi::check_disjoint(o, scales);
    if (lse) ffi::check_disjoint(lse, scales);
    check_on_device(scales, launch.device_id);
  }
}

FLASHINFER_FFI_EXPORT(attention_output_scale, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  const Tensor scale = args.tensor("out_scale");
  const Tensor q = args.tensor("q"), o = args.tensor("out"), lse = args.optional_tensor("lse");
  set_output_scale(launch, scale, o);
  for (const Tensor& other : {q, o, lse}) {
    if (other) ffi::check_disjoint(scale, other);
  }
  check_on_device(scale, launch.device_id);
}

FLASHINFER_FFI_EXPORT(attention_profile, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  const Tensor buffer = args.tensor("profiler_buffer");
  const Tensor o = args.tensor("out"), lse = args.optional_tensor("lse");
  [[maybe_unused]] const ProfileWords profile = profile_words(buffer);
  ffi::check_disjoint(o, buffer);
  if (lse) ffi::check_disjoint(lse, buffer);
  check_on_device(buffer, launch.device_id);
#if FLASHINFER_CFG_PROFILED
  launch.params.profile = profile.words;
  launch.params.profile_words = profile.count;
#else
  ffi::raise("RuntimeError", "the module records no events");
#endif
}

FLASHINFER_FFI_EXPORT(attention_run, args) {
  AttentionLaunch& launch = bound_launch_of(args);
  auto params = launch.params;
  VariantParams& variant = params.variant;
  take_output_scale(launch);  // also if this run is refused
  const RunTensors given = read_tensors(args, launch, 0, FLASHINFER_CFG_PAGED, params.tensors[0]);
  variant.sm_scale = static_cast<float>(args.number("sm_scale"));
  set_soft_cap(params.variant);
  take_block_scales(launch, params.tensors[0]);
  params.tensors[0].v_scale = static_cast<float>(args.number("v_scale") * kUnit);
  variant.window_left = static_cast<int32_t>(args.integer("window_left"));
  const Tensor sinks = args.optional_tensor("sinks");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  if (sinks) ffi::check_shape(sinks, {variant.num_qo_heads});
  variant.sinks = option_data<float>(sinks, ffi::dtype::float32, variant.num_qo_heads);
  if (!launch.has_second) params.tensors[1] = params.tensors[0];
#if FLASHINFER_CFG_CUSTOM_VARIANT
  VariantReader reader(args);
  params.variant.read(reader);
  reader.check_device(launch.device_id);
#endif
  args.all_taken();
  set_second_variant(params, launch);
  given.check_device(launch.device_id);
  if (sinks) check_on_device(sinks, launch.device_id);

  if (params.num_ctas.divisor == 0) return;  // there are no queries
  const DLTensor device{nullptr, {kDLCUDA, launch.device_id}, 0, {}, nullptr, nullptr, 0};
  const Tensor place{&device, "q"};
  const ffi::DeviceGuard guard(place);
  ffi::check_launch(
      attention(params, ffi::resolve_pdl(enable_pdl, place), ffi::current_stream(place)));
}
