// Arguments of group quantisation. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>

namespace flashinfer {

struct GroupQuantParams {
  // [num_rows, num_cols], with silu_and_mul [num_rows, 2 * num_cols]; last dimension contiguous
  const void* input;
  void* out;    // [num_rows, out_cols] codes, contiguous; 4-bit codes in pairs, the first one lower
  void* scale;  // [scale_rows, scale_cols] in the module's layout
  const float* global_scale;  // device, [1]; null: 1
  int64_t input_stride;       // elements from one row to the next
  int64_t scale_stride;       // column-major scales: elements from one group to the next
  uint32_t num_rows;
  uint32_t num_cols;  // whole groups
  uint32_t out_cols;  // whole groups, >= num_cols: the input counts as zero after its last column
  // rows, and groups per row, that have a scale, including the layout's padding
  uint32_t scale_rows;
  uint32_t scale_cols;
  float eps;                 // smallest magnitude for which a float scale is computed
  bool invert_global_scale;  // uses the reciprocal of *global_scale
  bool vectorizable;         // every row of input and out starts at a whole vector
  bool launches_early;       // the next grid waits before it reads what any earlier grid writes

  // The launcher sets these for each of its grids.
  uint32_t first_row;
  uint32_t num_groups;  // in the rows from first_row on
  FastDivisor divide_by_scale_cols;
};

}  // namespace flashinfer
