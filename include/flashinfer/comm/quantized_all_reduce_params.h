// Arguments of the all-reduce in 8 bits. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/comm/workspace.h>

namespace flashinfer {

struct QuantizedAllReduceParams {
  comm::CommWorkspace workspace;
  const void* input;  // num_elements, a multiple of 16
  void* output;
  int64_t num_elements;
  int64_t scales_offset;  // bytes of the codes in a half of a receive buffer; scales follow
  uint32_t owned_groups;  // of each rank, the last one's may be empty
};

}  // namespace flashinfer
