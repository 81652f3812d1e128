// All-reduce of the ranks of one host over peer memory, with the steps that follow it.
//
// Every rank adds the same values in the order of the ranks, in float32, and rounds once: all ranks
// hold the same bits, run after run, and one-shot and two-shot hold the same ones.
//
//   one-shot: each rank pushes its rows to all others; each adds all ranks' rows
//   two-shot: each rank pushes to each other the rows that the other owns; the owner adds them and
//             pushes the sums to all others
//
// Two-shot moves 2 (W - 1) / W of the data instead of W - 1 times, and waits twice. A CTA pushes a
// row before it waits for it, and takes rows in ascending order, and grids are alike on all ranks,
// so that the lowest unfinished row can always be finished, whichever CTAs are resident.
#pragma once

#include <flashinfer/comm/lamport.cuh>
#include <flashinfer/comm/row_output.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename T_, typename Input_, typename Output_, int kRanks_>
struct AllReduceTraits {
  using T = T_;
  using Input = Input_;
  using Output = Output_;
  static constexpr int kRanks = kRanks_;
  static constexpr int kVecSize = 16 / sizeof(T);
};

namespace detail {

// The receive buffers in the half of one call, in vectors of 16 bytes.
class ReceiveBuffers {
 public:
  __device__ __forceinline__ ReceiveBuffers(const comm::CommWorkspace& workspace, uint32_t half)
      : workspace_(workspace), half_offset_(half * workspace.half_bytes) {}

  __device__ __forceinline__ uint4* of(uint32_t rank, int64_t vec) const {
    return reinterpret_cast<uint4*>(static_cast<char*>(workspace_.buffers[rank]) + half_offset_) +
           vec;
  }

  // A rank keeps no place for data of its own.
  __device__ __forceinline__ static uint32_t place_of(uint32_t source, uint32_t owner) {
    return source < owner ? source : source - 1;
  }

 private:
  const comm::CommWorkspace& workspace_;
  int64_t half_offset_;
};

// One vector from each rank.
template <typename Traits>
struct Contributions {
  using Vec = Vector<typename Traits::T, Traits::kVecSize>;
  Vec from[Traits::kRanks];

  // Polls until the vectors of all other ranks are there, then puts the sentinels back.
  // `address(source)` is where one arrives.
  template <typename Address>
  __device__ __forceinline__ void receive(uint32_t rank, comm::Patience& patience,
                                          const Address& address) {
    patience.renew();
    while (true) {
      uint32_t missing = Traits::kRanks;
#pragma unroll
      for (uint32_t r = 0; r < Traits::kRanks; ++r) {
        if (r == rank) continue;
        from[r].words[0] = comm::peek(address(r));
      }
#pragma unroll
      for (uint32_t r = 0; r < Traits::kRanks; ++r) {
        if (r != rank && !comm::has_arrived(from[r].words[0])) missing = r;
      }
      if (missing == Traits::kRanks) break;
      patience.spend(missing);
    }
#pragma unroll
    for (uint32_t r = 0; r < Traits::kRanks; ++r) {
      if (r != rank) comm::put_sentinel(address(r));
    }
  }

  __device__ __forceinline__ Vec sum() const {
    float total[Traits::kVecSize] = {};
#pragma unroll
    for (int r = 0; r < Traits::kRanks; ++r) {
#pragma unroll
      for (int j = 0; j < Traits::kVecSize; ++j) {
        total[j] = r == 0 ? from[0][j] : total[j] + from[r][j];
      }
    }
    Vec result;
    result.from_floats(total);
    return result;
  }
};

// The same sum with fewer registers, for threads that hold many vectors: waits for one rank after
// the other.
template <typename Traits, typename Vec, typename Address>
__device__ __forceinline__ Vec sum_in_turn(const Vec& own, uint32_t rank, comm::Patience& patience,
                                           const Address& address) {
  float total[Traits::kVecSize];
#pragma unroll
  for (int j = 0; j < Traits::kVecSize; ++j) total[j] = -0.f;  // changes no number that is added
#pragma unroll 1
  for (uint32_t r = 0; r < Traits::kRanks; ++r) {
    Vec x = own;
    if (r != rank) {
      uint4* place = address(r);
      patience.renew();
      while (!comm::has_arrived(x.words[0] = comm::peek(place))) patience.spend(r);
      comm::put_sentinel(place);
    }
#pragma unroll
    for (int j = 0; j < Traits::kVecSize; ++j) total[j] += x[j];
  }
  Vec result;
  result.from_floats(total);
  return result;
}

// Whether vector `vec` of a row exists, and its index in the whole tensor.
__device__ __forceinline__ bool is_in_row(const AllReduceParams& params, uint32_t row,
                                          uint32_t vec) {
  return row < params.num_rows && vec < params.row_vecs &&
         static_cast<int64_t>(row) * params.row_vecs + vec < params.total_vecs;
}

}  // namespace detail

template <typename Traits, int kVecs>
__global__ void __launch_bounds__(512, Traits::kRanks <= 4 && kVecs < 4 ? 2 : 1)
    all_reduce_one_shot_kernel(const __grid_constant__ AllReduceParams params) {
  using T = typename Traits::T;
  using Vec = Vector<T, Traits::kVecSize>;
  const uint32_t rank = params.workspace.rank;
  ptx::grid_dependency_wait();
  if (!params.completes_at_end) ptx::grid_launch_dependents();
  const comm::CallCounter counter(params.workspace.control);
  const detail::ReceiveBuffers buffers(params.workspace, counter.half());
  const int64_t place_vecs = params.total_vecs;
  RowOutput<T, typename Traits::Output, kVecs> output;
  comm::Patience patience(params.workspace.control, comm::Wait::kOneShot);
  uint32_t parity = 0;
  for (uint32_t row = blockIdx.x; row < params.num_rows; row += gridDim.x, parity ^= 1) {
    Vec own[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t vec = threadIdx.x + i * blockDim.x;
      own[i].clear();
      if (detail::is_in_row(params, row, vec)) {
        own[i] = Traits::Input::template load<T>(params, row, vec);
      }
    }
    output.prepare(params, row);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t vec = threadIdx.x + i * blockDim.x;
      if (!detail::is_in_row(params, row, vec)) continue;
      const int64_t index = static_cast<int64_t>(row) * params.row_vecs + vec;
#pragma unroll
      for (uint32_t k = 1; k < Traits::kRanks; ++k) {
        const uint32_t peer = (rank + k) % Traits::kRanks;
        const uint32_t place = buffers.place_of(rank, peer);
        comm::push(buffers.of(peer, place * place_vecs + index), own[i].words[0]);
      }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t vec = threadIdx.x + i * blockDim.x;
      if (!detail::is_in_row(params, row, vec)) continue;
      const int64_t index = static_cast<int64_t>(row) * params.row_vecs + vec;
      const auto address = [&](uint32_t source) {
        return buffers.of(rank, buffers.place_of(source, rank) * place_vecs + index);
      };
      if constexpr (kVecs == 4) {
        own[i] = detail::sum_in_turn<Traits>(own[i], rank, patience, address);
      } else {
        detail::Contributions<Traits> all;
#pragma unroll
        for (int r = 0; r < Traits::kRanks; ++r) all.from[r] = own[i];
        all.receive(rank, patience, address);
        own[i] = all.sum();
      }
    }
    output.finish(params, row, own, parity);
  }
  counter.leave();
}

template <typename Traits, int kVecs>
__global__ void __launch_bounds__(512, Traits::kRanks <= 4 && kVecs < 4 ? 2 : 1)
    all_reduce_two_shot_kernel(const __grid_constant__ AllReduceParams params) {
  using T = typename Traits::T;
  using Vec = Vector<T, Traits::kVecSize>;
  constexpr uint32_t kRanks = Traits::kRanks;
  const uint32_t rank = params.workspace.rank;
  ptx::grid_dependency_wait();
  if (!params.completes_at_end) ptx::grid_launch_dependents();
  const comm::CallCounter counter(params.workspace.control);
  const detail::ReceiveBuffers buffers(params.workspace, counter.half());
  const uint32_t owned_rows = ceil_div(params.num_rows, kRanks);
  const int64_t place_vecs = static_cast<int64_t>(owned_rows) * params.row_vecs;
  const int64_t sums = (kRanks - 1) * place_vecs;  // where the sums of all rows arrive
  RowOutput<T, typename Traits::Output, kVecs> output;
  comm::Patience scattering(params.workspace.control, comm::Wait::kReduceScatter);
  comm::Patience gathering(params.workspace.control, comm::Wait::kAllGather);
  uint32_t parity = 0;
  for (uint32_t group = blockIdx.x; group < owned_rows; group += gridDim.x) {
    Vec own[kVecs];
    const uint32_t own_row = rank * owned_rows + group;
#pragma unroll 1
    for (uint32_t k = 0; k < kRanks; ++k) {
      const uint32_t owner = (rank + k) % kRanks, row = owner * owned_rows + group;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const uint32_t vec = threadIdx.x + i * blockDim.x;
        Vec x;
        x.clear();
        if (detail::is_in_row(params, row, vec)) {
          x = Traits::Input::template load<T>(params, row, vec);
          if (k != 0) {
            const int64_t place = buffers.place_of(rank, owner) * place_vecs;
            comm::push(buffers.of(owner, place + int64_t{group} * params.row_vecs + vec),
                       x.words[0]);
          }
        }
        if (k == 0) own[i] = x;
      }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t vec = threadIdx.x + i * blockDim.x;
      if (!detail::is_in_row(params, own_row, vec)) continue;
      detail::Contributions<Traits> all;
#pragma unroll
      for (uint32_t r = 0; r < kRanks; ++r) all.from[r] = own[i];
      all.receive(rank, scattering, [&](uint32_t source) {
        return buffers.of(rank, buffers.place_of(source, rank) * place_vecs +
                                    int64_t{group} * params.row_vecs + vec);
      });
      own[i] = all.sum();
      const int64_t index = static_cast<int64_t>(own_row) * params.row_vecs + vec;
#pragma unroll
      for (uint32_t k = 1; k < kRanks; ++k) {
        comm::push(buffers.of((rank + k) % kRanks, sums + index), own[i].words[0]);
      }
    }
    for (uint32_t k = 0; k < kRanks; ++k) {
      const uint32_t owner = (rank + k) % kRanks, row = owner * owned_rows + group;
      if (row >= params.num_rows) continue;
      output.prepare(params, row);
      if (k != 0) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          const uint32_t vec = threadIdx.x + i * blockDim.x;
          own[i].clear();
          if (!detail::is_in_row(params, row, vec)) continue;
          uint4* place = buffers.of(rank, sums + static_cast<int64_t>(row) * params.row_vecs + vec);
          gathering.renew();
          while (!comm::has_arrived(own[i].words[0] = comm::peek(place))) gathering.spend(owner);
          comm::put_sentinel(place);
        }
      }
      output.finish(params, row, own, parity);
      parity ^= 1;
    }
  }
  counter.leave();
}

#ifndef __CUDACC_RTC__

template <typename Traits, int kVecs>
inline cudaError_t launch_all_reduce_vecs(const AllReduceParams& params,
                                          const AllReduceSchedule& schedule, bool enable_pdl,
                                          cudaStream_t stream) {
  const auto kernel = schedule.one_shot ? all_reduce_one_shot_kernel<Traits, kVecs>
                                        : all_reduce_two_shot_kernel<Traits, kVecs>;
  return launch_kernel(kernel, dim3(schedule.num_ctas), dim3(schedule.threads), 0, stream,
                       enable_pdl, params);
}

template <typename Traits>
inline cudaError_t launch_all_reduce(const AllReduceParams& params,
                                     const AllReduceSchedule& schedule, bool enable_pdl,
                                     cudaStream_t stream) {
  switch (schedule.vecs_per_thread) {
    case 1:
      return launch_all_reduce_vecs<Traits, 1>(params, schedule, enable_pdl, stream);
    case 2:
      return launch_all_reduce_vecs<Traits, 2>(params, schedule, enable_pdl, stream);
    default:
      return launch_all_reduce_vecs<Traits, 4>(params, schedule, enable_pdl, stream);
  }
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
