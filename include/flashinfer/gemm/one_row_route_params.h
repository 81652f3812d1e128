// Arguments of the product of one row that makes logits of experts. Plain C++.
#pragma once

#include <flashinfer/gemm/one_row_params.h>
#include <flashinfer/moe/moe_params.h>

namespace flashinfer {

// `out` gets the logits; the route's are not used.
struct OneRowRouteParams : OneRowParams {
  MoeRouteParams route;
};

}  // namespace flashinfer
