//   weight_gemm(names, out, a, weights, scales, alpha, bias, rows, gate, enable_pdl)
//
// out = act(alpha a weights^T + bias). `names` says what the public function calls its tensors.
// `weights`: [.., n, bytes of k], `scales`: None, or [.., n] for a scale per row, or [.., n, k /
// group]; both have a leading dimension for groups, where there are groups. `alpha`: None, or
// float32 [1] or [groups]. `rows`: None or (offsets, row_index, starts_early), the second of which
// may be None: rows offsets[g] to offsets[g + 1] use group g, and row r of out reads row
// row_index[r] of a; starts_early: offsets and weights were ready before the preceding grid began,
// which is one of these products.
// `gate`: None or (alpha, beta, limit), each a number or, in groups, a tensor [groups].
#include "ffi.h"
#include "weight_gemm.h"

#include <limits>

#include <flashinfer/common/math.cuh>
#include <flashinfer/gemm/gemm_params.h>

namespace flashinfer {
namespace {

enum class Weights { plain, int8, int4, mxfp4, nvfp4 };

constexpr DLDataType kDtypeA = ffi::dtype::FLASHINFER_CFG_DTYPE_A;
constexpr DLDataType kDtypeOut = ffi::dtype::FLASHINFER_CFG_DTYPE_OUT;
constexpr DLDataType kDtypeScale = ffi::dtype::FLASHINFER_CFG_DTYPE_SCALE;
constexpr Weights kWeights = Weights::FLASHINFER_CFG_WEIGHTS;
constexpr int64_t kBits = kWeights == Weights::plain ? 16 : kWeights == Weights::int8 ? 8 : 4;
constexpr int64_t kGroupSize = FLASHINFER_CFG_GROUP_SIZE;
constexpr bool kGated = is_gated(GemmActivation::FLASHINFER_CFG_ACTIVATION);
constexpr int64_t kMaxGroups = 1024, kMaxTiles = 65535;

struct Names {
  const char *a, *weights, *scales, *bias;
};
constexpr Names kNames[] = {
    {"input", "weight", "weight_scale", "bias"},
    {"mat_a", "mat_b", "scales", "bias"},
    {"input", "fc1_expert_weights", "quant_scales[0]", "fc1_expert_biases"},
    {"hidden", "fc2_expert_weights", "quant_scales[1]", "fc2_expert_biases"},
};
constexpr int64_t kNumNames = sizeof(kNames) / sizeof(Names);

struct Tensors {
  ffi::Tensor out, a, weights, scales, alpha, bias, offsets, row_index, gates[3];
};

// A matrix whose rows are contiguous and begin on 16 bytes; `rank` 3 has groups in front.
void check_rows(const ffi::Tensor& tensor, int rank) {
  ffi::check_ndim(tensor, rank, rank);
  ffi::check_vector_rows(tensor);
}

int64_t stride_of_rows(const ffi::Tensor& tensor) {
  return tensor.dim(-2) > 1 ? tensor.stride(-2) : tensor.dim(-1);
}

void fill_weights(WeightGemmParams& params, const Tensors& t, int64_t k, bool grouped) {
  const int rank = grouped ? 3 : 2;
  check_rows(t.weights, rank);
  const DLDataType type = kWeights == Weights::plain  ? kDtypeA
                          : kWeights == Weights::int8 ? ffi::dtype::int8
                                                      : ffi::dtype::uint8;
  ffi::check_dtype(t.weights, type);
  const int64_t n = t.weights.dim(-2), columns = k * kBits / (type.bits);
  if (t.weights.dim(-1) != columns || k * kBits % 128 != 0 || k % 8 != 0 || n == 0) {
    ffi::raise("ValueError",
               "`%s` must have rows of %lld elements for `%s` with k = %lld, a multiple of %lld, "
               "got shape %s",
               t.weights.name, static_cast<long long>(columns), t.a.name, static_cast<long long>(k),
               static_cast<long long>(128 / kBits), t.weights.shape_text().c_str());
  }
  params.weights = t.weights.data();
  params.weight_stride = stride_of_rows(t.weights) * t.weights.itemsize();
  params.weight_group_stride = grouped ? t.weights.stride(0) * t.weights.itemsize() : 0;
  if (kWeights == Weights::plain) return;
  ffi::check_dtype(t.scales, kDtypeScale);
  const int64_t groups = grouped ? t.weights.dim(0) : 1;
  const int scale_rank = rank - (kGroupSize == 0 ? 1 : 0);
  int64_t shape[3] = {groups, n,
                      kGroupSize == 0 ? 0 : ceil_div<int64_t>(k, kGroupSize ? kGroupSize : 1)};
  ffi::check_shape(t.scales, shape + (grouped ? 0 : 1), scale_rank);
  if (kGroupSize != 0) ffi::check_last_dim_contiguous(t.scales);
  params.scales = t.scales.data();
  params.scale_stride = t.scales.stride(kGroupSize == 0 ? -1 : -2);
  params.scale_group_stride = grouped ? t.scales.stride(0) : 0;
}

void fill_gates(WeightGemmParams& params, Tensors& t, ffi::Args& args) {
  float* const numbers[3] = {&params.gate_alpha, &params.gate_beta, &params.gate_limit};
  const float** const tensors[3] = {&params.gate_alphas, &params.gate_betas, &params.gate_limits};
  constexpr const char* kGateNames[3] = {"swiglu_alpha", "swiglu_beta", "swiglu_limit"};
  params.gate_alpha = 1.f;
  params.gate_limit = std::numeric_limits<float>::infinity();
  ffi::Args gate = args.optional_group("gate", 3);
  if (!gate) return;
  for (int i = 0; i < 3; ++i) {
    if (!gate.next_is_tensor()) {
      *numbers[i] = static_cast<float>(gate.number(kGateNames[i]));
      continue;
    }
    t.gates[i] = gate.tensor(kGateNames[i]);
    *tensors[i] = static_cast<const float*>(t.gates[i].data());
  }
}

void check_bias(const ffi::Tensor& bias, int64_t groups, int64_t n, bool grouped) {
  if (!grouped) return ffi::check_vector(bias, kDtypeOut, n);
  ffi::check_dtype(bias, kDtypeOut);
  ffi::check_shape(bias, {groups, n});
  ffi::check_contiguous(bias);
}

void run(ffi::Args& args) {
  const Names& names = kNames[args.integer_in("names", 0, kNumNames - 1)];
  WeightGemmParams params = {};
  Tensors t;
  t.out = args.tensor("out");
  t.a = args.tensor(names.a);
  t.weights = args.tensor(names.weights);
  t.scales =
      kWeights == Weights::plain ? args.optional_tensor(names.scales) : args.tensor(names.scales);
  t.alpha = args.optional_tensor("alpha");
  t.bias = args.optional_tensor(names.bias);
  if (ffi::Args rows = args.optional_group("rows", 3)) {
    t.offsets = rows.tensor("offsets");
    t.row_index = rows.optional_tensor("row_index");
    params.starts_early = rows.flag("starts_early");
  }
  fill_gates(params, t, args);
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  const bool grouped = static_cast<bool>(t.offsets);
  ffi::check_dtype(t.a, kDtypeA);
  ffi::check_dtype(t.out, kDtypeOut);
  check_rows(t.a, 2);
  const int64_t k = t.a.dim(1), m = t.row_index ? t.row_index.dim(0) : t.a.dim(0);
  fill_weights(params, t, k, grouped);
  const int64_t n = t.weights.dim(-2), groups = grouped ? t.weights.dim(0) : 1;
  ffi::check_shape(t.out, {m, kGated ? n / 2 : n});
  ffi::check_last_dim_contiguous(t.out);
  ffi::check_no_broadcast(t.out);
  if (t.bias) check_bias(t.bias, groups, n, grouped);
  if (t.alpha) {
    ffi::check_vector(t.alpha, ffi::dtype::float32, t.alpha.numel() == 1 ? 1 : groups);
  }
  if (grouped) {
    ffi::check_vector(t.offsets, ffi::dtype::int32, groups + 1);
    if (t.row_index) ffi::check_vector(t.row_index, ffi::dtype::int32, m);
  }
  for (const ffi::Tensor& gate : t.gates) {
    if (gate) ffi::check_vector(gate, ffi::dtype::float32, groups);
  }
  if (t.weights.numel() == 0 && t.out.numel() != 0) {  // the copy engine takes no sizes of zero
    ffi::raise("ValueError", "`%s` must have matrices with k above 0, got shape %s", t.weights.name,
               t.weights.shape_text().c_str());
  }
  // A tile has at least one row.
  const int64_t full_tiles = ceil_div<int64_t>(m, FLASHINFER_CFG_TOKENS);
  const int64_t tiles = grouped && full_tiles + groups < m ? full_tiles + groups
                        : grouped                          ? m
                                                           : full_tiles;
  if (tiles > kMaxTiles || groups > kMaxGroups || n > INT32_MAX || k > INT32_MAX) {
    ffi::raise("ValueError", "`%s` and `%s` are too large, got shapes %s and %s", t.a.name,
               t.weights.name, t.a.shape_text().c_str(), t.weights.shape_text().c_str());
  }

  const auto read = {t.a,       t.weights,   t.scales,   t.alpha,    t.bias,
                     t.offsets, t.row_index, t.gates[0], t.gates[1], t.gates[2]};
  for (const ffi::Tensor& tensor : read) {
    if (tensor) ffi::check_disjoint(t.out, tensor);
  }
  ffi::check_cuda(t.a);
  ffi::check_same_device(t.out, t.a);
  for (const ffi::Tensor& tensor : read) {
    if (tensor) ffi::check_same_device(tensor, t.a);
  }
  if (t.out.numel() == 0) return;
  params.a = t.a.data();
  params.d = t.out.data();
  params.bias = t.bias ? t.bias.data() : nullptr;
  params.a_stride = stride_of_rows(t.a);
  params.d_stride = stride_of_rows(t.out);
  params.m = static_cast<uint32_t>(m);
  params.n = static_cast<uint32_t>(n);
  params.k = static_cast<uint32_t>(k);
  params.alpha = 1.f;
  params.alphas = t.alpha ? static_cast<const float*>(t.alpha.data()) : nullptr;
  params.alpha_stride = t.alpha && t.alpha.numel() > 1 ? 1 : 0;
  params.offsets = grouped ? static_cast<const int32_t*>(t.offsets.data()) : nullptr;
  params.num_groups = static_cast<uint32_t>(groups);
  params.token_tiles = static_cast<uint32_t>(tiles);
  params.row_index = t.row_index ? static_cast<const int32_t*>(t.row_index.data()) : nullptr;
  params.num_input_rows = static_cast<uint32_t>(t.a.dim(0));

  const ffi::DeviceGuard guard(t.a);
  ffi::check_launch(
      weight_gemm(params, ffi::resolve_pdl(enable_pdl, t.a), ffi::current_stream(t.a)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(weight_gemm, args) { flashinfer::run(args); }
