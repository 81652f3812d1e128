// Attention of one query row in double precision, straight from its definition.
#pragma once

#include "attention_case.h"

namespace flashinfer {

class Reference {
 public:
  Reference(const Case& problem, const Group& group, int request_idx, int kv_head)
      : problem_(problem),
        group_(group),
        request_idx_(request_idx),
        kv_head_(kv_head),
        request_(group.plan.requests[request_idx]) {
    for (int i = 0; i < request_.kv_len; ++i) {
      keys_.push_back(read_kv(group.k, group.k_sf, i, kv_head, kHeadDimQK));
      values_.push_back(read_kv(group.v, group.v_sf, i, kv_head, kHeadDimVO));
      if (encoding() == PosEncoding::rope_llama) rotate(keys_.back(), i);
      if (ConfiguredVariant::kHasKeyTransform) {
        for (double& x : keys_.back()) x += 0.25;
      }
    }
  }

  // Sets `output` and `lse` (base 2).
  void run(int qo_idx, int head) {
    std::vector<double> q = read(group_.q->row(0, request_.qo_begin + qo_idx, head), kHeadDimQK);
    const int position = qo_idx + request_.kv_len - request_.qo_len;
    if (encoding() == PosEncoding::rope_llama) rotate(q, position);
    if (ConfiguredVariant::kHasQueryTransform) {
      for (double& x : q) x *= 0.5;
    }
    std::vector<double> weights(request_.kv_len, 0.);
    double sum = 0;
    if constexpr (ConfiguredVariant::use_softmax) {
      const double minus_infinity = -std::numeric_limits<double>::infinity();
      const double extra = extra_logit(head);
      double largest = extra;
      for (int i = 0; i < request_.kv_len; ++i) {
        const bool visible = sees(qo_idx, position, i);
        weights[i] = visible ? logit(dot(q, keys_[i]), head, i - position) : minus_infinity;
        largest = std::max(largest, weights[i]);
      }
      if (largest == minus_infinity) {
        output.assign(kHeadDimVO, 0.);
        lse = minus_infinity;
        return;
      }
      sum = std::exp(extra - largest);
      for (double& weight : weights) sum += weight = std::exp(weight - largest);
      lse = (largest + std::log(sum)) / std::log(2.);
    } else {
      for (int i = 0; i < request_.kv_len; ++i) {
        if (!sees(qo_idx, position, i)) continue;
        weights[i] = 1 / (1 + std::exp(-logit(dot(q, keys_[i]), head, i - position)));
      }
      sum = 1;
      lse = std::nan("");
    }
    output.assign(kHeadDimVO, 0.);
    for (int i = 0; i < request_.kv_len; ++i) {
      for (int j = 0; j < kHeadDimVO; ++j) output[j] += weights[i] * values_[i][j];
    }
    const double gate = ConfiguredVariant::kHasOutputTransform ? 1. + 0.25 * (head % 4) : 1.;
    const double scale = gate * group_.v_scale * head_scale(group_.v_scales, kv_head_);
    for (double& x : output) x *= scale / sum;
  }

  std::vector<double> output;
  double lse;

 private:
  template <typename T>
  static std::vector<double> read(const T* row, int dim) {
    std::vector<double> result(dim);
    for (int i = 0; i < dim; ++i) result[i] = to_float(row[i]);
    return result;
  }

  template <typename T>
  std::vector<double> read_kv(const std::unique_ptr<Rows<T>>& rows,
                              const std::unique_ptr<Rows<T>>& scales, int kv_idx, int kv_head,
                              int dim) const {
    const T* const row = group_.kv_row(*rows, request_, kv_idx, kv_head);
    if constexpr (kKeysAre4Bit) {
      constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const T* const scale = group_.kv_row(*scales, request_, kv_idx, kv_head);
      std::vector<double> result(dim);
      for (int i = 0; i < dim; ++i) {
        const int code = row[i / 2] >> (i % 2 * 4) & 15;
        result[i] = kMagnitudes[code % 8] * (code < 8 ? 1 : -1) *
                    to_float(dtype::float8_e4m3fn{scale[i / 16]});
      }
      return result;
    } else {
      return read(row, dim);
    }
  }

  const VariantParams& options() const { return problem_.options_of(group_); }
  PosEncoding encoding() const { return kEncodings[group_.kind]; }

  static double head_scale(const std::vector<float>& scales, int head) {
    return scales.empty() ? 1. : scales[scales.size() > 1 ? head : 0];
  }

  static double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }

  void rotate(std::vector<double>& row, int position) const {
    const int half = kHeadDimQK / 2;
    for (int i = 0; i < half; ++i) {
      const double angle =
          position * options().rope_scale_rcp * std::pow(10000., -2. * i / kHeadDimQK);
      const double a = row[i], b = row[i + half];
      row[i] = a * std::cos(angle) - b * std::sin(angle);
      row[i + half] = b * std::cos(angle) + a * std::sin(angle);
    }
  }

  double logit(double product, int head, int distance) const {
    double x = product * options().sm_scale;
    if (kHeadScales) {
      x *= group_.logits_scale * head_scale(group_.q_scales, head) *
           head_scale(group_.k_scales, kv_head_);
    }
#if FLASHINFER_CFG_CUSTOM_VARIANT && !defined(EMULATION_RANGES)
    x /= problem_.variant.temperature[head];
    if (!ConfiguredVariant::use_softmax) x += problem_.variant.bias;
#endif
    if (encoding() == PosEncoding::alibi) x += options().alibi_slopes[head] * distance;
    const double cap = options().logits_soft_cap;
    return kSoftCaps[group_.kind] ? cap * std::tanh(x / cap) : x;
  }

  // In the denominator besides those of the keys.
  double extra_logit(int head) const {
    const bool exists = kSinks || ConfiguredVariant::kHasMDUpdate;
    return exists ? problem_.variant.sinks[head] : -std::numeric_limits<double>::infinity();
  }

  bool sees(int qo_idx, int position, int kv_idx) const {
    const VariantParams& options = problem_.variant;  // masks are of both kinds
    const int32_t window_left = this->options().window_left;
#if defined(EMULATION_RANGES)
    const auto& own = problem_.variant;
    const int32_t* range = own.bidirectional_ranges + 2 * (request_.qo_begin + qo_idx);
    const auto is_within = [&](int64_t window) {
      return window < 0 || kv_idx >= position - window;
    };
    if (kv_idx <= position && is_within(own.causal_window_left)) return true;
    return kv_idx >= range[0] && kv_idx <= range[1] && is_within(own.range_window_left);
#endif
    if (ConfiguredVariant::kHasLogitsMask && kCustomVariant && (position + kv_idx) % 3 == 0)
      return false;
    if (window_left >= 0 && kv_idx < position - window_left) return false;
    if (group_.plan.causal && kv_idx > position) return false;
    if (group_.mask == MaskMode::custom) {
      const int64_t bit = int64_t{qo_idx} * request_.kv_len + kv_idx;
      const uint8_t* mask = options.custom_mask + options.mask_indptr[request_idx_];
      return mask[bit / 8] >> (bit % 8) & 1;
    }
    if (group_.mask == MaskMode::draft) {
      const int own = qo_idx + kv_idx - position;  // among the keys of the queries
      const auto* words = reinterpret_cast<const uint32_t*>(options.custom_mask);
      return own < 0 || words[request_.qo_begin + qo_idx] >> own & 1;
    }
    if (group_.mask == MaskMode::multi_item) {
      const int prefix_len = options.prefix_len_ptr[request_idx_];
      if (kv_idx < prefix_len || position < prefix_len) return true;
      const int at = position - prefix_len, length = options.token_pos_in_items_len;
      if (at >= length) return false;  // after the last item
      const int in_item = options.token_pos_in_items_ptr[int64_t{request_idx_} * length + at];
      return kv_idx > position - in_item;
    }
    return true;
  }

  const Case& problem_;
  const Group& group_;
  const int request_idx_, kv_head_;
  const PlanRequest& request_;
  std::vector<std::vector<double>> keys_, values_;
};

}  // namespace flashinfer
