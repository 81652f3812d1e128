// Moves registers between warpgroups (sm_90a). All warps of a warpgroup call together.
#pragma once

namespace flashinfer::ptx {

// Waits until the CTA has enough free registers.
template <int kCount>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace flashinfer::ptx
