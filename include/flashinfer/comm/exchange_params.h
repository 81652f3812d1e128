// Arguments of the exchange between ranks. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/comm/workspace.h>

namespace flashinfer {

// Blocks [outer, inner, units] of one tensor, one block for each rank, with strides in units. A
// unit is 16 bytes, or 4 for rows that are not whole 16 bytes.
struct ExchangeSide {
  void* data;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t rank_stride;  // from one rank's block to the next; 0: the same block for all
};

struct ExchangeSegment {
  ExchangeSide source;  // block j is for rank j
  ExchangeSide target;  // block j comes from rank j; of a sum, there is one block
  uint32_t outer, inner, units;
  bool is_wide;  // units of 16 bytes
};

struct ExchangeParams {
  comm::CommWorkspace workspace;
  ExchangeSegment segments[2];
  uint32_t num_segments;
  int64_t place_units[2];  // units that a rank's block takes in a receive buffer
  int64_t offsets[2];      // bytes where a segment begins in a receive buffer
};

}  // namespace flashinfer
