// Arguments of the product of one row that makes logits of experts. Plain C++.
#pragma once

#include <flashinfer/gemm/one_row_params.h>

namespace flashinfer {

// `out` gets the logits.
struct OneRowRouteParams : OneRowParams {
  float* weights;    // [top_k]
  int32_t* experts;  // [top_k], from the best one on
  uint32_t top_k;
  bool renormalize;  // weights sum to `scale`; else they are shares of all experts
  float scale;       // factor of all weights
};

}  // namespace flashinfer
