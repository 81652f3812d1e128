// Where a token of a request lives in a paged cache. Plain C++: shared by kernels, launchers and
// bindings.
//
// A request owns the pages indices[indptr[b]] ... indices[indptr[b + 1] - 1]; its position p is in
// page p / page_size, at slot p % page_size.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>

namespace flashinfer {

struct PageTable {
  const int32_t* batch_indices;  // [num_tokens] request of each token; negative: padding
  const int32_t* positions;      // [num_tokens] position of each token in its request
  const int32_t* indices;        // [num_indices] page numbers
  const int32_t* indptr;         // [batch_size + 1]
  uint32_t batch_size;
  uint32_t num_indices;
  uint32_t num_pages;  // pages of the cache
  FastDivisor page_size;
};

}  // namespace flashinfer
