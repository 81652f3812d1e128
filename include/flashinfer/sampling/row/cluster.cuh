// One row of logits or probabilities, divided among the CTAs of a cluster and kept in their shared
// memory, so that device memory is read once however often the row is walked.
//
// The row is cut into vectors of 16 bytes at 16-byte addresses; its first and last vector may lie
// partly outside. Ranks, then warps, own consecutive stretches of vectors, so a list of per-warp
// results in rank and warp order is in index order. A thread walks the same vectors every time, so
// walks need no barrier between them. A row that does not fit (a launch without clusters) is walked
// in global memory.
#pragma once

#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/cluster.cuh>

namespace flashinfer {

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

// Maps larger floats to larger keys; both zeros have the same key. Not for NaN.
__device__ __forceinline__ uint32_t float_to_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float key_to_float(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ uint64_t warp_sum_u64(uint64_t x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Over an aligned power-of-two part of a warp.
__device__ __forceinline__ uint64_t warp_max_u64(uint64_t x, int width = 32) {
#pragma unroll
  for (int offset = width / 2; offset > 0; offset /= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Sum over this lane and the lanes before it.
__device__ __forceinline__ uint64_t warp_inclusive_sum(uint64_t x) {
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t before = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane_idx >= offset) x += before;
  }
  return x;
}

// Bound for __launch_bounds__ of row kernels, which run with up to 512 threads. It lets three CTAs
// of 256 threads share an SM's registers (80 per thread).
inline constexpr int kRowThreadLimit = 768;

// How many elements are walked at a time and by which thread; host (sizes) and device share it.
struct RowLayout {
  uint32_t num_vecs;  // of the row, including vectors that are partly outside
  uint32_t vecs_per_cta;
  uint32_t vecs_per_warp;  // a multiple of 32

  FLASHINFER_HOST_DEVICE static RowLayout make(uint32_t num_vecs, uint32_t cluster_size,
                                               uint32_t num_warps) {
    const uint32_t per_cta = ceil_div(num_vecs, cluster_size);
    return {num_vecs, per_cta, round_up(ceil_div(per_cta, num_warps), 32u)};
  }
};

// How a walk changes an element that it loads: `apply(x, first)` changes a vector whose first
// element has index `first`; some of its elements may lie outside the row.
struct AsItIs {
  template <typename Vec>
  __device__ __forceinline__ void apply(Vec&, uint32_t) const {}
};

// With kCluster = false one CTA owns the row and walks it in global memory.
template <typename T_, bool kCluster_ = true, typename View = AsItIs>
class RowCluster {
 public:
  using T = T_;
  static constexpr bool kCluster = kCluster_;
  static constexpr int kVecSize = 16 / sizeof(T);
  using Vec = Vector<T, kVecSize>;

  const T* row;    // first element, in global memory
  uint32_t size;   // elements
  uint32_t phase;  // elements of the first vector that lie before the row
  uint32_t num_ranks, rank;
  uint32_t num_warps, warp_idx, lane_idx;
  bool is_resident;  // otherwise the row is walked in global memory
  Vec* resident;  // this CTA's vectors in shared memory, indexed by the vector's number in the row
  uint64_t* gathered;           // two lists of every CTA, for gather()
  uint32_t first_vec, end_vec;  // this warp's stretch
  uint32_t parity = 0;
  View view;

  // Number of words in the two lists of `gather_buffer`.
  FLASHINFER_HOST_DEVICE static constexpr uint32_t list_words(uint32_t num_ranks,
                                                              uint32_t num_warps) {
    return 2 * num_ranks * list_entries(num_warps);
  }

  // `max_vecs` is the capacity of `resident_buffer` in vectors.
  __device__ RowCluster(const T* row_, uint32_t size_, void* resident_buffer, uint32_t max_vecs,
                        uint64_t* gather_buffer)
      : row(row_), size(size_), gathered(gather_buffer) {
    phase = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    num_ranks = kCluster ? ptx::cluster_size() : 1;
    rank = kCluster ? ptx::cluster_rank() : 0;
    num_warps = blockDim.x / 32;
    warp_idx = threadIdx.x / 32;
    lane_idx = threadIdx.x % 32;
    const RowLayout layout = RowLayout::make(
        ceil_div(phase + size, static_cast<uint32_t>(kVecSize)), num_ranks, num_warps);
    const uint32_t cta_first = rank * layout.vecs_per_cta;
    const uint32_t cta_end = min(cta_first + layout.vecs_per_cta, layout.num_vecs);
    first_vec = min(cta_first + warp_idx * layout.vecs_per_warp, cta_end);
    end_vec = min(first_vec + layout.vecs_per_warp, cta_end);
    is_resident = kCluster && layout.vecs_per_cta <= max_vecs;
    resident = static_cast<Vec*>(resident_buffer) - cta_first;
  }

  __device__ __forceinline__ uint32_t elements_per_cta() const {
    return ceil_div(phase + size, num_ranks) + 2 * kVecSize;
  }

  // Row index of a vector's first element. It wraps around, like a negative number, for the vector
  // that begins before the row.
  __device__ __forceinline__ uint32_t index_of(uint32_t vec) const {
    return vec * kVecSize - phase;
  }

  __device__ __forceinline__ bool is_whole(uint32_t vec) const {
    const uint32_t first = index_of(vec);
    return first < size && size - first >= kVecSize;
  }

  // Elements outside the row become -inf: they weigh nothing and come last in any order.
  __device__ __forceinline__ Vec load_global(uint32_t vec) const {
    Vec x;
    if (is_whole(vec)) {
      x.load(row + static_cast<int64_t>(vec) * kVecSize - phase);
    } else {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        const uint32_t i = index_of(vec) + j;
        x.elements[j] = i < size ? row[i] : from_float<T>(negative_infinity());
      }
    }
    view.apply(x, index_of(vec));
    return x;
  }

  __device__ __forceinline__ Vec load(uint32_t vec) const {
    return kCluster && is_resident ? resident[vec] : load_global(vec);
  }

  // First walk: loads the row. `visit(x)` sees each element.
  template <typename Visit>
  __device__ __forceinline__ void fill(Visit visit) {
    constexpr uint32_t kInFlight = sizeof(T) == 4 ? 8 : 4;
    for (uint32_t base = first_vec + lane_idx; base < end_vec; base += 32 * kInFlight) {
      Vec x[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        if (base + 32 * i < end_vec) x[i] = load_global(base + 32 * i);
      }
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        if (base + 32 * i >= end_vec) break;
        if (kCluster && is_resident) resident[base + 32 * i] = x[i];
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) visit(x[i][j]);
      }
    }
  }

  // `visit(x)` sees each element of this thread again.
  template <typename Visit>
  __device__ __forceinline__ void walk(Visit visit) const {
#pragma unroll 2
    for (uint32_t vec = first_vec + lane_idx; vec < end_vec; vec += 32) {
      const Vec x = load(vec);
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) visit(x[j]);
    }
  }

  // Calls `body(x)` for the elements of this warp in [least, most], 32 at a time. Few elements pass
  // such a test, and a branch per element would idle most lanes. `queue` holds 64 floats of this
  // warp.
  template <typename Body>
  __device__ __forceinline__ void walk_between(float least, float most, float* queue,
                                               Body body) const {
    const uint32_t lanes_before = (1u << lane_idx) - 1;
    uint32_t waiting = 0;
#pragma unroll 1
    for (uint32_t base = first_vec; base < end_vec; base += 32) {
      const uint32_t vec = base + lane_idx;
      Vec x;
      bool passes[kVecSize];
      bool any = false;
      if (vec < end_vec) x = load(vec);
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        passes[j] = vec < end_vec && x[j] >= least && x[j] <= most;
        any = any || passes[j];
      }
      if (!__any_sync(0xffffffffu, any)) continue;
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        const uint32_t mask = __ballot_sync(0xffffffffu, passes[j]);
        if (passes[j]) queue[waiting + __popc(mask & lanes_before)] = x[j];
        waiting += __popc(mask);
        if (waiting >= 32) {
          __syncwarp();
          const float ready = queue[lane_idx];
          const float later = queue[32 + lane_idx];
          __syncwarp();
          waiting -= 32;
          if (lane_idx < waiting) queue[lane_idx] = later;
          body(ready);
        }
      }
    }
    __syncwarp();
    if (lane_idx < waiting) body(queue[lane_idx]);
    __syncwarp();
  }

  // Replaces each element of this thread in the shared copy by visit(x) and returns true. Without a
  // shared copy it only visits the elements and returns false.
  template <typename Visit>
  __device__ __forceinline__ bool replace(Visit visit) {
    const bool replaces = sizeof(T) == 4 && kCluster && is_resident;
#pragma unroll 2
    for (uint32_t vec = first_vec + lane_idx; vec < end_vec; vec += 32) {
      Vec x = load(vec);
      float y[kVecSize];
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) y[j] = visit(x[j]);
      if constexpr (sizeof(T) == 4) {
        x.from_floats(y);
        if (replaces) resident[vec] = x;
      }
    }
    return replaces;
  }

  __device__ __forceinline__ void barrier() const {
    if (!kCluster || num_ranks == 1) {
      __syncthreads();
    } else {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }

  // The next list to publish. `publish` writes entry i in every CTA's copy. The list may be read
  // from the next barrier until the list after the next one is published.
  __device__ __forceinline__ uint64_t* next_list() {
    uint64_t* list = gathered + parity * num_ranks * list_entries(num_warps);
    parity ^= 1;
    return list;
  }

  // `value` is the same in all lanes.
  __device__ __forceinline__ void publish(uint64_t* list, uint32_t i, uint64_t value) const {
    if constexpr (kCluster) {
      if (lane_idx < num_ranks) {
        ptx::cluster_store(ptx::cluster_address(list + i, lane_idx), value);
      }
    } else if (lane_idx == 0) {
      list[i] = value;
    }
  }

  __device__ __forceinline__ uint32_t global_warp() const { return rank * num_warps + warp_idx; }

  // Gathers one value per warp, in index order, in every CTA. It takes one barrier.
  __device__ __forceinline__ const uint64_t* gather(uint64_t value) {
    uint64_t* list = next_list();
    publish(list, global_warp(), value);
    barrier();
    return list;
  }

  // Sum of the first `count` entries of a list.
  __device__ __forceinline__ uint64_t sum_list(const uint64_t* list, uint32_t count) const {
    uint64_t sum = 0;
    for (uint32_t i = lane_idx; i < count; i += 32) sum += list[i];
    return warp_sum_u64(sum);
  }

  __device__ __forceinline__ uint64_t gather_sum(uint64_t warp_value) {
    return sum_list(gather(warp_value), num_ranks * num_warps);
  }

 private:
  // Entries of one rank in a list: one per warp, or one per group of bins (select.cuh).
  FLASHINFER_HOST_DEVICE static constexpr uint32_t list_entries(uint32_t num_warps) {
    return num_warps < 8 ? 8 : num_warps;
  }
};

}  // namespace flashinfer
