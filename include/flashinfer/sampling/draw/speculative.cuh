// Chain speculative sampling: keeps draft tokens while the target model agrees, then draws one
// token of its own.
//
//   draft i is accepted with probability min(1, p_i(x_i) / q_i(x_i)),  q the draft's probabilities,
//   p the target's emitted: the drafts before the first that is not accepted, then one token drawn
//   from
//     max(p - q, 0) of that position, or p of the last position when all were accepted
//
// The emitted tokens are distributed as the target model's own.
// C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
#pragma once

#include <flashinfer/sampling/row/sampling.cuh>
#include <flashinfer/sampling/speculative_params.h>

namespace flashinfer {

namespace detail {

// max(x - other, 0), or x without another row.
struct PositiveDifference {
  const float* other = nullptr;  // row with the same number of elements
  uint32_t size = 0;

  template <typename T, int N>
  __device__ __forceinline__ void apply(Vector<T, N>& x, uint32_t first) const {
    if (!other) return;
    // The two rows may differ in alignment.
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (first + j < size) {
        const float difference = x.elements[j] - other[first + j];
        x.elements[j] = difference <= 0.f ? 0.f : difference;  // NaN stays
      }
    }
  }
};

}  // namespace detail

// One cluster per row of the batch; shared memory as for sampling_kernel.
template <typename T>
__global__ void __launch_bounds__(kRowThreadLimit)
    chain_speculative_kernel(const __grid_constant__ SpeculativeParams params) {
  using Row = RowCluster<T, true, detail::PositiveDifference>;
  extern __shared__ __align__(16) uint64_t dynamic_smem[];
  ptx::cluster_arrive();
  const uint32_t num_ranks = ptx::cluster_size();
  const uint32_t batch = blockIdx.x / num_ranks;
  const uint32_t lane_idx = threadIdx.x % 32;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  const uint32_t num_drafts = params.num_drafts;
  const uint64_t vocab_size = params.vocab_size;
  const float* drafts = params.draft_probs + uint64_t{batch} * num_drafts * vocab_size;
  const float* targets = params.target_probs + uint64_t{batch} * (num_drafts + 1) * vocab_size;
  const int32_t* tokens = params.draft_token_ids + uint64_t{batch} * num_drafts;
  const uint64_t seed = params.seed[params.seed_is_shared ? 0 : batch];
  const uint64_t offset = params.offset[params.offset_is_shared ? 0 : batch];
  const uint32_t stream = params.rows_have_streams ? batch : 0;

  // Every warp computes the decision itself, one draft per lane.
  uint32_t num_accepted = 0, num_emitted = num_drafts;
  for (uint32_t base = 0; base < num_drafts; base += 32) {
    const uint32_t i = base + lane_idx;
    bool accepted = false;
    if (i < num_drafts) {
      const uint32_t token = static_cast<uint32_t>(tokens[i]);
      if (token < vocab_size) {
        const float u =
            static_cast<float>(philox_bits(seed, offset, stream, i + 1) >> 40) * 0x1p-24f;
        accepted = u * drafts[i * vocab_size + token] < targets[i * vocab_size + token];
      }
    }
    const uint32_t mask = __ballot_sync(0xffffffffu, accepted);
    num_accepted += __popc(mask);
    if (num_emitted == num_drafts && ~mask != 0) {
      num_emitted = min(num_drafts, base + __ffs(static_cast<int>(~mask)) - 1);
    }
  }

  const bool all_accepted = num_emitted == num_drafts;
  Row row(targets + num_emitted * vocab_size, params.vocab_size,
          dynamic_smem + Row::list_words(num_ranks, blockDim.x / 32), params.max_vecs,
          dynamic_smem);
  if (!all_accepted) row.view = {drafts + num_emitted * vocab_size, params.vocab_size};
  float max = negative_infinity();
  row.fill([&](float x) { max = detail::max_nan(max, x); });
  ptx::cluster_wait();
  max = detail::gather_maxima(row, max).max;
  if (!(max > 0.f) && !all_accepted && max == max) {
    // Except for rounding, p equals q, so the token is drawn from p.
    row.view.other = nullptr;
    max = negative_infinity();
    row.fill([&](float x) { max = detail::max_nan(max, x); });
    max = detail::gather_maxima(row, max).max;
  }

  int32_t* out = params.token_ids + uint64_t{batch} * (num_drafts + 1);
  if (row.rank == 0) {
    for (uint32_t i = threadIdx.x; i <= num_drafts; i += blockDim.x) {
      if (i != num_emitted) out[i] = i < num_emitted ? tokens[i] : -1;
    }
    if (threadIdx.x == 0) {
      params.num_accepted[batch] += static_cast<int32_t>(num_accepted);
      params.num_emitted[batch] += static_cast<int32_t>(num_emitted);
    }
  }
  if (!detail::has_distribution<false>(max)) {
    if (row.rank == 0 && threadIdx.x == 0) out[num_emitted] = 0;
    return;
  }
  SamplingParams token = {};
  token.out = out;
  const ProbWeight weight(max, 1.f);
  detail::draw_from_row(token, row, weight, negative_infinity(),
                        philox_bits(seed, offset, stream, 0), num_emitted);
}

#ifndef __CUDACC_RTC__

inline cudaError_t launch_chain_speculative(const SpeculativeParams& params, int device,
                                            int num_sms, bool enable_pdl, cudaStream_t stream) {
  const RowLauncher launcher{chain_speculative_kernel<float>, device, num_sms};
  return launcher.launch(params, uint64_t{params.vocab_size} * sizeof(float), enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
