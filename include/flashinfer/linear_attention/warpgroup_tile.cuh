// Products of a warpgroup with tiles in shared memory (wgmma, sm_90a): four warps, 16 rows each,
// read a tile once where mma.sync reads it four times. The counterpart of WarpProducts in tile.cuh.
#pragma once

#include <flashinfer/linear_attention/tile.cuh>
#include <flashinfer/ptx/tma.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

// Products of a warpgroup; they run asynchronously from commit() to the wait() for their sums.
struct WarpgroupProducts {
  template <typename T, int kBlocks, int kSteps, typename TileType>
  __device__ __forceinline__ static void rows(float (&sums)[kBlocks][4],
                                              const uint32_t (&a)[kSteps][4],
                                              const TileType& tile) {
    static_assert(kBlocks * 8 == TileType::kRows && kSteps * 16 == TileType::kColumns);
    const uint64_t operand = ptx::wgmma_operand(tile.base);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t offset = step / 4 * (TileType::kRows * 128) + step % 4 * 32;
      ptx::wgmma<T, false>(sums, a[step], ptx::wgmma_advance(operand, offset), true);
    }
  }

  template <typename T, int kBlocks, int kSteps, typename TileType>
  __device__ __forceinline__ static void columns(float (&sums)[kBlocks][4],
                                                 const uint32_t (&a)[kSteps][4],
                                                 const TileType& tile) {
    static_assert(kBlocks * 8 == TileType::kColumns && kSteps * 16 == TileType::kRows);
    const uint64_t operand = ptx::wgmma_operand(tile.base, TileType::kRows * 128);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::wgmma<T, true>(sums, a[step], ptx::wgmma_advance(operand, step * 2048), true);
    }
  }

  // Called before products that add to `sums` if ordinary instructions wrote `sums`.
  template <typename... Sums>
  __device__ __forceinline__ static void begin(Sums&... sums) {
    (ptx::wgmma_done(sums), ...);
    ptx::wgmma_fence();
  }
  __device__ __forceinline__ static void commit() { ptx::wgmma_commit(); }
  // Waits until at most kPending of the latest groups are unfinished; earlier groups own `sums`.
  template <int kPending, int kBlocks>
  __device__ __forceinline__ static void wait(float (&sums)[kBlocks][4]) {
    ptx::wgmma_wait<kPending>();
    ptx::wgmma_done(sums);
  }
  __device__ __forceinline__ static void fence_copies() { ptx::async_proxy_fence(); }
};

}  // namespace flashinfer
