// The part that the bindings of the experts' all-to-all share.
#pragma once

#include <flashinfer/comm/expert_exchange_params.h>

#include "comm_binding.h"

namespace flashinfer {

// A number with a bit for each rank, or int64 [1] on the device.
inline ActiveRanks take_active_ranks(ffi::Args& args, const ffi::Tensor& like) {
  ActiveRanks active = {};
  if (!args.next_is_tensor()) {
    active.ranks = static_cast<uint64_t>(args.integer_in("active_rank_mask", 0, INT64_MAX));
    return active;
  }
  const ffi::Tensor mask = args.tensor("active_rank_mask");
  ffi::check_dtype(mask, ffi::dtype::int64);
  ffi::check_shape(mask, {1});
  ffi::check_same_device(mask, like);
  active.on_device = static_cast<const uint64_t*>(mask.data());
  return active;
}

}  // namespace flashinfer
