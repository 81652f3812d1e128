// Programmatic dependent launch (griddepcontrol, sm_90): a grid may start before the preceding grid
// of the stream has finished. Both functions are no-ops in a grid launched without the attribute,
// and on older architectures.
#pragma once

namespace flashinfer::ptx {

// Waits until all grids that this one depends on have completed and their writes are visible. Every
// global access to data that an earlier kernel may have written must come after it. The clobber
// keeps the compiler from moving loads above it.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next grid to be scheduled once every CTA has called this or exited. It orders no
// memory: the next grid still waits for this one's completion in its own grid_dependency_wait.
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Both, for small kernels that read nothing before the wait: the next grid takes its place on the
// SMs, and loads what nobody writes, while the preceding one ends. A grid that reads memory before
// its own wait, because the one before it has waited, must not follow such a kernel.
__device__ __forceinline__ void grid_launch_and_wait() {
  grid_launch_dependents();
  grid_dependency_wait();
}

}  // namespace flashinfer::ptx
