// Values that a launcher determines once per device and keeps.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

namespace flashinfer {

// Returns the number that `find(device, value)` gives for the current device. It is called once per
// device and call site, unless it fails; the number must not be 0.
template <typename Find>
inline cudaError_t once_per_device(int* value, const Find& find) {
  constexpr int kMaxDevices = 64;
  static int found[kMaxDevices] = {};  // one array per closure type
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (found[device] == 0) {
    int number = 0;
    status = find(device, &number);
    if (status != cudaSuccess) return status;
    found[device] = number;
  }
  *value = found[device];
  return cudaSuccess;
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
