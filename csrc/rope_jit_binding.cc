//   rope(q_out, k_out, q, k, pos_ids, indptr, offsets, rotary_dim, rope_scale, rope_theta, smoothing)
//   rope_with_cache(query_out, key_out, positions, query, key, head_size, cos_sin_cache)
//
// A configuration with computed angles exports the first, one with a cache the second. Either
// pos_ids is None, or indptr and offsets are. `smoothing` is None or a tuple (low_freq_factor,
// high_freq_factor, old_context_len). The outputs may be the inputs.
#include "rope_binding.h"
#include "rope_frequencies.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

// One of q and k, seen as [tokens, heads, head_dim].
void add_operand(RopeParams& params, RopeAlignment& alignment, const Tensor& out, const Tensor& in,
                 int64_t head_dim, int64_t rotary_dim) {
  ffi::check_same_shape(out, in);
  ffi::check_dtype(out, kOutDtype);
  ffi::check_last_dim_contiguous(out);
  ffi::check_no_broadcast(out);
  ffi::check_same_view_or_disjoint(out, in);
  const int64_t num_heads = in.ndim() == 3 ? in.dim(1) : in.dim(1) / head_dim;
  const auto rows = [&](const Tensor& tensor, int64_t offset) {
    RopeRows result = rope_rows(tensor, offset);
    if (tensor.ndim() == 2) result.stride_head = head_dim;
    return result;
  };
  alignment.rows(in);
  alignment.rows(out);
  alignment.require(rotary_dim % (2 * kVecSize) == 0);
  if (in.ndim() == 2) alignment.require(num_heads <= 1 || head_dim % kVecSize == 0);
  add_segment(params, rows(in, 0), rows(out, 0), num_heads, rotary_dim, true);
  if (out.data() == in.data() || rotary_dim == head_dim) return;
  alignment.require(head_dim % kVecSize == 0);
  add_segment(params, rows(in, rotary_dim), rows(out, rotary_dim), num_heads, head_dim - rotary_dim,
              false);
}

void check_input(const Tensor& tensor, int low_ndim) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_ndim(tensor, low_ndim, 3);
  ffi::check_last_dim_contiguous(tensor);
  ffi::check_count(tensor, "tokens", tensor.dim(0));
  if (tensor.ndim() == 3) ffi::check_count(tensor, "heads", tensor.dim(1), 0, ffi::kMaxHeads / 2);
}

void check_same_tokens(const Tensor& tensor, const Tensor& like) {
  if (tensor.dim(0) != like.dim(0)) {
    ffi::raise("ValueError", "`%s` must have the %lld tokens of `%s`, got shape %s", tensor.name,
               static_cast<long long>(like.dim(0)), like.name, tensor.shape_text().c_str());
  }
}

}  // namespace
}  // namespace flashinfer

#if FLASHINFER_CFG_COMPUTED

namespace flashinfer {
namespace {

// Inputs of the frequencies; compared as bytes.
struct FrequencyKey {
  int64_t rotary_dim;
  double scale, theta;
  double low_freq_factor, high_freq_factor, old_context_len;  // all 0: no smoothing
};

RopeFrequencies compute_frequencies(const FrequencyKey& key) {
  RopeFrequencies result = {};
  for (int64_t j = 0; j < key.rotary_dim / 2; ++j) {
    const double base = std::pow(key.theta, -2. * j / key.rotary_dim);  // radians per position
    double frequency = base / key.scale;
    if (key.old_context_len > 0.) {
      // Llama 3.1: short wavelengths, which the old context holds many times, stay; long ones are
      // stretched.
      const double periods = key.old_context_len * base / kTwoPi;
      double keep = (periods - key.low_freq_factor) / (key.high_freq_factor - key.low_freq_factor);
      keep = keep < 0. ? 0. : keep > 1. ? 1. : keep;
      frequency = (1. - keep) * frequency + keep * base;
    }
    result.turns[j] = turns_of(frequency);
  }
  return result;
}

void take_smoothing(ffi::Args& args, FrequencyKey& key) {
  ffi::Args smoothing = args.optional_group("smoothing", 3);
  if (!smoothing) return;
  key.low_freq_factor = smoothing.positive("low_freq_factor");
  key.high_freq_factor = smoothing.positive("high_freq_factor");
  key.old_context_len = smoothing.positive("old_context_len");
}

void check_smoothing(const FrequencyKey& key) {
  if (key.old_context_len > 0. && key.high_freq_factor <= key.low_freq_factor) {
    ffi::raise("ValueError", "`high_freq_factor` must be greater than `low_freq_factor` %g, got %g",
               key.low_freq_factor, key.high_freq_factor);
  }
}

void check_rotary_dim(int64_t rotary_dim, int64_t head_dim) {
  constexpr int64_t kMaxDim = 2 * RopeFrequencies::kMaxPairs;
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > head_dim || rotary_dim > kMaxDim) {
    ffi::raise("ValueError",
               "`rotary_dim` must be even, from 2 to the head size %lld and at most %lld, got %lld",
               static_cast<long long>(head_dim), static_cast<long long>(kMaxDim),
               static_cast<long long>(rotary_dim));
  }
}

// Checks positions that follow from the request of a token.
void check_ragged(RopeParams& params, const Tensor& indptr, const Tensor& offsets) {
  if (!indptr || !offsets) ffi::raise("TypeError", "`indptr` and `offsets` must be torch.Tensor");
  params.batch_size = static_cast<uint32_t>(ffi::check_indptr(indptr));
  ffi::check_indices(offsets, params.batch_size);
  params.indptr = static_cast<const int32_t*>(indptr.data());
  params.offsets = static_cast<const int32_t*>(offsets.data());
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(rope, args) {
  using namespace flashinfer;
  const ffi::Tensor q_out = args.tensor("q"), k_out = args.tensor("k");
  const ffi::Tensor q = args.tensor("q"), k = args.tensor("k");
  const ffi::Tensor pos_ids = args.optional_tensor("pos_ids");
  const ffi::Tensor indptr = args.optional_tensor("indptr");
  const ffi::Tensor offsets = args.optional_tensor("offsets");
  FrequencyKey key = {};
  key.rotary_dim = args.integer("rotary_dim");
  key.scale = args.positive("rope_scale");
  key.theta = args.positive("rope_theta");
  take_smoothing(args, key);
  args.all_taken();

  check_smoothing(key);
  check_input(q, 3);
  check_input(k, 3);
  check_same_tokens(k, q);
  const int64_t num_tokens = q.dim(0), head_dim = q.dim(2);
  if (k.dim(2) != head_dim) {
    ffi::raise("ValueError", "`k` must have the head size of `q`, %lld, got shape %s",
               static_cast<long long>(head_dim), k.shape_text().c_str());
  }
  check_rotary_dim(key.rotary_dim, head_dim);
  RopeCallParams params = {};
  RopeAlignment alignment;
  params.num_tokens = static_cast<uint32_t>(num_tokens);
  params.rope_dim = static_cast<uint32_t>(key.rotary_dim);
  add_operand(params, alignment, q_out, q, head_dim, key.rotary_dim);
  add_operand(params, alignment, k_out, k, head_dim, key.rotary_dim);
  ffi::check_disjoint(q_out, k);
  ffi::check_disjoint(k_out, q);
  if (pos_ids) {
    check_positions(params, pos_ids, num_tokens);
    ffi::check_disjoint(q_out, pos_ids);
    ffi::check_disjoint(k_out, pos_ids);
  } else {
    check_ragged(params, indptr, offsets);
  }
  ffi::check_cuda(q);
  for (const ffi::Tensor& tensor : {k, q_out, k_out, pos_ids, indptr, offsets}) {
    if (tensor) ffi::check_same_device(tensor, q);
  }
  params.frequencies = frequencies_of(key);
  launch_checked(params, alignment, ffi::Args::Flag::kNone, q);
}

#else

FLASHINFER_FFI_EXPORT(rope_with_cache, args) {
  using namespace flashinfer;
  const ffi::Tensor query_out = args.tensor("query"), key_out = args.tensor("key");
  const ffi::Tensor positions = args.tensor("positions");
  const ffi::Tensor query = args.tensor("query"), key = args.tensor("key");
  const int64_t head_size = args.integer("head_size");
  const ffi::Tensor cache = args.tensor("cos_sin_cache");
  args.all_taken();

  check_input(query, 2);
  check_input(key, 2);
  check_same_tokens(key, query);
  RopeCallParams params = {};
  RopeAlignment alignment;
  const int64_t rotary_dim = check_cos_sin_cache(params, alignment, cache);
  if (head_size < rotary_dim) {
    ffi::raise("ValueError",
               "`head_size` must be at least the %lld columns of `cos_sin_cache`, got %lld",
               static_cast<long long>(rotary_dim), static_cast<long long>(head_size));
  }
  for (const ffi::Tensor& tensor : {query, key}) {
    const bool fits =
        tensor.ndim() == 3 ? tensor.dim(2) == head_size : tensor.dim(1) % head_size == 0;
    if (!fits) {
      ffi::raise("ValueError",
                 "`%s` must have shape [tokens, heads * %lld] or [tokens, heads, %lld], got %s",
                 tensor.name, static_cast<long long>(head_size), static_cast<long long>(head_size),
                 tensor.shape_text().c_str());
    }
    if (tensor.ndim() == 2) {
      ffi::check_count(tensor, "columns", tensor.dim(1), 0, ffi::kMaxHeads / 2 * head_size);
    }
  }
  params.num_tokens = static_cast<uint32_t>(query.dim(0));
  check_positions(params, positions, query.dim(0));
  add_operand(params, alignment, query_out, query, head_size, rotary_dim);
  add_operand(params, alignment, key_out, key, head_size, rotary_dim);
  ffi::check_disjoint(query_out, key);
  ffi::check_disjoint(key_out, query);
  for (const ffi::Tensor& out : {query_out, key_out}) {
    ffi::check_disjoint(out, cache);
    ffi::check_disjoint(out, positions);
  }
  ffi::check_cuda(query);
  for (const ffi::Tensor& tensor : {key, query_out, key_out, positions, cache}) {
    ffi::check_same_device(tensor, query);
  }
  launch_checked(params, alignment, ffi::Args::Flag::kNone, query);
}

#endif
