// Adds up the sums of the CTAs that split k, and turns them into D.
#pragma once

#include <flashinfer/gemm/portable/tile.cuh>
#include <flashinfer/ptx/cluster.cuh>

namespace flashinfer {

// The row of the weights that row `local` of the CTA's is; n if there is none. The first half of a
// gated CTA's rows is of the first half of the weights.
template <typename Tile>
__device__ __forceinline__ uint32_t weight_row(const WeightGemmParams& params, uint32_t local) {
  constexpr uint32_t kOut = Tile::kOutColumns;
  const uint32_t n = Tile::kGated ? params.n / 2 : params.n;
  const uint32_t row = blockIdx.z * kOut + local % kOut;
  if (row >= n) return params.n;
  return Tile::kGated && local >= kOut ? row + n : row;
}

template <typename Tile>
class WeightGemmEpilogue {
  using D = typename Tile::D;

 public:
  __device__ __forceinline__ WeightGemmEpilogue(const WeightGemmParams& params,
                                                const WeightGemmWork& work, const float* shared)
      : params_(params), work_(work), shared_(shared) {
    alpha_ = params.alpha * static_cast<float>(1 << Tile::Codes::kShift);
    if (params.alphas != nullptr) alpha_ *= __ldg(params.alphas + work.group * params.alpha_stride);
    if constexpr (Tile::kGated) gate_ = gemm_gate(params, work.group);
  }

  // Stores this CTA's share of the tile, two columns at a time.
  __device__ __forceinline__ void store() const {
    constexpr uint32_t kPairs = Tile::kOutColumns / 2;
    const uint32_t n = Tile::kGated ? params_.n / 2 : params_.n;
    const uint32_t rank = Tile::kSplits > 1 ? ptx::cluster_rank() : 0;
    for (uint32_t i = rank * Tile::kThreads + threadIdx.x; i < Tile::kTokens * kPairs;
         i += Tile::kSplits * Tile::kThreads) {
      const uint32_t token = i / kPairs, local = i % kPairs * 2;
      const uint32_t row = work_.row + token, column = blockIdx.z * Tile::kOutColumns + local;
      if (row >= work_.row_end || column >= n) continue;
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
  }

 private:
  // Scaled sums plus bias, of two neighbouring rows of the weights.
  __device__ __forceinline__ float2 finished(uint32_t token, uint32_t local) const {
    float2 sum = make_float2(0.f, 0.f);
    const float* place = shared_ + token * Tile::kSumStride + local;
#pragma unroll
    for (int split = 0; split < Tile::kSplits; ++split) {
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
    const uint32_t row = weight_row<Tile>(params_, local);
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

// All threads of the cluster call. The sums take the place of the weights in shared memory.
template <typename Tile>
__device__ __forceinline__ void finish_weight_gemm(const WeightGemmParams& params,
                                                   const WeightGemmWork& work, float* shared,
                                                   const float (&sums)[Tile::kTokenTiles][4]) {
  const uint32_t lane_idx = threadIdx.x % 32;
  const uint32_t column = threadIdx.x / 32 * 16 + lane_idx / 4;
#pragma unroll
  for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t token = j * 8 + lane_idx % 4 * 2 + i % 2;
      shared[token * Tile::kSumStride + column + i / 2 * 8] = sums[j][i];
    }
  }
  if constexpr (Tile::kSplits > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  WeightGemmEpilogue<Tile>(params, work, shared).store();
  // Other CTAs of the cluster may still read this one's shared memory.
  if constexpr (Tile::kSplits > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace flashinfer
