// Bytes to bits: bit i of an output byte (counted from the low or the high end) says whether byte 8
// * byte + i of x is nonzero; bits after the end are 0. In the segmented form each segment of x
// starts a new output byte.
//
// A thread makes aligned words of the output. Without segments it reads a word's 32 bytes of x as
// aligned vectors and shifts them into place as bits. With segments the bits may start at any
// address: a warp makes bits of the aligned vectors that cover its part of x, stores them in shared
// memory, and takes its words from there.
//
// Measurements, also of what lost: docs/tuning/quantization.md.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/quantization/packbits_params.h>
#include <type_traits>

namespace flashinfer {

namespace detail {

// Bit i says whether byte i is nonzero.
__device__ __forceinline__ uint32_t nonzero_bits(uint32_t word) {
  // Bit 7 of each byte, then a product that moves these four bits next to each other at the top.
  const uint32_t flags = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
  return (flags * 0x00204081u) >> 28;
}

__device__ __forceinline__ uint32_t nonzero_bits(uint4 v) {
  return nonzero_bits(v.x) | nonzero_bits(v.y) << 4 | nonzero_bits(v.z) << 8 |
         nonzero_bits(v.w) << 12;
}

// Packs bytes begin ... end - 1 of x, at most 32, into bits, the first one lowest.
__device__ __forceinline__ uint32_t pack_bytes(const PackBitsParams& params, int64_t begin,
                                               int64_t end) {
  uint32_t word = 0;
#pragma unroll 1
  for (int64_t i = begin; i < end; ++i) word |= (params.x[i] ? 1u : 0u) << (i - begin);
  return word;
}

// Packs `count` bytes from `begin`, reading the two or three aligned vectors around them.
__device__ __forceinline__ uint32_t pack_word(const PackBitsParams& params, int64_t begin,
                                              uint32_t count) {
  const uint8_t* address = params.x + begin;
  const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) % 16);
  const uint8_t* aligned = address - shift;
  if (aligned < params.x || aligned + (shift ? 48 : 32) > params.x + params.num_x) {
    return pack_bytes(params, begin, begin + count);
  }
  const auto* source = reinterpret_cast<const uint4*>(aligned);
  uint64_t all = nonzero_bits(source[0]) | nonzero_bits(source[1]) << 16;
  if (shift) all |= static_cast<uint64_t>(nonzero_bits(source[2])) << 32;
  const uint32_t word = static_cast<uint32_t>(all >> shift);
  return count < 32 ? word & ((1u << count) - 1) : word;
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

// Words in a warp's part of the output: one less than the bits of its vectors of x fill, so that
// the vectors cover the part wherever it begins.
inline constexpr int kPackVectors = 8;  // vectors per lane
inline constexpr uint32_t kPackWarpWords = 32 * kPackVectors / 2 - 1;
inline constexpr uint32_t kPackWarpBytes = 4 * kPackWarpWords;

namespace detail {

inline constexpr uint32_t kWarpMask = 0xffffffffu;

// A window of 64 entries of the indptr arrays from `base` on, two per lane; the last entry of the
// array repeats.
template <typename Index>
struct SegmentWindow {
  Index begins[2], out_begins[2];
  // Output bytes first ... last belong to the window's segments `low` to `high` - 1.
  uint32_t low, high;

  __device__ __forceinline__ static Index get(const Index (&entries)[2], uint32_t i) {
    const Index a = __shfl_sync(kWarpMask, entries[0], i % 32);
    const Index b = __shfl_sync(kWarpMask, entries[1], i % 32);
    return i < 32 ? a : b;
  }

  __device__ __forceinline__ static uint32_t count_at_most(const Index (&entries)[2], int64_t x) {
    return __popc(__ballot_sync(kWarpMask, entries[0] <= x)) +
           __popc(__ballot_sync(kWarpMask, entries[1] <= x));
  }

  __device__ __forceinline__ void load(const PackBitsParams& params, uint32_t base, int64_t first,
                                       int64_t last) {
    const uint32_t lane = threadIdx.x % 32, room = params.num_segments - base;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t i = lane + 32 * k;
      begins[k] = static_cast<const Index*>(params.indptr)[base + (i < room ? i : room)];
      out_begins[k] = static_cast<const Index*>(params.out_indptr)[base + (i < room ? i : room)];
    }
    low = count_at_most(out_begins, first) - 1;
    high = count_at_most(out_begins, last);
  }

  // Finds the window with the output bytes. If they span more segments than a window holds, the
  // window begins at the first of them: low = 0 and high = 64. The first guess uses the mean length
  // of segments; later ones use what a window shows. All lanes of the warp call together.
  __device__ __forceinline__ uint32_t find(const PackBitsParams& params, int64_t first,
                                           int64_t last) {
    constexpr int64_t kMargin = 12;
    const float rate = static_cast<float>(params.num_segments) / static_cast<float>(params.num_out);
    int64_t base = static_cast<int64_t>(static_cast<float>(first) * rate) - kMargin;
#pragma unroll 1
    for (int tries = 0; tries < 6; ++tries) {
      base = base < 0 ? 0 : base < params.num_segments ? base : params.num_segments;
      load(params, static_cast<uint32_t>(base), first, last);
      if (low < 64 && (high < 64 || low == 0)) return static_cast<uint32_t>(base);
      if (low < 63) {
        base += low;
      } else {
        const auto ahead = static_cast<float>(first - get(out_begins, 0)) * rate;
        const int64_t next = base + static_cast<int64_t>(ahead) - kMargin;
        base = low == 63 && next < base + 48 ? base + 48 : next;
      }
    }
    const auto* out_indptr = static_cast<const Index*>(params.out_indptr);
    uint32_t lowest = 0, end = params.num_segments;
    while (end - lowest > 1) {
      const uint32_t middle = lowest + (end - lowest) / 2;
      (out_indptr[middle] <= first ? lowest : end) = middle;
    }
    load(params, lowest, first, last);
    return lowest;
  }
};

// The last segment from `low` on that starts at or before `position`, which is near; the stride
// doubles.
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

// The last of the segments `low` to `high` - 1 that begins at or before `position`; `low` does.
template <typename Index, typename Position>
__device__ __forceinline__ uint32_t last_at_most(const Index* entries, uint32_t low, uint32_t high,
                                                 Position position) {
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (entries[middle] <= position ? low : high) = middle;
  }
  return low;
}

// Packs the output word at byte `position`, whose first byte is in `segment`, an index into the two
// arrays; bytes from `end` on are left 0. `pack(begin, count)` makes bits of `count` bytes of x.
template <typename Index, typename Position, typename Pack>
__device__ __forceinline__ uint32_t pack_segments(const Index* begins, const Index* out_begins,
                                                  uint32_t segment, Position position, Position end,
                                                  const Pack& pack) {
  uint32_t word = 0;
  for (uint32_t i = 0; i < 4 && position + i < end;) {
    while (position + i >= out_begins[segment + 1]) ++segment;
    const Position begin = begins[segment] + 8 * (position + i - out_begins[segment]);
    const uint32_t bytes = at_most(out_begins[segment + 1] - position - i, 4 - i);
    word |= pack(begin, at_most(begins[segment + 1] - begin, 8 * bytes)) << (8 * i);
    i += bytes;
  }
  return word;
}

// A warp's part in shared memory: the bits of its vectors, and its segments, relative to the first
// of these bits and to the first byte of output.
struct PackTile {
  union {
    uint16_t halves[32 * kPackVectors];
    uint32_t words[32 * kPackVectors / 2 + 1];  // two are read for 32 bits
  };
  int32_t begins[64], out_begins[64];
  uint32_t out[kPackWarpWords + 1];

  // Loads `num_vectors` vectors of x from `base` on as bits.
  __device__ __forceinline__ void load(const PackBitsParams& params, int64_t base,
                                       uint32_t num_vectors) {
    const uint32_t lane = threadIdx.x % 32;
    const auto* source = reinterpret_cast<const uint4*>(params.x + base);
    if (base < 0 || base + 16 * num_vectors > params.num_x) {
      // The array x begins or ends within this vector.
#pragma unroll 1
      for (uint32_t i = lane; i < num_vectors; i += 32) {
        const int64_t first = base + 16 * i, from = first < 0 ? 0 : first;
        const int64_t to = first + 16 < params.num_x ? first + 16 : params.num_x;
        halves[i] = static_cast<uint16_t>(pack_bytes(params, from, to) << (from - first));
      }
      return;
    }
    uint4 vectors[kPackVectors];
#pragma unroll
    for (int k = 0; k < kPackVectors; ++k) {
      if (lane + 32 * k < num_vectors) vectors[k] = source[lane + 32 * k];
    }
#pragma unroll
    for (int k = 0; k < kPackVectors; ++k) {
      if (lane + 32 * k < num_vectors) {
        halves[lane + 32 * k] = static_cast<uint16_t>(nonzero_bits(vectors[k]));
      }
    }
  }

  // Returns `count` <= 32 bits, starting with bit `first`.
  __device__ __forceinline__ uint32_t bits(uint32_t first, uint32_t count) const {
    const uint32_t word = __funnelshift_r(words[first / 32], words[first / 32 + 1], first % 32);
    return count < 32 ? word & ((1u << count) - 1) : word;
  }
};

}  // namespace detail

// Index is the type of the indptr arrays.
template <typename Index>
__global__ void __launch_bounds__(kPackThreads)
    segment_packbits_kernel(const __grid_constant__ PackBitsParams params) {
  __shared__ detail::PackTile tiles[kPackThreads / 32];
  detail::PackTile& tile = tiles[threadIdx.x / 32];
  const uint32_t lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kPackThreads / 32) + threadIdx.x / 32;
  const int64_t first = warp * kPackWarpBytes;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (first >= params.num_out) return;
  const uint32_t num_bytes = detail::at_most(params.num_out - first, kPackWarpBytes);
  detail::SegmentWindow<Index> window;
  const uint32_t segment = window.find(params, first, first + num_bytes - 1);
  if (window.high == 64) {
    const auto pack = [&](int64_t begin, uint32_t count) {
      return detail::pack_word(params, begin, count);
    };
    const auto* indptr = static_cast<const Index*>(params.indptr);
    const auto* out_indptr = static_cast<const Index*>(params.out_indptr);
#pragma unroll 1
    for (int64_t position = first + 4 * lane; position < first + num_bytes; position += 128) {
      const uint32_t its =
          detail::find_segment_from(out_indptr, params.num_segments, segment, position);
      detail::store_word(
          params, position,
          detail::pack_segments(indptr, out_indptr, its, position, params.num_out, pack));
    }
    return;
  }

  const auto begin_of = [&](uint32_t i) { return int64_t{window.get(window.begins, i)}; };
  const auto out_begin_of = [&](uint32_t i) { return int64_t{window.get(window.out_begins, i)}; };
  const int64_t begin = begin_of(window.low) + 8 * (first - out_begin_of(window.low));
  const int64_t end_of_last = begin_of(window.high);
  int64_t end = begin_of(window.high - 1) + 8 * (first + num_bytes - out_begin_of(window.high - 1));
  end = end < end_of_last ? end : end_of_last;
  const int64_t base =
      begin - static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.x + begin) % 16);
  constexpr uint32_t kFar = 1u << 30;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t i = lane + 32 * k;
    const bool is_first = i == window.low;
    tile.begins[i] = is_first ? begin - base : detail::at_most(window.begins[k] - base, kFar);
    tile.out_begins[i] = is_first ? 0 : detail::at_most(window.out_begins[k] - first, kFar);
  }
  tile.load(params, base, static_cast<uint32_t>(ceil_div<int64_t>(end - base, 16)));
  __syncwarp();
  // A lane makes adjacent words, so that it searches for its segment once and then steps from part
  // to part; hardly any word has two.
  constexpr uint32_t kLaneBytes = 4 * ceil_div<uint32_t>(kPackWarpWords, 32);
  uint32_t position = kLaneBytes * lane;
  const uint32_t lane_end = position + kLaneBytes < num_bytes ? position + kLaneBytes : num_bytes;
  uint32_t its = detail::last_at_most(tile.out_begins, window.low, window.high,
                                      static_cast<int32_t>(position));
  uint32_t word = 0;
  while (position < lane_end) {
    const uint32_t out_end = tile.out_begins[its + 1];
    if (position >= out_end) {
      ++its;
      continue;
    }
    const uint32_t byte = position % 4;
    const uint32_t bytes = min(out_end - position, 4 - byte);
    const uint32_t from = tile.begins[its] + 8 * (position - tile.out_begins[its]);
    word |= tile.bits(from, min(tile.begins[its + 1] - from, 8 * bytes)) << (8 * byte);
    position += bytes;
    if (position % 4 == 0 || position >= lane_end) {
      tile.out[(position - 1) / 4] = word;
      word = 0;
    }
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < ceil_div<int>(kPackWarpWords, 32); ++k) {
    const uint32_t i = lane + 32 * k;
    if (4 * i < num_bytes) detail::store_word(params, first + 4 * i, tile.out[i]);
  }
}

#ifndef __CUDACC_RTC__

// `out` is aligned to 4 bytes. Index is void without segments.
template <typename Index>
inline cudaError_t launch_packbits(const PackBitsParams& params, bool enable_pdl,
                                   cudaStream_t stream) {
  void (*kernel)(PackBitsParams) = packbits_kernel<kPackThreads>;
  int64_t bytes = 4 * kPackThreads;  // per CTA
  if constexpr (!std::is_same_v<Index, void>) {
    kernel = segment_packbits_kernel<Index>;
    bytes = kPackThreads / 32 * kPackWarpBytes;
  }
  const auto ctas = static_cast<uint32_t>(ceil_div(params.num_out, bytes));
  return launch_kernel(kernel, dim3(ctas), dim3(kPackThreads), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
