// The buffer in which a kernel records its events (flashinfer/profiler.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi.h"

namespace flashinfer {

struct ProfileWords {
  uint64_t* words;
  uint32_t count;
};

inline ProfileWords profile_words(const ffi::Tensor& buffer) {
  ffi::check_dtype(buffer, {DLDataType{kDLUInt, 64, 1}, ffi::dtype::int64});
  ffi::check_ndim(buffer, 1, 1);
  ffi::check_contiguous(buffer);
  if (buffer.numel() == 0) ffi::raise("ValueError", "`profiler_buffer` must not be empty");
  return {static_cast<uint64_t*>(buffer.data()),
          static_cast<uint32_t>(std::min<int64_t>(buffer.numel(), UINT32_MAX))};
}

}  // namespace flashinfer
