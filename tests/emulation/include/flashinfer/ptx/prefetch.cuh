// In place of the product's header: there is no L2.
#pragma once

namespace flashinfer::ptx {

inline void prefetch_l2(const void*) {}

}  // namespace flashinfer::ptx
