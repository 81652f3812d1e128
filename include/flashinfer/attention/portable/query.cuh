// Loads query rows into shared memory and applies rotary embedding in the kernel.
//
// Measurements, also of what lost: docs/tuning/attention_decode.md.
#pragma once

#include <flashinfer/attention/math.cuh>
#include <flashinfer/attention/portable/loader.cuh>
#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/float8.cuh>
#include <flashinfer/common/vec.cuh>

namespace flashinfer {

// Rotates pairs (x_i, x_{i + D/2}) for i = first ... first + 7 by position * theta^(-2i/D) / scale,
// in Llama's layout of halves.
class ChunkRotation {
 public:
  __device__ __forceinline__ ChunkRotation(int first, const VariantParams& params) {
    constexpr float kTurnsPerRadian = 0.15915494309189533577f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      frequency_[i] = exp2f(static_cast<float>(first + i) * params.rope_theta_rcp_log2) *
                      params.rope_scale_rcp * kTurnsPerRadian;
    }
  }

  // The angle in turns is split into a product and its rounding error, so that distant positions
  // keep the accuracy of the frequency. Within half a turn the sine and cosine of the hardware err
  // by less than 2^-20, much less than 16-bit keys do.
  __device__ __forceinline__ void rotate(float (&low)[8], float (&high)[8], int position) const {
    constexpr float kRadiansPerTurn = 6.28318530717958647693f;
    const float x = static_cast<float>(position);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float turns = x * frequency_[i];
      const float rest = fmaf(x, frequency_[i], -turns);
      const float angle = (turns - rintf(turns) + rest) * kRadiansPerTurn;
      const float sine = __sinf(angle), cosine = __cosf(angle);
      const float a = low[i], b = high[i];
      low[i] = a * cosine - b * sine;
      high[i] = b * cosine + a * sine;
    }
  }

 private:
  float frequency_[8];  // turns per token
};

// Column of a 16-column block at which mma finds element `i` of an 8-bit K row. Lane t of a quad
// reads bytes 4t ... 4t + 3, which mma takes as columns 2t, 2t + 1, 2t + 8, 2t + 9.
__device__ __forceinline__ int float8_column(int i) {
  return (i / 4) * 2 + i % 2 + (i % 4 / 2) * 8;
}

// Column of a 32-column block at which mma finds element `i` of a 4-bit K row. Lane t of a quad
// reads codes 8t ... 8t + 7, which are unpacked in pairs (p, p + 4); two pairs are a lane's part of
// 16 columns, 2t, 2t + 1, 2t + 8, 2t + 9.
__device__ __forceinline__ int float4_column(int i) {
  const int pair = i % 4;
  return pair / 2 * 16 + i / 8 * 2 + i % 8 / 4 + pair % 2 * 8;
}

// Copies the tile's query rows unchanged, 8-bit ones to the first half of their place. Rows after
// the tile's end become zeros.
template <typename Traits>
__device__ __forceinline__ void copy_query(const AttentionTensors& tensors, const WorkItem& item,
                                           const FastDivisor& group_size, uint32_t kv_head,
                                           int num_rows, uint32_t shared) {
  constexpr int kSize = static_cast<int>(sizeof(typename Traits::Q));
  constexpr int kRowsPerWarp = Traits::kTileQ / kAttentionWarps;
  const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
  const int first_row = warp_idx * kRowsPerWarp;
  const int row = first_row + lane_idx;
  const uint32_t packed = item.row_begin + row;
  const uint32_t token = group_size.divide(packed);
  const uint32_t head = kv_head * group_size.divisor + packed - token * group_size.divisor;
  const int64_t offset =
      ((item.qo_begin + int64_t{token}) * tensors.q_stride_token + head * tensors.q_stride_head) *
      kSize;
  const auto target = [&](int row, int column) {
    return shared + (first_row + row) * Traits::kPitchQ + column;
  };
  copy_rows_async<kRowsPerWarp, Traits::kHeadDimQK * kSize>(
      target, static_cast<const char*>(tensors.q), row < num_rows ? offset : -1, lane_idx);
}

// Flips the sign of `kRows` query rows in shared memory with one warp. A negative scale needs this,
// so that the largest q.k remains the largest logit.
template <typename Traits, int kRows>
__device__ __forceinline__ void negate_query(char* shared) {
  constexpr int kChunks = Traits::kHeadDimQK / 8;
  for (int i = threadIdx.x % 32; i < kRows * kChunks; i += 32) {
    uint4& word =
        *reinterpret_cast<uint4*>(shared + i / kChunks * Traits::kPitchQ + i % kChunks * 16);
    word.x ^= 0x80008000u, word.y ^= 0x80008000u, word.z ^= 0x80008000u, word.w ^= 0x80008000u;
  }
}

// A query row held by a warp: eight elements per lane and pass.
template <typename Traits>
struct QueryRowValues {
  static constexpr int kChunks = Traits::kHeadDimQK / 8;
  static constexpr int kPasses = ceil_div(kChunks, 32);
  using Q = typename Traits::Q;
  using Mma = typename Traits::Mma;
  Vector<Q, 8> chunks[kPasses];
  float values[kPasses][8];
  Vector<Mma, 8> rounded[kPasses];

  __device__ __forceinline__ void load(const Q* source) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int chunk = pass * 32 + threadIdx.x % 32;
      chunks[pass].words[0] = {};
      if (chunk < kChunks) chunks[pass].load(source + chunk * 8);
    }
  }

  // Rotates and transforms the row; returns the lane's largest magnitude.
  template <bool kRotate, typename Variant, typename Params>
  __device__ __forceinline__ float transform(const Q* source, const WorkItem& item,
                                             const FastDivisor& group_size, int row,
                                             const Variant& variant, const Params& params) {
    float largest = 0.f;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int chunk = pass * 32 + threadIdx.x % 32;
#pragma unroll
      for (int j = 0; j < 8; ++j) values[pass][j] = chunks[pass][j];
      if constexpr (kRotate) {
        if (chunk < kChunks) {
          const bool is_low = chunk < kChunks / 2;
          const int partner = is_low ? chunk + kChunks / 2 : chunk - kChunks / 2;
          Vector<Q, 8> other_chunk;
          other_chunk.load(source + partner * 8);
          float other[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) other[j] = other_chunk[j];
          const uint32_t token = group_size.divide(item.row_begin + row);
          const int position = item.kv_len - item.qo_len + static_cast<int>(token);
          const ChunkRotation rotation((is_low ? chunk : partner) * 8, params);
          if (is_low) {
            rotation.rotate(values[pass], other, position);
          } else {
            rotation.rotate(other, values[pass], position);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if constexpr (Variant::kHasQueryTransform) {
          values[pass][j] = variant.QueryTransform(params, values[pass][j]);
        }
        largest = fmaxf(largest, fabsf(values[pass][j]));
      }
    }
    return largest;
  }

  // Rounds the row to the type of the products.
  __device__ __forceinline__ void round(float scale) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int j = 0; j < 8; ++j) values[pass][j] *= scale;
      rounded[pass].from_floats(values[pass]);
    }
  }

  __device__ __forceinline__ void store(char* row_begin) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int chunk = pass * 32 + threadIdx.x % 32;
      if (chunk >= kChunks) continue;
      if constexpr (Traits::kMultipliesKeysOf8Bits) {
        const uint32_t pairs[4] = {rounded[pass].words[0].x, rounded[pass].words[0].y,
                                   rounded[pass].words[0].z, rounded[pass].words[0].w};
        char* const block = row_begin + chunk / 2 * 32;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<uint32_t*>(block + float8_column(chunk % 2 * 8 + 2 * j) * 2) = pairs[j];
        }
      } else if constexpr (Traits::kKeysAre4Bit) {
        const uint4& x = rounded[pass].words[0];
        const uint32_t pairs[4] = {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                                   __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
        char* const block = row_begin + chunk / 4 * 64;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<uint32_t*>(block + float4_column(chunk % 4 * 8 + j) * 2) = pairs[j];
        }
      } else {
        *reinterpret_cast<uint4*>(row_begin + chunk * 16) = rounded[pass].words[0];
      }
    }
  }
};

// Returns the power of two that moves a row's largest magnitude to [2^14, 2^15). Values below 2^-24
// are then less than 2^-38 of it. Lane 0 stores the inverse, times `unit`.
__device__ __forceinline__ float query_scale(float largest, float unit, float* inverse) {
  largest = warp_reduce_max(largest);
  float scale = 1.f;
  const uint32_t exponent = __float_as_uint(largest) >> 23;
  if (exponent > 14 && exponent < 255) {
    scale = __uint_as_float((127 + 127 + 14 - exponent) << 23);
  }
  if (threadIdx.x % 32 == 0) {
    const bool is_moved = exponent > 14 && exponent < 255;
    *inverse = unit * (is_moved ? __uint_as_float((exponent - 14) << 23) : 1.f);
  }
  return scale;
}

// Rotates, transforms or converts the copied query rows in place, one warp per row: the warp that
// multiplies the row, unless all warps do. For keys of few bits they become float16: rows of
// bfloat16, and all for keys of 4 bits or widened ones, are scaled into its range, and `row_scale`
// receives the inverse.
template <typename Traits, bool kRotate, typename Variant, typename Params>
__device__ __forceinline__ void convert_query(const WorkItem& item, const FastDivisor& group_size,
                                              const Variant& variant, const Params& params,
                                              char* shared, float* row_scale) {
  using Q = typename Traits::Q;
  constexpr int kRowsPerWarp = Traits::kTileQ / kAttentionWarps;
  const int warp_idx = threadIdx.x / 32;
  const bool flip = Variant::kNegatesQuery && params.sm_scale < 0.f;

#pragma unroll 4
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = Traits::kSplitKV ? i * kAttentionWarps + warp_idx : warp_idx * kRowsPerWarp + i;
    char* const row_begin = shared + row * Traits::kPitchQ;
    const Q* const source = reinterpret_cast<const Q*>(row_begin);
    QueryRowValues<Traits> values;
    values.load(source);
    const float largest =
        values.template transform<kRotate>(source, item, group_size, row, variant, params);
    float scale = 1.f;
    if constexpr (Traits::kScalesQuery) {
      scale = query_scale(largest, Traits::kUnitK, row_scale + row);
    }
    values.round(flip ? -scale : scale);
    __syncwarp();  // all lanes have read the row
    values.store(row_begin);
  }
}

// Eight elements of a K row as floats.
template <typename KV>
__device__ __forceinline__ void load_keys(float (&values)[8], const char* address) {
  Vector<KV, 8> chunk;
  chunk.load(reinterpret_cast<const KV*>(address));
  if constexpr (dtype::kIsFloat8<KV>) {
    Vector<dtype::float16, 8> wide;
    uint4& pairs = wide.words[0];
    float8_to_half2<KV>(chunk.words[0].x, pairs.x, pairs.y);
    float8_to_half2<KV>(chunk.words[0].y, pairs.z, pairs.w);
    wide.to_floats(values);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = chunk[j];
  }
}

// Rotates and transforms `num_rows` K rows of a tile, of positions from `first_position` on, with
// `num_threads` threads: in place, or from `shared` to `wide` what becomes 16 bits. A thread keeps
// its columns, and with them the frequencies.
template <typename Traits, bool kRotate, typename Variant, typename Params>
__device__ __forceinline__ void transform_keys(char* shared, char* wide, int first_position,
                                               int num_rows, int thread_idx, int num_threads,
                                               const Variant& variant, const Params& params) {
  using KV = typename Traits::KV;
  using Wide = typename Traits::Mma;
  using Source = typename Traits::RowsK;
  using Target = typename Traits::ProductRowsK;
  constexpr int kHalves = Traits::kHeadDimQK / 16;  // chunks of 8 elements in half a row
  constexpr int kLanes = next_power_of_two(kHalves);
  constexpr int kHalf = Traits::kHeadDimQK / 2, kSize = static_cast<int>(sizeof(KV));
  const int chunk = thread_idx % kLanes;
  if (chunk >= kHalves) return;
  const ChunkRotation rotation(chunk * 8, params);
#pragma unroll 2
  for (int row = thread_idx / kLanes; row < num_rows; row += num_threads / kLanes) {
    const auto target = [&](int column) {
      return reinterpret_cast<Wide*>(wide + Target::offset(row, column * 2));
    };
    float low[8], high[8];
    load_keys<KV>(low, shared + Source::offset(row, chunk * 8 * kSize));
    load_keys<KV>(high, shared + Source::offset(row, (kHalf + chunk * 8) * kSize));
    if constexpr (kRotate) rotation.rotate(low, high, first_position + row);
    if constexpr (Variant::kHasKeyTransform) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        low[j] = variant.KeyTransform(params, low[j]);
        high[j] = variant.KeyTransform(params, high[j]);
      }
    }
    if constexpr (Traits::kUnitK != 1.f) {
#pragma unroll
      for (int j = 0; j < 8; ++j) low[j] *= 1.f / Traits::kUnitK, high[j] *= 1.f / Traits::kUnitK;
    }
    Vector<Wide, 8> low_chunk, high_chunk;
    low_chunk.from_floats(low);
    high_chunk.from_floats(high);
    low_chunk.store(target(chunk * 8));
    high_chunk.store(target(kHalf + chunk * 8));
  }
}

}  // namespace flashinfer
