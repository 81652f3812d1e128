// Events that a kernel of MLA records in a profile. flashinfer.mla.PROFILE_EVENTS names them.
#pragma once

#include <flashinfer/mla/mla_params.h>
#include <flashinfer/profiler.cuh>

namespace flashinfer {

// kLoad: keys come to shared memory. kKeys, kValues: products with keys and with values, and the
// waiting for them. kWeights: softmax. kOutput: the end of a work item.
enum class MlaEvent : uint32_t { kLoad, kKeys, kWeights, kValues, kOutput };

template <bool kEnabled>
class MlaProfile {
 public:
  // `group` of `num_groups` in each CTA; `writes`: whether this thread writes for it.
  __device__ __forceinline__ MlaProfile(const MlaParams& params, uint32_t group,
                                        uint32_t num_groups, bool writes)
      : profiler_(params.profile, params.profile_words, group, num_groups, writes) {}

  __device__ __forceinline__ void begin(MlaEvent event) {
    profiler_.begin(static_cast<uint32_t>(event));
  }
  __device__ __forceinline__ void end(MlaEvent event) {
    profiler_.end(static_cast<uint32_t>(event));
  }

 private:
  Profiler<kEnabled> profiler_;
};

}  // namespace flashinfer
