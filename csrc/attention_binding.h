// Checks and state of the attention bindings.
//
// attention_bind() checks a plan's tensors and options once and keeps them as ready launch
// arguments in a CPU tensor that Python owns (struct_tensor.h). A run checks only q, k, v, o and
// lse, and launches.
#pragma once

#include <flashinfer/scheduler/plan_layout.h>

#include <cstring>

#include "attention.h"
#include "ffi.h"
#include "index_binding.h"
#include "struct_tensor.h"

namespace flashinfer {

using ffi::Tensor;

constexpr DLDataType kTypeKV = ffi::dtype::FLASHINFER_CFG_DTYPE_KV;
// 4-bit codes lie in pairs, and their values leave out a factor; see Tile::kUnit.
constexpr bool kKeysAre4Bit = kTypeKV.code == kDLUInt;
constexpr int kCodes = kKeysAre4Bit ? 2 : 1;
constexpr double kUnit = kKeysAre4Bit ? 0x1p14 : 1.;
constexpr DLDataType kTypeO = ffi::dtype::FLASHINFER_CFG_DTYPE_O;
constexpr bool kOutputIsCode = kTypeO.bits == 8;

// Requirements of a plan on the tensors of one kind of work item.
struct PlannedTensors {
  int64_t qo_tokens;
  int64_t kv_entries;  // paged: entries of kv_indices; ragged: tokens
  int64_t paged_rows;  // if not negative, k and v have this many tokens and are read as pages
  bool is_hnd;
  bool exact_tokens;  // false: q may have more rows than the plan; they are left unchanged
};

// Options that items of kind 1 with tensors of their own have for themselves.
struct OwnOptions {
  float sm_scale, logits_soft_cap;
  int32_t window_left;
  float rope_scale_rcp, rope_theta_rcp_log2;
  const float* alibi_slopes;
};

// Written by attention_bind() and read by attention_run().
struct AttentionLaunch {
  static constexpr uint64_t kTag = 0x61747465'6e74696fu;

  uint64_t tag;  // bytes that were not bound have a different tag
  ConfiguredParams params;
  PlannedTensors planned[2];
  OwnOptions second;
  int64_t num_scale_rows;  // pages of kv_cache_sf, or tokens; negative: it was not given
  int32_t device_id;
  bool has_second;        // items of kind 1 have tensors of their own
  bool has_output_scale;  // for the next run
};

inline AttentionLaunch& bound_launch_of(ffi::Args& args) {
  AttentionLaunch& launch = struct_in<AttentionLaunch>(args.tensor("launch"));
  if (launch.tag != AttentionLaunch::kTag) {
    ffi::raise("RuntimeError", "attention_bind() comes first");
  }
  return launch;
}

// Sets the options of items of kind 1, once those of kind 0 are: the same but for their own.
inline void set_second_variant([[maybe_unused]] ConfiguredParams& params,
                               [[maybe_unused]] const AttentionLaunch& launch) {
#if FLASHINFER_CFG_TILE_Q_SECOND && FLASHINFER_CFG_CUSTOM_VARIANT
  params.second_variant = params.variant;
#elif FLASHINFER_CFG_TILE_Q_SECOND
  VariantParams& second = params.second_variant;
  second = params.variant;
  if (launch.has_second) {
    const OwnOptions& own = launch.second;
    second.sm_scale = own.sm_scale;
    second.logits_soft_cap = own.logits_soft_cap;
    second.window_left = own.window_left;
    second.rope_scale_rcp = own.rope_scale_rcp;
    second.rope_theta_rcp_log2 = own.rope_theta_rcp_log2;
    second.alibi_slopes = own.alibi_slopes;
  }
  set_soft_cap(params.second_variant);
#endif
}

// Elements of a contiguous operand of the options; the caller checks the device.
template <typename T>
const T* option_data(const Tensor& tensor, DLDataType type, int64_t min_length) {
  if (!tensor) return nullptr;
  ffi::check_dtype(tensor, type);
  if (tensor.numel() < min_length) {
    ffi::raise("ValueError", "`%s` must have at least %lld elements, got shape %s", tensor.name,
               static_cast<long long>(min_length), tensor.shape_text().c_str());
  }
  int64_t expected = 1;
  for (int i = tensor.ndim() - 1; i >= 0; --i) {
    if (tensor.dim(i) > 1 && tensor.stride(i) != expected) {
      ffi::raise("ValueError", "`%s` must be contiguous, got strides %s", tensor.name,
                 ffi::list_text(tensor.dl->strides, tensor.ndim()).c_str());
    }
    expected *= tensor.dim(i);
  }
  return static_cast<const T*>(tensor.data());
}

inline void check_on_device(const Tensor& tensor, int32_t device_id) {
  ffi::check_cuda(tensor);
  if (tensor.dl->device.device_id != device_id) {
    ffi::raise("ValueError", "`%s` is on cuda:%d, the workspace of the plan on cuda:%d",
               tensor.name, tensor.dl->device.device_id, device_id);
  }
}

// A factor for each of `heads` heads, or one factor for all.
inline HeadScale read_head_scale(ffi::Args& args, const char* name, int64_t heads,
                                 int32_t device_id) {
  const Tensor scale = args.optional_tensor(name);
  if (!scale) return {nullptr, 0};
  ffi::check_dtype(scale, ffi::dtype::float32);
  const bool is_one = scale.numel() == 1 && scale.ndim() < 2;
  if (!is_one) ffi::check_shape(scale, {heads});
  check_on_device(scale, device_id);
  return {static_cast<const float*>(scale.data()), is_one ? 0 : scale.stride(0)};
}

// Checks and sets the query and the output of one run.
inline void set_queries(AttentionTensors& tensors, const PlannedTensors& planned, int64_t heads,
                        const Tensor& q, const Tensor& o, const Tensor& lse) {
  ffi::check_dtype(q, ffi::dtype::FLASHINFER_CFG_DTYPE_Q);
  ffi::check_ndim(q, 3, 3);
  if (q.dim(0) < planned.qo_tokens || (planned.exact_tokens && q.dim(0) != planned.qo_tokens)) {
    ffi::raise("ValueError", "`%s` must have %s%lld tokens as planned, got shape %s", q.name,
               planned.exact_tokens ? "" : "at least ", static_cast<long long>(planned.qo_tokens),
               q.shape_text().c_str());
  }
  ffi::check_shape(q, {q.dim(0), heads, FLASHINFER_CFG_HEAD_DIM_QK});
  ffi::check_vector_rows(q);
  ffi::check_dtype(o, kTypeO);
  ffi::check_shape(o, {q.dim(0), heads, FLASHINFER_CFG_HEAD_DIM_VO});
  ffi::check_vector_rows(o);
  ffi::check_no_broadcast(o);
  ffi::check_disjoint(o, q);
  tensors.q = q.data();
  tensors.q_stride_token = q.stride(0);
  tensors.q_stride_head = q.stride(1);
  tensors.num_qo_tokens = q.dim(0);
  tensors.o = o.data();
  tensors.o_stride_token = o.stride(0);
  tensors.o_stride_head = o.stride(1);
  tensors.lse = nullptr;
  if (!lse) return;
  ffi::check_shape(lse, {q.dim(0), heads});
  tensors.lse = const_cast<float*>(option_data<float>(lse, ffi::dtype::float32, 0));
  ffi::check_disjoint(lse, q);
  ffi::check_disjoint(lse, o);
}

// Keys and values, or their scales, as the kernel reads them; strides are in elements.
struct KeyValueView {
  const void *k, *v;
  int64_t k_stride_page, k_stride_token, k_stride_head;
  int64_t v_stride_page, v_stride_token, v_stride_head;
};

// Elements of the rows of k and v, and the bytes at whose multiples the rows begin.
struct RowSizes {
  int64_t k, v;
  int alignment_k = 16, alignment_v = 16;
};
constexpr RowSizes kRows = {FLASHINFER_CFG_HEAD_DIM_QK / kCodes,
                            FLASHINFER_CFG_HEAD_DIM_VO / kCodes};

// Checks keys and values in pages: two caches, or one with a dimension of 2 after the pages. Pages
// of one token may lack the dimension of slots: engines keep [tokens, heads, dim].
inline KeyValueView view_pages(bool is_hnd, int64_t page_size, int64_t heads, const Tensor& k,
                               const Tensor& v, const RowSizes& rows) {
  const int parts = v ? 0 : 1;
  const bool by_token = page_size == 1 && k.ndim() == 3 + parts;
  const ffi::CacheAxes axes = by_token ? ffi::CacheAxes{0, 1} : ffi::cache_axes(is_hnd);
  const int slot = by_token ? 0 : axes.slot + parts, head = axes.head + parts;
  const auto check_part = [&](const Tensor& part, int64_t head_dim, int alignment) {
    int64_t shape[5] = {k.dim(0), 2};
    int ndim = 1 + parts;
    if (!by_token && !is_hnd) shape[ndim++] = page_size;
    shape[ndim++] = heads;
    if (!by_token && is_hnd) shape[ndim++] = page_size;
    shape[ndim++] = head_dim;
    ffi::check_shape(part, shape, ndim);
    ffi::check_aligned_rows(part, alignment);
  };
  if (!by_token) ffi::check_ndim(k, 4 + parts, 4 + parts);
  check_part(k, rows.k, rows.alignment_k);
  if (v) {
    check_part(v, rows.v, rows.alignment_v);
  } else if (FLASHINFER_CFG_HEAD_DIM_QK != FLASHINFER_CFG_HEAD_DIM_VO) {
    ffi::raise("ValueError", "`%s` must be a tuple of keys and values: head sizes differ, %d, %d",
               k.name, FLASHINFER_CFG_HEAD_DIM_QK, FLASHINFER_CFG_HEAD_DIM_VO);
  }
  ffi::check_count(k, "pages", k.dim(0));
  const Tensor& values = v ? v : k;
  return {k.data(),
          static_cast<char*>(values.data()) + (parts ? k.stride(1) * k.itemsize() : 0),
          k.stride(0),
          k.stride(slot),
          k.stride(head),
          values.stride(0),
          values.stride(slot),
          values.stride(head)};
}

// Checks keys and values as tokens: [tokens, heads, dim], or [heads, tokens, dim] for HND.
inline KeyValueView view_tokens(bool is_hnd, int64_t min_tokens, int64_t heads, const Tensor& k,
                                const Tensor& v, const RowSizes& rows) {
  const int token = is_hnd ? 1 : 0, head = 1 - token;
  ffi::check_ndim(k, 3, 3);
  const int64_t tokens = k.dim(token);
  if (tokens < min_tokens) {
    ffi::raise("ValueError", "`%s` must have at least %lld tokens as planned, got shape %s", k.name,
               static_cast<long long>(min_tokens), k.shape_text().c_str());
  }
  const int64_t outer[2] = {is_hnd ? heads : tokens, is_hnd ? tokens : heads};
  ffi::check_shape(k, {outer[0], outer[1], rows.k});
  ffi::check_shape(v, {outer[0], outer[1], rows.v});
  ffi::check_aligned_rows(k, rows.alignment_k);
  ffi::check_aligned_rows(v, rows.alignment_v);
  return {k.data(),        v.data(),      0, k.stride(token), k.stride(head), 0,
          v.stride(token), v.stride(head)};
}

inline void set_keys(AttentionTensors& tensors, const KeyValueView& view) {
  tensors.k = view.k;
  tensors.v = view.v;
  tensors.k_stride_page = view.k_stride_page;
  tensors.k_stride_token = view.k_stride_token;
  tensors.k_stride_head = view.k_stride_head;
  tensors.v_stride_page = view.v_stride_page;
  tensors.v_stride_token = view.v_stride_token;
  tensors.v_stride_head = view.v_stride_head;
}

inline void check_kv_dtypes(const Tensor& k, const Tensor& v) {
  ffi::check_dtype(k, kTypeKV);
  if (v) ffi::check_dtype(v, kTypeKV);
}

inline void set_paged(AttentionTensors& tensors, bool is_hnd, int64_t page_size, int64_t heads,
                      const Tensor& k, const Tensor& v) {
  check_kv_dtypes(k, v);
  set_keys(tensors, view_pages(is_hnd, page_size, heads, k, v, kRows));
  tensors.num_pages = static_cast<uint32_t>(k.dim(0));
}

inline void set_ragged(AttentionTensors& tensors, const PlannedTensors& planned, int64_t min_tokens,
                       int64_t heads, const Tensor& k, const Tensor& v) {
  check_kv_dtypes(k, v);
  set_keys(tensors, view_tokens(planned.is_hnd, min_tokens, heads, k, v, kRows));
  tensors.num_kv_tokens = k.dim(planned.is_hnd ? 1 : 0);
}

// Reads tokens, [tokens, heads, dim] or [heads, tokens, dim], as consecutive pages. The last page
// may extend past the end of the tensors: no request uses its slots from `paged_rows` on.
inline void set_paged_rows(AttentionTensors& tensors, const PlannedTensors& planned,
                           int64_t page_size, int64_t heads, const Tensor& k, const Tensor& v) {
  set_ragged(tensors, planned, planned.paged_rows, heads, k, v);
  tensors.k_stride_page = page_size * tensors.k_stride_token;
  tensors.v_stride_page = page_size * tensors.v_stride_token;
  tensors.num_pages = static_cast<uint32_t>((planned.paged_rows + page_size - 1) / page_size);
}

// Names of the tensors in the caller's signature, for a launch with one set or for either kind.
struct TensorNames {
  const char *q, *k, *v, *cache, *cache_k, *cache_v, *o, *lse;
};
constexpr TensorNames kTensorNames[3] = {
    {"q", "k", "v", "paged_kv_cache", "paged_kv_cache[0]", "paged_kv_cache[1]", "out", "lse"},
    {"q_p", "k_p", "v_p", "paged_kv_cache_p", "paged_kv_cache_p[0]", "paged_kv_cache_p[1]", "out_p",
     "lse_p"},
    {"q_d", "k_d", "v_d", "paged_kv_cache_d", "paged_kv_cache_d[0]", "paged_kv_cache_d[1]", "out_d",
     "lse_d"},
};

// The tensors of one kind, read from the arguments q, k, v | None, o, lse | None. The caller checks
// their devices after everything else.
struct RunTensors {
  Tensor q, k, v, o, lse;

  void check_device(int32_t device_id) const {
    for (const Tensor& tensor : {q, k, v, o, lse}) {
      if (tensor) check_on_device(tensor, device_id);
    }
  }
};

inline RunTensors read_tensors(ffi::Args& args, const AttentionLaunch& launch, int kind, bool paged,
                               AttentionTensors& tensors) {
  const PlannedTensors& planned = launch.planned[kind];
  const int64_t kv_heads = launch.params.variant.num_kv_heads;
  const TensorNames& names = kTensorNames[launch.has_second ? 1 + kind : 0];
  const bool rows = !paged || planned.paged_rows >= 0;
  const Tensor q = args.tensor(names.q);
  Tensor k = args.tensor(rows ? names.k : names.cache);
  const Tensor v = rows ? args.tensor(names.v) : args.optional_tensor(names.cache_v);
  const Tensor o = args.tensor(names.o);
  const Tensor lse = args.optional_tensor(names.lse);
  if (!rows && v) k.name = names.cache_k;
  set_queries(tensors, planned, launch.params.variant.num_qo_heads, q, o, lse);
  if (!paged) {
    set_ragged(tensors, planned, planned.kv_entries, kv_heads, k, v);
  } else if (rows) {
    set_paged_rows(tensors, planned, launch.params.page_size.divisor, kv_heads, k, v);
  } else {
    set_paged(tensors, planned.is_hnd, launch.params.page_size.divisor, kv_heads, k, v);
  }
  for (const Tensor& written : {o, lse}) {
    if (!written) continue;
    ffi::check_disjoint(written, k);
    if (v) ffi::check_disjoint(written, v);
  }
  return {q, k, v, o, lse};
}

// The bytes that the kernel copies of a row of `scales` at a time.
constexpr int scale_alignment(int scales) {
  return scales % 16 == 0 ? 16 : scales % 8 == 0 ? 8 : 4;
}

// Checks and sets the scales of 4-bit keys and values: as these, a row for each of their rows.
inline void set_block_scales(AttentionLaunch& launch, const Tensor& k, const Tensor& v) {
  if (!kKeysAre4Bit) {
    ffi::raise("ValueError", "`kv_cache_sf` must be left out: `kv_data_type` is %s, not of 4 bits",
               ffi::dtype_name(kTypeKV).c_str());
  }
  constexpr int kScalesK = FLASHINFER_CFG_HEAD_DIM_QK / 16;
  constexpr int kScalesV = FLASHINFER_CFG_HEAD_DIM_VO / 16;
  const RowSizes rows = {kScalesK, kScalesV, scale_alignment(kScalesK), scale_alignment(kScalesV)};
  const PlannedTensors& planned = launch.planned[0];
  const int64_t heads = launch.params.variant.num_kv_heads;
  for (const Tensor& scales : {k, v}) {
    if (scales) ffi::check_dtype(scales, {ffi::dtype::float8_e4m3fn, ffi::dtype::uint8});
  }
  const KeyValueView view =
      FLASHINFER_CFG_PAGED
          ? view_pages(planned.is_hnd, launch.params.page_size.divisor, heads, k, v, rows)
          : view_tokens(planned.is_hnd, planned.kv_entries, heads, k, v, rows);
  AttentionTensors& tensors = launch.params.tensors[0];
  tensors.k_sf = {static_cast<const uint8_t*>(view.k), view.k_stride_page, view.k_stride_token,
                  view.k_stride_head};
  tensors.v_sf = {static_cast<const uint8_t*>(view.v), view.v_stride_page, view.v_stride_token,
                  view.v_stride_head};
  launch.num_scale_rows = k.dim(!FLASHINFER_CFG_PAGED && planned.is_hnd ? 1 : 0);
}

// Refuses a run of 4-bit keys without their scales, which are those of one run.
inline void take_block_scales(AttentionLaunch& launch, const AttentionTensors& tensors) {
  if constexpr (kKeysAre4Bit) {
    const int64_t rows = FLASHINFER_CFG_PAGED ? tensors.num_pages : tensors.num_kv_tokens;
    const int64_t given = launch.num_scale_rows;
    launch.num_scale_rows = -1;
    if (given < 0) ffi::raise("ValueError", "`kv_cache_sf` must be given with 4-bit keys");
    if (given != rows) {
      ffi::raise("ValueError", "`kv_cache_sf` must have the %lld %s of the keys, got %lld",
                 static_cast<long long>(rows), FLASHINFER_CFG_PAGED ? "pages" : "tokens",
                 static_cast<long long>(given));
    }
  }
}

// Checks and sets where the scales of 8-bit outputs go.
inline void set_output_scale(AttentionLaunch& launch, const Tensor& scale, const Tensor& o) {
  if (!kOutputIsCode) {
    ffi::raise("ValueError", "`out_scale` must be left out: `o_data_type` is %s, not of 8 bits",
               ffi::dtype_name(kTypeO).c_str());
  }
  ffi::check_dtype(scale, ffi::dtype::float32);
  ffi::check_ndim(o, 3, 3);
  ffi::check_shape(scale, {o.dim(0), launch.params.variant.num_qo_heads});
  ffi::check_no_broadcast(scale);
  launch.params.o_scale = {static_cast<float*>(scale.data()), scale.stride(0), scale.stride(1)};
  launch.has_output_scale = true;
}

// Refuses a run of 8-bit outputs without the place of their scales, which is that of one run.
inline void take_output_scale(AttentionLaunch& launch) {
  if constexpr (kOutputIsCode) {
    if (!launch.has_output_scale) {
      ffi::raise("ValueError", "`out_scale` must be given with an `o_data_type` of 8 bits");
    }
    launch.has_output_scale = false;
  }
}

// Fills the members that a user's variant adds: `read(reader)` of the rendered struct calls these
// functions in the order in which run() takes the values.
class VariantReader {
 public:
  explicit VariantReader(ffi::Args& args) : args_(args) {}

  // A tensor whose name begins with maybe_ may be None.
  template <typename T>
  void tensor(const char* name, T*& pointer, const char* type) {
    const bool optional = std::strncmp(name, "maybe_", 6) == 0;
    const Tensor tensor = optional ? args_.optional_tensor(name) : args_.tensor(name);
    pointer = nullptr;
    if (!tensor) return;
    if (std::strcmp(ffi::dtype_name(tensor.dtype()).c_str(), type) != 0) {
      ffi::raise("ValueError", "`%s` must have dtype %s, got %s", name, type,
                 ffi::dtype_name(tensor.dtype()).c_str());
    }
    pointer = const_cast<T*>(option_data<T>(tensor, tensor.dtype(), 0));
    if (count_ == kMaxTensors) ffi::raise("ValueError", "more than %d tensors", kMaxTensors);
    tensors_[count_++] = tensor;
  }

  void check_device(int32_t device_id) const {
    for (int i = 0; i < count_; ++i) check_on_device(tensors_[i], device_id);
  }

  template <typename T>
  void scalar(const char* name, T& value) {
    if constexpr (T(0.5) == T(0)) {
      value = static_cast<T>(args_.integer(name));
    } else {
      value = static_cast<T>(args_.number(name));
    }
  }

 private:
  static constexpr int kMaxTensors = 32;
  ffi::Args& args_;
  Tensor tensors_[kMaxTensors];
  int count_ = 0;
};

}  // namespace flashinfer
