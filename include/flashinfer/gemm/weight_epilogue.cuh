// Adds up the sums of those who have a part of k each, and turns them into D.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/gemm/activation.cuh>
#include <flashinfer/gemm/weight_codes.cuh>
#include <flashinfer/gemm/weight_work.cuh>
#include <flashinfer/ptx/cluster.cuh>

namespace flashinfer {

// Sums are in shared memory, [kParts, kTokens, kSumStride] floats in each of the kSplits CTAs of a
// cluster; they are added in the order of CTAs and parts, and are 2^kShift too small.
template <typename Tile>
class WeightGemmEpilogue {
  using D = typename Tile::D;

 public:
  __device__ __forceinline__ WeightGemmEpilogue(const WeightGemmParams& params,
                                                const WeightGemmWork& work, const float* shared)
      : params_(params), work_(work), shared_(shared) {
    alpha_ = params.alpha * static_cast<float>(1 << Tile::kShift);
    if (params.alphas != nullptr) alpha_ *= __ldg(params.alphas + work.group * params.alpha_stride);
    if constexpr (Tile::kGated) gate_ = gemm_gate(params, work.group);
  }

  // Stores the share of thread `thread` of the `threads` that call in each CTA of the cluster.
  __device__ __forceinline__ void store(uint32_t thread, uint32_t threads) const {
    constexpr uint32_t kPairs = Tile::kOutColumns / 2;
    const uint32_t rank = Tile::kSplits > 1 ? ptx::cluster_rank() : 0;
    for (uint32_t i = rank * threads + thread; i < Tile::kTokens * kPairs;
         i += Tile::kSplits * threads) {
      store_pair(i / kPairs, i % kPairs * 2);
    }
  }

  // Stores column `local` of a token whose sum is complete, without gates.
  __device__ __forceinline__ void store_sum(uint32_t token, uint32_t local, float sum) const {
    const uint32_t row = work_.row + token, column = work_.column + local;
    if (row >= work_.row_end || column >= params_.n) return;
    float value = finished(local, sum);
    if constexpr (Tile::kActivation == GemmActivation::relu2) value = squared_relu(value);
    static_cast<D*>(params_.d)[row * params_.d_stride + column] = from_float<D>(value);
  }

  // Stores the columns `local` and `local` + 1 of a token.
  __device__ __forceinline__ void store_pair(uint32_t token, uint32_t local) const {
    const uint32_t n = Tile::kGated ? params_.n / 2 : params_.n;
    const uint32_t row = work_.row + token, column = work_.column + local;
    if (row >= work_.row_end || column >= n) return;
    float2 values = finished(token, local);
    if constexpr (Tile::kGated) {
      const float2 second = finished(token, local + Tile::kOutColumns);
      values.x = activate_pair<Tile::kActivation>(gate_, values.x, second.x);
      values.y = activate_pair<Tile::kActivation>(gate_, values.y, second.y);
    } else if constexpr (Tile::kActivation == GemmActivation::relu2) {
      values = make_float2(squared_relu(values.x), squared_relu(values.y));
    }
    D* target = static_cast<D*>(params_.d) + row * params_.d_stride + column;
    target[0] = from_float<D>(values.x);
    if (column + 1 < n) target[1] = from_float<D>(values.y);
  }

 private:
  // Scaled sums plus bias, of two neighbouring rows of the weights.
  __device__ __forceinline__ float2 finished(uint32_t token, uint32_t local) const {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < Tile::kSplits * Tile::kParts; ++i) {
      const int split = i / Tile::kParts;
      const float* place =
          shared_ + (i % Tile::kParts * Tile::kTokens + token) * Tile::kSumStride + local;
      float2 part;
      if constexpr (Tile::kSplits > 1) {
        const uint64_t bits = ptx::cluster_load_u64(ptx::cluster_address(place, split));
        part = make_float2(__uint_as_float(static_cast<uint32_t>(bits)),
                           __uint_as_float(static_cast<uint32_t>(bits >> 32)));
      } else {
        part = *reinterpret_cast<const float2*>(place);
      }
      sum = make_float2(sum.x + part.x, sum.y + part.y);
    }
    return make_float2(finished(local, sum.x), finished(local + 1, sum.y));
  }

  __device__ __forceinline__ float finished(uint32_t local, float sum) const {
    const uint32_t row = weight_row<Tile>(params_, work_.column, local);
    if (row >= params_.n) return 0.f;
    float factor = alpha_;
    if constexpr (Tile::kScalesRows) {
      const auto* scales = static_cast<const typename Tile::Scale*>(params_.scales);
      factor *= scale_to_float(
          scales[work_.group * params_.scale_group_stride + row * params_.scale_stride]);
    }
    if (params_.bias == nullptr) return sum * factor;
    const D* bias =
        static_cast<const D*>(params_.bias) + static_cast<uint64_t>(work_.group) * params_.n;
    return sum * factor + to_float(bias[row]);
  }

  const WeightGemmParams& params_;
  const WeightGemmWork& work_;
  const float* shared_;
  float alpha_;
  GemmGate gate_ = {};
};

}  // namespace flashinfer
