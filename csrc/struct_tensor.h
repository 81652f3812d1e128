// Native structs that Python owns, as the bytes of a CPU tensor of uint8.
//
// They hold state that outlives a call, and pass plain structs between Python and the native
// modules. Python asks the module for the size, allocates zeros, and passes the tensor to every
// call.
#pragma once

#include "ffi.h"

namespace flashinfer {

// The struct in `bytes`, which may be longer than it.
template <typename T>
T& struct_in(const ffi::Tensor& bytes) {
  ffi::check_dtype(bytes, ffi::dtype::uint8);
  ffi::check_ndim(bytes, 1, 1);
  ffi::check_last_dim_contiguous(bytes);
  constexpr int64_t kAlignment = alignof(T) < 16 ? 16 : alignof(T);
  if (bytes.dl->device.device_type != kDLCPU || bytes.numel() < static_cast<int64_t>(sizeof(T)) ||
      !ffi::is_aligned(bytes, kAlignment)) {
    ffi::raise("ValueError", "`%s` must have at least %lld aligned bytes on the CPU, got shape %s",
               bytes.name, static_cast<long long>(sizeof(T)), bytes.shape_text().c_str());
  }
  return *static_cast<T*>(bytes.data());
}

// A struct whose fields Python fills or reads by name; the size must agree.
template <typename T>
T& exact_struct_in(const ffi::Tensor& bytes) {
  T& result = struct_in<T>(bytes);
  if (bytes.numel() != static_cast<int64_t>(sizeof(T))) {
    ffi::raise("ValueError", "`%s` must have %lld bytes, got shape %s", bytes.name,
               static_cast<long long>(sizeof(T)), bytes.shape_text().c_str());
  }
  return result;
}

}  // namespace flashinfer
