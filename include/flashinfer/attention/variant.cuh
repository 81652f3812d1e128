// What an attention variant is, and the one that holds the built-in options.
//
// A variant is a struct built once per work item by (params, batch_idx, smem_ptr), with hooks that
// are written with the macros below. A hook that is not written costs nothing. The kernel computes
//
//   q  <- QueryTransform(q), k <- KeyTransform(k)          elementwise, before the product
//   s  <- LogitsTransform(q.k), -inf where not LogitsMask
//   p  <- exp2(s * sm_scale_log2 - m),  d <- sum of p      with use_softmax; else p <- s
//   MDUpdate(m, d, scale)                                  once per row when all of K/V was seen
//   o  <- OutputTransform(sum of p v, m, d, scale)
//
// with m and d in base 2: m is the largest s * sm_scale_log2. The names and argument lists of the
// macros are FlashInfer's, so that variants written for it compile here.
#pragma once

#include <cstdint>
#include <type_traits>
#include <flashinfer/attention/attention_params.h>
#include <flashinfer/attention/math.cuh>

// Each macro also defines a flag that tells the kernel that the hook exists.
#define REGISTER_QUERY_TRANSFORM(params, q, ...)                                 \
  static constexpr bool kHasQueryTransform = true;                               \
  template <typename Params, typename T>                                         \
  __device__ __forceinline__ T QueryTransform(const Params& params, T q) const { \
    __VA_ARGS__                                                                  \
  }

#define REGISTER_KEY_TRANSFORM(params, k, ...)                                 \
  static constexpr bool kHasKeyTransform = true;                               \
  template <typename Params, typename T>                                       \
  __device__ __forceinline__ T KeyTransform(const Params& params, T k) const { \
    __VA_ARGS__                                                                \
  }

#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx,          \
                                  kv_head_idx, ...)                                                \
  static constexpr bool kHasLogitsTransform = true;                                                \
  template <typename Params, typename T>                                                           \
  __device__ __forceinline__ T LogitsTransform(const Params& params, T logits, uint32_t batch_idx, \
                                               uint32_t qo_idx, uint32_t kv_idx,                   \
                                               uint32_t qo_head_idx, uint32_t kv_head_idx) const { \
    __VA_ARGS__                                                                                    \
  }

#define REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...)   \
  static constexpr bool kHasLogitsMask = true;                                                   \
  template <typename Params>                                                                     \
  __device__ __forceinline__ bool LogitsMask(const Params& params, uint32_t batch_idx,           \
                                             uint32_t qo_idx, uint32_t kv_idx,                   \
                                             uint32_t qo_head_idx, uint32_t kv_head_idx) const { \
    __VA_ARGS__                                                                                  \
  }

#define REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, ...)          \
  static constexpr bool kHasMDUpdate = true;                                             \
  template <typename Params, typename T>                                                 \
  __device__ __forceinline__ void MDUpdate(const Params& params, uint32_t kv_tile_idx,   \
                                           uint32_t qo_head_idx, T& m, T& d, T& scale) { \
    __VA_ARGS__                                                                          \
  }

#define REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale,     \
                                  ...)                                                             \
  static constexpr bool kHasOutputTransform = true;                                                \
  template <typename Params, typename T, typename TM, typename TD, typename TScale>                \
  __device__ __forceinline__ T OutputTransform(const Params& params, T output, uint32_t batch_idx, \
                                               uint32_t qo_idx, uint32_t qo_head_idx, TM& m,       \
                                               TD& d, TScale scale) const {                        \
    __VA_ARGS__                                                                                    \
  }

namespace flashinfer {

struct AttentionVariantBase {
  static constexpr bool use_softmax = true;
  static constexpr float sm_scale_log2 = 1.f;  // variants without softmax need not define it
  static constexpr bool kHasQueryTransform = false;
  static constexpr bool kHasKeyTransform = false;
  static constexpr bool kHasLogitsTransform = false;
  static constexpr bool kHasLogitsMask = false;
  static constexpr bool kHasMDUpdate = false;
  static constexpr bool kHasOutputTransform = false;
  // Whether the kernel applies the sign of a negative params.sm_scale to q; the variant then scales
  // by the magnitude.
  static constexpr bool kNegatesQuery = false;
  // Whether the kernel reads AttentionTensors::head_scales.
  static constexpr bool kHasHeadScales = false;
  // Whether the logits transform is the member `soft_cap`, which the kernel applies itself.
  static constexpr bool kCapsLogits = false;
};

__device__ __forceinline__ float head_scale(const HeadScale& scale, uint32_t head) {
  return scale.data == nullptr ? 1.f : scale.data[head * scale.stride];
}

// Parameters that a variant sees: the launch's parameters and the lengths of the current request.
template <typename Params>
struct RequestParams : Params {
  uint32_t qo_len, kv_len;

  __device__ __forceinline__ RequestParams(const Params& params, uint32_t qo_len, uint32_t kv_len)
      : Params(params), qo_len(qo_len), kv_len(kv_len) {}
  __device__ __forceinline__ uint32_t get_qo_len(uint32_t) const { return qo_len; }
  __device__ __forceinline__ uint32_t get_kv_len(uint32_t) const { return kv_len; }
};

// The options of items of kind `kKind`, and their type.
template <int kKind, typename Params>
__device__ __forceinline__ const auto& options_of(const Params& params) {
  if constexpr (kKind == 1 && Params::kHasSecondVariant) {
    return params.second_variant;
  } else {
    return params.variant;
  }
}
template <int kKind, typename Params>
using OptionsOf = std::decay_t<decltype(options_of<kKind>(*static_cast<const Params*>(nullptr)))>;

// Implements the built-in options. `kSoftCap`: logits <- c * tanh(logits / c). `kAlibi`: logits +
// slope * (kv - qo position). `kSinks`: one more logit per head in the denominator, without a
// value. `kHeadScales`: factors per head for logits and outputs.
template <bool kSoftCap, bool kAlibi, bool kSinks, bool kHeadScales = false>
struct DefaultAttention;

namespace detail {

struct ScaledAttention : AttentionVariantBase {
  static constexpr bool kNegatesQuery = true;
  float sm_scale_log2;

  template <typename Params>
  __device__ __forceinline__ ScaledAttention(const Params& params, uint32_t, uint8_t*) {
    sm_scale_log2 = fabsf(params.sm_scale) * math::log2e;
  }
};

struct CappedAttention : AttentionVariantBase {
  static constexpr bool kNegatesQuery = true;
  static constexpr bool kHasLogitsTransform = true;
  static constexpr bool kCapsLogits = true;
  static constexpr float sm_scale_log2 = 1.f;  // the cap has the base in it
  math::SoftCap soft_cap;

  template <typename Params>
  __device__ __forceinline__ CappedAttention(const Params& params, uint32_t, uint8_t*)
      : soft_cap(params.soft_cap) {}
};

template <bool kSoftCap>
struct AlibiAttention : AttentionVariantBase {
  static constexpr bool kNegatesQuery = true;
  static constexpr float sm_scale_log2 = math::log2e;  // the transform applies the scale
  float logits_scale;
  math::SoftCap soft_cap;
  int32_t shift;  // position of a query minus its index

  template <typename Params>
  __device__ __forceinline__ AlibiAttention(const Params& params, uint32_t batch_idx, uint8_t*)
      : soft_cap(params.logits_soft_cap, 1.f) {
    logits_scale = fabsf(params.sm_scale);
    shift = static_cast<int32_t>(params.get_kv_len(batch_idx) - params.get_qo_len(batch_idx));
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t distance = static_cast<int32_t>(kv_idx - qo_idx) - shift;
    float x = logits * logits_scale;
    x += params.alibi_slopes[qo_head_idx] * static_cast<float>(distance);
    if constexpr (kSoftCap) x = soft_cap(x);
    return x;
  })
};

template <bool kSoftCap, bool kAlibi>
struct LogitsOf {
  using type = AlibiAttention<kSoftCap>;
};
template <>
struct LogitsOf<false, false> {
  using type = ScaledAttention;
};
template <>
struct LogitsOf<true, false> {
  using type = CappedAttention;
};

}  // namespace detail

template <bool kSoftCap, bool kAlibi, bool kHeadScales>
struct DefaultAttention<kSoftCap, kAlibi, false, kHeadScales>
    : detail::LogitsOf<kSoftCap, kAlibi>::type {
  using Logits = typename detail::LogitsOf<kSoftCap, kAlibi>::type;
  using Logits::Logits;
  static constexpr bool kHasHeadScales = kHeadScales;
};

template <bool kSoftCap, bool kAlibi, bool kHeadScales>
struct DefaultAttention<kSoftCap, kAlibi, true, kHeadScales>
    : detail::LogitsOf<kSoftCap, kAlibi>::type {
  using Logits = typename detail::LogitsOf<kSoftCap, kAlibi>::type;
  using Logits::Logits;
  static constexpr bool kHasHeadScales = kHeadScales;

  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    const float sink = params.sinks[qo_head_idx] * math::log2e;
    const float largest = fmaxf(m, sink);
    if (largest == -math::inf) return;
    scale = math::ptx_exp2(m - largest);
    d = d * scale + math::ptx_exp2(sink - largest);
    m = largest;
  })
};

}  // namespace flashinfer
