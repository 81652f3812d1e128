// Scores of all KV tokens for a query, of which sparse attention takes the best (the "lightning
// indexer" of DeepSeek-AI, "DeepSeek-V3.2", 2025):
//   logits[i, p] = scale[p] sum over h of weights[i, h] max(q[i, h] k[p], 0)
//
// A CTA per SM. Each of four warpgroups multiplies 64 keys by the queries of all heads, adds up
// the heads in registers and stores; meanwhile a warp copies its next keys, and the other
// warpgroups multiply. With one query a key of 132 bytes takes 16 KFLOP, less than the tensor cores
// do while it comes from DRAM.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/indexer/sm90/producer.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/setmaxnreg.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

template <typename Tile>
class MqaConsumer {
  static constexpr int kHeadTiles = Tile::kHeads / 8;
  using Sums = float[Tile::kTiles][4];

 public:
  __device__ __forceinline__ MqaConsumer(const MqaLogitsParams& params,
                                         const MqaShared<Tile>& shared)
      : params_(params), shared_(shared) {
    // The compiler then knows that all lanes of a warp have the same descriptors.
    pair_ = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    row_ = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    quad_ = threadIdx.x % 4;
  }

  __device__ __forceinline__ void run() {
    MqaWork<Tile::kPaged> work(params_, params_.groups * Tile::kQueries);
    MqaControl& control = shared_.control();
    ptx::Ring<Tile::kStages> ring;
    ptx::Ring<Tile::kQueryBuffers> buffer;
    MqaUnit unit;
    int owner = -1;
    while (work.next(unit)) {
      if (unit.owner != owner) {
        if (owner >= 0) {
          release(control.query_empty[buffer.stage]);
          buffer.advance();
        }
        owner = unit.owner;
        ptx::mbarrier_wait(ptx::shared_address(&control.query_full[buffer.stage]), buffer.phase);
      }
      const int first = unit.kv_begin + pair_ * Tile::kKeys;
      if (first >= unit.kv_end) continue;
      ptx::mbarrier_wait(ptx::shared_address(&control.full[pair_][ring.stage]), ring.phase);
      score(unit, first, buffer.stage, ring.stage);
      ring.advance();
    }
  }

 private:
  __device__ __forceinline__ static void release(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }

  __device__ __forceinline__ void score(const MqaUnit& unit, int first, int buffer, int stage) {
    const auto* const scales =
        reinterpret_cast<const float*>(shared_.base + shared_.scales_offset(pair_, stage));
    const float scale[2] = {scales[row_], scales[row_ + 8]};
    const uint64_t keys = ptx::wgmma_operand(shared_.keys(pair_, stage));
    const uint64_t queries = ptx::wgmma_operand(shared_.queries(buffer));
#pragma unroll 1
    for (int group = 0; group < params_.groups; ++group) {
      Sums sums;
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma<dtype::float8_e4m3fn, false>(
            sums, ptx::wgmma_advance(keys, step * 32),
            ptx::wgmma_advance(queries, group * Tile::kColumns * 128 + step * 32), step != 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(sums);
      if (group == params_.groups - 1) release(shared_.control().empty[pair_][stage]);
#pragma unroll
      for (int i = 0; i < Tile::kQueries; ++i) {
        const int query = group * Tile::kQueries + i;
        if (query >= unit.num_queries) break;
        add_heads(unit, first, buffer, query, &sums[i * kHeadTiles], scale);
      }
    }
  }

  // The four lanes of a row have the heads of a query among them; one of them stores the sum.
  __device__ __forceinline__ void add_heads(const MqaUnit& unit, int first, int buffer, int query,
                                            const float (*sums)[4], const float (&scale)[2]) {
    const float* const weights = shared_.weights(buffer) + query * Tile::kHeads + 2 * quad_;
    float total[2] = {};
#pragma unroll
    for (int j = 0; j < kHeadTiles; ++j) {
      const float2 weight = *reinterpret_cast<const float2*>(weights + 8 * j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        total[half] += weight.x * fmaxf(sums[j][2 * half], 0.f);
        total[half] += weight.y * fmaxf(sums[j][2 * half + 1], 0.f);
      }
    }
    const int2 seen = shared_.ranges(buffer)[query];
    using Out = typename Tile::Out;
    Out* const out =
        static_cast<Out*>(params_.logits) + (unit.first_query + query) * params_.logits_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
      total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
      const int position = first + row_ + 8 * half;
      if (quad_ != query % 4 || position >= unit.kv_end) continue;
      const bool sees = seen.x <= position && position < seen.y;
      out[position] =
          from_float<Out>(sees ? total[half] * scale[half] : __int_as_float(0xff800000));
    }
  }

  const MqaLogitsParams& params_;
  const MqaShared<Tile>& shared_;
  int pair_, row_, quad_;
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    mqa_logits_kernel(const __grid_constant__ MqaLogitsParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  const MqaShared<Tile> shared{dynamic_shared, ptx::shared_address(dynamic_shared), params.groups};
  if (threadIdx.x == 0) {
    MqaControl& control = shared.control();
    for (int pair = 0; pair < Tile::kPairs; ++pair) {
      for (int i = 0; i < Tile::kStages; ++i) {
        ptx::mbarrier_init(ptx::shared_address(&control.full[pair][i]), 1);
        ptx::mbarrier_init(ptx::shared_address(&control.empty[pair][i]), 4);
      }
    }
    for (int i = 0; i < Tile::kQueryBuffers; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&control.query_full[i]), Tile::kPairs);
      ptx::mbarrier_init(ptx::shared_address(&control.query_empty[i]), Tile::kPairs * 4);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  if (threadIdx.x < Tile::kPairs * 128) {
    ptx::increase_registers<Tile::kConsumerRegisters>();
    MqaConsumer<Tile>(params, shared).run();
  } else {
    ptx::decrease_registers<Tile::kProducerRegisters>();
    MqaProducer<Tile>(params, shared).run();
  }
}

#ifndef __CUDACC_RTC__

template <typename Tile>
cudaError_t launch_mqa_logits(const MqaLogitsParams& params, int num_ctas, bool enable_pdl,
                              cudaStream_t stream) {
  const int shared = Tile::shared_bytes(params.groups);
  const cudaError_t status = cudaFuncSetAttribute(
      mqa_logits_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  return launch_kernel(mqa_logits_kernel<Tile>, dim3(num_ctas), dim3(Tile::kThreads), shared,
                       stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
