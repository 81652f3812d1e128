// Arguments of bit packing. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

struct PackBitsParams {
  const uint8_t* x;  // [num_x] one byte per bit, any value but 0 is a 1
  uint8_t* out;      // [num_out]
  int64_t num_x;
  int64_t num_out;
  const void* indptr;  // [num_segments + 1], where segments start in x; only in the segmented form
  const void* out_indptr;  // [num_segments + 1], where segments start in out
  uint32_t num_segments;
  bool big_endian;  // the first bit of eight is the highest one
};

}  // namespace flashinfer
