//   all_reduce(workspace, input, sum_out, norm, moe, schedule, launch)
//     norm      None, or (residual_in, weight, residual_out, norm_out, quant_out, scale_out, scale,
//               eps, weight_bias)
//     moe       None; (expert_scales, shared); or (weights, permuted_rows, shared, routed_scale),
//               as the configuration's input has it
//     schedule  (one_shot, threads, vecs_per_thread, num_ctas)
//     launch    (enable_pdl, completes_at_end)
//
// `workspace` has the bytes of a CommWorkspace of flashinfer/comm/workspace.h, a CPU tensor.
// Outputs may be None, and `scale` is a number or a tensor of one element.
#include "all_reduce.h"
#include "comm_binding.h"

#include <algorithm>

namespace flashinfer {
namespace {

namespace input_kind {
constexpr int tensor = 0, moe_reduction = 1, moe_finalize = 2;
constexpr int kThis = FLASHINFER_CFG_INPUT;
}  // namespace input_kind

namespace output_kind {
constexpr int sum = 0, norm = 1, static_e4m3 = 2, row_e4m3 = 3;
constexpr int nvfp4_linear = 4, nvfp4_128x4 = 5, nvfp4_8x4 = 6;
constexpr int kThis = FLASHINFER_CFG_OUTPUT;
}  // namespace output_kind

constexpr bool kTensor = input_kind::kThis == input_kind::tensor;
constexpr bool kNorm = output_kind::kThis != output_kind::sum;
constexpr bool kFp4 = output_kind::kThis >= output_kind::nvfp4_linear;
constexpr bool kFp8 =
    output_kind::kThis == output_kind::static_e4m3 || output_kind::kThis == output_kind::row_e4m3;
constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr int kVecSize = 16 / (kDtype.bits / 8);

// The tensors of a call, for what is checked of all of them together.
class Tensors {
 public:
  // `by_rows`: a thread reads its part of a row before it writes the same part of that row.
  void reads(const ffi::Tensor& tensor, bool by_rows = false) {
    read_[num_read_++] = {tensor, by_rows};
  }
  void writes(const ffi::Tensor& tensor, bool by_rows = false) {
    written_[num_written_++] = {tensor, by_rows};
  }

  // Overlaps, then the device. Rows may be written where rows are read, and nowhere else.
  void check(const ffi::Tensor& input) const {
    for (int i = 0; i < num_written_; ++i) {
      const Entry& written = written_[i];
      for (int j = 0; j < i; ++j) ffi::check_disjoint(written.tensor, written_[j].tensor);
      for (int j = 0; j < num_read_; ++j) {
        const bool in_place = written.by_rows && read_[j].by_rows &&
                              written.tensor.data() == read_[j].tensor.data() &&
                              written.tensor.numel() == read_[j].tensor.numel();
        if (!in_place) ffi::check_disjoint(written.tensor, read_[j].tensor);
      }
    }
    ffi::check_cuda(input);
    for (int i = 0; i < num_read_; ++i) ffi::check_same_device(read_[i].tensor, input);
    for (int i = 0; i < num_written_; ++i) ffi::check_same_device(written_[i].tensor, input);
  }

 private:
  struct Entry {
    ffi::Tensor tensor;
    bool by_rows;
  };
  Entry read_[7], written_[5];
  int num_read_ = 0, num_written_ = 0;
};

// A contiguous tensor of the module's dtype, as every row tensor here.
void check_rows(const ffi::Tensor& tensor) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_contiguous(tensor);
  ffi::check_aligned(tensor, 16);
}

void* optional_rows(ffi::Args& args, const char* name, const ffi::Tensor& like, Tensors& tensors) {
  const ffi::Tensor tensor = args.optional_tensor(name);
  if (!tensor) return nullptr;
  check_rows(tensor);
  if (tensor.numel() != like.numel()) ffi::check_same_shape(tensor, like);
  tensors.writes(tensor, true);
  return tensor.data();
}

void take_norm(ffi::Args args, const ffi::Tensor& input, AllReduceParams& params,
               Tensors& tensors) {
  const ffi::Tensor residual = args.tensor("residual_in");
  ffi::check_ndim(residual, 2, 2);
  check_rows(residual);
  tensors.reads(residual, true);
  if (kTensor && input.numel() != residual.numel()) ffi::check_same_shape(input, residual);
  const ffi::Tensor weight = args.tensor("rms_gamma");
  check_rows(weight);
  tensors.reads(weight);
  ffi::check_shape(weight, {residual.dim(1)});
  params.residual_in = residual.data();
  params.weight = weight.data();
  params.residual_out = optional_rows(args, "residual_out", residual, tensors);
  params.norm_out = optional_rows(args, "norm_out", residual, tensors);
  const ffi::Tensor codes = args.optional_tensor("quant_out");
  const ffi::Tensor scales = args.optional_tensor("scale_out");
  const int64_t count = residual.numel();
  if (kFp4 || kFp8) {
    if (!codes) ffi::raise("ValueError", "`quant_out` is needed by this pattern, got None");
    if (kFp8) ffi::check_dtype(codes, ffi::dtype::float8_e4m3fn);
    ffi::check_contiguous(codes);
    tensors.writes(codes);
    if (codes.numel() * codes.itemsize() != (kFp4 ? count / 2 : count)) {
      ffi::raise("ValueError", "`quant_out` must have %lld bytes, got shape %s",
                 static_cast<long long>(kFp4 ? count / 2 : count), codes.shape_text().c_str());
    }
    params.quant_out = codes.data();
  }
  if (kFp4 || output_kind::kThis == output_kind::row_e4m3) {
    if (!scales) ffi::raise("ValueError", "`scale_out` is needed by this pattern, got None");
    ffi::check_contiguous(scales);
    tensors.writes(scales);
    int64_t bytes = 4 * residual.dim(0);
    if (kFp4) {
      const bool is_linear = output_kind::kThis == output_kind::nvfp4_linear;
      const int64_t tile = is_linear ? 1 : output_kind::kThis == output_kind::nvfp4_128x4 ? 128 : 8;
      const int64_t groups = residual.dim(1) / 16, rows = residual.dim(0);
      bytes = (rows + tile - 1) / tile * tile * (is_linear ? groups : (groups + 3) / 4 * 4);
    } else {
      ffi::check_dtype(scales, ffi::dtype::float32);
    }
    if (scales.numel() * scales.itemsize() < bytes) {
      ffi::raise("ValueError", "`scale_out` must have at least %lld bytes, got shape %s",
                 static_cast<long long>(bytes), scales.shape_text().c_str());
    }
    params.scale_out = scales.data();
  }
  if (args.next_is_tensor()) {
    const ffi::Tensor scale = args.tensor("scale_factor");
    ffi::check_dtype(scale, ffi::dtype::float32);
    ffi::check_shape(scale, {1});
    tensors.reads(scale);
    params.scale = static_cast<const float*>(scale.data());
  } else {
    params.scale_value = args.float32("scale_factor");
  }
  params.eps = args.float32("rms_eps", ffi::Zero::allowed);
  params.weight_bias = static_cast<float>(args.number("weight_bias"));
  params.num_rows = static_cast<uint32_t>(residual.dim(0));
  params.row_vecs = static_cast<uint32_t>(residual.dim(1) / kVecSize);
  params.inv_hidden = 1.f / static_cast<float>(residual.dim(1));
  if (residual.dim(1) % (kFp4 ? 16 : kVecSize) != 0) {
    ffi::raise("ValueError",
               "`residual_in` must have a hidden size that is a multiple of %d, got %lld",
               kFp4 ? 16 : kVecSize, static_cast<long long>(residual.dim(1)));
  }
}

void take_moe(ffi::Args args, const ffi::Tensor& input, AllReduceParams& params, Tensors& tensors) {
  const int64_t tokens = params.num_rows, hidden = int64_t{params.row_vecs} * kVecSize;
  if (input_kind::kThis == input_kind::moe_reduction) {
    const ffi::Tensor scales = args.tensor("moe_reduction_scale_input");
    ffi::check_dtype(scales, ffi::dtype::float32);
    ffi::check_shape(scales, {input.dim(0), tokens});
    ffi::check_contiguous(scales);
    tensors.reads(scales);
    ffi::check_shape(input, {scales.dim(0), tokens, hidden});
    params.expert_scales = static_cast<const float*>(scales.data());
    params.num_terms = static_cast<uint32_t>(scales.dim(0));
    const ffi::Tensor shared = args.tensor("moe_reduction_token_input");
    check_rows(shared);
    ffi::check_shape(shared, {tokens, hidden});
    tensors.reads(shared, true);
    params.shared_input = shared.data();
    return;
  }
  const ffi::Tensor weights = args.optional_tensor("expert_scale_factor");
  const ffi::Tensor rows = args.tensor("expanded_idx_to_permuted_idx");
  ffi::check_dtype(rows, ffi::dtype::int32);
  ffi::check_ndim(rows, 2, 2);
  ffi::check_contiguous(rows);
  ffi::check_shape(rows, {tokens, rows.dim(1)});
  tensors.reads(rows);
  ffi::check_shape(input, {input.dim(0), hidden});
  if (weights) {
    ffi::check_dtype(weights, kDtype);
    ffi::check_same_shape(weights, rows);
    ffi::check_contiguous(weights);
    tensors.reads(weights);
    params.expert_weights = weights.data();
  }
  params.permuted_rows = static_cast<const int32_t*>(rows.data());
  params.num_terms = static_cast<uint32_t>(rows.dim(1));
  params.num_input_rows = static_cast<uint32_t>(std::min<int64_t>(input.dim(0), INT32_MAX));
  const ffi::Tensor shared = args.optional_tensor("shared_expert_output");
  if (shared) {
    check_rows(shared);
    ffi::check_shape(shared, {tokens, hidden});
    tensors.reads(shared, true);
    params.shared_input = shared.data();
  }
  params.routed_scale = static_cast<float>(args.number("routed_scaling_factor"));
}

AllReduceSchedule take_schedule(ffi::Args args) {
  AllReduceSchedule schedule = {};
  schedule.one_shot = args.flag("one_shot");
  schedule.threads = static_cast<uint32_t>(args.integer_in("threads", 32, 512));
  schedule.vecs_per_thread = static_cast<uint32_t>(args.integer_in("vecs_per_thread", 1, 4));
  schedule.num_ctas = static_cast<uint32_t>(args.integer_in("num_ctas", 1, 65535));
  return schedule;
}

void check_room(const AllReduceParams& params, bool one_shot) {
  const int64_t ranks = FLASHINFER_CFG_WORLD_SIZE;
  const int64_t owned = (params.num_rows + ranks - 1) / ranks * params.row_vecs;
  const int64_t vecs =
      one_shot ? (ranks - 1) * int64_t{params.total_vecs} : (ranks - 1) * owned + ranks * owned;
  if (16 * vecs > params.workspace.half_bytes) {
    ffi::raise("ValueError",
               "`input` needs %lld bytes of the workspace's receive buffer, which has %lld: create "
               "the workspace for more tokens",
               static_cast<long long>(16 * vecs),
               static_cast<long long>(params.workspace.half_bytes));
  }
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(all_reduce, args) {
  using namespace flashinfer;
  AllReduceParams params = {};
  const ffi::Tensor workspace = args.tensor("workspace");
  const ffi::Tensor input = args.tensor("input");
  const ffi::Tensor sum_out = args.optional_tensor("output");
  ffi::Args norm = args.optional_group("norm", 9);
  ffi::Args moe =
      args.optional_group("moe", input_kind::kThis == input_kind::moe_reduction ? 2 : 4);
  const ffi::Args cut = args.group("schedule", 4);
  ffi::Args launch = args.group("launch", 2);
  args.all_taken();
  params.workspace = workspace_of(workspace, FLASHINFER_CFG_WORLD_SIZE);
  const AllReduceSchedule schedule = take_schedule(cut);
  check_rows(input);
  Tensors tensors;
  tensors.reads(input, kTensor);
  const ffi::Args::Flag pdl = launch.optional_flag("launch_with_pdl");
  params.completes_at_end = launch.flag("trigger_completion_at_end");
  params.input = input.data();
  if constexpr (kNorm) {
    take_norm(norm, input, params, tensors);
    params.total_vecs = params.num_rows * params.row_vecs;
    if (!kTensor) take_moe(moe, input, params, tensors);
    if (params.row_vecs > schedule.threads * schedule.vecs_per_thread) {
      ffi::raise("ValueError", "`schedule` must cover rows of %u vectors", params.row_vecs);
    }
  } else {
    if (input.numel() % kVecSize != 0) {
      ffi::raise("ValueError", "`input` must have a multiple of %d elements, got shape %s",
                 kVecSize, input.shape_text().c_str());
    }
    params.total_vecs = static_cast<uint32_t>(input.numel() / kVecSize);
    params.row_vecs = schedule.threads * schedule.vecs_per_thread;
    params.num_rows = (params.total_vecs + params.row_vecs - 1) / params.row_vecs;
  }
  if (sum_out) {
    check_rows(sum_out);
    if (sum_out.numel() != int64_t{params.total_vecs} * kVecSize) {
      ffi::raise("ValueError", "`output` must have %lld elements, got shape %s",
                 static_cast<long long>(params.total_vecs) * kVecSize,
                 sum_out.shape_text().c_str());
    }
    params.sum_out = sum_out.data();
    tensors.writes(sum_out, true);
  }
  tensors.check(input);
  if (params.total_vecs == 0) return;
  check_room(params, schedule.one_shot);
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(
      all_reduce(params, schedule, ffi::resolve_pdl(pdl, input), ffi::current_stream(input)));
}
