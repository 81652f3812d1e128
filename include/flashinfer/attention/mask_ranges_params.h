// Arguments of the kernel that finds which keys custom masks show (mask_ranges.cuh). Plain C++.
#pragma once

#include <cstdint>
#include <flashinfer/scheduler/work.h>

namespace flashinfer {

struct MaskRangesParams {
  const uint8_t* mask;         // packed little-endian bits, qo_len x kv_len per request
  const int32_t* mask_indptr;  // [batch_size + 1] first byte of each request's mask
  const int32_t* qo_indptr;    // [batch_size + 1] first query of each request
  const int32_t* kv_len;       // [batch_size]
  VisibleRange* ranges;        // [num_queries]
  int32_t batch_size, num_queries;
};

}  // namespace flashinfer
