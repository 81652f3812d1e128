// Finds a token's slot in a paged cache.
#pragma once

#include <flashinfer/layout/page_table.h>

namespace flashinfer {

struct PageSlot {
  uint32_t page;
  uint32_t slot;
  bool exists;
};

// A token that does not lead to a page of its own request has no slot: writing there would hit
// another request's pages, or memory outside the cache.
__device__ __forceinline__ PageSlot find_slot(const PageTable& table, uint32_t token) {
  const int32_t request = table.batch_indices[token];
  const int32_t position = table.positions[token];
  PageSlot result{0, 0, false};
  if (static_cast<uint32_t>(request) >= table.batch_size || position < 0) return result;
  const uint32_t page_of_request = table.page_size.divide(static_cast<uint32_t>(position));
  const uint32_t entry = static_cast<uint32_t>(table.indptr[request]) + page_of_request;
  if (entry >= static_cast<uint32_t>(table.indptr[request + 1]) || entry >= table.num_indices) {
    return result;
  }
  result.page = static_cast<uint32_t>(table.indices[entry]);
  result.slot = static_cast<uint32_t>(position) - page_of_request * table.page_size.divisor;
  result.exists = result.page < table.num_pages;
  return result;
}

}  // namespace flashinfer
