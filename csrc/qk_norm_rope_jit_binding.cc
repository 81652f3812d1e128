//   qk_norm_rope(qkv, q_weight, k_weight, video, heads, eps, frequencies, attention_factor, scales,
//                outs)
//
// Tuples:
//
//   video        (ppf, pph, ppw, num_frame_channels, num_height_channels, num_width_channels)
//   heads        (num_heads_q, num_heads_k, num_heads_v, head_dim)
//   frequencies  (base, factor, low, high)
//   scales       (output_quant_scale, v_quant_scale)
//   outs         (q_out, k_out, v_out)
#include "qk_norm_rope.h"

#include "ffi.h"
#include "rope_frequencies.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr DLDataType kOutDtype = ffi::dtype::FLASHINFER_CFG_OUT_DTYPE;
constexpr int64_t kVecSize = 16 / (kDtype.bits / 8);
constexpr int64_t kMaxHeadDim = 2 * RopeFrequencies::kMaxPairs;

// Inputs of the frequencies; compared as bytes.
struct FrequencyKey {
  int64_t channels[3];
  double base, factor, low, high;
};

// The pairs of each axis are numbered from 0.
RopeFrequencies compute_frequencies(const FrequencyKey& key) {
  RopeFrequencies result = {};
  int pair = 0;
  for (const int64_t channels : key.channels) {
    for (int64_t j = 0; j < channels / 2; ++j) {
      double frequency = std::pow(key.base, -2. * j / channels);  // radians per position
      // YaRN: frequencies before `low` stay, those after `high` are divided, and those between are
      // blended.
      const double span = key.high > key.low ? key.high - key.low : 1e-3;
      double ramp = (j - key.low) / span;
      ramp = ramp < 0. ? 0. : ramp > 1. ? 1. : ramp;
      if (key.factor != 1.) frequency *= (1. - ramp) + ramp / key.factor;
      result.turns[pair++] = turns_of(frequency);
    }
  }
  return result;
}

// Takes the patches of a video, and the split of a head's pairs among its axes.
void take_video(ffi::Args args, QkNormRopeParams& params, FrequencyKey& key) {
  const int64_t frames = args.integer_in("ppf", 1, INT32_MAX);
  const int64_t rows = args.integer_in("pph", 1, INT32_MAX);
  const int64_t columns = args.integer_in("ppw", 1, INT32_MAX);
  params.frames = FastDivisor(static_cast<uint32_t>(frames));
  params.rows = FastDivisor(static_cast<uint32_t>(rows));
  params.columns = FastDivisor(static_cast<uint32_t>(columns));
  const char* names[] = {"num_frame_channels", "num_height_channels", "num_width_channels"};
  for (int i = 0; i < 3; ++i) {
    key.channels[i] = args.integer_in(names[i], 0, kMaxHeadDim);
    if (key.channels[i] % 2 != 0) {
      ffi::raise("ValueError", "`%s` must be even, got %lld", names[i],
                 static_cast<long long>(key.channels[i]));
    }
  }
  params.frame_pairs = static_cast<uint32_t>(key.channels[0] / 2);
  params.row_end = static_cast<uint32_t>((key.channels[0] + key.channels[1]) / 2);
}

void take_heads(ffi::Args args, QkNormRopeParams& params) {
  const char* heads[] = {"num_heads_q", "num_heads_k", "num_heads_v"};
  for (int i = 0; i < 3; ++i) {
    params.parts[i].num_heads = static_cast<uint32_t>(args.integer_in(heads[i], 1, 1 << 16));
  }
  const int64_t head_dim = args.integer_in("head_dim", 2, kMaxHeadDim);
  params.head_dim = static_cast<uint32_t>(head_dim);
}

void take_frequencies(ffi::Args args, FrequencyKey& key) {
  key.base = args.positive("base");
  key.factor = args.positive("factor");
  key.low = args.positive("low", ffi::Zero::allowed);
  key.high = args.positive("high", ffi::Zero::allowed);
}

void take_scales(ffi::Args args, QkNormRopeParams& params) {
  params.parts[0].scale = params.parts[1].scale = args.float32("output_quant_scale");
  params.parts[2].scale = args.float32("v_quant_scale");
}

// An output has the shape of qkv with [heads, head_dim] in place of the columns.
void check_output(const Tensor& out, const Tensor& qkv, int64_t heads, int64_t head_dim) {
  ffi::check_dtype(out, kOutDtype);
  if (qkv.ndim() == 2) {
    ffi::check_shape(out, {qkv.dim(0), heads, head_dim});
  } else {
    ffi::check_shape(out, {qkv.dim(0), qkv.dim(1), heads, head_dim});
  }
  ffi::check_contiguous(out);
}

bool is_vectorizable(const QkNormRopeParams& params, const Tensor& qkv) {
  bool result = params.head_dim % (2 * kVecSize) == 0 && ffi::is_aligned(qkv, 16) &&
                params.qkv_stride % kVecSize == 0;
  const int64_t out_bytes = kVecSize * (kOutDtype.bits / 8);
  for (const QkNormRopePart& part : params.parts) {
    result = result && reinterpret_cast<uintptr_t>(part.out) % out_bytes == 0 &&
             reinterpret_cast<uintptr_t>(part.weight) % 16 == 0;
  }
  return result;
}

// Checks how the numbers relate to each other; returns the number of patches of a video.
int64_t check_numbers(const QkNormRopeParams& params, const FrequencyKey& key) {
  const int64_t frames = params.frames.divisor, rows = params.rows.divisor;
  const int64_t columns = params.columns.divisor;
  if (rows * columns > INT32_MAX || frames > INT32_MAX / (rows * columns)) {
    ffi::raise("ValueError", "`ppf` * `pph` * `ppw` must be below 2^31, got %lld * %lld * %lld",
               static_cast<long long>(frames), static_cast<long long>(rows),
               static_cast<long long>(columns));
  }
  const int64_t sum = key.channels[0] + key.channels[1] + key.channels[2];
  if (params.head_dim != sum) {
    ffi::raise("ValueError",
               "`head_dim` must be `num_frame_channels` + `num_height_channels` + "
               "`num_width_channels`, %lld, got %lld",
               static_cast<long long>(sum), static_cast<long long>(params.head_dim));
  }
  if (key.low > key.high) {
    ffi::raise("ValueError", "`low` must be at most `high`, %g, got %g", key.high, key.low);
  }
  return frames * rows * columns;
}

// Splits the columns of qkv into heads; returns the number of tokens.
int64_t check_qkv(const Tensor& qkv, int64_t patches, QkNormRopeParams& params) {
  ffi::check_dtype(qkv, kDtype);
  ffi::check_ndim(qkv, 2, 3);
  int64_t columns = 0;
  for (QkNormRopePart& part : params.parts) {
    part.first_column = static_cast<uint32_t>(columns);
    columns += int64_t{part.num_heads} * params.head_dim;
  }
  if (qkv.dim(-1) != columns) {
    ffi::raise("ValueError",
               "`qkv` must have (`num_heads_q` + `num_heads_k` + `num_heads_v`) * `head_dim` = "
               "%lld columns, got shape %s",
               static_cast<long long>(columns), qkv.shape_text().c_str());
  }
  ffi::check_last_dim_contiguous(qkv);
  params.qkv_stride = ffi::row_stride(qkv);
  const int64_t num_tokens = qkv.numel() / columns;
  if (num_tokens % patches != 0 || num_tokens > INT32_MAX / 4) {
    ffi::raise("ValueError",
               "`qkv` must have tokens for whole videos of `ppf` * `pph` * `ppw` = %lld, fewer "
               "than 2^29, got shape %s",
               static_cast<long long>(patches), qkv.shape_text().c_str());
  }
  params.num_tokens = static_cast<uint32_t>(num_tokens);
  return num_tokens;
}

void run(ffi::Args& args) {
  const Tensor qkv = args.tensor("qkv");
  const Tensor weights[] = {args.tensor("q_weight"), args.tensor("k_weight")};
  QkNormRopeParams params = {};
  FrequencyKey key = {};
  take_video(args.group("video", 6), params, key);
  take_heads(args.group("heads", 4), params);
  params.eps = args.float32("eps", ffi::Zero::allowed);
  take_frequencies(args.group("frequencies", 4), key);
  params.attention_factor = args.float32("attention_factor");
  take_scales(args.group("scales", 2), params);
  ffi::Args results = args.group("outs", 3);
  const Tensor outs[] = {results.tensor("q_out"), results.tensor("k_out"), results.tensor("v_out")};
  args.all_taken();

  const int64_t num_tokens = check_qkv(qkv, check_numbers(params, key), params);
  for (int i = 0; i < 2; ++i) {
    ffi::check_vector(weights[i], kDtype, int64_t{params.parts[i].num_heads} * params.head_dim);
    params.parts[i].weight = weights[i].data();
  }
  for (int i = 0; i < 3; ++i) {
    check_output(outs[i], qkv, params.parts[i].num_heads, params.head_dim);
    for (const Tensor& read : {qkv, weights[0], weights[1]}) ffi::check_disjoint(outs[i], read);
    for (int j = 0; j < i; ++j) ffi::check_disjoint(outs[i], outs[j]);
    params.parts[i].out = outs[i].data();
  }
  ffi::check_cuda(qkv);
  for (const Tensor& tensor : {weights[0], weights[1], outs[0], outs[1], outs[2]}) {
    ffi::check_same_device(tensor, qkv);
  }
  if (num_tokens == 0) return;
  params.qkv = qkv.data();
  params.frequencies = frequencies_of(key);
  const ffi::DeviceGuard guard(qkv);
  ffi::check_launch(
      qk_norm_rope(params, is_vectorizable(params, qkv), ffi::device_info(qkv).num_sms,
                   ffi::resolve_pdl(ffi::Args::Flag::kNone, qkv), ffi::current_stream(qkv)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(qk_norm_rope, args) { flashinfer::run(args); }
