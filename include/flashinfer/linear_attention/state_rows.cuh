// Rows of a recurrent state in registers. A row of kDim elements lies across kLanes neighbouring
// lanes of a warp, so a warp holds 32 / kLanes rows, and the 16-byte accesses of a warp are whole
// lines. Nothing is shared between rows, so a kernel on this layout needs no barrier.
//
// Asynchronous copies bring rows to shared memory, where a thread reads back only what it copied
// itself. All rows of a thread are in flight at once and take no registers. Meanwhile the operands
// that rows share (queries, keys, gates) are computed.
#pragma once

#include <cstdint>
#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/cp_async.cuh>

namespace flashinfer {

template <typename StateT, int kDim, int kMostLanes = 8>
struct RowLayout {
  static constexpr int kVecSize = 16 / static_cast<int>(sizeof(StateT));
  static constexpr int kLanes = kDim / kVecSize < kMostLanes ? kDim / kVecSize : kMostLanes;
  static constexpr int kElements = kDim / kLanes;  // of a row, per lane
  static constexpr int kVecs = kElements / kVecSize;
  static_assert(kVecs * kVecSize * kLanes == kDim, "a row is whole vectors of every lane");

  // Column of the first element of this lane's vector `i`.
  __device__ __forceinline__ static int column(int lane, int i) {
    return (i * kLanes + lane) * kVecSize;
  }
};

// The lane's part of a row of elements of any type T, by the layout of the state.
template <typename Layout, typename T>
__device__ __forceinline__ void load_row(float (&values)[Layout::kElements], const T* row,
                                         int lane) {
  constexpr int kVecSize = Layout::kVecSize;
#pragma unroll
  for (int i = 0; i < Layout::kVecs; ++i) {
    Vector<T, kVecSize> vec;
    vec.load(row + Layout::column(lane, i));
    float part[kVecSize];
    vec.to_floats(part);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) values[i * kVecSize + j] = part[j];
  }
}

// kStreaming: the row's lines leave L2 first, which makes room for rows that are still to be read.
template <typename Layout, bool kStreaming = false, typename T>
__device__ __forceinline__ void store_row(T* row, const float (&values)[Layout::kElements],
                                          int lane) {
  constexpr int kVecSize = Layout::kVecSize;
#pragma unroll
  for (int i = 0; i < Layout::kVecs; ++i) {
    float part[kVecSize];
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) part[j] = values[i * kVecSize + j];
    Vector<T, kVecSize> vec;
    vec.from_floats(part);
    if constexpr (kStreaming) {
      vec.store_streaming(row + Layout::column(lane, i));
    } else {
      vec.store(row + Layout::column(lane, i));
    }
  }
}

// The rows of a CTA's threads in shared memory: kStep rows per thread in each of kPasses passes.
template <typename Layout, typename StateT, int kThreads, int kStep, int kPasses>
struct StagedRows {
  static constexpr int kBytes = kStep * kPasses * Layout::kVecs * kThreads * 16;
  static constexpr int kGroups = kThreads / Layout::kLanes;  // rows of a CTA at a time
  char* shared;

  __device__ __forceinline__ static int row_of(int pass, int i) {
    return (pass * kStep + i) * kGroups + threadIdx.x / Layout::kLanes;
  }

  __device__ __forceinline__ char* unit(int pass, int i, int vec) const {
    return shared + (((pass * kStep + i) * Layout::kVecs + vec) * kThreads + threadIdx.x) * 16;
  }

  // Begins the copies of all passes of rows `matrix`, rows of kDim; rows from `num_rows` on become
  // zeros. A group of copies per pass.
  template <int kDim>
  __device__ __forceinline__ void copy(const StateT* matrix, int num_rows) const {
    const int lane = threadIdx.x % Layout::kLanes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int row = row_of(pass, i);
        const bool valid = row < num_rows;
#pragma unroll
        for (int vec = 0; vec < Layout::kVecs; ++vec) {
          ptx::cp_async_16(ptx::shared_address(unit(pass, i, vec)),
                           matrix + (valid ? row * kDim : 0) + Layout::column(lane, vec), valid);
        }
      }
      ptx::cp_async_commit();
    }
  }

  // Waits for the rows of the next pass, in order. An empty group per call keeps the number of
  // groups that may be unfinished constant.
  __device__ __forceinline__ void wait() const {
    ptx::cp_async_commit();
    ptx::cp_async_wait<kPasses>();
  }

  __device__ __forceinline__ void load(float (&values)[Layout::kElements], int pass, int i) const {
    constexpr int kVecSize = Layout::kVecSize;
#pragma unroll
    for (int vec = 0; vec < Layout::kVecs; ++vec) {
      Vector<StateT, kVecSize> elements;
      elements.load(reinterpret_cast<const StateT*>(unit(pass, i, vec)));
      float part[kVecSize];
      elements.to_floats(part);
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) values[vec * kVecSize + j] = part[j];
    }
  }
};

// Sums over the lanes of kRows rows, each lane with a part of all of them: whenever lanes have
// several sums left, half of the lanes take half of these. Lane `lane` of kLanes gets the sum of
// row lane / (kLanes / kRows).
template <int kLanes, int kRows>
__device__ __forceinline__ float row_sums(const float (&x)[kRows], int lane) {
  static_assert(kLanes % kRows == 0, "a lane ends with one row");
  if constexpr (kRows == 1) {
    return warp_reduce_sum(x[0], kLanes);
  } else {
    const bool upper = lane & (kLanes / 2);
    float half[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const float given = upper ? x[i] : x[i + kRows / 2];
      const float kept = upper ? x[i + kRows / 2] : x[i];
      half[i] = kept + __shfl_xor_sync(0xffffffffu, given, kLanes / 2);
    }
    return row_sums<kLanes / 2>(half, lane);
  }
}

}  // namespace flashinfer
