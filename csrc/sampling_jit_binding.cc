//   sampling(out[, valid], workspace, input[, indices][, temperature][, top_k][, top_p][, min_p]
//            [, seed, offset], enable_pdl)
//   workspace_bytes(num_input_rows, num_rows, vocab_size) -> int
//
// The configuration says which arguments are there. `valid` and `indices` may be None, and so may
// `workspace` where it needs no bytes. A parameter is a number, or a tensor with one per row.
#include "ffi.h"
#include "row_arguments.h"
#include "sampling.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr DLDataType kOutDtype = ffi::dtype::FLASHINFER_CFG_OUT_DTYPE;
constexpr bool kLogits = FLASHINFER_CFG_LOGITS;
constexpr SamplingFilter kFilter = SamplingFilter::FLASHINFER_CFG_FILTER;
constexpr SamplingOutput kOutput = SamplingOutput::FLASHINFER_CFG_OUTPUT;
constexpr bool kToken = kOutput == SamplingOutput::kToken;
constexpr bool kBoth =
    kFilter == SamplingFilter::kTopKTopP || kFilter == SamplingFilter::kTopKTopPJoint;
constexpr bool kTopK = kFilter == SamplingFilter::kTopK || kBoth;
constexpr bool kStream = samples_by_stream(kFilter, kOutput, kLogits);
constexpr bool kTopP = kFilter == SamplingFilter::kTopP || kBoth;
constexpr bool kMinP = kFilter == SamplingFilter::kMinP;
constexpr bool kTemperature = kLogits && kOutput == SamplingOutput::kProbs;
// 2^19 weights of at most 2^44 sum to 2^63.
constexpr int64_t kMaxVocabSize = 1 << 19;

template <typename T>
void check_row_value(const ffi::RowValue<T>& value, int64_t num_rows) {
  if (value.tensor) ffi::check_row_vector(value.tensor, num_rows);
}

struct Call {
  ffi::Tensor out, valid, workspace, input, indices;
  ffi::RowValue<float> temperature{{}, 1.f}, top_p{{}, 1.f}, min_p{{}, 0.f};
  ffi::RowValue<int32_t> top_k{{}, 0};
  ffi::RowValue<uint64_t> seed{{}, 0}, offset{{}, 0};
  ffi::Args::Flag enable_pdl;

  int64_t num_rows() const { return indices ? indices.numel() : input.dim(0); }
};

Call take(ffi::Args& args) {
  Call call;
  call.out = args.tensor("out");
  if (kToken) call.valid = args.optional_tensor("valid");
  call.workspace = args.optional_tensor("workspace");
  call.input = args.tensor(kLogits ? "logits" : "probs");
  if (kToken) call.indices = args.optional_tensor("indices");
  if (kTemperature) call.temperature = ffi::take_row_float(args, "temperature");
  if (kTopK) call.top_k = ffi::take_row_int(args, "top_k");
  if (kTopP) call.top_p = ffi::take_row_float(args, "top_p");
  if (kMinP) call.min_p = ffi::take_row_float(args, "min_p");
  if (kToken) call.seed = ffi::take_row_seed(args, "seed");
  if (kToken) call.offset = ffi::take_row_seed(args, "offset");
  call.enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  return call;
}

void check_parameters(const Call& call) {
  const int64_t num_input_rows = call.input.dim(0), num_rows = call.num_rows();
  if (kTemperature && !call.temperature.tensor && !(call.temperature.value >= 0.f)) {
    ffi::raise("ValueError", "`temperature` must not be negative, got %g", call.temperature.value);
  }
  check_row_value(call.temperature, num_input_rows);
  check_row_value(call.top_k, num_input_rows);
  check_row_value(call.top_p, num_input_rows);
  check_row_value(call.min_p, num_input_rows);
  ffi::check_row_seeds(call.seed, call.offset, num_rows);
}

void check_outputs(const Call& call) {
  if (!kToken) {
    ffi::check_dtype(call.out, kOutDtype);
    ffi::check_same_shape(call.out, call.input);
    ffi::check_last_dim_contiguous(call.out);
    ffi::check_no_broadcast(call.out);
    return ffi::check_disjoint(call.out, call.input);
  }
  ffi::check_dtype(call.out, {ffi::dtype::int32, ffi::dtype::int64});
  ffi::check_row_vector(call.out, call.num_rows());
  if (call.valid) {
    ffi::check_dtype(call.valid, ffi::dtype::boolean);
    ffi::check_row_vector(call.valid, call.num_rows());
  }
}

int64_t bytes_needed(int64_t num_input_rows, int64_t num_rows, int64_t vocab_size) {
  if (!kStream) return 0;
  return static_cast<int64_t>(
      workspace_bytes(kFilter, num_input_rows, num_rows, static_cast<uint32_t>(vocab_size)));
}

void check(const Call& call) {
  const ffi::Tensor& input = call.input;
  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 2, 2);
  ffi::check_last_dim_contiguous(input);
  if (input.dim(1) < 1 || input.dim(1) > kMaxVocabSize || call.num_rows() > INT32_MAX / 16 ||
      input.dim(0) > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have 1 to %lld columns and at most 2^27 rows, got shape %s",
               input.name, static_cast<long long>(kMaxVocabSize), input.shape_text().c_str());
  }
  if (call.indices) {
    ffi::check_dtype(call.indices, {ffi::dtype::int32, ffi::dtype::int64});
    ffi::check_ndim(call.indices, 1, 1);
    ffi::check_last_dim_contiguous(call.indices);
  }
  check_parameters(call);
  check_outputs(call);
  ffi::check_workspace(call.workspace, bytes_needed(input.dim(0), call.num_rows(), input.dim(1)));
  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : {call.out, call.valid, call.workspace, call.indices,
                                    call.temperature.tensor, call.top_k.tensor, call.top_p.tensor,
                                    call.min_p.tensor, call.seed.tensor, call.offset.tensor}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
}

SamplingParams params_of(const Call& call) {
  const int64_t num_rows = call.num_rows();
  SamplingParams params = {};
  params.input = call.input.data();
  params.input_stride = call.input.stride(0);
  params.out = call.out.data();
  params.out_stride = call.out.stride(0);
  params.valid = call.valid ? static_cast<uint8_t*>(call.valid.data()) : nullptr;
  params.workspace = call.workspace ? call.workspace.data() : nullptr;
  params.indices = call.indices ? call.indices.data() : nullptr;
  params.temperature = call.temperature.per_row();
  params.top_k = call.top_k.per_row();
  params.top_p = call.top_p.per_row();
  params.min_p = call.min_p.per_row();
  params.seed = call.seed.per_row();
  params.offset = call.offset.per_row();
  params.num_rows = static_cast<uint32_t>(num_rows);
  params.num_input_rows = static_cast<uint32_t>(call.input.dim(0));
  params.vocab_size = static_cast<uint32_t>(call.input.dim(1));
  params.indices_are_64bit = call.indices && call.indices.itemsize() == 8;
  params.tokens_are_64bit = kToken && call.out.itemsize() == 8;
  params.seed_is_shared = call.seed.is_shared(num_rows);
  params.rows_have_streams = !call.seed.is_column();
  params.offset_is_shared = call.offset.is_shared(num_rows);
  return params;
}

void run(ffi::Args& args) {
  const Call call = take(args);
  check(call);
  const ffi::Tensor& input = call.input;
  if (call.num_rows() == 0) return;
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(sampling(params_of(call), input.dl->device.device_id,
                             ffi::device_info(input).num_sms,
                             ffi::resolve_pdl(call.enable_pdl, input), ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(sampling, args) { flashinfer::run(args); }

FLASHINFER_FFI_EXPORT_INT(workspace_bytes, args) {
  const int64_t num_input_rows = args.integer("num_input_rows");
  const int64_t num_rows = args.integer("num_rows");
  return flashinfer::bytes_needed(num_input_rows, num_rows, args.integer("vocab_size"));
}
