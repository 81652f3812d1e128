// sampling(out[, valid][, workspace], input[, indices][, temperature][, top_k][, top_p][, min_p][,
// seed, offset], enable_pdl): the configuration says which are there.
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

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("out");
  const ffi::Tensor valid = kToken ? args.optional_tensor("valid") : ffi::Tensor{};
  const ffi::Tensor workspace = kStream ? args.tensor("workspace") : ffi::Tensor{};
  const ffi::Tensor input = args.tensor(kLogits ? "logits" : "probs");
  const ffi::Tensor indices = kToken ? args.optional_tensor("indices") : ffi::Tensor{};
  ffi::RowValue<float> temperature{{}, 1.f}, top_p{{}, 1.f}, min_p{{}, 0.f};
  ffi::RowValue<int32_t> top_k{{}, 0};
  ffi::RowValue<uint64_t> seed{{}, 0}, offset{{}, 0};
  if (kTemperature) temperature = ffi::take_row_float(args, "temperature");
  if (kTopK) top_k = ffi::take_row_int(args, "top_k");
  if (kTopP) top_p = ffi::take_row_float(args, "top_p");
  if (kMinP) min_p = ffi::take_row_float(args, "min_p");
  if (kToken) seed = ffi::take_row_seed(args, "seed");
  if (kToken) offset = ffi::take_row_seed(args, "offset");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");

  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 2, 2);
  ffi::check_last_dim_contiguous(input);
  const int64_t num_input_rows = input.dim(0), vocab_size = input.dim(1);
  const int64_t num_rows = indices ? indices.numel() : num_input_rows;
  if (vocab_size < 1 || vocab_size > kMaxVocabSize || num_rows > INT32_MAX / 16 ||
      num_input_rows > INT32_MAX) {
    ffi::raise("ValueError", "`%s` must have 1 to %lld columns and at most 2^27 rows, got shape %s",
               input.name, static_cast<long long>(kMaxVocabSize), input.shape_text().c_str());
  }
  if (indices) {
    ffi::check_dtype(indices, {ffi::dtype::int32, ffi::dtype::int64});
    ffi::check_ndim(indices, 1, 1);
    ffi::check_last_dim_contiguous(indices);
  }
  if (kTemperature && !temperature.tensor && !(temperature.value >= 0.f)) {
    ffi::raise("ValueError", "`temperature` must not be negative, got %g", temperature.value);
  }
  check_row_value(temperature, num_input_rows);
  check_row_value(top_k, num_input_rows);
  check_row_value(top_p, num_input_rows);
  check_row_value(min_p, num_input_rows);
  check_row_value(offset, offset.tensor && offset.tensor.numel() == 1 ? 1 : num_rows);
  check_row_value(seed, seed.tensor && seed.tensor.numel() == 1 ? 1 : num_rows);
  if (kToken) {
    ffi::check_dtype(out, {ffi::dtype::int32, ffi::dtype::int64});
    ffi::check_row_vector(out, num_rows);
    if (valid) {
      ffi::check_dtype(valid, ffi::dtype::boolean);
      ffi::check_row_vector(valid, num_rows);
    }
  } else {
    ffi::check_dtype(out, kOutDtype);
    ffi::check_same_shape(out, input);
    ffi::check_last_dim_contiguous(out);
    ffi::check_no_broadcast(out);
    ffi::check_disjoint(out, input);
  }

  if (kStream) {
    const auto needed = static_cast<int64_t>(
        workspace_bytes(kFilter, num_input_rows, num_rows, static_cast<uint32_t>(vocab_size)));
    ffi::check_dtype(workspace, ffi::dtype::uint8);
    if (workspace.numel() < needed || !ffi::is_aligned(workspace, 16)) {
      ffi::raise("ValueError", "`workspace` must have %lld bytes at a 16-byte address, got %lld",
                 static_cast<long long>(needed), static_cast<long long>(workspace.numel()));
    }
  }

  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor :
       {out, valid, workspace, indices, temperature.tensor, top_k.tensor, top_p.tensor,
        min_p.tensor, seed.tensor, offset.tensor}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
  if (num_rows == 0) return;

  SamplingParams params = {};
  params.input = input.data();
  params.input_stride = input.stride(0);
  params.out = out.data();
  params.out_stride = out.stride(0);
  params.valid = valid ? static_cast<uint8_t*>(valid.data()) : nullptr;
  params.workspace = workspace ? workspace.data() : nullptr;
  params.indices = indices ? indices.data() : nullptr;
  params.temperature = temperature.per_row();
  params.top_k = top_k.per_row();
  params.top_p = top_p.per_row();
  params.min_p = min_p.per_row();
  params.seed = seed.per_row();
  params.offset = offset.per_row();
  params.num_rows = static_cast<uint32_t>(num_rows);
  params.num_input_rows = static_cast<uint32_t>(num_input_rows);
  params.vocab_size = static_cast<uint32_t>(vocab_size);
  params.indices_are_64bit = indices && indices.itemsize() == 8;
  params.tokens_are_64bit = kToken && out.itemsize() == 8;
  params.seed_is_shared = !seed.tensor || (seed.tensor.numel() == 1 && num_rows != 1);
  params.offset_is_shared = !offset.tensor || (offset.tensor.numel() == 1 && num_rows != 1);

  const ffi::DeviceGuard guard(input);
  ffi::check_launch(sampling(params, input.dl->device.device_id, ffi::device_info(input).num_sms,
                             ffi::resolve_pdl(enable_pdl, input), ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(sampling, args) { flashinfer::run(args); }
