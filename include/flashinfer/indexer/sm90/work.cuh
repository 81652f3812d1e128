// The units that a CTA scores, in order, as its producers and its consumers both walk them.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>
#include <flashinfer/indexer/mqa_logits_params.h>

namespace flashinfer {

// Positions kv_begin to kv_end - 1 (at most kMqaUnit) for queries that a CTA holds together.
struct MqaUnit {
  int32_t owner;  // request, or block of queries
  int32_t first_query, num_queries;
  int32_t kv_begin, kv_end;
};

template <bool kPaged>
class MqaWork;

template <>
class MqaWork<true> {
 public:
  __device__ __forceinline__ MqaWork(const MqaLogitsParams& params, int) : params_(params) {
    const int32_t* const bounds = params.schedule + 2 * blockIdx.x;
    request_ = bounds[0];
    unit_ = bounds[1];
    end_request_ = bounds[2];
    end_unit_ = bounds[3];
    read_length();
  }

  __device__ __forceinline__ bool next(MqaUnit& unit) {
    while (request_ < params_.batch_size &&
           (request_ < end_request_ || (request_ == end_request_ && unit_ < end_unit_))) {
      const int begin = unit_++ * kMqaUnit;
      if (begin < length_) {
        unit = {request_, request_ * params_.next_n, params_.next_n, begin,
                min(begin + kMqaUnit, length_)};
        return true;
      }
      ++request_;
      unit_ = 0;
      read_length();
    }
    return false;
  }

  // The positions that a query of the unit's request sees.
  __device__ __forceinline__ int2 range(const MqaUnit&, int query) const {
    const int32_t length = params_.seq_lens[request_ * params_.seq_lens_stride];
    return {0, length - params_.next_n + query + 1};
  }

 private:
  __device__ __forceinline__ void read_length() {
    if (request_ >= params_.batch_size) return;
    length_ = min(params_.seq_lens[request_ * params_.seq_lens_stride], params_.max_length);
  }

  const MqaLogitsParams& params_;
  int32_t request_, unit_, end_request_, end_unit_, length_ = 0;
};

template <>
class MqaWork<false> {
 public:
  // `block_queries`: queries of a block. Later queries see more where attention is causal, so the
  // last blocks come first.
  __device__ __forceinline__ MqaWork(const MqaLogitsParams& params, int block_queries)
      : params_(params) {
    const int block = (gridDim.x - 1 - blockIdx.x) / params.splits;
    const int part = blockIdx.x % params.splits;
    const int first = block * block_queries;
    unit_ = {block, first, min(block_queries, params.num_queries - first), params.max_length, 0};
    for (int query = 0; query < unit_.num_queries; ++query) {
      const int2 seen = range(unit_, query);
      if (seen.x >= seen.y) continue;
      unit_.kv_begin = min(unit_.kv_begin, seen.x);
      unit_.kv_end = max(unit_.kv_end, seen.y);
    }
    const int64_t units = ceil_div(max(unit_.kv_end - unit_.kv_begin, 0), kMqaUnit);
    const int begin = static_cast<int>(units * part / params.splits);
    const int end = static_cast<int>(units * (part + 1) / params.splits);
    unit_.kv_end = min(unit_.kv_end, unit_.kv_begin + end * kMqaUnit);
    unit_.kv_begin += begin * kMqaUnit;
  }

  __device__ __forceinline__ bool next(MqaUnit& unit) {
    if (unit_.kv_begin >= unit_.kv_end) return false;
    unit = unit_;
    unit.kv_end = min(unit.kv_begin + kMqaUnit, unit.kv_end);
    unit_.kv_begin += kMqaUnit;
    return true;
  }

  __device__ __forceinline__ int2 range(const MqaUnit& unit, int query) const {
    const int row = unit.first_query + query;
    return {max(params_.starts[row], 0), min(params_.ends[row], params_.max_length)};
  }

 private:
  const MqaLogitsParams& params_;
  MqaUnit unit_;
};

}  // namespace flashinfer
