// One random attention problem: lengths, tensors of random strides, options, and the kernel's
// arguments for them.
#pragma once

#include <sys/mman.h>

#include <memory>

#include "attention.cu"  // with what it is configured for

namespace flashinfer {

using Q = dtype::FLASHINFER_CFG_DTYPE_Q;
using KV = dtype::FLASHINFER_CFG_DTYPE_KV;
using O = dtype::FLASHINFER_CFG_DTYPE_O;
using Params = ConfiguredParams;

inline constexpr int kHeadDimQK = FLASHINFER_CFG_HEAD_DIM_QK;
inline constexpr int kHeadDimVO = FLASHINFER_CFG_HEAD_DIM_VO;
inline constexpr int kTileQ = FLASHINFER_CFG_TILE_Q;
inline constexpr int kTileQSecond = FLASHINFER_CFG_TILE_Q_SECOND;
inline constexpr bool kPaged = FLASHINFER_CFG_PAGED;
inline constexpr PosEncoding kEncodings[2] = {PosEncoding::FLASHINFER_CFG_POS_ENCODING,
                                              PosEncoding::FLASHINFER_CFG_POS_ENCODING_SECOND};
inline constexpr bool kSoftCaps[2] = {FLASHINFER_CFG_LOGITS_SOFT_CAP,
                                      FLASHINFER_CFG_LOGITS_SOFT_CAP_SECOND};
inline constexpr bool kWindows[2] = {FLASHINFER_CFG_SLIDING_WINDOW,
                                     FLASHINFER_CFG_SLIDING_WINDOW_SECOND};
// Whether the two kinds of items differ in what selects code.
inline constexpr bool kDiffer =
    kTileQSecond != 0 &&
    (kEncodings[0] != kEncodings[1] || kSoftCaps[0] != kSoftCaps[1] || kWindows[0] != kWindows[1]);
inline constexpr bool kSinks = FLASHINFER_CFG_SINKS;
inline constexpr bool kHeadScales = FLASHINFER_CFG_HEAD_SCALES;
inline constexpr bool kKeysAre4Bit = std::is_same_v<KV, dtype::uint8>;
inline constexpr int kCodes = kKeysAre4Bit ? 2 : 1;  // in an element of k and v
inline constexpr bool kCustomVariant = FLASHINFER_CFG_CUSTOM_VARIANT;
inline constexpr MaskMode kMask = MaskMode::FLASHINFER_CFG_MASK_MODE;
inline constexpr MaskMode kMaskSecond = MaskMode::FLASHINFER_CFG_MASK_MODE_SECOND;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  // A number from `low` to `high`, both included.
  int integer(int low, int high) { return low + static_cast<int>(engine_() % (high - low + 1)); }
  bool one_in(int n) { return integer(1, n) == 1; }
  float normal() { return normal_(engine_); }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

// Rows of `dim` elements by three strides. Memory is reserved, and real only where it is touched:
// strides may be of any size. What follows the last row cannot be read.
template <typename T>
class Rows {
 public:
  // `gap`: elements between rows; `outer_stride`: if not 0, elements from page to page, or from
  // token to token where there are no pages.
  Rows(int pages, int tokens, int heads, int dim, bool heads_first, int gap, int64_t outer_stride)
      : dim(dim) {
    const int64_t row = dim + gap;
    stride_token = heads_first ? row : row * heads;
    stride_head = heads_first ? row * tokens : row;
    stride_page = row * heads * tokens;
    if (outer_stride != 0) (pages > 1 ? stride_page : stride_token) = outer_stride;
    const int64_t last =
        (pages - 1) * stride_page + (tokens - 1) * stride_token + (heads - 1) * stride_head;
    const int64_t bytes = ceil_div((last + dim) * int64_t{sizeof(T)}, int64_t{16}) * 16;
    const int64_t readable = ceil_div(bytes, kGuard) * kGuard;
    bytes_ = readable + kGuard;
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      std::printf("cannot reserve %lld bytes\n", static_cast<long long>(bytes_));
      std::exit(77);  // skipped
    }
    memory_ = static_cast<char*>(memory);
    if (mprotect(memory_ + readable, kGuard, PROT_NONE) != 0) std::exit(77);
    data = reinterpret_cast<T*>(memory_ + readable - bytes);
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  ~Rows() { munmap(memory_, bytes_); }

  T* row(int page, int token, int head) const {
    return data + page * stride_page + token * stride_token + head * stride_head;
  }
  template <typename Value>
  void fill(int pages, int tokens, int heads, const Value& value) {
    for (int p = 0; p < pages; ++p) {
      for (int t = 0; t < tokens; ++t) {
        for (int h = 0; h < heads; ++h) {
          for (int i = 0; i < dim; ++i) row(p, t, h)[i] = value();
        }
      }
    }
  }

  T* data;
  int dim;
  int64_t stride_page, stride_token, stride_head;

 private:
  static constexpr int64_t kGuard = 1 << 16;  // a multiple of a page on any machine
  char* memory_;
  int64_t bytes_;
};

// Requests that share tensors, masks and options.
struct Group {
  int kind = 0;  // whose options they have
  RequestGroup plan;
  MaskMode mask;
  bool paged;
  int page_size, num_pages;
  std::vector<int32_t> pages;  // of all requests
  std::unique_ptr<Rows<Q>> q;
  std::unique_ptr<Rows<KV>> k, v, k_sf, v_sf;  // scales of 4-bit rows
  std::unique_ptr<Rows<O>> o;
  std::vector<float> lse;      // empty: not wanted
  std::vector<float> o_scale;  // of 8-bit outputs
  int64_t o_stride_scale = 0;
  float v_scale;
  float logits_scale = 1.f;
  std::vector<float> q_scales, k_scales, v_scales;  // of heads, or one for all; empty: none

  const KV* kv_row(const Rows<KV>& rows, const PlanRequest& request, int kv_idx, int head) const {
    if (!paged) return rows.row(0, request.kv_base + kv_idx, head);
    return rows.row(pages[request.kv_base + kv_idx / page_size], kv_idx % page_size, head);
  }

  AttentionTensors tensors() {
    AttentionTensors t = {};
    t.q = q->data, t.k = k->data, t.v = v->data, t.o = o->data;
    t.lse = lse.empty() ? nullptr : lse.data();
    t.kv_indices = paged ? pages.data() : nullptr;
    t.q_stride_token = q->stride_token, t.q_stride_head = q->stride_head;
    t.o_stride_token = o->stride_token, t.o_stride_head = o->stride_head;
    t.k_stride_page = k->stride_page, t.v_stride_page = v->stride_page;
    t.k_stride_token = k->stride_token, t.v_stride_token = v->stride_token;
    t.k_stride_head = k->stride_head, t.v_stride_head = v->stride_head;
    t.num_pages = paged ? num_pages : 0;
    t.v_scale = v_scale * First::Tile::kUnit;
    const auto of_heads = [](const std::vector<float>& scales) {
      return HeadScale{scales.empty() ? nullptr : scales.data(), scales.size() > 1 ? 1 : 0};
    };
    t.head_scales = {logits_scale, of_heads(q_scales), of_heads(k_scales), of_heads(v_scales)};
    if (kKeysAre4Bit) {
      const auto scales = [](const auto& rows) {
        return BlockScales{reinterpret_cast<const uint8_t*>(rows.data), rows.stride_page,
                           rows.stride_token, rows.stride_head};
      };
      t.k_sf = scales(*k_sf), t.v_sf = scales(*v_sf);
    }
    return t;
  }
};

// Calls `change` with the options of items of kind 1, if they have some of their own.
template <typename P, typename Change>
void change_second(P& params, const Change& change) {
  if constexpr (P::kHasSecondVariant) change(params.second_variant);
}

class Case {
 public:
  Case(uint32_t seed, bool huge_strides) : random_(seed), huge_strides_(huge_strides) {
    group_size = random_.integer(1, kTileQ <= 16 ? 8 : 5);
    num_kv_heads = random_.integer(1, 2);
    num_qo_heads = group_size * num_kv_heads;
    page_size = random_.one_in(2) ? 16 * random_.integer(1, 3) : random_.integer(1, 20);
    draw_options();
    // Two shapes: by length among the requests of one group, or a group each.
    const bool two_groups =
        kTileQSecond != 0 && (!kPaged || kMask != kMaskSecond || kDiffer || random_.one_in(2));
    if (two_groups && !kCustomVariant) draw_numbers(second, 1);
    groups.push_back(draw_group(0, kPaged, kMask, kTileQ, kTileQSecond != 0 && !two_groups));
    if (two_groups) groups.push_back(draw_group(1, true, kMaskSecond, kTileQSecond, false));
    if (First::Tile::kScalesQuery && kTileQSecond == 0 && !kSoftCaps[0] && random_.one_in(8)) {
      make_faint();
    }
  }

  // The plan and the workspaces are filled in later.
  Params params() {
    Params p = {};
    p.tensors[0] = groups.front().tensors();
    p.tensors[1] = groups.back().tensors();
    Group& first = groups.front();
    if (!first.o_scale.empty()) p.o_scale = {first.o_scale.data(), first.o_stride_scale, 1};
    p.variant = variant;
    set_second_variant(p);
    p.num_kv_heads = FastDivisor(num_kv_heads);
    p.group_size = FastDivisor(group_size);
    p.page_size = FastDivisor(page_size);
    return p;
  }

  template <typename P>
  void set_second_variant(P& p) const {
    if constexpr (P::kHasSecondVariant && kCustomVariant) {
      p.second_variant = variant;
    } else if constexpr (P::kHasSecondVariant) {
      VariantParams& options = p.second_variant;
      options = variant;
      options.sm_scale = second.sm_scale;
      options.window_left = second.window_left;
      options.logits_soft_cap = second.logits_soft_cap;
      options.rope_scale_rcp = second.rope_scale_rcp;
      set_soft_cap(p.second_variant);
    }
  }

  const VariantParams& options_of(const Group& group) const {
    return group.kind == 0 ? static_cast<const VariantParams&>(variant) : second;
  }

  int group_size, num_kv_heads, num_qo_heads, page_size;
  ConfiguredVariantParams variant = {};
  VariantParams second = {};  // numbers of items of kind 1
  std::vector<Group> groups;

 private:
  // Draws the numbers that either kind of items has for itself.
  void draw_numbers(VariantParams& options, int kind) {
    const float sign = random_.one_in(5) ? -1.f : 1.f;
    const float sharpness = random_.one_in(4) ? 8.f : 1.f;
    options.sm_scale = sign * sharpness / std::sqrt(static_cast<float>(kHeadDimQK));
    options.logits_soft_cap = kind == 0 ? 5.f : 9.f;
    const int most = random_.one_in(3) ? 700 : 90;
    options.window_left = kWindows[kind] ? random_.integer(-1, most) : -1;
    options.rope_scale_rcp = kind == 0 ? 0.5f : 0.75f;
  }

  void draw_options() {
    VariantParams& options = variant;
    draw_numbers(options, 0);
    set_soft_cap(variant);
    options.num_qo_heads = num_qo_heads;
    options.num_kv_heads = num_kv_heads;
    options.rope_theta_rcp_log2 = -std::log2(10000.f) * 2 / kHeadDimQK;
    for (int i = 0; i < num_qo_heads; ++i) {
      slopes_.push_back(random_.normal() * 0.1f);
      sinks_.push_back(random_.normal());
      temperatures_.push_back(0.5f + 0.25f * (i % 4));
    }
    options.alibi_slopes = slopes_.data();
    options.sinks = sinks_.data();
    second = options;
#if FLASHINFER_CFG_CUSTOM_VARIANT && !defined(EMULATION_RANGES)
    variant.temperature = temperatures_.data();
    variant.extra_logits = sinks_.data();
    variant.bias = 0.25f;
#endif
  }

  Group draw_group(int kind, bool paged, MaskMode mask, int tile_q, bool mixed) {
    Group group = {};
    group.kind = kind;
    group.mask = mask;
    group.paged = paged;
    group.page_size = page_size;
    group.plan.causal = mask == MaskMode::causal || mask == MaskMode::multi_item;
    group.plan.window_left = options_of(group).window_left;
    group.v_scale = random_.one_in(2) ? 0.7f : 1.f;
    if (kHeadScales) draw_scales(group);
    const int batch_size = random_.integer(1, 4);
    int longest = tile_q <= 16 ? tile_q / group_size : tile_q == 64 ? 40 : 70;
    if (mask == MaskMode::draft) longest = std::min(longest, 32);
    int tokens = 0, entries = 0;  // of q, and of K/V or of its pages
    for (int i = 0; i < batch_size; ++i) {
      PlanRequest request;
      request.qo_begin = tokens;
      request.qo_len = random_.integer(0, mixed && i % 2 == 0 ? 3 : longest);
      request.kv_base = entries;
      const int most = random_.one_in(10) ? 1000 : 300;
      request.kv_len = random_.integer(0, random_.one_in(6) ? 3 : most);
      tokens += request.qo_len;
      entries += paged ? ceil_div(request.kv_len, page_size) : request.kv_len;
      group.plan.requests.push_back(request);
    }
    for (int i = 0; i < entries + 1; ++i) group.pages.push_back(i);
    random_.shuffle(group.pages);
    group.num_pages = entries + 1;
    draw_tensors(group, tokens + 1, entries + 1);
    if (mask == MaskMode::custom) draw_custom_mask(group);
    if (mask == MaskMode::multi_item) draw_items(group);
    if (mask == MaskMode::draft) draw_drafts(tokens);
    draw_ranges(group);
    return group;
  }

  void draw_scales(Group& group) {
    const auto draw = [&](int heads) {
      std::vector<float> scales(random_.one_in(3) ? 0 : random_.one_in(2) ? 1 : heads);
      for (float& scale : scales) scale = 0.25f * random_.integer(1, 8);
      return scales;
    };
    group.logits_scale = 0.5f * random_.integer(1, 4);
    group.q_scales = draw(num_qo_heads);
    group.k_scales = draw(num_kv_heads);
    group.v_scales = draw(num_kv_heads);
  }

  void draw_tensors(Group& group, int tokens, int entries) {
    const auto normal = [&](auto type) {
      return [&] { return from_float<decltype(type)>(random_.normal()); };
    };
    const auto gap = [&] { return random_.one_in(2) ? 0 : 16; };
    const int64_t huge_token = huge_strides_ ? (int64_t{1} << 28) + 16 : 0;
    const int64_t huge_outer = huge_strides_ ? (int64_t{1} << 31) + 16 : 0;
    const auto make_q = [&](auto type, int dim) {
      // Heads first needs the token stride; a huge one replaces it.
      const bool heads_first = !huge_strides_ && random_.one_in(2);
      return std::make_unique<Rows<decltype(type)>>(1, tokens, num_qo_heads, dim, heads_first,
                                                    gap(), huge_token);
    };
    const int pages = group.paged ? entries : 1, slots = group.paged ? page_size : entries;
    // Rows of a page that follow each other, the same way in all of these tensors.
    const bool is_dense = kKeysAre4Bit && group.paged && random_.one_in(2);
    const auto make_kv = [&](int dim, const auto& value, int alignment) {
      const bool heads_first = is_dense || ((group.paged || !huge_strides_) && random_.one_in(2));
      const int space = is_dense ? 0 : gap() + (alignment - dim % alignment) % alignment;
      auto rows = std::make_unique<Rows<KV>>(pages, slots, num_kv_heads, dim, heads_first, space,
                                             group.paged && pages > 1 ? huge_outer : huge_token);
      rows->fill(pages, slots, num_kv_heads, value);
      return rows;
    };
    group.q = make_q(Q{}, kHeadDimQK);
    group.q->fill(1, tokens, num_qo_heads, normal(Q{}));
    const auto draw_kv = [&](auto type) {
      using T = decltype(type);
      if constexpr (kKeysAre4Bit) {
        const auto codes = [&] { return T(random_.integer(0, 255)); };
        // Most scales are 0.06 to 0.3. A few are any number up to 4, also subnormal.
        const auto scale = [&] {
          return T(random_.one_in(20) ? random_.integer(0, 72) : random_.integer(24, 42));
        };
        group.k = make_kv(kHeadDimQK / 2, codes, 16);
        group.v = make_kv(kHeadDimVO / 2, codes, 16);
        group.k_sf = make_kv(kHeadDimQK / 16, scale, 16);
        group.v_sf = make_kv(kHeadDimVO / 16, scale, 16);
      } else {
        group.k = make_kv(kHeadDimQK, normal(type), 1);
        group.v = make_kv(kHeadDimVO, normal(type), 1);
      }
    };
    draw_kv(KV{});
    group.o = make_q(O{}, kHeadDimVO);
    group.o->fill(1, tokens, num_qo_heads, [] { return O{static_cast<decltype(O::bits)>(~0u)}; });
    if (!random_.one_in(4)) group.lse.assign(tokens * num_qo_heads, math::nan);
    if (kIsCode<O>) {
      group.o_stride_scale = num_qo_heads + random_.integer(0, 3);
      group.o_scale.assign(tokens * group.o_stride_scale, math::nan);
    }
  }

  // Queries and a scale whose product float32 does not represent.
  void make_faint() {
    if constexpr (!std::is_same_v<Q, dtype::bfloat16>) return;
    variant.sm_scale = std::copysign(1e-25f, variant.sm_scale);
    for (const Group& group : groups) {
      const PlanRequest& last = group.plan.requests.back();
      group.q->fill(1, last.qo_begin + last.qo_len, num_qo_heads,
                    [&] { return from_float<Q>(0x1p-100f * random_.normal()); });
    }
  }

  void draw_custom_mask(const Group& group) {
    mask_indptr_ = {0};
    for (const PlanRequest& r : group.plan.requests) {
      mask_indptr_.push_back(mask_indptr_.back() + ceil_div(r.qo_len * r.kv_len, 8));
    }
    for (int i = 0; i <= mask_indptr_.back(); ++i) mask_.push_back(random_.integer(0, 255));
    variant.VariantParams::custom_mask = mask_.data();
    variant.VariantParams::mask_indptr = mask_indptr_.data();
  }

  // A word for each query; no more, so that a read of another is found.
  void draw_drafts(int tokens) {
    for (int i = 0; i < tokens; ++i) {
      draft_words_.push_back(random_.integer(0, 0xffff) << 16 | random_.integer(0, 0xffff));
    }
    variant.VariantParams::custom_mask = reinterpret_cast<const uint8_t*>(draft_words_.data());
  }

  // Items of random lengths from a random prefix on.
  void draw_items(const Group& group) {
    constexpr int kLength = 400;
    for (const PlanRequest& r : group.plan.requests) {
      prefix_lens_.push_back(random_.integer(0, std::max(r.kv_len, 1)));
      for (int i = 0, position = 0; i < kLength; ++i) {
        item_positions_.push_back(position);
        position = random_.one_in(10) ? 0 : position + 1;
      }
    }
    variant.VariantParams::prefix_len_ptr = prefix_lens_.data();
    variant.VariantParams::token_pos_in_items_ptr = item_positions_.data();
    variant.VariantParams::token_pos_in_items_len = kLength;
  }

  // A range of keys for each query: none, around its position, or anywhere, also beyond the keys.
  void draw_ranges([[maybe_unused]] const Group& group) {
#if defined(EMULATION_RANGES)
    for (const PlanRequest& r : group.plan.requests) {
      first_rows_.push_back(r.qo_begin);
      for (int i = 0; i < r.qo_len; ++i) {
        const int position = i + r.kv_len - r.qo_len;
        const bool is_near = random_.one_in(2);
        const int begin = is_near ? position - random_.integer(0, 40) : random_.integer(-5, 320);
        const bool is_none = random_.one_in(4);
        ranges_.push_back(is_none ? -1 : begin);
        ranges_.push_back(is_none ? -1 : begin + random_.integer(-1, 80));
      }
    }
    variant.bidirectional_ranges = ranges_.data();
    variant.qo_indptr = first_rows_.data();
    variant.causal_window_left = random_.one_in(2) ? -1 : random_.integer(0, 100);
    variant.range_window_left = random_.one_in(2) ? -1 : random_.integer(0, 30);
#endif
  }

  Random random_;
  bool huge_strides_;
  std::vector<int32_t> first_rows_, ranges_;
  std::vector<float> slopes_, sinks_, temperatures_;
  std::vector<uint8_t> mask_;
  std::vector<int32_t> mask_indptr_;
  std::vector<uint32_t> prefix_lens_, draft_words_;
  std::vector<uint16_t> item_positions_;
};

}  // namespace flashinfer
