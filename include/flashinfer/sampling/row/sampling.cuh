// Softmax, sampling, and the filters top-k, top-p and min-p, as one kernel with a configuration:
//
//   w_i = input_i or exp((input_i - max) / temperature)       weights, as exact fixed-point numbers
//   kept = { i : input_i >= T },  T from the filter           equal values are all in or all out
//   token: i with probability w_i / sum of kept weights       probs: w_i / sum, or 0      mask:
//   input_i, or -inf
//
// A cluster of CTAs takes a row and reads it once; see cluster.cuh. All sums are integers, so a
// row's result does not depend on the batch it is in or on the size of the cluster, and every
// search ends where it must: there is no retry and no wait but the cluster's barrier.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/common/philox.cuh>
#include <flashinfer/sampling/row/cluster.cuh>
#include <flashinfer/sampling/row/launch.cuh>
#include <flashinfer/sampling/row/maxima.cuh>
#include <flashinfer/sampling/sampling_params.h>
#include <flashinfer/sampling/row/select.cuh>
#include <flashinfer/sampling/row/weight.cuh>
#include <type_traits>

namespace flashinfer {

template <typename T_, typename TOut_, bool kLogits_, SamplingFilter kFilter_,
          SamplingOutput kOutput_>
struct SamplingTraits {
  using T = T_;
  using TOut = TOut_;  // not for kToken
  using Weight = std::conditional_t<kLogits_, LogitWeight, ProbWeight>;
  static constexpr bool kLogits = kLogits_;
  static constexpr SamplingFilter kFilter = kFilter_;
  static constexpr SamplingOutput kOutput = kOutput_;
  static constexpr bool kTopK = kFilter == SamplingFilter::kTopK ||
                                kFilter == SamplingFilter::kTopKTopP ||
                                kFilter == SamplingFilter::kTopKTopPJoint;
  static constexpr bool kTopP = kFilter == SamplingFilter::kTopP ||
                                kFilter == SamplingFilter::kTopKTopP ||
                                kFilter == SamplingFilter::kTopKTopPJoint;
  static constexpr bool kMinP = kFilter == SamplingFilter::kMinP;
};

namespace detail {

// Sum of the weights of this warp's elements that are at least `threshold`.
template <typename Row, typename Weight>
__device__ __forceinline__ uint64_t warp_weight(const Row& row, const Weight& weight,
                                                float threshold) {
  uint64_t sum = 0;
  row.walk([&](float x) { sum += x >= threshold ? weight(x) : 0; });
  return warp_sum_u64(sum);
}

// Weight that a nucleus must reach.
__device__ __forceinline__ uint64_t top_p_target(float p, uint64_t total) {
  const auto target =
      static_cast<uint64_t>(ceil(static_cast<double>(fmaxf(p, 0.f)) * static_cast<double>(total)));
  return target < 1 ? 1 : target > total ? total : target;
}

// Key of the smallest element of the nucleus among the elements that are at least `threshold`.
template <typename Row, typename Weight>
__device__ __forceinline__ uint32_t select_top_p(Row& row, SelectStorage& storage,
                                                 const RowMaxima& maxima, const Weight& weight,
                                                 float threshold, float p) {
  const uint64_t total = row.gather_sum(warp_weight(row, weight, threshold));
  const uint64_t target = top_p_target(p, total);
  // Elements below this value weigh less than 1 - p in total, so the nucleus ends above them.
  const float negligible =
      __fdividef((1.f - p) * static_cast<float>(total), static_cast<float>(row.size));
  const float bound = weight.at_most(p < 0.999f ? 0.9f * negligible : 0.25f);
  const uint32_t low = float_to_key(fmaxf(bound, threshold));
  return select_threshold(row, storage, WeightMeasure<Weight>{weight}, low,
                          float_to_key(maxima.max), target);
}

// Finds the element where the running sum of weights, in index order, passes `target`. The warp
// whose stretch holds it calls this, with `target` relative to the stretch.
template <typename Row, typename Weight>
__device__ __forceinline__ uint32_t find_in_stretch(const Row& row, const Weight& weight,
                                                    float threshold, uint64_t target) {
  uint32_t found = 0;
  for (uint32_t base = row.first_vec; base < row.end_vec; base += 32) {
    const uint32_t vec = base + row.lane_idx;
    uint64_t weights[Row::kVecSize];
    uint64_t sum = 0;
    if (vec < row.end_vec) {
      const typename Row::Vec x = row.load(vec);
#pragma unroll
      for (int j = 0; j < Row::kVecSize; ++j) {
        weights[j] = x[j] >= threshold ? weight(x[j]) : 0;
        sum += weights[j];
      }
    }
    const uint64_t inclusive = warp_inclusive_sum(sum);
    const uint64_t total = __shfl_sync(0xffffffffu, inclusive, 31);
    if (target >= total) {
      target -= total;
      continue;
    }
    const uint32_t passed = __ballot_sync(0xffffffffu, inclusive > target);
    const int lane = __ffs(static_cast<int>(passed)) - 1;
    if (static_cast<int>(row.lane_idx) == lane) {
      uint64_t before = inclusive - sum;
#pragma unroll
      for (int j = 0; j < Row::kVecSize; ++j) {
        if (target >= before) found = row.index_of(vec) + j;
        before += weights[j];
      }
    }
    return __shfl_sync(0xffffffffu, found, lane);
  }
  return found;
}

__device__ __forceinline__ void write_token(const SamplingParams& params, uint32_t out_row,
                                            uint32_t token) {
  if (params.tokens_are_64bit) {
    static_cast<int64_t*>(params.out)[out_row] = token;
  } else {
    static_cast<int32_t*>(params.out)[out_row] = static_cast<int32_t>(token);
  }
}

// Writes value(x) for each element of this thread.
template <typename TOut, typename Row, typename Value>
__device__ __forceinline__ void write_row(const Row& row, TOut* out, Value value) {
  constexpr int kVecSize = Row::kVecSize;
  constexpr uint32_t kOutVecSize = 16 / sizeof(TOut);
  const uint32_t out_phase =
      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out) / sizeof(TOut)) % kOutVecSize;
  const bool aligned = (out_phase + kOutVecSize - row.phase % kOutVecSize) % kOutVecSize == 0;
#pragma unroll 2
  for (uint32_t vec = row.first_vec + row.lane_idx; vec < row.end_vec; vec += 32) {
    const typename Row::Vec x = row.load(vec);
    float y[kVecSize];
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) y[j] = value(x[j]);
    if (aligned && row.is_whole(vec)) {
      Vector<TOut, kVecSize> packed;
      packed.from_floats(y);
      packed.store(out + row.index_of(vec));
    } else {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        const uint32_t i = row.index_of(vec) + j;
        if (i < row.size) out[i] = from_float<TOut>(y[j]);
      }
    }
  }
}

// Input row of an output row; a value of num_input_rows or more means that there is none.
__device__ __forceinline__ uint64_t input_row_of(const SamplingParams& params, uint32_t out_row) {
  if (!params.indices) return out_row;
  return params.indices_are_64bit
             ? static_cast<const uint64_t*>(params.indices)[out_row]
             : static_cast<uint64_t>(static_cast<const uint32_t*>(params.indices)[out_row]);
}

// Random bits of an output row, for its `draw`-th draw.
__device__ __forceinline__ uint64_t row_bits(const SamplingParams& params, uint32_t out_row,
                                             uint32_t draw = 0) {
  return philox_bits(params.seed[params.seed_is_shared ? 0 : out_row],
                     params.offset[params.offset_is_shared ? 0 : out_row],
                     params.rows_have_streams ? out_row : 0, draw);
}

// Whether a row with this maximum (NaN if it has one) has a distribution.
template <bool kLogits>
__device__ __forceinline__ bool has_distribution(float max) {
  return kLogits ? max > negative_infinity() : max > 0.f && max < -negative_infinity();
}

// The smallest value that the filter keeps.
template <typename Traits, typename Row>
__device__ __forceinline__ float find_threshold(Row& row, SelectStorage& storage,
                                                const RowMaxima& maxima,
                                                const typename Traits::Weight& weight, int32_t k,
                                                float p, float min_p) {
  float threshold = negative_infinity();
  if constexpr (Traits::kTopK) {
    if (k >= 1 && static_cast<uint32_t>(k) < row.size) {
      threshold = key_to_float(select_top_k(row, storage, maxima, static_cast<uint32_t>(k)));
    }
  }
  if constexpr (Traits::kTopP) {
    p = fmaxf(p, 0.f);
    if (p < 1.f) {
      const float from =
          Traits::kFilter == SamplingFilter::kTopKTopP ? threshold : negative_infinity();
      threshold =
          fmaxf(threshold, key_to_float(select_top_p(row, storage, maxima, weight, from, p)));
    }
  }
  if constexpr (Traits::kMinP) threshold = fminf(min_p, 1.f) * maxima.max;
  return threshold;
}

// Draws from the elements that are at least `threshold`; the warp that owns the drawn element calls
// found(token).
template <typename Row, typename Weight, typename Found>
__device__ __forceinline__ void find_in_row(Row& row, const Weight& weight, float threshold,
                                            uint64_t bits, Found found) {
  const uint64_t* list = row.gather(warp_weight(row, weight, threshold));
  const uint64_t total = row.sum_list(list, row.num_ranks * row.num_warps);
  const uint64_t before = row.sum_list(list, row.global_warp());
  const uint64_t target = __umul64hi(bits, total) - before;
  if (target < list[row.global_warp()]) found(find_in_stretch(row, weight, threshold, target));
}

// Draws as find_in_row() does and writes the element as the row's token.
template <typename Row, typename Weight>
__device__ __forceinline__ void draw_from_row(const SamplingParams& params, Row& row,
                                              const Weight& weight, float threshold, uint64_t bits,
                                              uint32_t out_row) {
  find_in_row(row, weight, threshold, bits, [&](uint32_t token) {
    if (row.lane_idx == 0) write_token(params, out_row, token);
  });
}

}  // namespace detail

// One cluster per output row. Dynamic shared memory: the row's lists, then its vectors.
template <typename Traits>
__global__ void __launch_bounds__(kRowThreadLimit)
    sampling_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  using Row = RowCluster<T>;
  constexpr SamplingOutput kOutput = Traits::kOutput;
  extern __shared__ __align__(16) uint64_t dynamic_smem[];
  __shared__ SelectStorage storage;

  // Other CTAs may be written to only once they run; the matching wait follows after the row is
  // loaded.
  ptx::cluster_arrive();
  const uint32_t num_ranks = ptx::cluster_size();
  const uint32_t out_row = blockIdx.x / num_ranks;
  const bool is_leader = blockIdx.x % num_ranks == 0 && threadIdx.x == 0;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  const uint64_t input_row = detail::input_row_of(params, out_row);
  const bool exists = input_row < params.num_input_rows;
  const T* input =
      static_cast<const T*>(params.input) + (exists ? input_row : 0) * params.input_stride;
  Row row(input, exists ? params.vocab_size : 0,
          dynamic_smem + Row::list_words(num_ranks, blockDim.x / 32), params.max_vecs,
          dynamic_smem);
  const uint32_t param_row = exists ? static_cast<uint32_t>(input_row) : 0;

  float thread_max = negative_infinity();
  row.fill([&](float x) { thread_max = detail::max_nan(thread_max, x); });
  ptx::cluster_wait();
  const RowMaxima maxima = detail::gather_maxima(row, thread_max);

  float p = 1.f, min_p = 0.f;
  bool has_nan = maxima.max != maxima.max;
  if constexpr (Traits::kTopP) p = params.top_p[param_row];
  if constexpr (Traits::kMinP) min_p = params.min_p[param_row];
  float inv_temperature = 1.f;
  if constexpr (Traits::kLogits && kOutput == SamplingOutput::kProbs) {
    const float temperature = params.temperature[param_row];
    inv_temperature = 1.f / temperature;
    has_nan = has_nan || !(temperature >= 0.f);
  }
  has_nan = has_nan || p != p || min_p != min_p;
  const bool valid = detail::has_distribution<Traits::kLogits>(maxima.max) && !has_nan;
  if (is_leader && params.valid) params.valid[out_row] = valid;
  if (kOutput == SamplingOutput::kMask ? has_nan : !valid) {
    if constexpr (kOutput == SamplingOutput::kToken) {
      if (is_leader) detail::write_token(params, out_row, 0);
    } else {
      using TOut = typename Traits::TOut;
      const float fill = has_nan || Traits::kLogits ? __uint_as_float(0x7fc00000u) : 0.f;
      detail::write_row(row, static_cast<TOut*>(params.out) + out_row * params.out_stride,
                        [&](float) { return fill; });
    }
    return;
  }

  const typename Traits::Weight weight(maxima.max, inv_temperature);
  int32_t k = 0;
  if constexpr (Traits::kTopK) k = params.top_k[param_row];
  const float threshold = detail::find_threshold<Traits>(row, storage, maxima, weight, k, p, min_p);
  if constexpr (kOutput == SamplingOutput::kToken) {
    detail::draw_from_row(params, row, weight, threshold, detail::row_bits(params, out_row),
                          out_row);
  } else {
    using TOut = typename Traits::TOut;
    TOut* out = static_cast<TOut*>(params.out) + out_row * params.out_stride;
    if constexpr (kOutput == SamplingOutput::kProbs) {
      uint64_t sum = 0;
      const bool replaced = row.replace([&](float x) {
        const float w = x >= threshold ? weight.to_float(x) : 0.f;
        sum += weight.to_fixed(w);
        return w;
      });
      const float factor = weight.scale() / static_cast<float>(row.gather_sum(warp_sum_u64(sum)));
      if (replaced) {
        detail::write_row(row, out, [&](float w) { return w * factor; });
      } else {
        detail::write_row(
            row, out, [&](float x) { return x >= threshold ? weight.to_float(x) * factor : 0.f; });
      }
    } else {
      row.barrier();
      detail::write_row(row, out,
                        [&](float x) { return x >= threshold ? x : negative_infinity(); });
    }
  }
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_sampling(SamplingParams params, int device, int num_sms, bool enable_pdl,
                                   cudaStream_t stream) {
  const RowLauncher launcher{sampling_kernel<Traits>, device, num_sms};
  return launcher.launch(params, uint64_t{params.vocab_size} * sizeof(typename Traits::T),
                         enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
