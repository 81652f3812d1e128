// Arguments of the product of one row that makes heads of queries, keys and values. Plain C++.
#pragma once

#include <flashinfer/gemm/one_row_params.h>
#include <flashinfer/rope/rope_params.h>

namespace flashinfer {

// Columns of `b` are heads of all segments, one after the other. Segments read no input: their
// `in` is not used, nor is `out` of the base.
struct OneRowHeadsParams : OneRowParams {
  RopeParams rope;
};

}  // namespace flashinfer
