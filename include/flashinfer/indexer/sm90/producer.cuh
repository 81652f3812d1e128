// The warps that copy: keys and scales for one warpgroup each, and a quarter of the queries.
//
// Pages may have any size, so rows come by cp.async, 16 bytes a lane. A stage is given to its
// readers when the copies after it have been issued as well, so that several are under way.
#pragma once

#include <flashinfer/indexer/sm90/tile.cuh>
#include <flashinfer/indexer/sm90/work.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/ring.cuh>
#include <flashinfer/ptx/tma.cuh>

namespace flashinfer {

template <typename Tile>
class MqaProducer {
 public:
  __device__ __forceinline__ MqaProducer(const MqaLogitsParams& params,
                                         const MqaShared<Tile>& shared)
      : params_(params), shared_(shared) {
    pair_ = threadIdx.x / 32 - Tile::kPairs * 4;
    lane_ = threadIdx.x % 32;
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
        owner = unit.owner;
        wait_for_queries(ptx::shared_address(&control.query_empty[buffer.stage]), buffer.phase ^ 1);
        load_queries(work, unit, buffer.stage);
        submit(ptx::shared_address(&control.query_full[buffer.stage]));
        buffer.advance();
      }
      const int first = unit.kv_begin + pair_ * Tile::kKeys;
      if (first >= unit.kv_end) continue;
      ptx::mbarrier_wait(ptx::shared_address(&control.empty[pair_][ring.stage]), ring.phase ^ 1);
      load_keys(unit, first, ring.stage);
      submit(ptx::shared_address(&control.full[pair_][ring.stage]));
      ring.advance();
    }
    flush();
  }

 private:
  static constexpr int kDepth = Tile::kStages - 1;  // groups of copies that are under way

  __device__ __forceinline__ void announce(uint32_t barrier) const {
    if (lane_ == 0 && barrier != 0) ptx::mbarrier_arrive(barrier);
  }

  // Closes a group of copies; `barrier` hears of it when kDepth more have been closed.
  __device__ __forceinline__ void submit(uint32_t barrier) {
    ptx::cp_async_commit();
    ptx::cp_async_wait<kDepth>();
    ptx::async_proxy_fence();
    __syncwarp();
    announce(pending_[0]);
#pragma unroll
    for (int i = 0; i + 1 < kDepth; ++i) pending_[i] = pending_[i + 1];
    pending_[kDepth - 1] = barrier;
  }

  __device__ __forceinline__ void flush() {
    ptx::cp_async_wait<0>();
    ptx::async_proxy_fence();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      announce(pending_[i]);
      pending_[i] = 0;
    }
  }

  // A reader of the buffer may wait for copies that have not been announced.
  __device__ __forceinline__ void wait_for_queries(uint32_t barrier, uint32_t parity) {
    const bool is_empty = ptx::mbarrier_test(barrier, parity);
    if (__all_sync(0xffffffffu, is_empty)) return;
    flush();
    ptx::mbarrier_wait(barrier, parity);
  }

  // Queries beyond the last one become zeros.
  __device__ __forceinline__ void load_queries(const MqaWork<Tile::kPaged>& work,
                                               const MqaUnit& unit, int buffer) {
    const int thread = pair_ * 32 + lane_;
    const uint32_t rows = shared_.queries(buffer);
    const char* const q = static_cast<const char*>(params_.q);
    for (int i = thread; i < params_.groups * Tile::kColumns * 8; i += Tile::kPairs * 32) {
      const int row = i / 8, query = row / Tile::kHeads;
      const bool exists = query < unit.num_queries;
      const int64_t at = (unit.first_query + query) * params_.q_stride + row % Tile::kHeads * 128;
      ptx::cp_async_16(rows + row * 128 + (i ^ row) % 8 * 16, q + (exists ? at + i % 8 * 16 : 0),
                       exists);
    }
    const uint32_t weights = shared_.address + shared_.weights_offset(buffer);
    for (int i = thread; i < params_.groups * Tile::kColumns / 4; i += Tile::kPairs * 32) {
      const int query = 4 * i / Tile::kHeads;
      const bool exists = query < unit.num_queries;
      const int64_t at = (unit.first_query + query) * params_.weights_stride + 4 * i % Tile::kHeads;
      ptx::cp_async_16(weights + 16 * i, params_.weights + (exists ? at : 0), exists);
    }
    if (thread < unit.num_queries) shared_.ranges(buffer)[thread] = work.range(unit, thread);
  }

  // Page of the key at `position`. The one 256 tokens further is read ahead: the request's next.
  __device__ __forceinline__ int page_of(const MqaUnit& unit, int position, int half) {
    const int32_t* const table = params_.block_table + unit.owner * params_.block_table_stride;
    const bool is_read = ahead_owner_ == unit.owner && ahead_[half].position == position;
    const int page = is_read ? ahead_[half].page : table[params_.page_size.divide(position)];
    const int next = position + kMqaUnit;
    if (next < params_.max_length) {
      ahead_[half] = {next, table[params_.page_size.divide(next)]};
    }
    return page;
  }

  // Address of the key at `position`, or null if there is none; `scale`: of its scale.
  __device__ __forceinline__ const char* key(const MqaUnit& unit, int position, int half,
                                             const void*& scale) {
    if (position >= unit.kv_end) return nullptr;
    if constexpr (Tile::kPaged) {
      const int page = page_of(unit, position, half);
      if (static_cast<uint32_t>(page) >= static_cast<uint32_t>(params_.num_pages)) return nullptr;
      const char* const begin = params_.keys + page * params_.key_stride;
      const int size = params_.page_size.divisor;
      const int slot = position - params_.page_size.divide(position) * size;
      scale = begin + size * 128 + slot * 4;
      return begin + slot * 128;
    } else {
      scale = params_.scales + position;
      return params_.keys + position * params_.key_stride;
    }
  }

  __device__ __forceinline__ void load_keys(const MqaUnit& unit, int first, int stage) {
    const uint32_t scales = shared_.address + shared_.scales_offset(pair_, stage);
    uint64_t keys[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 32 + lane_;
      const void* scale = params_.keys;
      const char* const from = key(unit, first + row, half, scale);
      keys[half] = reinterpret_cast<uint64_t>(from);
      ptx::cp_async_4(scales + row * 4, scale, from != nullptr);
    }
    ahead_owner_ = unit.owner;
    const uint32_t rows = shared_.keys(pair_, stage);
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 4; ++i) {
      const int row = 4 * i + lane_ / 8, chunk = lane_ % 8;
      const char* const from =
          reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, keys[i / 8], row % 32));
      const bool exists = from != nullptr;
      ptx::cp_async_16(rows + swizzled_offset<Tile::kKeys>(row, chunk),
                       exists ? from + chunk * 16 : params_.keys, exists);
    }
  }

  const MqaLogitsParams& params_;
  const MqaShared<Tile>& shared_;
  int pair_, lane_;
  uint32_t pending_[kDepth] = {};
  struct {
    int position, page;
  } ahead_[2] = {};
  int ahead_owner_ = -1;
};

}  // namespace flashinfer
