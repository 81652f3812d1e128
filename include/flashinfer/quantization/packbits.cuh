// Bytes to bits: bit i of an output byte (counted from the low or the high end) says whether byte 8
// * byte + i of x is not zero; bits past the end are 0. In the segmented form each segment of x
// starts a new output byte.
//
// A thread makes aligned words of the output from 32 bytes of x each, which it reads as aligned
// vectors and shifts into place as bits, so that a segment may start anywhere.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/quantization/packbits_params.h>
#include <type_traits>

namespace flashinfer {

namespace detail {

// Bit i: whether byte i is not zero.
__device__ __forceinline__ uint32_t nonzero_bits(uint32_t word) {
  // Bit 7 of each byte, then a product that moves these four bits next to each other at the top.
  const uint32_t flags = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
  return (flags * 0x00204081u) >> 28;
}

__device__ __forceinline__ uint32_t nonzero_bits(uint4 v) {
  return nonzero_bits(v.x) | nonzero_bits(v.y) << 4 | nonzero_bits(v.z) << 8 |
         nonzero_bits(v.w) << 12;
}

// 32 bytes of x from any address on, on their way as the two or three aligned vectors around them.
struct PackedWord {
  uint4 vectors[3];
  uint32_t shift;
  bool in_bounds;  // else nothing was loaded: the vectors would reach beyond x

  __device__ __forceinline__ void load(const PackBitsParams& params, int64_t begin) {
    const uint8_t* address = params.x + begin;
    shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) % 16);
    const uint8_t* aligned = address - shift;
    in_bounds = aligned >= params.x && aligned + (shift ? 48 : 32) <= params.x + params.num_x;
    if (!in_bounds) return;
    const auto* source = reinterpret_cast<const uint4*>(aligned);
    vectors[0] = source[0];
    vectors[1] = source[1];
    if (shift) vectors[2] = source[2];
  }

  // The first `count` <= 32 bytes as bits, the first one lowest.
  __device__ __forceinline__ uint32_t bits(uint32_t count) const {
    uint64_t all = nonzero_bits(vectors[0]) | nonzero_bits(vectors[1]) << 16;
    if (shift) all |= static_cast<uint64_t>(nonzero_bits(vectors[2])) << 32;
    const uint32_t word = static_cast<uint32_t>(all >> shift);
    return count < 32 ? word & ((1u << count) - 1) : word;
  }
};

// The first `count` <= 32 bytes from x[begin] on as bits, the first one lowest.
__device__ __forceinline__ uint32_t pack_word(const PackBitsParams& params, int64_t begin,
                                              uint32_t count) {
  PackedWord packed;
  packed.load(params, begin);
  if (packed.in_bounds) return packed.bits(count);
  uint32_t word = 0;
  for (uint32_t i = 0; i < count; ++i) word |= (params.x[begin + i] ? 1u : 0u) << i;
  return word;
}

__device__ __forceinline__ uint32_t in_bit_order(uint32_t word, bool big_endian) {
  return big_endian ? __byte_perm(__brev(word), 0, 0x0123) : word;
}

__device__ __forceinline__ uint32_t at_most(int64_t count, uint32_t limit) {
  return count < limit ? static_cast<uint32_t>(count) : limit;
}

__device__ __forceinline__ void store_word(const PackBitsParams& params, int64_t position,
                                           uint32_t word) {
  word = in_bit_order(word, params.big_endian);
  uint8_t* out = params.out + position;
  if (params.num_out - position >= 4) {
    *reinterpret_cast<uint32_t*>(out) = word;
  } else {
    for (int64_t i = 0; i < params.num_out - position; ++i) {
      out[i] = static_cast<uint8_t>(word >> (8 * i));
    }
  }
}

// The last segment that starts at or before the output byte `position` of the CTA's first thread:
// all threads look at once, so that few loads follow each other.
template <typename Index>
__device__ __forceinline__ uint32_t find_first_segment(const Index* out_indptr,
                                                       uint32_t num_segments, int64_t position) {
  uint32_t low = 0, high = num_segments;  // out_indptr[low] <= position < out_indptr[high]
  while (high - low > 1) {
    const uint32_t step = ceil_div(high - low, blockDim.x);
    const uint64_t probe = low + static_cast<uint64_t>(threadIdx.x + 1) * step;
    const bool is_before = probe < high && out_indptr[probe] <= position;
    low += static_cast<uint32_t>(__syncthreads_count(is_before)) * step;
    high = high - low > step ? low + step : high;
  }
  return low;
}

// The last of entries[low .. high) that is at most `position`; the first of them is.
template <typename Index>
__device__ __forceinline__ uint32_t last_at_most(const Index* entries, uint32_t low, uint32_t high,
                                                 int64_t position) {
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (entries[middle] <= position ? low : high) = middle;
  }
  return low;
}

// Entries `base` ... of the indptr arrays in shared memory, one per thread; the last one repeats.
template <typename Index, int kThreads>
struct SegmentWindow {
  Index begins[kThreads], out_begins[kThreads];

  // Whether output bytes first ... last are all in segments that begin and end in the window; if
  // so, in those from `low` to before `high`. For the whole CTA.
  __device__ __forceinline__ bool load(const PackBitsParams& params, uint32_t base, int64_t first,
                                       int64_t last, uint32_t& low, uint32_t& high) {
    const uint32_t room = params.num_segments - base;
    const uint32_t i = base + (threadIdx.x < room ? threadIdx.x : room);
    const Index out_begin = static_cast<const Index*>(params.out_indptr)[i];
    begins[threadIdx.x] = static_cast<const Index*>(params.indptr)[i];
    out_begins[threadIdx.x] = out_begin;
    const int begun = __syncthreads_count(out_begin <= first);
    high = static_cast<uint32_t>(__syncthreads_count(out_begin <= last));
    low = static_cast<uint32_t>(begun - 1);
    return begun > 0 && high < kThreads;
  }
};

// The same for a position further on, by strides that double: it is not far.
template <typename Index>
__device__ __forceinline__ uint32_t find_segment_from(const Index* out_indptr,
                                                      uint32_t num_segments, uint32_t low,
                                                      int64_t position) {
  uint32_t stride = 1;
  while (num_segments - low > stride && out_indptr[low + stride] <= position) {
    low += stride;
    stride *= 2;
  }
  uint32_t high = num_segments - low > stride ? low + stride : num_segments;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (out_indptr[middle] <= position ? low : high) = middle;
  }
  return low;
}

// The output word at byte `position` where segments may end inside of it. `segment`, which holds
// its first byte, counts entries of the two arrays.
template <typename Index>
__device__ __forceinline__ uint32_t pack_segments(const PackBitsParams& params, const Index* begins,
                                                  const Index* out_begins, uint32_t segment,
                                                  int64_t position) {
  uint32_t word = 0;
  for (int64_t i = 0; i < 4 && position + i < params.num_out;) {
    while (position + i >= out_begins[segment + 1]) ++segment;
    const int64_t begin = begins[segment] + 8 * (position + i - out_begins[segment]);
    const uint32_t bytes = at_most(out_begins[segment + 1] - position - i, 4 - i);
    word |= pack_word(params, begin, at_most(begins[segment + 1] - begin, 8 * bytes)) << (8 * i);
    i += bytes;
  }
  return word;
}

}  // namespace detail

inline constexpr int kPackThreads = 256;

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    packbits_kernel(const __grid_constant__ PackBitsParams params) {
  const int64_t position = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (position >= params.num_out) return;
  const uint32_t count = detail::at_most(params.num_x - 8 * position, 32);
  detail::store_word(params, position, detail::pack_word(params, 8 * position, count));
}

// Index is the type of the indptr arrays.
template <typename Index>
__global__ void __launch_bounds__(kPackThreads)
    segment_packbits_kernel(const __grid_constant__ PackBitsParams params) {
  const int64_t first = 4 * static_cast<int64_t>(blockIdx.x) * kPackThreads;
  const int64_t position = first + 4 * threadIdx.x;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const auto* out_indptr = static_cast<const Index*>(params.out_indptr);
  uint32_t segment = detail::find_first_segment(out_indptr, params.num_segments, first);
  if (position >= params.num_out) return;
  segment = detail::find_segment_from(out_indptr, params.num_segments, segment, position);
  const auto* indptr = static_cast<const Index*>(params.indptr);
  const uint32_t word = detail::pack_segments(params, indptr, out_indptr, segment, position);
  detail::store_word(params, position, word);
}

// For long segments. The CTA guesses where its own are, and each thread loads several words before
// it uses one: the look-up takes longer than the data. 2^28 bytes on an H200, without and with:
// segments of 2^20 85 and 76 us, of 2^20 + 3 92 and 81, of 1001 171 and 176, of 64 193 and 345.
inline constexpr int kPackWords = 4;

template <typename Index>
__global__ void __launch_bounds__(kPackThreads)
    long_segment_packbits_kernel(const __grid_constant__ PackBitsParams params) {
  constexpr int kBytes = 4 * kPackWords * kPackThreads;
  __shared__ detail::SegmentWindow<Index, kPackThreads> window;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBytes;
  const int64_t last = (params.num_out - first > kBytes ? first + kBytes : params.num_out) - 1;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  // Where the segments would be if all were as long, and a few before; else by search.
  const float place = static_cast<float>(first) / static_cast<float>(params.num_out);
  auto guess = static_cast<uint32_t>(place * static_cast<float>(params.num_segments));
  guess = guess < params.num_segments ? guess : params.num_segments;
  const uint32_t base = guess < 32 ? 0 : guess - 32;
  uint32_t low, high;
  if (!window.load(params, base, first, last, low, high)) {
    const auto* indptr = static_cast<const Index*>(params.indptr);
    const auto* out_indptr = static_cast<const Index*>(params.out_indptr);
    const uint32_t begun = detail::find_first_segment(out_indptr, params.num_segments, first);
    for (int64_t position = first + 4 * threadIdx.x; position <= last;
         position += 4 * kPackThreads) {
      const uint32_t segment =
          detail::find_segment_from(out_indptr, params.num_segments, begun, position);
      const uint32_t word = detail::pack_segments(params, indptr, out_indptr, segment, position);
      detail::store_word(params, position, word);
    }
    return;
  }

  detail::PackedWord words[kPackWords];
  uint32_t segments[kPackWords], counts[kPackWords];
#pragma unroll
  for (int i = 0; i < kPackWords; ++i) {
    const int64_t position = first + 4 * (threadIdx.x + i * kPackThreads);
    words[i].in_bounds = false;
    if (position > last) continue;
    segments[i] = detail::last_at_most(window.out_begins, low, high, position);
    const int64_t begin =
        window.begins[segments[i]] + 8 * (position - window.out_begins[segments[i]]);
    counts[i] = detail::at_most(window.begins[segments[i] + 1] - begin, 32);
    // The word is the segment's alone.
    if (window.out_begins[segments[i] + 1] - position >= 4) words[i].load(params, begin);
  }
#pragma unroll
  for (int i = 0; i < kPackWords; ++i) {
    const int64_t position = first + 4 * (threadIdx.x + i * kPackThreads);
    if (position > last) continue;
    const uint32_t word = words[i].in_bounds
                              ? words[i].bits(counts[i])
                              : detail::pack_segments(params, window.begins, window.out_begins,
                                                      segments[i], position);
    detail::store_word(params, position, word);
  }
}

#ifndef __CUDACC_RTC__

// `out` is aligned to 4 bytes. Index is void without segments.
template <typename Index>
inline cudaError_t launch_packbits(const PackBitsParams& params, bool enable_pdl,
                                   cudaStream_t stream) {
  int64_t words = 1;
  void (*kernel)(PackBitsParams);
  if constexpr (std::is_same_v<Index, void>) {
    kernel = packbits_kernel<kPackThreads>;
  } else if (params.num_out >= int64_t{16384} * params.num_segments) {
    kernel = long_segment_packbits_kernel<Index>;
    words = kPackWords;
  } else {
    kernel = segment_packbits_kernel<Index>;
  }
  const auto ctas = static_cast<uint32_t>(ceil_div(params.num_out, 4 * words * kPackThreads));
  return launch_kernel(kernel, dim3(ctas), dim3(kPackThreads), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
