// The part that the bindings of communication share.
#pragma once

#include <cstring>
#include <flashinfer/comm/workspace.h>

#include "ffi.h"

namespace flashinfer {

// A CommWorkspace as Python holds it: the bytes of the struct in a CPU tensor. `ranks`: what the
// module is made for, or 0 for any number.
inline comm::CommWorkspace workspace_of(const ffi::Tensor& bytes, uint32_t ranks) {
  ffi::check_dtype(bytes, ffi::dtype::uint8);
  ffi::check_shape(bytes, {static_cast<int64_t>(sizeof(comm::CommWorkspace))});
  ffi::check_contiguous(bytes);
  if (bytes.dl->device.device_type != kDLCPU) {
    ffi::raise("ValueError", "`workspace` must be a CPU tensor");
  }
  comm::CommWorkspace workspace;
  std::memcpy(&workspace, bytes.data(), sizeof(workspace));
  if ((ranks != 0 && workspace.world_size != ranks) || workspace.world_size > comm::kMaxRanks) {
    ffi::raise("ValueError", "`workspace` must be of %u ranks, got %u", ranks,
               workspace.world_size);
  }
  return workspace;
}

}  // namespace flashinfer
