// Products of warpgroups are not emulated; those of warps stand in for them.
#pragma once

#include <flashinfer/linear_attention/tile.cuh>

namespace flashinfer {

using WarpgroupProducts = WarpProducts;

}  // namespace flashinfer
