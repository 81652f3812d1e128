// Events inside a kernel: which warps did what, when. flashinfer.profiler reads the buffer.
//
// The buffer has 64-bit words, zero before the launch. Word 0: number of blocks (low half) and of
// groups. Each further word is an event: tag (low half), nanoseconds (high half). A group is what
// one thread writes for, such as the producer's warp of a block. Event i of a group lies at
//   1 + block * num_groups + group + i * num_blocks * num_groups.
// Events that find no room are dropped.
//
//   tag bits   0-1 kind   2-11 event   12-23 block * num_groups + group   24-31 multiprocessor
//
// A Profiler<false> has no state and no instructions.
#pragma once

#include <cstdint>

namespace flashinfer {

enum class ProfilerEventKind : uint32_t { kBegin = 0, kEnd = 1, kInstant = 2 };

template <bool kEnabled>
class Profiler {
 public:
  // `writes`: whether this thread is the one that writes for its group. `capacity` is in words.
  __device__ __forceinline__ Profiler(uint64_t*, uint32_t, uint32_t, uint32_t, bool) {}
  __device__ __forceinline__ void begin(uint32_t) {}
  __device__ __forceinline__ void end(uint32_t) {}
  __device__ __forceinline__ void instant(uint32_t) {}
};

template <>
class Profiler<true> {
 public:
  __device__ __forceinline__ Profiler(uint64_t* buffer, uint32_t capacity, uint32_t group,
                                      uint32_t num_groups, bool writes)
      : buffer_(buffer), capacity_(writes ? capacity : 0) {
    const uint32_t num_blocks = gridDim.x * gridDim.y * gridDim.z;
    const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const uint32_t place = block * num_groups + group;
    uint32_t multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    tag_ = (multiprocessor & 0xff) << 24 | (place & 0xfff) << 12;
    next_ = 1 + place;
    stride_ = num_blocks * num_groups;
    if (place == 0 && capacity_ > 0) buffer_[0] = word(num_blocks, num_groups);
  }

  __device__ __forceinline__ void begin(uint32_t event) { write(event, ProfilerEventKind::kBegin); }
  __device__ __forceinline__ void end(uint32_t event) { write(event, ProfilerEventKind::kEnd); }
  __device__ __forceinline__ void instant(uint32_t event) {
    write(event, ProfilerEventKind::kInstant);
  }

 private:
  static __device__ __forceinline__ uint64_t word(uint32_t low, uint32_t high) {
    return static_cast<uint64_t>(high) << 32 | low;
  }

  __device__ __forceinline__ void write(uint32_t event, ProfilerEventKind kind) {
    if (next_ >= capacity_) return;
    uint32_t nanoseconds;
    // Memory operations stay on their side of the clock.
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(nanoseconds) : : "memory");
    buffer_[next_] = word(tag_ | (event & 0x3ff) << 2 | static_cast<uint32_t>(kind), nanoseconds);
    next_ += stride_;
  }

  uint64_t* buffer_;
  uint32_t capacity_;
  uint32_t tag_;
  uint32_t next_;
  uint32_t stride_;
};

}  // namespace flashinfer
