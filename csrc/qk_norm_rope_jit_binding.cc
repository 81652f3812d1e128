// qk_norm_rope(qkv, q_weight, k_weight, ppf, pph, ppw, num_frame_channels, num_height_channels,
//              num_width_channels, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, base,
//              factor, low, high, attention_factor, output_quant_scale, v_quant_scale, q_out,
//              k_out, v_out)
#include "qk_norm_rope.h"

#include <cmath>
#include <cstring>

#include "ffi_layout.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr DLDataType kOutDtype = ffi::dtype::FLASHINFER_CFG_OUT_DTYPE;
constexpr int64_t kVecSize = 16 / (kDtype.bits / 8);
constexpr int64_t kMaxHeadDim = 2 * RopeFrequencies::kMaxPairs;

int64_t integer_from(ffi::Args& args, const char* name, int64_t low, int64_t high) {
  const int64_t value = args.integer(name);
  if (value < low || value > high) {
    ffi::raise("ValueError", "`%s` must be from %lld to %lld, got %lld", name,
               static_cast<long long>(low), static_cast<long long>(high),
               static_cast<long long>(value));
  }
  return value;
}

double number_from(ffi::Args& args, const char* name, bool zero_is_fine) {
  const double value = args.number(name);
  if (!(zero_is_fine ? value >= 0. : value > 0.) || std::isinf(value)) {
    ffi::raise("ValueError", "`%s` must be %s and finite, got %g", name,
               zero_is_fine ? "at least 0" : "positive", value);
  }
  return value;
}

// What the frequencies depend on; compared as bytes.
struct FrequencyKey {
  int64_t channels[3];
  double base, factor, low, high;
};

// 2^64 times the turns per position of each pair, modulo 2^64; the pairs of an axis count from 0.
RopeFrequencies compute_frequencies(const FrequencyKey& key) {
  constexpr double kTwoPi = 6.283185307179586476925;
  RopeFrequencies result = {};
  int pair = 0;
  for (const int64_t channels : key.channels) {
    for (int64_t j = 0; j < channels / 2; ++j) {
      double frequency = std::pow(key.base, -2. * j / channels);  // radians per position
      // YaRN: frequencies before `low` stay, those after `high` are divided, between they blend.
      const double span = key.high > key.low ? key.high - key.low : 1e-3;
      double ramp = (j - key.low) / span;
      ramp = ramp < 0. ? 0. : ramp > 1. ? 1. : ramp;
      if (key.factor != 1.) frequency *= (1. - ramp) + ramp / key.factor;
      const double turns = std::fmod(frequency / kTwoPi, 1.);
      result.turns[pair++] = static_cast<uint64_t>(std::ldexp(turns, 64));
    }
  }
  return result;
}

// The model's frequencies do not change from call to call.
const RopeFrequencies& frequencies_of(const FrequencyKey& key) {
  thread_local FrequencyKey last_key = {};
  thread_local RopeFrequencies last = {};
  if (std::memcmp(&key, &last_key, sizeof(key)) != 0) {
    last = compute_frequencies(key);
    last_key = key;
  }
  return last;
}

// The arguments that are no tensors; gives the patches of a video.
int64_t take_sizes(ffi::Args& args, QkNormRopeParams& params, FrequencyKey& key) {
  const int64_t frames = integer_from(args, "ppf", 1, INT32_MAX);
  const int64_t rows = integer_from(args, "pph", 1, INT32_MAX);
  const int64_t columns = integer_from(args, "ppw", 1, INT32_MAX);
  if (rows * columns > INT32_MAX || frames > INT32_MAX / (rows * columns)) {
    ffi::raise("ValueError", "`ppf` * `pph` * `ppw` must be below 2^31, got %lld * %lld * %lld",
               static_cast<long long>(frames), static_cast<long long>(rows),
               static_cast<long long>(columns));
  }
  params.frames = FastDivisor(static_cast<uint32_t>(frames));
  params.rows = FastDivisor(static_cast<uint32_t>(rows));
  params.columns = FastDivisor(static_cast<uint32_t>(columns));
  const char* names[] = {"num_frame_channels", "num_height_channels", "num_width_channels"};
  int64_t sum = 0;
  for (int i = 0; i < 3; ++i) {
    key.channels[i] = integer_from(args, names[i], 0, kMaxHeadDim);
    sum += key.channels[i];
    if (key.channels[i] % 2 != 0) {
      ffi::raise("ValueError", "`%s` must be even, got %lld", names[i],
                 static_cast<long long>(key.channels[i]));
    }
  }
  const char* heads[] = {"num_heads_q", "num_heads_k", "num_heads_v"};
  for (int i = 0; i < 3; ++i) {
    params.parts[i].num_heads = static_cast<uint32_t>(integer_from(args, heads[i], 1, 1 << 16));
  }
  const int64_t head_dim = integer_from(args, "head_dim", 2, kMaxHeadDim);
  if (head_dim != sum) {
    ffi::raise("ValueError",
               "`head_dim` must be `num_frame_channels` + `num_height_channels` + "
               "`num_width_channels`, %lld, got %lld",
               static_cast<long long>(sum), static_cast<long long>(head_dim));
  }
  params.head_dim = static_cast<uint32_t>(head_dim);
  params.frame_pairs = static_cast<uint32_t>(key.channels[0] / 2);
  params.row_end = static_cast<uint32_t>((key.channels[0] + key.channels[1]) / 2);
  return frames * rows * columns;
}

void take_numbers(ffi::Args& args, QkNormRopeParams& params, FrequencyKey& key) {
  const auto float_from = [&](const char* name, bool may_be_zero) {
    return ffi::check_float(name, args.number(name), may_be_zero);
  };
  params.eps = float_from("eps", true);
  key.base = number_from(args, "base", false);
  key.factor = number_from(args, "factor", false);
  key.low = number_from(args, "low", true);
  key.high = number_from(args, "high", true);
  if (key.low > key.high) {
    ffi::raise("ValueError", "`low` must be at most `high`, %g, got %g", key.high, key.low);
  }
  params.attention_factor = float_from("attention_factor", false);
  const float scale = float_from("output_quant_scale", false);
  params.parts[0].scale = params.parts[1].scale = scale;
  params.parts[2].scale = float_from("v_quant_scale", false);
}

// q_out and its like have the shape of qkv, but [heads, head_dim] in place of the columns.
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

void run(ffi::Args& args) {
  const Tensor qkv = args.tensor("qkv");
  const Tensor weights[] = {args.tensor("q_weight"), args.tensor("k_weight")};
  QkNormRopeParams params = {};
  FrequencyKey key = {};
  const int64_t patches = take_sizes(args, params, key);
  take_numbers(args, params, key);
  const Tensor outs[] = {args.tensor("q_out"), args.tensor("k_out"), args.tensor("v_out")};

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
  for (int i = 0; i < 2; ++i) {
    ffi::check_dtype(weights[i], kDtype);
    ffi::check_shape(weights[i], {int64_t{params.parts[i].num_heads} * params.head_dim});
    ffi::check_last_dim_contiguous(weights[i]);
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
