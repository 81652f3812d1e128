//   mla_planner_size()
//   mla_plan_size()
//   mla_plan_create(planner)
//   mla_plan_destroy(planner)
//   mla_plan(planner, plan, int_workspace, float_workspace_bytes, batch, sizes, options)
//
// `planner` holds the bytes of a planner, mla_planner_size() of them, and `plan` those of an
// MlaLaunchPlan, mla_plan_size() of them, which mla_plan writes. Index tensors are on the host. A
// CUDA int_workspace is filled by one asynchronous copy on the current stream, and a CPU tensor in
// place; with None, only `plan` is made. Tuples:
//
//   batch    (qo_indptr, kv_indptr, kv_len_arr)
//   sizes    (num_heads, head_dim_ckv, page_size, num_sms)
//   options  (causal, splits, is_graph)
//
// The work is divided for `num_sms` multiprocessors; 0: for all of the GPU.
#include <flashinfer/mla/plan_params.h>
#include <flashinfer/scheduler/mla_plan.h>

#include <algorithm>
#include <new>

#include "index_binding.h"
#include "plan_staging.h"
#include "struct_tensor.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

struct Planner {
  static constexpr uint64_t kTag = 0x6d6c6170'6c616e72u;

  uint64_t tag = kTag;  // bytes that are not a planner have a different tag
  MlaPlanner planner;
  std::vector<MlaRequest> requests;
  StagingRing staging;
};

Planner& planner_of(ffi::Args& args) {
  Planner& planner = struct_in<Planner>(args.tensor("planner"));
  if (planner.tag != Planner::kTag) ffi::raise("RuntimeError", "mla_plan_create() comes first");
  return planner;
}

const int32_t* host_indices(const Tensor& tensor, int64_t length) {
  ffi::check_indices(tensor, length);
  if (tensor.dl->device.device_type != kDLCPU && tensor.dl->device.device_type != kDLCUDAHost) {
    ffi::raise("ValueError", "`%s` must be on the host here, got a tensor on a GPU", tensor.name);
  }
  return static_cast<const int32_t*>(tensor.data());
}

void check_order(const Tensor& indptr, const int32_t* values, int64_t i) {
  const int64_t low = i == 0 ? 0 : values[i - 1];
  if (values[i] >= low) return;
  ffi::raise("ValueError", "`%s`[%lld] must be at least %lld, got %d", indptr.name,
             static_cast<long long>(i), static_cast<long long>(low), values[i]);
}

void read_requests(Planner& planner, MlaPlan& plan, const Tensor& qo_indptr,
                   const Tensor& kv_indptr, const Tensor& kv_len, int64_t num_heads,
                   int64_t page_size) {
  const int64_t batch_size = ffi::check_indptr(qo_indptr);
  const int32_t* qo = host_indices(qo_indptr, -1);
  const int32_t* kv = host_indices(kv_indptr, batch_size + 1);
  const int32_t* lengths = host_indices(kv_len, batch_size);
  check_order(qo_indptr, qo, 0);
  check_order(kv_indptr, kv, 0);
  planner.requests.resize(batch_size);
  for (int64_t i = 0; i < batch_size; ++i) {
    check_order(qo_indptr, qo, i + 1);
    check_order(kv_indptr, kv, i + 1);
    const int64_t most = (int64_t{kv[i + 1]} - kv[i]) * page_size;
    if (lengths[i] < 0 || lengths[i] > most) {
      ffi::raise("ValueError",
                 "`%s`[%lld] must be from 0 to the %lld tokens of the request's pages, got %d",
                 kv_len.name, static_cast<long long>(i), static_cast<long long>(most), lengths[i]);
    }
    if ((int64_t{qo[i + 1]} - qo[i]) * num_heads > INT32_MAX - 1024) {
      ffi::raise("ValueError", "`%s`: request %lld has too many tokens for %lld heads: %d",
                 qo_indptr.name, static_cast<long long>(i), static_cast<long long>(num_heads),
                 qo[i + 1] - qo[i]);
    }
    planner.requests[i] = {qo[i], qo[i + 1] - qo[i], kv[i], lengths[i]};
  }
  plan.num_tokens = qo[batch_size];
  plan.num_indices = kv[batch_size];
}

void check_workspace(const char* name, int64_t needed, int64_t given) {
  if (given >= needed) return;
  ffi::raise("ValueError", "`%s` is too small: the plan needs %lld bytes, it has %lld", name,
             static_cast<long long>(needed), static_cast<long long>(given));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT_INT(mla_planner_size, args) {
  args.all_taken();
  return sizeof(flashinfer::Planner);
}

FLASHINFER_FFI_EXPORT_INT(mla_plan_size, args) {
  args.all_taken();
  return sizeof(flashinfer::MlaLaunchPlan);
}

FLASHINFER_FFI_EXPORT(mla_plan_create, args) {
  using namespace flashinfer;
  const ffi::Tensor bytes = args.tensor("planner");
  struct_in<Planner>(bytes);
  args.all_taken();
  new (bytes.data()) Planner();
}

FLASHINFER_FFI_EXPORT(mla_plan_destroy, args) {
  using namespace flashinfer;
  Planner& planner = planner_of(args);
  args.all_taken();
  planner.tag = 0;
  planner.~Planner();
}

FLASHINFER_FFI_EXPORT(mla_plan, args) {
  using namespace flashinfer;
  Planner& planner = planner_of(args);
  MlaLaunchPlan& plan = exact_struct_in<MlaLaunchPlan>(args.tensor("plan"));
  const ffi::Tensor ints = args.optional_tensor("int_workspace_buffer");
  const int64_t float_bytes = args.integer("float_workspace_bytes");
  ffi::Args batch = args.group("batch", 3);
  const ffi::Tensor qo_indptr = batch.tensor("qo_indptr");
  const ffi::Tensor kv_indptr = batch.tensor("kv_indptr");
  const ffi::Tensor kv_len = batch.tensor("kv_len_arr");
  ffi::Args dims = args.group("sizes", 4);
  const int64_t num_heads = dims.integer_in("num_heads", 1, 65535);
  const int64_t head_dim_ckv = dims.integer_in("head_dim_ckv", 1, 65535);
  const int64_t page_size = dims.integer_in("page_size", 1, INT32_MAX);
  const int64_t num_sms = dims.integer_in("num_sms", 0, 1 << 16);
  ffi::Args options = args.group("options", 3);
  MlaPlanConfig config = {};
  config.causal = options.flag("causal");
  config.splits = options.flag("splits");
  const bool is_graph = options.flag("is_graph");
  args.all_taken();
  plan = {};
  MlaLaunchPlan made = {};
  read_requests(planner, made, qo_indptr, kv_indptr, kv_len, num_heads, page_size);

  constexpr int64_t kNominalCtas = 132;  // for plans without a GPU
  const bool is_on_gpu = ints && ints.dl->device.device_type == kDLCUDA;
  config.num_heads = num_heads;
  config.num_ctas = is_on_gpu ? ffi::device_info(ints).num_sms : kNominalCtas;
  if (num_sms != 0) config.num_ctas = std::min(num_sms, config.num_ctas);
  planner.planner.plan(config, planner.requests, made);
  made.num_heads = static_cast<int32_t>(num_heads);
  made.page_size = static_cast<int32_t>(page_size);
  made.causal = config.causal;
  made.merges = is_graph || made.num_merges > 0;
  made.few_parts = !is_graph && made.few_parts;
  made.in_pairs = !is_graph && made.in_pairs;
  made.float_bytes = mla_float_bytes(made.num_ctas, made.num_slots, head_dim_ckv);
  if (ints) {
    check_workspace("int_workspace_buffer", made.int_bytes, ints.numel() * ints.itemsize());
    check_workspace("float_workspace_buffer", made.float_bytes, float_bytes);
    const auto write = [&](void* target) { planner.planner.write(static_cast<char*>(target)); };
    if (is_on_gpu) {
      planner.staging.copy(ints, made.int_bytes, write);
    } else {
      write(ints.data());
    }
  }
  plan = made;
}
