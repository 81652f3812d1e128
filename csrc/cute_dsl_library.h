// Loading the kernel of an object that CuTe-DSL has written, for launchers that include its header.
//
// The header's own loader loads for every device, which makes a context on each. This one loads for
// the current device when it is first launched there.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace flashinfer::cute_dsl {

class Library {
 public:
  using Entry = void (*)(void** args);

  // `init` and `load_to_device` are `_mlir_<kernel>_cuda_init` and `_cuda_load_to_device`.
  constexpr Library(Entry init, Entry load_to_device)
      : init_(init), load_to_device_(load_to_device) {}

  cudaError_t load() {
    int32_t device = 0;
    const cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    if (device < 0 || device >= kMaxDevices) return cudaErrorInvalidDevice;
    if (loaded_[device].load(std::memory_order_acquire)) return cudaSuccess;
    const std::lock_guard<std::mutex> lock(mutex_);
    return load_on(device);
  }

 private:
  // Both entries take an array of pointers to their arguments, the last of them to the result.
  cudaError_t load_on(int32_t device) {
    cudaLibrary_t* library = &library_;
    cudaError_t status = cudaSuccess;
    if (library_ == nullptr) {
      void* args[] = {&library, &status};
      init_(args);
      if (status != cudaSuccess) return status;
    }
    void* args[] = {&library, &device, &status};
    load_to_device_(args);
    loaded_[device].store(status == cudaSuccess, std::memory_order_release);
    return status;
  }

  static constexpr int kMaxDevices = 64;
  Entry init_, load_to_device_;
  cudaLibrary_t library_ = nullptr;
  std::atomic<bool> loaded_[kMaxDevices] = {};
  std::mutex mutex_;
};

}  // namespace flashinfer::cute_dsl
