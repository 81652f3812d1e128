// A row that the copy engine loads into a CTA's shared memory (sm_90).
#pragma once

#include <cstdint>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/tma.cuh>

namespace flashinfer {

// Starts to copy `bytes` of the row to `shared`; addresses and size are multiples of 16. All
// threads call it once; `arrival` is in shared memory.
__device__ __forceinline__ void start_row_copy(const void* row, uint32_t bytes, uint4* shared,
                                               uint64_t* arrival) {
  if (threadIdx.x != 0) return;
  const uint32_t barrier = ptx::shared_address(arrival);
  ptx::mbarrier_init(barrier, 1);
  ptx::mbarrier_init_fence();
  ptx::mbarrier_arrive_expect(barrier, bytes);
  ptx::bulk_load(ptx::shared_address(shared), row, bytes, barrier);
}

// All threads call it once; when it returns, each thread sees the row.
__device__ __forceinline__ void wait_for_row_copy(uint64_t* arrival) {
  __syncthreads();  // the barrier is initialised
  ptx::mbarrier_wait(ptx::shared_address(arrival), 0);
}

}  // namespace flashinfer
