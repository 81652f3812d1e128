// Events that an attention kernel records in a profile. flashinfer.attention.PROFILE_EVENTS names
// them.
#pragma once

#include <flashinfer/attention/attention_params.h>
#include <flashinfer/profiler.cuh>

namespace flashinfer {

// kQuery: queries come to shared memory. kLoad: keys and values do, or a warpgroup waits for keys.
// kKeys, kValues: products with keys and with values, and the waiting for them. kWeights: softmax.
// kOutput: the end of a work item.
enum class AttentionEvent : uint32_t { kQuery, kLoad, kKeys, kWeights, kValues, kOutput };

// Without Params::kProfiled it has no state and no instructions.
template <typename Params>
class AttentionProfile {
 public:
  // `group` of `num_groups` in each CTA; `writes`: whether this thread writes for it.
  __device__ __forceinline__ AttentionProfile(const Params& params, uint32_t group,
                                              uint32_t num_groups, bool writes)
      : profiler_(make(params, group, num_groups, writes)) {}

  __device__ __forceinline__ void begin(AttentionEvent event) {
    profiler_.begin(static_cast<uint32_t>(event));
  }
  __device__ __forceinline__ void end(AttentionEvent event) {
    profiler_.end(static_cast<uint32_t>(event));
  }

  // An event as long as a scope.
  class Span {
   public:
    __device__ __forceinline__ Span(AttentionProfile& profile, AttentionEvent event)
        : profile_(profile), event_(event) {
      profile_.begin(event_);
    }
    __device__ __forceinline__ ~Span() { profile_.end(event_); }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    AttentionProfile& profile_;
    const AttentionEvent event_;
  };

 private:
  using Profiler = flashinfer::Profiler<Params::kProfiled>;

  __device__ __forceinline__ static Profiler make(const Params& params, uint32_t group,
                                                  uint32_t num_groups, bool writes) {
    if constexpr (Params::kProfiled) {
      return Profiler(params.profile, params.profile_words, group, num_groups, writes);
    } else {
      return Profiler(nullptr, 0, group, num_groups, writes);
    }
  }

  Profiler profiler_;
};

}  // namespace flashinfer
