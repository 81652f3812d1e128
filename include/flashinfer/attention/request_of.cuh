// Which request of a batch a row belongs to.
#pragma once

#include <cstdint>

namespace flashinfer {

// The last request that begins at or before `row`, by the first rows [batch_size + 1] of requests.
__device__ __forceinline__ int request_of(const int32_t* indptr, int batch_size, int row) {
  int low = 0, high = batch_size;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (indptr[middle] <= row ? low : high) = middle;
  }
  return low;
}

}  // namespace flashinfer
