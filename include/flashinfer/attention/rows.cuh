// The query rows that a thread holds: applies variants and masks to their logits, which lie in
// registers as the C fragments of mma.
#pragma once

#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/rotation.cuh>
#include <flashinfer/attention/row_weights.cuh>
#include <flashinfer/attention/variant.cuh>

namespace flashinfer {

template <typename Traits, typename Params>
class TileRows : public RowWeights<Traits> {
  using Tile = typename Traits::Tile;
  using Base = RowWeights<Traits>;
  using Base::kTilesOfStep;
  using typename Base::Logits;
  using typename Base::Scales;

 public:
  using Variant = typename Traits::Variant;
  using View = RequestParams<OptionsOf<Traits::kKind, Params>>;
  // Whether a soft cap of visible tiles is left to those who make the weights.
  static constexpr bool kCapsWeights = Variant::kCapsLogits && Tile::kCapsWeights;
  // Whether the query's inverse scale is part of the weights' scale, as no one sees the logits.
  static constexpr bool kFoldsQueryScale = Tile::kNarrow && Tile::kScalesQuery &&
                                           Variant::use_softmax && !Variant::kHasLogitsTransform &&
                                           !Variant::kCapsLogits;

  // Sets up each row before the first key.
  __device__ __forceinline__ TileRows(const Params& params, const WorkItem& item, uint32_t kv_head,
                                      char* shared)
      : params_(params),
        item_(item),
        kv_head_(kv_head),
        kv_end_(item.kv_end),
        view(options_of<Traits::kKind>(params), item.qo_len, item.kv_len),
        variant(view, item.request, reinterpret_cast<uint8_t*>(shared)) {
    if constexpr (kNegatesLogits) {
      sign_ = variant.sm_scale_log2 < 0.f ? 0x80000000u : 0u;
      asm volatile("" : "+r"(sign_));  // else the compiler makes it anew for each tile
    }
  }

  __device__ __forceinline__ void begin(WarpState<Tile>& state) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state.largest[i][h] = Base::kNothingSeen;
        state.sum[i][h] = 0.f;
        const int packed = item_.row_begin + thread_row<Tile>(i, h);
        rows_[i][h] = make_query_row<Traits::kMask, Traits::kWindow>(
            item_, packed, params_.group_size, kv_head_,
            options_of<Traits::kKind>(params_).window_left);
        if constexpr (Variant::kHasHeadScales) {
          const HeadScales& scales = params_.tensors[item_.kind].head_scales;
          // Rows after the tile's end may have heads after the last head.
          const uint32_t head = min(rows_[i][h].qo_head_idx, params_.variant.num_qo_heads - 1);
          head_scale_[i][h] =
              scales.logits * head_scale(scales.q, head) * head_scale(scales.k, kv_head_);
        }
      }
#pragma unroll
      for (int j = 0; j < Tile::kOutputTiles; ++j) {
        state.output[i][j][0] = state.output[i][j][1] = 0.f;
        state.output[i][j][2] = state.output[i][j][3] = 0.f;
      }
    }
  }

  // Whether any of the warp's rows may not see all of its tokens from `first_token` on. Rows ascend
  // with position, so the first has the smallest end and the last the largest beginning.
  __device__ __forceinline__ bool has_hidden_keys(int first_token) const {
    if constexpr (kReadsMask && !kMasksLatest) return true;
    const int last_token = first_token + Tile::kWarpKV - 1;
    bool hidden = last_token >= kv_end_;
    if constexpr (kMasksLatest) hidden |= last_token >= item_.kv_len - item_.qo_len;
    if constexpr (Traits::kMask == MaskMode::causal) {
      hidden |= last_token > __shfl_sync(0xffffffffu, rows_[0][0].last_kv, 0);
    }
    if constexpr (Traits::kWindow) {
      hidden |= first_token < __shfl_sync(0xffffffffu, rows_[Tile::kRowTiles - 1][1].first_kv, 31);
    }
    return hidden;
  }

  // Range of tokens that all of the warp's rows see, for callers that test often. It uses warp
  // reductions, whose results the compiler knows to be the same in all lanes.
  __device__ __forceinline__ KeyRange common_range() const {
    if constexpr (kReadsMask) return KeyRange{0, 0};
    KeyRange range = {0, kv_end_};
    if constexpr (Traits::kMask == MaskMode::causal) {
      range.end = __reduce_min_sync(0xffffffffu, rows_[0][0].last_kv) + 1;
    }
    if constexpr (Traits::kWindow) {
      range.begin = __reduce_max_sync(0xffffffffu, rows_[Tile::kRowTiles - 1][1].first_kv);
    }
    return range;
  }

  // One after the last token that any of the warp's rows may see.
  __device__ __forceinline__ int visible_end() const {
    if constexpr (Traits::kMask != MaskMode::causal) return kv_end_;
    return __reduce_max_sync(0xffffffffu, rows_[Tile::kRowTiles - 1][1].last_kv) + 1;
  }

  // Applies the variant's transform to token tiles kFrom ... kTiles - 1. `inverse_scale` belongs to
  // each row's query, where the tile scales queries. Without `kCaps` the soft cap is left to the
  // caller.
  template <int kTiles = Tile::kTokenTiles, int kFrom = 0, bool kCaps = true>
  __device__ __forceinline__ void transform(
      Logits& logits, int first_token, const float (&inverse_scale)[Tile::kRowTiles][2]) const {
    if constexpr (Variant::kCapsLogits) {
      scale_before_cap<kTiles, kFrom>(logits, inverse_scale);
      if constexpr (kCaps) cap<kTiles, kFrom>(logits);
    }
    constexpr bool kTransforms = Variant::kHasLogitsTransform && !Variant::kCapsLogits;
    const int column = first_column(first_token);
    for_each<kTiles, kFrom>(logits, [&](float& logit, int i, int j, int e) {
      const QueryRow& row = rows_[i][e / 2];
      if constexpr (Tile::kScalesQuery && !Variant::kCapsLogits && !kFoldsQueryScale) {
        logit *= inverse_scale[i][e / 2];
      }
      if constexpr (kTransforms) {
        if constexpr (Variant::kHasHeadScales) logit *= head_scale_[i][e / 2];
        logit = variant.LogitsTransform(view, logit, item_.request, row.qo_idx,
                                        column + token(j, e), row.qo_head_idx, kv_head_);
      }
      if constexpr (kTransforms && Tile::kHidesByMinimum && !Variant::kNegatesQuery) {
        // Where a user's transform is one multiplication, ptxas moves it to each use of the logit
        // and serializes the products (C7511). It does not move this.
        asm volatile("xor.b32 %0, %0, %1;" : "+f"(logit) : "r"(sign_));
      } else if constexpr (kNegatesLogits) {
        logit = __uint_as_float(__float_as_uint(logit) ^ sign_);
      }
    });
  }

  template <int kTiles>
  __device__ __forceinline__ static void negate(Logits& logits) {
    for_each<kTiles, 0>(logits, [](float& logit, int, int, int) { logit = -logit; });
  }

  // Hides the logits of keys that their row does not see.
  template <int kTiles = Tile::kTokenTiles, int kFrom = 0>
  __device__ __forceinline__ void hide(Logits& logits, int first_token) const {
    if constexpr (kReadsWords) {
      hide_by_words<kTiles, kFrom>(logits, first_token);
    } else if constexpr (kHidesByBounds) {
      hide_by_bounds<kTiles, kFrom>(logits, first_column(first_token));
    } else {
      const int column = first_column(first_token);
      for_each<kTiles, kFrom>(logits, [&](float& logit, int i, int j, int e) {
        if (!sees(rows_[i][e / 2], column + token(j, e))) logit = kHiddenLogit;
      });
    }
  }

  // Both, but hides only in steps with tokens beyond `plain`.
  template <int kTiles, int kFrom = 0>
  __device__ __forceinline__ void transform_steps(Logits& logits, int first_token,
                                                  const float (&inverse_scale)[Tile::kRowTiles][2],
                                                  KeyRange plain) const {
    constexpr int kTo = kFrom + Tile::kStepTokens / 8;
    transform<kTo, kFrom>(logits, first_token, inverse_scale);
    if (first_token + kFrom * 8 < plain.begin || first_token + kTo * 8 > plain.end) {
      hide<kTo, kFrom>(logits, first_token);
    }
    if constexpr (kTo < kTiles) {
      transform_steps<kTiles, kTo>(logits, first_token, inverse_scale, plain);
    }
  }

  // A logit is hidden by its minimum with a bound: two instructions, no predicate. Bounds are
  // integers that decrease with the token. Read as floats, they are NaN for visible tokens, for
  // which the minimum is the logit itself, and minus infinity for hidden tokens.
  template <int kTiles, int kFrom>
  __device__ __forceinline__ void hide_by_bounds(Logits& logits, int column) const {
    int first_bounds[Tile::kRowTiles][2], last_bounds[Tile::kRowTiles][2];  // relative to `column`
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const QueryRow& row = rows_[i][h];
        last_bounds[i][h] = min(row.last_kv - column, Tile::kWarpKV) + kHiddenBound + 1;
        if constexpr (Traits::kWindow) {
          first_bounds[i][h] = min(column - max(row.first_kv, 0), Tile::kWarpKV) + kHiddenBound + 1;
        }
      }
    }
    for_each<kTiles, kFrom>(logits, [&](float& logit, int i, int j, int e) {
      if (!variant_sees(rows_[i][e / 2], column + token(j, e))) logit = kHiddenLogit;
      logit = fminf(logit, hidden_bound(last_bounds[i][e / 2], -token(j, e)));
      if constexpr (Traits::kWindow) {
        logit = fminf(logit, hidden_bound(first_bounds[i][e / 2], token(j, e)));
      }
    });
  }

  // Applies a mask that is no range of keys, unless the warp sees all tokens of the tile, as it
  // often does. What it sees is read for all of them at once.
  template <int kTiles, int kFrom>
  __device__ __forceinline__ void hide_by_words(Logits& logits, int first_token) const {
    constexpr int kTokens = (kTiles - kFrom) * 8, kWords = ceil_div(kTokens, 32);
    const int first = first_token + kFrom * 8;
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
      uint32_t words[2][kWords];
      bool sees_all = true;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        visible_words<kTokens>(rows_[i][h], first, words[h]);
#pragma unroll
        for (int w = 0; w < kWords; ++w) sees_all &= words[h][w] == low_bits(kTokens - 32 * w);
      }
      if (!Variant::kHasLogitsMask && __all_sync(0xffffffffu, sees_all)) continue;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[0][w] >>= threadIdx.x % 4 * 2;
        words[1][w] >>= threadIdx.x % 4 * 2;
      }
#pragma unroll
      for (int j = kFrom; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = (j - kFrom) * 8 + e % 2;
          bool visible = words[e / 2][token / 32] & 1u << token % 32;
          visible &= variant_sees(rows_[i][e / 2], first + threadIdx.x % 4 * 2 + token);
          if (!visible) logits[i][j][e] = kHiddenLogit;
        }
      }
    }
  }

  // Which of the `kTokens` tokens from `first_token` on a row sees. Rows after the tile's end have
  // no mask to read, and nothing reads their results.
  template <int kTokens, int kWords>
  __device__ __forceinline__ void visible_words(const QueryRow& row, int first_token,
                                                uint32_t (&words)[kWords]) const {
    const bool has_mask = row.qo_idx < item_.qo_len;
    const int count = min(row.last_kv + 1 - first_token, kTokens);
    const VariantParams& options = params_.variant;
    if constexpr (Traits::kMask == MaskMode::custom) {
      const int64_t bit = int64_t{row.qo_idx} * item_.kv_len + first_token;
      mask_words(options.custom_mask + options.mask_indptr[item_.request], bit,
                 has_mask ? count : 0, words);
    } else if constexpr (Traits::kMask == MaskMode::draft) {
      const uint32_t bits = has_mask ? draft_bits(item_, row, options) : 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int before = item_.kv_len - item_.qo_len - first_token - 32 * w;
        words[w] = low_bits(before);
        if (before >= 0 && before < 32) words[w] |= bits << before;
        if (before < 0 && before > -32) words[w] |= bits >> -before;
        words[w] &= low_bits(count - 32 * w);
      }
    } else {
      const int position = row.qo_idx + item_.kv_len - item_.qo_len;
      const int keys = has_mask ? keys_of_item(item_, position, options) : 0;
      const int prefix_len = static_cast<int>(options.prefix_len_ptr[item_.request]);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int first = first_token + 32 * w;
        words[w] = low_bits(prefix_len - first) | ~low_bits(position + 1 - keys - first);
        words[w] &= low_bits(count - 32 * w);
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (Traits::kWindow) words[w] &= ~low_bits(row.first_kv - first_token - 32 * w);
      if (!has_mask) words[w] = low_bits(kTokens - 32 * w);
    }
  }

  // A thread's first logit has this token.
  __device__ __forceinline__ static int first_column(int first_token) {
    const int lane_idx = threadIdx.x % 32;
    return first_token + (Tile::kNarrow ? lane_idx / 4 : lane_idx % 4 * 2);
  }
  // The distance of the token of logit e of tile j to it.
  __device__ __forceinline__ static constexpr int token(int j, int e) {
    return j * (16 / kTilesOfStep) + e % 2 * (Tile::kNarrow ? 8 : 1);
  }

  template <int kTiles, int kFrom, typename Function>
  __device__ __forceinline__ static void for_each(Logits& logits, const Function& function) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int j = kFrom; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) function(logits[i][j][e], i, j, e);
      }
    }
  }

  // Applies factors of logits, which the soft cap must see.
  template <int kTiles, int kFrom>
  __device__ __forceinline__ void scale_before_cap(
      Logits& logits, const float (&inverse_scale)[Tile::kRowTiles][2]) const {
    if constexpr (Tile::kScalesQuery || Variant::kHasHeadScales) {
      for_each<kTiles, kFrom>(logits, [&](float& logit, int i, int, int e) {
        if constexpr (Tile::kScalesQuery) logit *= inverse_scale[i][e / 2];
        if constexpr (Variant::kHasHeadScales) logit *= head_scale_[i][e / 2];
      });
    }
  }

  // Applies the soft cap. Most logits are small against it, and a warp whose logits all are skips
  // what the others need. A logit's value does not depend on that.
  template <int kTiles, int kFrom>
  __device__ __forceinline__ void cap(Logits& logits) const {
    const math::SoftCap& soft_cap = variant.soft_cap;
    float most[4] = {};  // four, so that few maxima wait for each other
    for_each<kTiles, kFrom>(
        logits, [&](float logit, int, int, int e) { most[e] = fmaxf(most[e], fabsf(logit)); });
    const float largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    if (__builtin_expect(__all_sync(0xffffffffu, soft_cap.is_near(largest)), true)) {
      return for_each<kTiles, kFrom>(
          logits, [&](float& logit, int, int, int) { logit = soft_cap.near(logit); });
    }
#pragma unroll 1
    for (int turn = kFrom; turn < kTiles; ++turn) {
#pragma unroll
      for (int i = 0; i < Tile::kRowTiles; ++i) {
        for (float& logit : logits[i][kFrom]) logit = soft_cap(logit);
        rotate_fragments<1, kTiles - kFrom>([&](int j) -> auto& { return logits[i][kFrom + j]; });
      }
    }
  }

  // Scale of row h of row tile i, in base 2, times `factor`. It is never zero, since zero would
  // turn a masked logit's minus infinity into NaN. A negative scale is applied to q or to the
  // logits instead, so that the largest logit stays the largest.
  __device__ __forceinline__ float scale_log2(int i, int h, float factor = 1.f) const {
    if constexpr (!Variant::use_softmax) return 1.f;  // such a variant has no scale
    float scale = variant.sm_scale_log2;
    // A logits transform has applied the head scale already.
    if constexpr (Variant::kHasHeadScales && !Variant::kHasLogitsTransform) {
      scale *= head_scale_[i][h];
    }
    return fmaxf(fabsf(scale) * factor, 1e-30f);
  }

  __device__ __forceinline__ void scales_log2(Scales& scale, const Scales& inverse_scale) const {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
      for (int h = 0; h < 2; ++h) {
        scale[i][h] = scale_log2(i, h, kFoldsQueryScale ? inverse_scale[i][h] : 1.f);
      }
    }
  }

 private:
  // Whether a negative scale is applied to logits. Without softmax a variant has no scale.
  static constexpr bool kNegatesLogits = Variant::use_softmax && !Variant::kNegatesQuery;
  static constexpr bool kReadsMask = Traits::kMask == MaskMode::custom ||
                                     Traits::kMask == MaskMode::multi_item ||
                                     Traits::kMask == MaskMode::draft || Variant::kHasLogitsMask;
  // Whether only keys of the queries themselves have a mask.
  static constexpr bool kMasksLatest = Traits::kMask == MaskMode::draft && !Variant::kHasLogitsMask;
  // Whether a thread's tokens are neighbours, so that it evaluates a mask by words.
  static constexpr bool kReadsWords =
      (Traits::kMask == MaskMode::custom || Traits::kMask == MaskMode::multi_item ||
       Traits::kMask == MaskMode::draft) &&
      !Tile::kNarrow;
  static constexpr float kHiddenLogit = Variant::use_softmax ? -math::inf : 0.f;
  static constexpr bool kHidesByBounds =
      Tile::kHidesByMinimum && Variant::use_softmax && !kReadsWords;
  static constexpr int kHiddenBound = static_cast<int>(0xff800000u);  // minus infinity
  __device__ __forceinline__ static float hidden_bound(int first, int token) {
    return __int_as_float(__viaddmax_s32(first, token, kHiddenBound));
  }

  __device__ __forceinline__ bool sees(const QueryRow& row, int kv_idx) const {
    bool visible = kv_idx <= row.last_kv;
    if constexpr (Traits::kWindow) visible = visible && kv_idx >= row.first_kv;
    if constexpr (kReadsMask) {
      // Rows after the tile's end have no mask to read.
      visible = visible && row.qo_idx < item_.qo_len;
      visible = visible && is_visible<Traits::kMask>(item_, row, kv_idx, params_.variant);
      visible &= variant_sees(row, kv_idx);
    }
    return visible;
  }

  // Asks the variant's own mask, with indices of tokens and queries that exist in place of others:
  // so no branch need keep it from reading with those.
  __device__ __forceinline__ bool variant_sees(const QueryRow& row, int kv_idx) const {
    if constexpr (Variant::kHasLogitsMask) {
      return variant.LogitsMask(view, item_.request, min(row.qo_idx, item_.qo_len - 1),
                                min(kv_idx, max(row.last_kv, 0)), row.qo_head_idx, kv_head_);
    }
    return true;
  }

  const Params& params_;
  const WorkItem& item_;
  const uint32_t kv_head_;
  const int kv_end_;
  uint32_t sign_ = 0;  // that logits get of a negative scale
  QueryRow rows_[Tile::kRowTiles][2];
  Scales head_scale_;  // factors of logits, if the variant has them

 public:
  const View view;
  Variant variant;
};

}  // namespace flashinfer
