// In place of the product's header: fibers have no registers to move.
#pragma once

namespace flashinfer::ptx {

template <int kCount>
inline void increase_registers() {}
template <int kCount>
inline void decrease_registers() {}

}  // namespace flashinfer::ptx
