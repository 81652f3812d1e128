// Launches of the two stages of the delta rule in chunks: chunk_transform.cuh or, with a decay per
// key channel, chunk_channel_transform.cuh, then chunk_scan.cuh.
#pragma once

#include <flashinfer/linear_attention/chunk_channel_transform.cuh>
#include <flashinfer/linear_attention/chunk_scan.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

// Lets a kernel's CTAs have so many bytes. An SM that runs one kernel takes CTAs of the other only
// if both want the same share of its memory to be shared memory: all of it.
template <typename Kernel>
cudaError_t reserve_shared(Kernel kernel, int bytes) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

template <typename Traits, int kWarps>
cudaError_t launch_chunk_scan(const ChunkDeltaRuleParams& params, bool enable_pdl,
                              cudaStream_t stream) {
  using Shared = ChunkScanShared<Traits, kWarps>;
  const cudaError_t status = reserve_shared(chunk_scan_kernel<Traits, kWarps>, Shared::kBytes);
  if (status != cudaSuccess) return status;
  const DeltaRuleParams& recurrence = params.recurrence;
  const int64_t num_ctas = int64_t{recurrence.batch_size} * recurrence.state_heads *
                           (recurrence.head_dim_v / Shared::kRows);
  return launch_kernel(chunk_scan_kernel<Traits, kWarps>, dim3(static_cast<unsigned>(num_ctas)),
                       dim3(Shared::kThreads), Shared::kBytes, stream, enable_pdl, params);
}

inline constexpr int kTransformsPerSm = 2;

// A kernel of the first stage. `room`: CTAs of it that an SM has room for beside one of the second.
struct FirstStage {
  void (*kernel)(ChunkDeltaRuleParams);
  int threads, bytes, room;
};

// Both stages; head_dim_v is a multiple of 64. `schedule`: warps of a CTA of the second stage, 16
// value channels each. 0 chooses 8, which share what they read, if that gives every SM a CTA, else
// 4. Two warps cannot multiply as a warpgroup and lose to both (docs/tuning/linear_attention.md).
//
// Stages that run at once (params.progress, with PDL): the CTAs of the first are all resident
// before the second begins and wait for nobody, so they end, and what the second waits for gets
// done. Two of them on an SM leave time to the second's one warp per scheduler; where there is room
// for one alone, the second's CTAs get SMs with one.
template <typename Traits>
cudaError_t launch_chunk_stages(const FirstStage& first, const ChunkDeltaRuleParams& params,
                                int num_sms, int schedule, bool enable_pdl, cudaStream_t stream) {
  ChunkDeltaRuleParams all = params;
  if (!enable_pdl) all.progress = nullptr;
  const DeltaRuleParams& recurrence = all.recurrence;
  cudaError_t status = reserve_shared(first.kernel, first.bytes);
  if (status != cudaSuccess) return status;
  const int64_t channels =
      int64_t{recurrence.batch_size} * recurrence.state_heads * recurrence.head_dim_v;
  int64_t num_ctas = int64_t{all.num_slots} * recurrence.state_heads;
  int64_t at_once = int64_t{kTransformsPerSm} * num_sms;
  if (first.room < kTransformsPerSm) at_once -= channels / 64;
  if (at_once < num_sms) at_once = num_sms;
  if (all.progress != nullptr && num_ctas > at_once) num_ctas = at_once;
  status = launch_kernel(first.kernel, dim3(static_cast<unsigned>(num_ctas)), dim3(first.threads),
                         first.bytes, stream, enable_pdl, all);
  if (status != cudaSuccess) return status;
  if (schedule == 0) {
    schedule = channels / 128 >= num_sms && recurrence.head_dim_v % 128 == 0 ? 8 : 4;
  }
  return schedule == 8 ? launch_chunk_scan<Traits, 8>(all, enable_pdl, stream)
                       : launch_chunk_scan<Traits, 4>(all, enable_pdl, stream);
}

template <typename Traits>
cudaError_t launch_chunk_delta_rule(const ChunkDeltaRuleParams& params, int num_sms, int schedule,
                                    bool enable_pdl, cudaStream_t stream) {
  const FirstStage first = {chunk_transform_kernel<Traits>, detail::kTransformThreads,
                            ChunkTransformShared<Traits>::kBytes, kTransformsPerSm};
  return launch_chunk_stages<Traits>(first, params, num_sms, schedule, enable_pdl, stream);
}

template <typename Traits>
cudaError_t launch_chunk_kda(const ChunkDeltaRuleParams& params, int num_sms, int schedule,
                             bool enable_pdl, cudaStream_t stream) {
  using Shared = ChannelTransformShared<Traits>;
  const FirstStage first = {chunk_channel_transform_kernel<Traits>, Shared::kThreads,
                            Shared::kBytes, 1};
  return launch_chunk_stages<Traits>(first, params, num_sms, schedule, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
