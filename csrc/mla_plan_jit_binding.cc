//   mla_plan_create(handle)
//   mla_plan_destroy(handle)
//   mla_plan(handle, plan, int_workspace, float_workspace_bytes, batch, sizes, options)
//
// Plan objects of MLA, by handle: create writes it to an int64 [1]. Index tensors are on the host.
// `plan`, uint8, receives the MlaPlan. int_workspace: a CUDA tensor is filled by one asynchronous
// copy on the current stream, a CPU tensor in place; None: only `plan` is wanted. Tuples:
//
//   batch    (qo_indptr, kv_indptr, kv_len_arr)
//   sizes    (num_heads, head_dim_ckv, page_size)
//   options  (causal, splits, is_graph)
#include <flashinfer/scheduler/mla_plan.h>

#include "index_binding.h"
#include "plan_staging.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

struct Planner {
  MlaPlanner planner;
  std::vector<MlaRequest> requests;
  StagingRing staging;
};

Planner& planner_of(ffi::Args& args) {
  const int64_t handle = args.integer("handle");
  if (handle == 0) ffi::raise("ValueError", "`handle` must be that of a planner, got 0");
  return *reinterpret_cast<Planner*>(handle);
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

FLASHINFER_FFI_EXPORT(mla_plan_create, args) {
  using namespace flashinfer;
  const ffi::Tensor handle = args.tensor("handle");
  ffi::check_dtype(handle, ffi::dtype::int64);
  ffi::check_shape(handle, {1});
  *static_cast<int64_t*>(handle.data()) = reinterpret_cast<int64_t>(new Planner());
}

FLASHINFER_FFI_EXPORT(mla_plan_destroy, args) {
  using namespace flashinfer;
  delete &planner_of(args);
}

FLASHINFER_FFI_EXPORT(mla_plan, args) {
  using namespace flashinfer;
  Planner& planner = planner_of(args);
  const ffi::Tensor result = args.tensor("plan");
  const ffi::Tensor ints = args.optional_tensor("int_workspace_buffer");
  const int64_t float_bytes = args.integer("float_workspace_bytes");
  ffi::Args batch = args.group("batch", 3);
  const ffi::Tensor qo_indptr = batch.tensor("qo_indptr");
  const ffi::Tensor kv_indptr = batch.tensor("kv_indptr");
  const ffi::Tensor kv_len = batch.tensor("kv_len_arr");
  ffi::Args dims = args.group("sizes", 3);
  const int64_t num_heads = dims.integer_in("num_heads", 1, 65535);
  const int64_t head_dim_ckv = dims.integer_in("head_dim_ckv", 1, 65535);
  const int64_t page_size = dims.integer_in("page_size", 1, INT32_MAX);
  ffi::Args options = args.group("options", 3);
  MlaPlanConfig config = {};
  config.causal = options.flag("causal");
  config.splits = options.flag("splits");
  const bool is_graph = options.flag("is_graph");
  args.all_taken();
  ffi::check_dtype(result, ffi::dtype::uint8);
  ffi::check_shape(result, {static_cast<int64_t>(sizeof(MlaPlan))});
  MlaPlan& plan = *static_cast<MlaPlan*>(result.data());
  plan = {};
  MlaPlan made = {};
  read_requests(planner, made, qo_indptr, kv_indptr, kv_len, num_heads, page_size);

  constexpr int64_t kNominalCtas = 132;  // for plans without a GPU
  const bool is_on_gpu = ints && ints.dl->device.device_type == kDLCUDA;
  config.num_heads = num_heads;
  config.num_ctas = is_on_gpu ? ffi::device_info(ints).num_sms : kNominalCtas;
  planner.planner.plan(config, planner.requests, made);
  made.num_heads = static_cast<int32_t>(num_heads);
  made.page_size = static_cast<int32_t>(page_size);
  made.causal = config.causal;
  made.merges = is_graph || made.num_merges > 0;
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
