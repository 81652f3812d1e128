//   gemm(names, out, a, b, scales, bias, alpha, rows, gate, layout, max_ctas, enable_pdl)
//
// out = alpha scale(a, b) a b^T + bias, then the gated activation and row_weight, as the
// configuration says. `scales`: None or (a_scale, b_scale, out_scale), each of which may be None.
// Where the configuration has no scales, the first two are factors of alpha with one element;
// b_scale may have one for each matrix of b in groups. out_scale is for results of 8 bits: [rows,
// columns / 128], which is written, where the configuration has scales of blocks; otherwise factors
// of the result, one or, in groups, one for each matrix of b. `rows`: None or (groups,
// weight_indices, row_index, row_weight), each of which may be None: row r of the result reads row
// row_index[r] of a. `gate`: None or (alpha, beta, limit), each a number or, in groups, a tensor.
// `names` says what the public function calls its tensors. Bits of `layout`: 1: b is [.., k, n]
// (else [.., n, k]); 2: scales are [.., k / 128, rows] (else [.., rows, k / 128]); 4: 128 rows of a
// share a scale; 8: the previous kernel of the stream writes only a and its scales, and where there
// are groups the one before it has finished, so that weights are loaded early. a and out have a
// leading dimension for batches or masked groups, b for batches or groups; a single one may be left
// out.
#include "ffi.h"
#include "gemm.h"

#include <limits>
#include <string>

#include <flashinfer/common/math.cuh>

namespace flashinfer {
namespace {

constexpr DLDataType kDtypeA = ffi::dtype::FLASHINFER_CFG_DTYPE_A;
constexpr DLDataType kDtypeB = ffi::dtype::FLASHINFER_CFG_DTYPE_B;
constexpr DLDataType kDtypeOut = ffi::dtype::FLASHINFER_CFG_DTYPE_OUT;
constexpr GemmScale kScale = GemmScale::FLASHINFER_CFG_SCALE;
constexpr GemmGroups kGroups = GemmGroups::FLASHINFER_CFG_GROUPS;
constexpr bool kBlockScales = kScale == GemmScale::block || kScale == GemmScale::group;
constexpr bool kFlatRows = kGroups != GemmGroups::batch && kGroups != GemmGroups::masked;
constexpr int kElement = kDtypeA.bits / 8;
constexpr int64_t kMaxGroups = 1024;
constexpr bool kGated = is_gated(GemmActivation::FLASHINFER_CFG_ACTIVATION);
constexpr bool kGrouped = kGroups != GemmGroups::batch;
constexpr bool kGathers = FLASHINFER_CFG_GATHERS;
enum Layout { kTransposedB = 1, kScalesByK = 2, kScalesByBlock = 4, kStartsEarly = 8 };

struct Names {
  const char *a, *b, *a_scale, *b_scale, *groups, *out_scale = "out_scale";
};
constexpr Names kNames[] = {
    {"a", "b", "a_scale", "b_scale", "m_indptr"},
    {"A", "B", "A_scale", "B_scale", "m_indptr"},
    {"input", "weight", "input_scale", "weight_scale", "m_indptr"},
    {"a", "b", "a_scale", "b_scale", "m_indices"},
    {"a", "b", "a_scale", "b_scale", "masked_m"},
    {"x", "weights", "a_scale", "b_scale", "seg_indptr"},
    {"input", "fc1_expert_weights", "input_scale", "quant_scales[0]", "offsets", "quant_scales[1]"},
    {"hidden", "fc2_expert_weights", "hidden_scale", "quant_scales[1]", "offsets"},
    {"a", "weight", "a_scale", "weight_scale", "m_indptr"},
};
constexpr int64_t kNumNames = sizeof(kNames) / sizeof(Names);

// Rows and k of an operand; `transposed` operands are [.., k, rows].
struct Operand {
  int64_t batches, rows, k, stride_row, stride_batch;

  Operand(const ffi::Tensor& tensor, bool transposed) {
    const int row = transposed ? -1 : -2, column = transposed ? -2 : -1;
    rows = tensor.dim(row);
    k = tensor.dim(column);
    batches = tensor.ndim() == 3 ? tensor.dim(0) : 1;
    stride_row = rows > 1 ? tensor.stride(row) : k;
    stride_batch = batches > 1 ? tensor.stride(0) : rows * stride_row;
    if (k > 1 && tensor.stride(column) != 1) {
      ffi::raise("ValueError", "`%s` must be contiguous along k (%s), got shape %s with strides %s",
                 tensor.name, transposed ? "column-major" : "row-major",
                 tensor.shape_text().c_str(),
                 ffi::list_text(tensor.dl->strides, tensor.ndim()).c_str());
    }
  }

  // Alignment that the copy engine and asynchronous copies need.
  void check_aligned(const ffi::Tensor& tensor, int64_t element) const {
    const bool aligned = ffi::is_aligned(tensor, 16) &&
                         (rows <= 1 || stride_row * element % 16 == 0) &&
                         (batches <= 1 || stride_batch * element % 16 == 0);
    if (!aligned || stride_row < k || stride_batch < 0) {
      ffi::raise("ValueError",
                 "`%s` must begin at a multiple of 16 bytes and have strides that are such "
                 "multiples, got shape %s with strides %s",
                 tensor.name, tensor.shape_text().c_str(),
                 ffi::list_text(tensor.dl->strides, tensor.ndim()).c_str());
    }
  }

  GemmMatrix matrix(const ffi::Tensor& tensor) const {
    return {tensor.data(), stride_row, stride_batch};
  }
};

// Scales [batches, rows, blocks of k], or of `by_k` [batches, blocks, at least rows].
GemmScaleMatrix scales_of(const ffi::Tensor& scale, int64_t batches, int64_t rows, int64_t blocks,
                          bool by_k) {
  ffi::check_dtype(scale, ffi::dtype::float32);
  const int row = by_k ? -1 : -2, column = by_k ? -2 : -1;
  const bool fits = (scale.ndim() == 3 ? scale.dim(0) == batches : batches == 1) &&
                    scale.ndim() >= 2 && scale.ndim() <= 3 &&
                    (by_k ? scale.dim(row) >= rows : scale.dim(row) == rows) &&
                    scale.dim(column) == blocks;
  if (!fits) {
    const int64_t shape[3] = {batches, by_k ? blocks : rows, by_k ? rows : blocks};
    const int skipped = batches == 1 ? 1 : 0;
    ffi::raise("ValueError", "`%s` must have shape %s, got %s", scale.name,
               ffi::list_text(shape + skipped, 3 - skipped).c_str(), scale.shape_text().c_str());
  }
  return {static_cast<const float*>(scale.data()), scale.stride(row), scale.stride(column),
          scale.ndim() == 3 ? scale.stride(0) : 0, 0};
}

// One number, or `count` of them where that is allowed; gives the stride from one to the next.
uint32_t check_floats(const ffi::Tensor& tensor, int64_t count) {
  ffi::check_dtype(tensor, ffi::dtype::float32);
  if (tensor.numel() == 1) return 0;
  if (tensor.numel() != count) {
    ffi::raise("ValueError", "`%s` must have 1%s elements, got shape %s", tensor.name,
               count > 1 ? (" or " + std::to_string(count)).c_str() : "",
               tensor.shape_text().c_str());
  }
  ffi::check_contiguous(tensor);
  return 1;
}

// A vector of int32 or int64; gives the 32-bit numbers from one to the next.
uint32_t check_numbers(const ffi::Tensor& tensor, int64_t length) {
  ffi::check_vector(tensor, {ffi::dtype::int32, ffi::dtype::int64}, length);
  return tensor.dtype().bits / 32;
}

struct Tensors {
  ffi::Tensor out, a, b, a_scale, b_scale, out_scale, bias, groups, weight_indices, row_index,
      row_weight;
};

void fill_scales(GemmParams& params, const Tensors& t, const Operand& a, const Operand& b,
                 int64_t layout) {
  const bool by_k = layout & kScalesByK, by_block = layout & kScalesByBlock;
  const int64_t blocks = ceil_div<int64_t>(a.k, 128);
  if (kScale == GemmScale::none) {
    if (t.a_scale) check_floats(t.a_scale, 1);
    if (t.b_scale) params.alpha_b_stride = check_floats(t.b_scale, kGrouped ? b.batches : 1);
    params.alpha_a = t.a_scale ? static_cast<const float*>(t.a_scale.data()) : nullptr;
    params.alpha_b = t.b_scale ? static_cast<const float*>(t.b_scale.data()) : nullptr;
    return;
  }
  if (!t.a_scale || !t.b_scale) {
    ffi::raise("TypeError", "`%s` must be a torch.Tensor, got None",
               (t.a_scale ? t.b_scale : t.a_scale).name);
  }
  if (kScale == GemmScale::token_channel) {
    // One per row and one per column, as vectors or as a column and a row.
    for (const ffi::Tensor* scale : {&t.a_scale, &t.b_scale}) {
      ffi::check_dtype(*scale, ffi::dtype::float32);
      const Operand& operand = scale == &t.a_scale ? a : b;
      if (scale->numel() != operand.batches * operand.rows) {
        ffi::raise("ValueError", "`%s` must have %lld elements, got shape %s", scale->name,
                   static_cast<long long>(operand.batches * operand.rows),
                   scale->shape_text().c_str());
      }
      ffi::check_contiguous(*scale);
    }
    params.a_scale = {static_cast<const float*>(t.a_scale.data()), 1, 0, a.rows, 0};
    params.b_scale = {static_cast<const float*>(t.b_scale.data()), 1, 0, b.rows, 0};
  } else {
    if (a.k % 128 != 0) {
      ffi::raise("ValueError", "`%s` must have a multiple of 128 columns for scales of 128, got %s",
                 t.a.name, t.a.shape_text().c_str());
    }
    params.a_scale = scales_of(t.a_scale, a.batches,
                               by_block ? ceil_div<int64_t>(a.rows, 128) : a.rows, blocks, by_k);
    params.a_scale.row_shift = by_block ? 7 : 0;
    const int64_t columns = kScale == GemmScale::block ? ceil_div<int64_t>(b.rows, 128) : b.rows;
    params.b_scale = scales_of(t.b_scale, b.batches, columns, blocks, by_k);
  }
}

// Takes the scales of results of 8 bits.
void fill_out_scale(GemmParams& params, const Tensors& t, const Operand& b) {
  if (kDtypeOut.bits != 8) {
    if (t.out_scale) ffi::raise("TypeError", "`%s` must be None", t.out_scale.name);
    return;
  }
  if (!t.out_scale) ffi::raise("TypeError", "`out_scale` must be a torch.Tensor, got None");
  const int64_t columns = t.out.dim(-1);
  if (columns % (kBlockScales ? 128 : 8) != 0 || t.out.stride(-2) % 8 != 0 ||
      !ffi::is_aligned(t.out, 8) || t.out.ndim() != 2 || t.bias) {
    ffi::raise("ValueError",
               "`%s` must be a matrix with a multiple of %d columns and rows that "
               "begin at multiples of 8 bytes, without a bias, got shape %s",
               t.out.name, kBlockScales ? 128 : 8, t.out.shape_text().c_str());
  }
  if (kBlockScales) {
    ffi::check_dtype(t.out_scale, ffi::dtype::float32);
    ffi::check_shape(t.out_scale, {t.out.dim(0), columns / 128});
    ffi::check_contiguous(t.out_scale);
    params.d_scale = static_cast<float*>(t.out_scale.data());
  } else {
    params.out_factor_stride = check_floats(t.out_scale, kGrouped ? b.batches : 1);
    params.out_factor = static_cast<const float*>(t.out_scale.data());
  }
}

// Constants of a gated activation: numbers, or in groups tensors with one for each matrix of b.
struct Gate {
  ffi::Tensor alphas, betas, limits;

  Gate(GemmParams& params, ffi::Args& args) {
    params.gate_alpha = 1.f;
    params.gate_limit = std::numeric_limits<float>::infinity();
    ffi::Args gate = args.optional_group("gate", 3);
    if (!gate) return;
    alphas = take(gate, "swiglu_alpha", params.gate_alpha, params.gate_alphas);
    betas = take(gate, "swiglu_beta", params.gate_beta, params.gate_betas);
    limits = take(gate, "swiglu_limit", params.gate_limit, params.gate_limits);
  }

 private:
  static ffi::Tensor take(ffi::Args& gate, const char* name, float& value, const float*& values) {
    if (!kGrouped || !gate.next_is_tensor()) {
      value = static_cast<float>(gate.number(name));
      return {};
    }
    const ffi::Tensor tensor = gate.tensor(name);
    values = static_cast<const float*>(tensor.data());
    return tensor;
  }
};

// What is written shares no memory with what is read, and all tensors are on one device.
void check_tensors_together(const Tensors& t, const Gate& gate) {
  constexpr bool kWritesScales = kDtypeOut.bits == 8 && kBlockScales;
  const ffi::Tensor read_scale = kWritesScales ? ffi::Tensor() : t.out_scale;
  const ffi::Tensor written_scale = kWritesScales ? t.out_scale : ffi::Tensor();
  const auto read = {t.a,         t.b,        t.a_scale,        t.b_scale,   read_scale,
                     t.bias,      t.groups,   t.weight_indices, t.row_index, t.row_weight,
                     gate.alphas, gate.betas, gate.limits};
  for (const ffi::Tensor& tensor : read) {
    if (!tensor) continue;
    ffi::check_disjoint(t.out, tensor);
    if (written_scale) ffi::check_disjoint(written_scale, tensor);
  }
  if (written_scale) ffi::check_disjoint(t.out, written_scale);
  ffi::check_cuda(t.a);
  for (const ffi::Tensor& tensor : read) {
    if (tensor) ffi::check_same_device(tensor, t.a);
  }
  ffi::check_same_device(t.out, t.a);
  if (written_scale) ffi::check_same_device(written_scale, t.a);
}

void run(ffi::Args& args) {
  const Names names = kNames[args.integer_in("names", 0, kNumNames - 1)];
  Tensors t;
  t.out = args.tensor("out");
  t.a = args.tensor(names.a);
  t.b = args.tensor(names.b);
  if (ffi::Args scales = args.optional_group("scales", 3)) {
    t.a_scale = scales.optional_tensor(names.a_scale);
    t.b_scale = scales.optional_tensor(names.b_scale);
    t.out_scale = scales.optional_tensor(names.out_scale);
  }
  t.bias = args.optional_tensor("bias");
  const double alpha = args.number("alpha");
  if (ffi::Args rows = args.optional_group("rows", 4)) {
    t.groups = rows.optional_tensor(names.groups);
    t.weight_indices = rows.optional_tensor("weight_indices");
    t.row_index = rows.optional_tensor("row_index");
    t.row_weight = rows.optional_tensor("row_weight");
  }
  GemmParams params = {};
  const Gate gate(params, args);
  const int64_t layout = args.integer("layout");
  const int64_t max_ctas = args.integer_in("max_ctas", 0, INT32_MAX);
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  ffi::check_dtype(t.a, kDtypeA);
  ffi::check_dtype(t.b, kDtypeB);
  ffi::check_dtype(t.out, kDtypeOut);
  ffi::check_ndim(t.a, 2, kFlatRows ? 2 : 3);
  ffi::check_ndim(t.b, 2, 3);
  const Operand a(t.a, false), b(t.b, layout & kTransposedB);
  if (a.k != b.k) {
    ffi::raise("ValueError", "`%s` and `%s` must have the same k, got shapes %s and %s", t.a.name,
               t.b.name, t.a.shape_text().c_str(), t.b.shape_text().c_str());
  }
  if (!kFlatRows && a.batches != b.batches && !t.weight_indices) {
    ffi::raise("ValueError", "`%s` and `%s` must have the same batch size, got shapes %s and %s",
               t.a.name, t.b.name, t.a.shape_text().c_str(), t.b.shape_text().c_str());
  }
  if (kGathers != bool(t.row_index)) {
    ffi::raise("TypeError", "`row_index` must be %s", kGathers ? "given" : "None");
  }
  const int64_t num_rows = kGathers ? t.row_index.dim(0) : a.rows;
  const int64_t num_columns = kGated ? b.rows / 2 : b.rows;
  if (t.a.ndim() == 3) {
    ffi::check_shape(t.out, {a.batches, num_rows, num_columns});
  } else {
    ffi::check_shape(t.out, {num_rows, num_columns});
  }
  ffi::check_last_dim_contiguous(t.out);
  ffi::check_no_broadcast(t.out);
  if (a.rows > INT32_MAX || b.rows > INT32_MAX || a.k > INT32_MAX || b.batches > INT32_MAX) {
    ffi::raise("ValueError", "`%s` and `%s` must have dimensions below 2^31, got %s and %s",
               t.a.name, t.b.name, t.a.shape_text().c_str(), t.b.shape_text().c_str());
  }
  fill_scales(params, t, a, b, layout);
  fill_out_scale(params, t, b);
  if (t.bias && kGrouped) {
    ffi::check_dtype(t.bias, kDtypeOut);
    ffi::check_shape(t.bias, {b.batches, b.rows});
    ffi::check_contiguous(t.bias);
  } else if (t.bias) {
    ffi::check_vector(t.bias, kDtypeOut, b.rows);
  }
  for (const ffi::Tensor& constants : {gate.alphas, gate.betas, gate.limits}) {
    if (constants) ffi::check_vector(constants, ffi::dtype::float32, b.batches);
  }
  if (t.b.numel() == 0 && t.out.numel() != 0) {  // the copy engine takes no sizes of zero
    ffi::raise("ValueError", "`%s` must have matrices with k above 0, got shape %s", t.b.name,
               t.b.shape_text().c_str());
  }
  params.alpha = static_cast<float>(alpha);
  int64_t num_groups = b.batches;
  if (kGroups != GemmGroups::batch) {
    if (!t.groups) ffi::raise("TypeError", "`%s` must be a torch.Tensor, got None", names.groups);
    if (kGroups != GemmGroups::indices && t.groups.numel() > kMaxGroups) {
      ffi::raise("ValueError", "`%s` must have at most %lld groups, got shape %s", t.groups.name,
                 static_cast<long long>(kMaxGroups), t.groups.shape_text().c_str());
    }
    if (t.weight_indices) num_groups = t.weight_indices.dim(0);
    params.group_stride = check_numbers(t.groups, kGroups == GemmGroups::offsets   ? num_groups + 1
                                                  : kGroups == GemmGroups::indices ? num_rows
                                                                                   : num_groups);
    if (t.weight_indices) params.weight_index_stride = check_numbers(t.weight_indices, num_groups);
  }
  if (t.row_index) ffi::check_vector(t.row_index, ffi::dtype::int32, num_rows);
  if (t.row_weight) ffi::check_vector(t.row_weight, ffi::dtype::float32, num_rows);
  if (t.a.numel() > 0) a.check_aligned(t.a, kElement);
  if (t.b.numel() > 0) b.check_aligned(t.b, kElement);
  check_tensors_together(t, gate);
  if (t.out.numel() == 0) return;

  params.a = a.matrix(t.a);
  params.b = b.matrix(t.b);
  const bool has_batches = t.out.ndim() == 3 && a.batches > 1;
  params.d = {t.out.data(), num_rows > 1 ? t.out.stride(-2) : num_columns,
              has_batches ? t.out.stride(0) : 0};
  params.m = static_cast<uint32_t>(num_rows);
  params.n = static_cast<uint32_t>(b.rows);
  params.k = static_cast<uint32_t>(a.k);
  params.num_groups = static_cast<uint32_t>(num_groups);
  params.num_weights = static_cast<uint32_t>(b.batches);
  params.row_index = t.row_index ? static_cast<const int32_t*>(t.row_index.data()) : nullptr;
  params.num_input_rows = static_cast<uint32_t>(a.rows);
  params.bias = t.bias ? t.bias.data() : nullptr;
  params.group_rows = t.groups ? static_cast<const int32_t*>(t.groups.data()) : nullptr;
  params.weight_indices =
      t.weight_indices ? static_cast<const int32_t*>(t.weight_indices.data()) : nullptr;
  params.row_weight = t.row_weight ? static_cast<const float*>(t.row_weight.data()) : nullptr;
  params.starts_early = (layout & kStartsEarly) != 0;
  params.max_ctas = static_cast<uint32_t>(max_ctas);

  const ffi::DeviceGuard guard(t.a);
  ffi::check_launch(gemm(params, ffi::resolve_pdl(enable_pdl, t.a), ffi::current_stream(t.a)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(gemm, args) { flashinfer::run(args); }
