//   kv_float4_append(append_key, append_value, places, caches, scales, is_hnd)
//   kv_float4_append_slots(append_key, append_value, slot_mapping, caches, scales, is_hnd)
//   kv_float4_dequantize(out, codes, block_scales, global_scale)
//   kv_float4_dequantize_paged(out_k, out_v, block_tables, seq_lens, caches, scales, is_hnd)
//
// places: (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len). caches: (k, v |
// None, k_sf, v_sf | None); where v is None, k holds both, [pages, 2, ...]. scales: (k_scale |
// None, k_value, v_scale | None, v_value), the numbers where there is no tensor.
#include "kv_float4.h"

#include "ffi.h"
#include "index_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr DLDataType kType = ffi::dtype::FLASHINFER_CFG_DTYPE;

struct CacheTensors {
  Tensor k, v, k_sf, v_sf;
};

struct CacheShape {
  int64_t num_pages, page_size, num_heads;
};

// Elements of a head of keys and of values.
struct HeadDims {
  int64_t k, v;
};

CacheTensors take_caches(ffi::Args& args) {
  ffi::Args group = args.group("paged_kv_cache", 4);
  CacheTensors result;
  result.k = group.tensor("paged_kv_cache");
  result.v = group.optional_tensor("paged_kv_cache[1]");
  result.k_sf = group.tensor("kv_cache_sf");
  result.v_sf = group.optional_tensor("kv_cache_sf[1]");
  if (result.v) result.k.name = "paged_kv_cache[0]";
  if (result.v_sf) result.k_sf.name = "kv_cache_sf[0]";
  return result;
}

// Checks a cache, or its scales, of rows of `rows` bytes; `shape` is filled in, or compared.
void check_part(const Tensor& first, const Tensor& second, bool is_hnd, HeadDims rows,
                int alignment, CacheShape& shape) {
  const int parts = second ? 0 : 1;
  ffi::check_ndim(first, 4 + parts, 4 + parts);
  const ffi::CacheAxes axes = ffi::cache_axes(is_hnd);
  if (shape.num_pages < 0) {
    shape.num_pages = first.dim(0);
    shape.page_size = first.dim(axes.slot + parts);
  }
  const int64_t inner[2] = {is_hnd ? shape.num_heads : shape.page_size,
                            is_hnd ? shape.page_size : shape.num_heads};
  for (const bool is_v : {false, true}) {
    const Tensor& tensor = is_v ? second : first;
    if (!tensor) continue;
    const int64_t row = is_v ? rows.v : rows.k;
    if (parts) {
      ffi::check_shape(tensor, {shape.num_pages, 2, inner[0], inner[1], row});
    } else {
      ffi::check_shape(tensor, {shape.num_pages, inner[0], inner[1], row});
    }
    ffi::check_aligned_rows(tensor, alignment);
  }
}

void set_cache(Float4Cache& cache, const CacheTensors& caches, bool is_hnd, bool is_v) {
  const auto locate = [&](const Tensor& first, const Tensor& second, uint8_t*& data, int64_t& page,
                          int64_t& slot, int64_t& head) {
    const int parts = second ? 0 : 1;
    const Tensor& tensor = second && is_v ? second : first;
    const ffi::CacheAxes axes = ffi::cache_axes(is_hnd);
    data = static_cast<uint8_t*>(tensor.data()) + (parts && is_v ? tensor.stride(1) : 0);
    page = tensor.stride(0);
    slot = tensor.stride(axes.slot + parts);
    head = tensor.stride(axes.head + parts);
  };
  locate(caches.k, caches.v, cache.codes, cache.codes_stride_page, cache.codes_stride_slot,
         cache.codes_stride_head);
  locate(caches.k_sf, caches.v_sf, cache.scales, cache.scales_stride_page, cache.scales_stride_slot,
         cache.scales_stride_head);
}

CacheShape check_caches(const CacheTensors& caches, bool is_hnd, int64_t num_heads, HeadDims dims) {
  ffi::check_dtype(caches.k, ffi::dtype::uint8);
  if (caches.v) ffi::check_dtype(caches.v, ffi::dtype::uint8);
  for (const Tensor& scales : {caches.k_sf, caches.v_sf}) {
    if (scales) ffi::check_dtype(scales, {ffi::dtype::float8_e4m3fn, ffi::dtype::uint8});
  }
  CacheShape shape = {-1, 0, num_heads};
  check_part(caches.k, caches.v, is_hnd, {dims.k / 2, dims.v / 2}, 8, shape);
  check_part(caches.k_sf, caches.v_sf, is_hnd, {dims.k / 16, dims.v / 16}, 1, shape);
  ffi::check_count(caches.k, "pages", shape.num_pages);
  ffi::check_count(caches.k, "a page size", shape.page_size, 1);
  return shape;
}

struct GlobalScales {
  Tensor tensors[2];
  double values[2];
};
constexpr const char* kScaleNames[2] = {"k_scale", "v_scale"};

GlobalScales take_global_scales(ffi::Args& args) {
  ffi::Args group = args.group("k_scale", 4);
  GlobalScales scales;
  for (int i = 0; i < 2; ++i) {
    scales.tensors[i] = group.optional_tensor(kScaleNames[i]);
    scales.values[i] = group.number(kScaleNames[i]);
  }
  return scales;
}

void set_global_scales(Float4Operand (&operands)[2], const GlobalScales& scales,
                       const Tensor& like) {
  for (int i = 0; i < 2; ++i) {
    const Tensor& scale = scales.tensors[i];
    operands[i].global_value = static_cast<float>(scales.values[i]);
    operands[i].global_scale = nullptr;
    if (!scale) {
      if (!(operands[i].global_value > 0.f) || std::isinf(operands[i].global_value)) {
        ffi::raise("ValueError", "`%s` must be positive and finite, got %g", kScaleNames[i],
                   scales.values[i]);
      }
      continue;
    }
    ffi::check_dtype(scale, ffi::dtype::float32);
    if (scale.numel() != 1) {
      ffi::raise("ValueError", "`%s` must have one element, got shape %s", kScaleNames[i],
                 scale.shape_text().c_str());
    }
    ffi::check_same_device(scale, like);
    operands[i].global_scale = static_cast<const float*>(scale.data());
  }
}

Float4Rows rows_of(const Tensor& tensor, int head_axis) {
  return {tensor.data(), tensor.stride(0), tensor.stride(head_axis)};
}

uint32_t count_items(const Tensor& tensor, int64_t rows, int64_t head_dim) {
  const int64_t items = rows * (head_dim / 16);
  if (items >= int64_t{1} << 31) {
    ffi::raise("ValueError", "`%s` must have fewer than 2^31 blocks of 16 elements, got shape %s",
               tensor.name, tensor.shape_text().c_str());
  }
  return static_cast<uint32_t>(items);
}

void check_head_dim(const Tensor& tensor, int64_t head_dim) {
  if (head_dim % 16 != 0 || head_dim == 0) {
    ffi::raise("ValueError", "`%s` must have rows of a multiple of 16 elements, got shape %s",
               tensor.name, tensor.shape_text().c_str());
  }
}

// One tensor for keys and values has rows of one size.
void check_one_size(const CacheTensors& caches, const Tensor& out_v, HeadDims dims) {
  if (dims.k == dims.v || (caches.v && caches.v_sf)) return;
  ffi::raise("ValueError",
             "`%s` must have heads of %lld elements as `output_k`, since `%s` has keys and values, "
             "got shape %s",
             out_v.name, static_cast<long long>(dims.k),
             caches.v ? "kv_cache_sf" : "paged_kv_cache", out_v.shape_text().c_str());
}

FastDivisor divisor(int64_t value) { return FastDivisor(static_cast<uint32_t>(value ? value : 1)); }

struct AppendRows {
  Tensor key, value;
  int64_t num_heads, head_dim;
};

AppendRows take_rows(ffi::Args& args) {
  AppendRows rows = {};
  rows.key = args.tensor("append_key");
  rows.value = args.tensor("append_value");
  return rows;
}

void check(AppendRows& rows) {
  ffi::check_dtype(rows.key, kType);
  ffi::check_dtype(rows.value, kType);
  ffi::check_ndim(rows.key, 3, 3);
  ffi::check_same_shape(rows.value, rows.key);
  rows.num_heads = rows.key.dim(1);
  rows.head_dim = rows.key.dim(2);
  check_head_dim(rows.key, rows.head_dim);
  ffi::check_vector_rows(rows.key);
  ffi::check_vector_rows(rows.value);
  ffi::check_count(rows.key, "heads", rows.num_heads, 0, ffi::kMaxHeads);
}

void append(const AppendRows& rows, const CacheTensors& caches, const GlobalScales& scales,
            const CacheShape& shape, bool is_hnd, Float4AppendParams& params, int64_t num_tokens) {
  for (const Tensor& written : {caches.k, caches.v, caches.k_sf, caches.v_sf}) {
    if (!written) continue;
    ffi::check_no_broadcast(written);
    ffi::check_disjoint(written, rows.key);
    ffi::check_disjoint(written, rows.value);
  }
  ffi::check_disjoint(caches.k, caches.k_sf);
  if (caches.v) ffi::check_disjoint(caches.k, caches.v);
  if (caches.v_sf) ffi::check_disjoint(caches.k_sf, caches.v_sf);
  ffi::check_cuda(caches.k);
  for (const Tensor& tensor : {rows.key, rows.value, caches.v, caches.k_sf, caches.v_sf}) {
    if (tensor) ffi::check_same_device(tensor, caches.k);
  }
  set_global_scales(params.operands, scales, caches.k);
  for (int i = 0; i < 2; ++i) {
    params.operands[i].rows = rows_of(i == 0 ? rows.key : rows.value, 1);
    set_cache(params.operands[i].cache, caches, is_hnd, i == 1);
  }
  params.table.num_pages = static_cast<uint32_t>(shape.num_pages);
  params.table.page_size = divisor(shape.page_size);
  params.num_tokens = static_cast<uint32_t>(num_tokens);
  params.num_items = count_items(rows.key, num_tokens * rows.num_heads, rows.head_dim);
  params.blocks = divisor(rows.head_dim / 16);
  params.heads = divisor(rows.num_heads);
  if (params.num_items == 0 || shape.num_pages == 0) return;
  const ffi::DeviceGuard guard(caches.k);
  ffi::check_launch(kv_float4_append(params, ffi::resolve_pdl(ffi::Args::Flag::kNone, caches.k),
                                     ffi::current_stream(caches.k)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(kv_float4_append, args) {
  using namespace flashinfer;
  AppendRows rows = take_rows(args);
  ffi::Args places = args.group("batch_indices", 5);
  const Tensor batch_indices = places.tensor("batch_indices");
  const Tensor positions = places.tensor("positions");
  const Tensor kv_indices = places.tensor("kv_indices");
  const Tensor kv_indptr = places.tensor("kv_indptr");
  const Tensor kv_last_page_len = places.tensor("kv_last_page_len");
  const CacheTensors caches = take_caches(args);
  const GlobalScales scales = take_global_scales(args);
  const bool is_hnd = args.flag("kv_layout");
  args.all_taken();
  check(rows);
  const HeadDims dims = {rows.head_dim, rows.head_dim};
  const CacheShape shape = check_caches(caches, is_hnd, rows.num_heads, dims);
  Float4AppendParams params = {};
  params.table = ffi::make_page_table(batch_indices, positions, kv_indices, kv_indptr,
                                      rows.key.dim(0), shape.num_pages, shape.page_size);
  ffi::check_indices(kv_last_page_len, params.table.batch_size);
  for (const Tensor& tensor : {batch_indices, positions, kv_indices, kv_indptr}) {
    ffi::check_same_device(tensor, caches.k);
  }
  append(rows, caches, scales, shape, is_hnd, params, rows.key.dim(0));
}

FLASHINFER_FFI_EXPORT(kv_float4_append_slots, args) {
  using namespace flashinfer;
  AppendRows rows = take_rows(args);
  const Tensor slots = args.tensor("slot_mapping");
  const CacheTensors caches = take_caches(args);
  const GlobalScales scales = take_global_scales(args);
  const bool is_hnd = args.flag("kv_layout");
  args.all_taken();
  check(rows);
  const HeadDims dims = {rows.head_dim, rows.head_dim};
  const CacheShape shape = check_caches(caches, is_hnd, rows.num_heads, dims);
  ffi::check_ndim(slots, 1, 1);
  ffi::check_dtype(slots, {ffi::dtype::int32, ffi::dtype::int64});
  ffi::check_contiguous(slots);
  if (slots.dim(0) > rows.key.dim(0)) {
    ffi::raise("ValueError",
               "`append_key` must have at least the %lld rows of `slot_mapping`, got "
               "shape %s",
               static_cast<long long>(slots.dim(0)), rows.key.shape_text().c_str());
  }
  ffi::check_same_device(slots, caches.k);
  Float4AppendParams params = {};
  params.slots = slots.data();
  params.has_wide_slots = slots.itemsize() == 8;
  if (slots.dim(0) == 0) return;
  append(rows, caches, scales, shape, is_hnd, params, slots.dim(0));
}

FLASHINFER_FFI_EXPORT(kv_float4_dequantize, args) {
  using namespace flashinfer;
  const Tensor out = args.tensor("output");
  const Tensor codes = args.tensor("fp4_data");
  const Tensor scales = args.tensor("block_scales");
  const Tensor global = args.tensor("global_scale");
  args.all_taken();
  ffi::check_dtype(codes, ffi::dtype::uint8);
  ffi::check_dtype(scales, {ffi::dtype::float8_e4m3fn, ffi::dtype::uint8});
  ffi::check_ndim(codes, 2, 2);
  const int64_t num_rows = codes.dim(0), row = codes.dim(1) * 2;
  check_head_dim(codes, row);
  ffi::check_shape(scales, {num_rows, row / 16});
  ffi::check_aligned_rows(codes, 8);
  ffi::check_last_dim_contiguous(scales);
  ffi::check_dtype(out, kType);
  ffi::check_shape(out, {num_rows, row});
  ffi::check_aligned_rows(out, 16);
  ffi::check_dtype(global, ffi::dtype::float32);
  if (global.numel() != 1) {
    ffi::raise("ValueError", "`global_scale` must have one element, got shape %s",
               global.shape_text().c_str());
  }
  ffi::check_cuda(codes);
  for (const Tensor& tensor : {out, scales, global}) ffi::check_same_device(tensor, codes);
  Float4GatherParams params = {};
  Float4Operand& operand = params.operands[0];
  operand.rows = {out.data(), out.stride(0), 0};
  operand.cache = {static_cast<uint8_t*>(codes.data()),
                   static_cast<uint8_t*>(scales.data()),
                   0,
                   codes.stride(0),
                   0,
                   0,
                   scales.stride(0),
                   0};
  operand.global_scale = static_cast<const float*>(global.data());
  params.num_operands = 1;
  params.num_items[0] = count_items(codes, num_rows, row);
  params.blocks[0] = divisor(row / 16);
  params.heads = divisor(1);
  params.max_len = divisor(num_rows);
  params.page_size = divisor(1);
  if (params.num_items[0] == 0) return;
  const ffi::DeviceGuard guard(codes);
  ffi::check_launch(kv_float4_gather(params, ffi::resolve_pdl(ffi::Args::Flag::kNone, codes),
                                     ffi::current_stream(codes)));
}

FLASHINFER_FFI_EXPORT(kv_float4_dequantize_paged, args) {
  using namespace flashinfer;
  const Tensor out_k = args.tensor("output_k");
  const Tensor out_v = args.tensor("output_v");
  const Tensor tables = args.tensor("block_tables");
  const Tensor seq_lens = args.tensor("seq_lens");
  const CacheTensors caches = take_caches(args);
  const GlobalScales scales = take_global_scales(args);
  const bool is_hnd = args.flag("kv_layout");
  args.all_taken();
  for (const Tensor& out : {out_k, out_v}) {
    ffi::check_dtype(out, kType);
    ffi::check_ndim(out, 4, 4);
    ffi::check_contiguous(out);
    ffi::check_aligned_rows(out, 16);
    check_head_dim(out, out.dim(3));
  }
  const int64_t batch_size = out_k.dim(0), max_len = out_k.dim(1), heads = out_k.dim(2);
  const HeadDims dims = {out_k.dim(3), out_v.dim(3)};
  ffi::check_shape(out_v, {batch_size, max_len, heads, dims.v});
  check_one_size(caches, out_v, dims);
  const CacheShape shape = check_caches(caches, is_hnd, heads, dims);
  ffi::check_ndim(tables, 2, 2);
  ffi::check_dtype(tables, ffi::dtype::int32);
  ffi::check_shape(tables, {batch_size, tables.dim(1)});
  ffi::check_last_dim_contiguous(tables);
  ffi::check_indices(seq_lens, batch_size);
  ffi::check_cuda(caches.k);
  for (const Tensor& tensor :
       {out_k, out_v, tables, seq_lens, caches.v, caches.k_sf, caches.v_sf}) {
    if (tensor) ffi::check_same_device(tensor, caches.k);
  }
  for (const Tensor& read : {caches.k, caches.v, caches.k_sf, caches.v_sf}) {
    if (!read) continue;
    ffi::check_disjoint(out_k, read);
    ffi::check_disjoint(out_v, read);
  }
  ffi::check_disjoint(out_k, out_v);
  Float4GatherParams params = {};
  set_global_scales(params.operands, scales, caches.k);
  for (int i = 0; i < 2; ++i) {
    const Tensor& out = i == 0 ? out_k : out_v;
    const int64_t head_dim = out.dim(3);
    params.operands[i].rows = {out.data(), heads * head_dim, head_dim};
    params.num_items[i] = count_items(out, batch_size * max_len * heads, head_dim);
    params.blocks[i] = divisor(head_dim / 16);
    set_cache(params.operands[i].cache, caches, is_hnd, i == 1);
  }
  params.block_tables = static_cast<const int32_t*>(tables.data());
  params.seq_lens = static_cast<const int32_t*>(seq_lens.data());
  params.table_stride = tables.stride(0);
  params.max_pages = static_cast<uint32_t>(tables.dim(1));
  params.num_pages = static_cast<uint32_t>(shape.num_pages);
  params.num_operands = 2;
  params.heads = divisor(heads);
  params.max_len = divisor(max_len);
  params.page_size = divisor(shape.page_size);
  if (params.num_items[0] == 0 || shape.num_pages == 0) return;
  const ffi::DeviceGuard guard(caches.k);
  ffi::check_launch(kv_float4_gather(params, ffi::resolve_pdl(ffi::Args::Flag::kNone, caches.k),
                                     ffi::current_stream(caches.k)));
}
