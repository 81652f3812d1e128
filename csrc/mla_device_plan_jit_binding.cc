//   mla_device_plan(plan, workspace_buffer, counters, seq_lens, cum_seq_lens_q, table, sizes, causal,
//                   enable_pdl)
//
// Starts the planner of mla/plan.cuh and fills in `plan`, the bytes of an MlaLaunchPlan. With
// `counters`, zeros that this workspace's launches alone use and leave as zeros, CTAs of the kernel
// for Hopper plan for themselves instead if there are few units of work: nothing is launched.
// Returns where in the workspace the partial results begin, in bytes; the work list is at its
// front. counters, cum_seq_lens_q and enable_pdl may be None. Tuples:
//
//   table  (num_requests, width, stride, sharers)
//   sizes  (num_tokens, qo_len, num_heads, head_dim_ckv, page_size, num_sms)
//
// A row of the table has `width` page numbers. With cum_seq_lens_q, `qo_len` is the most that a
// request has. `sharers` requests, of a token each, share an element of seq_lens. The work is
// divided for `num_sms` multiprocessors.
#include <flashinfer/common/math.cuh>

#include <algorithm>

#include "index_binding.h"
#include "mla_device_plan.h"
#include "struct_tensor.h"

namespace flashinfer {
namespace {

int64_t lanes_of(int64_t num_heads, int64_t qo_len, int64_t num_ctas) {
  int64_t most = ceil_div(qo_len * num_heads, kMlaTileRows);
  if (most > kMlaMaxLanes) most = ceil_div(num_heads, kMlaTileRows);
  return std::max<int64_t>(1, std::min({most, kMlaMaxLanes, num_ctas}));
}

void check_size(const char* name, int64_t size, int64_t most) {
  if (size <= most) return;
  ffi::raise("ValueError", "`%s` leads to a plan of %lld, which must be at most %lld", name,
             static_cast<long long>(size), static_cast<long long>(most));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT_INT(mla_device_plan, args) {
  using namespace flashinfer;
  const ffi::Tensor planned = args.tensor("plan");
  const ffi::Tensor workspace = args.tensor("workspace_buffer");
  const ffi::Tensor counters = args.optional_tensor("counters");
  const ffi::Tensor seq_lens = args.tensor("seq_lens");
  const ffi::Tensor cum_seq_lens_q = args.optional_tensor("cum_seq_lens_q");
  ffi::Args table = args.group("table", 4);
  const int64_t num_requests = table.integer_in("num_requests", 0, INT32_MAX);
  const int64_t width = table.integer_in("width", 0, INT32_MAX);
  const int64_t stride = table.integer_in("stride", 0, INT32_MAX);
  const int64_t sharers = table.integer_in("sharers", 1, INT32_MAX);
  ffi::Args sizes = args.group("sizes", 6);
  const int64_t num_tokens = sizes.integer_in("num_tokens", 0, INT32_MAX);
  const int64_t qo_len = sizes.integer_in("max_q_len", 0, INT32_MAX);
  const int64_t num_heads = sizes.integer_in("num_heads", 1, 65535);
  const int64_t head_dim_ckv = sizes.integer_in("head_dim_ckv", 1, 65535);
  const int64_t page_size = sizes.integer_in("page_size", 1, INT32_MAX);
  const int64_t num_sms = sizes.integer_in("num_sms", 1, 1 << 16);
  const bool causal = args.flag("causal");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  MlaLaunchPlan& plan = exact_struct_in<MlaLaunchPlan>(planned);
  ffi::check_indices(seq_lens, num_requests / sharers);
  if (cum_seq_lens_q) ffi::check_indices(cum_seq_lens_q, num_requests + 1);
  check_size("max_q_len", qo_len * num_heads, INT32_MAX - 1024);
  check_size("block_tables", num_requests * std::max(stride, width), INT32_MAX);
  ffi::check_dtype(workspace, ffi::dtype::uint8);
  ffi::check_ndim(workspace, 1, 1);
  ffi::check_last_dim_contiguous(workspace);
  ffi::check_cuda(workspace);
  if (counters) {
    ffi::check_dtype(counters, ffi::dtype::int32);
    ffi::check_last_dim_contiguous(counters);
    if (counters.numel() < 2 * ffi::device_info(workspace).num_sms) {
      ffi::raise("ValueError", "`%s` must have 2 elements a multiprocessor, got shape %s",
                 counters.name, counters.shape_text().c_str());
    }
  }
  for (const ffi::Tensor& tensor : {counters, seq_lens, cum_seq_lens_q}) {
    if (tensor) ffi::check_same_device(tensor, workspace);
  }

  MlaPlanParams params = {};
  params.num_ctas =
      static_cast<int32_t>(std::min<int64_t>(num_sms, ffi::device_info(workspace).num_sms));
  params.lanes = static_cast<int32_t>(lanes_of(num_heads, qo_len, params.num_ctas));
  const int64_t units_of_request =
      ceil_div(ceil_div(qo_len * num_heads, kMlaTileRows), int64_t{params.lanes});
  const int64_t num_units = num_requests * units_of_request;
  const int64_t most_tokens = std::min<int64_t>(width * page_size, INT32_MAX - 256);
  check_size("query", num_units, mla_device_plan_most_units());
  check_size("block_tables", num_units * (most_tokens / 64 + 8), INT32_MAX);
  const MlaPlanLayout layout(params.num_ctas);
  const int64_t num_items = (num_units + params.num_ctas) * params.lanes;
  const int64_t int_bytes =
      ceil_div(layout.items_offset + num_items * int64_t{sizeof(MlaWorkItem)}, int64_t{128}) * 128;
  const int64_t float_bytes =
      mla_float_bytes(params.num_ctas, mla_most_slots(params.num_ctas), head_dim_ckv);
  if (workspace.numel() < int_bytes + float_bytes || !ffi::is_aligned(workspace, 16)) {
    ffi::raise("ValueError", "`%s` must have %lld bytes from a multiple of 16 on, it has %lld",
               workspace.name, static_cast<long long>(int_bytes + float_bytes),
               static_cast<long long>(workspace.numel()));
  }

  char* const base = static_cast<char*>(workspace.data());
  params.header = reinterpret_cast<MlaPlanHeader*>(base);
  params.cta_begin = reinterpret_cast<int32_t*>(base + layout.cta_begin_offset);
  params.merges = reinterpret_cast<MlaMerge*>(base + layout.merges_offset);
  params.counters = reinterpret_cast<MlaMergeCounters*>(base + layout.counters_offset);
  params.items = reinterpret_cast<MlaWorkItem*>(base + layout.items_offset);
  params.kv_lens = static_cast<const int32_t*>(seq_lens.data());
  if (cum_seq_lens_q) params.qo_indptr = static_cast<const int32_t*>(cum_seq_lens_q.data());
  params.num_requests = static_cast<int32_t>(num_requests);
  params.qo_len = static_cast<int32_t>(qo_len);
  params.num_tokens = static_cast<int32_t>(num_tokens);
  params.num_heads = FastDivisor(static_cast<uint32_t>(num_heads));
  params.sharers = FastDivisor(static_cast<uint32_t>(sharers));
  params.table_stride = static_cast<int32_t>(stride);
  params.most_tokens = static_cast<int32_t>(most_tokens);
  params.units_of_request =
      FastDivisor(static_cast<uint32_t>(std::max<int64_t>(units_of_request, 1)));
  params.causal = causal;

  plan = {};
  plan.num_ctas = params.num_ctas;
  plan.num_tokens = num_tokens;
  plan.num_indices = num_requests == 0 ? 0 : (num_requests - 1) * stride + width;
  plan.num_items = num_items;
  plan.int_bytes = int_bytes;
  plan.float_bytes = float_bytes;
  plan.num_heads = static_cast<int32_t>(num_heads);
  plan.page_size = static_cast<int32_t>(page_size);
  plan.causal = causal;
  plan.merges = true;
  plan.few_parts = false;
  plan.made_on_device = true;
  if (num_units == 0) return int_bytes;
  if (counters && num_units <= kMlaMostOwnUnits) {
    params.counters = static_cast<MlaMergeCounters*>(counters.data());
    plan.made_by_ctas = true;
    plan.planner = params;
    return int_bytes;
  }
  const ffi::DeviceGuard guard(workspace);
  ffi::check_launch(mla_device_plan(params, ffi::resolve_pdl(enable_pdl, workspace),
                                    ffi::current_stream(workspace)));
  return int_bytes;
}
