// Turns sums in registers into D: applies factors and bias, rounds, and stores through shared
// memory with the copy engine. Tiles that are not whole are stored row by row.
#pragma once

#include <flashinfer/common/vec.cuh>
#include <flashinfer/gemm/activation.cuh>
#include <flashinfer/gemm/sm90/quantize.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tma_boxes.cuh>

namespace flashinfer {

// Factors and addends of D by row and column. A thread reads them for its own elements.
template <typename Tile>
struct GemmFinish {
  using D = typename Tile::D;
  const GemmParams& params;
  float alpha;

  __device__ __forceinline__ explicit GemmFinish(const GemmParams& p) : params(p), alpha(p.alpha) {
    if (params.alpha_a != nullptr) alpha *= __ldg(params.alpha_a);
  }

  __device__ __forceinline__ float factor(const GemmWork& work) const {
    if (params.alpha_b == nullptr) return alpha;
    return alpha * __ldg(params.alpha_b + work.group * params.alpha_b_stride);
  }

  __device__ __forceinline__ float row_factor(const GemmWork& work, uint32_t row) const {
    float factor = 1.f;
    if (row >= work.row_end) return factor;
    if constexpr (Tile::kScale == GemmScale::token_channel) {
      factor *= __ldg(params.a_scale.data + work.batch * params.a_scale.stride_batch +
                      row * params.a_scale.stride_row);
    }
    return factor;
  }

  __device__ __forceinline__ float row_weight(const GemmWork& work, uint32_t row) const {
    return row < work.row_end ? __ldg(params.row_weight + row) : 0.f;
  }

  __device__ __forceinline__ GemmGate gate(const GemmWork& work) const {
    if constexpr (Tile::kGrouped) return gemm_gate(params, work.group);
    return {params.gate_alpha, params.gate_beta, params.gate_limit};
  }

  __device__ __forceinline__ float column_factor(const GemmWork& work, uint32_t column) const {
    if constexpr (Tile::kScale == GemmScale::token_channel) {
      if (column >= params.n) return 1.f;
      return __ldg(params.b_scale.data + work.group * params.b_scale.stride_batch +
                   column * params.b_scale.stride_row);
    }
    return 1.f;
  }

  __device__ __forceinline__ float addend(const GemmWork& work, uint32_t column) const {
    if (params.bias == nullptr || column >= params.n) return 0.f;
    const D* bias = static_cast<const D*>(params.bias);
    if constexpr (Tile::kGrouped) bias += static_cast<uint64_t>(work.group) * params.n;
    return to_float(bias[column]);
  }
};

template <typename Tile>
class GemmEpilogue {
  using D = typename Tile::D;
  static constexpr int kReps = Tile::kReps, kTiles = Tile::kTiles;
  static constexpr int kOutReps = Tile::kGated && Tile::kSwap ? 1 : kReps;
  static constexpr int kOutTiles = Tile::kOutRights / 8;
  static constexpr int kStoreTiles = Tile::kStoreRights / 8;
  static constexpr int kBoxBytes = Tile::kBoxColumns * 2;  // of a row of a box
  static constexpr int kBoxChunks = kBoxBytes / 16;

 public:
  __device__ __forceinline__ GemmEpilogue(const GemmKernelParams& params, uint32_t shared)
      : params_(params), finish_(params.gemm), quantizer_(params.gemm, shared) {
    warpgroup_idx_ = threadIdx.x / 128;
    thread_idx_ = threadIdx.x % 128;
    warp_idx_ = thread_idx_ / 32;
    lane_idx_ = threadIdx.x % 32;
    buffers_ =
        shared + Tile::kOffsetStore + warpgroup_idx_ * Tile::kStoreBuffers * Tile::kStoreBytes;
    buffer_ = buffers_;
  }

  template <typename Sums>
  __device__ __forceinline__ void store(const GemmWork& work, Sums& sums) {
    const bool whole = params_.stores_boxes &&
                       (!Tile::kGrouped ||
                        (work.row >= work.row_begin && work.row + Tile::kTileRows <= work.row_end));
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) scale(work, rep, sums[rep]);
    if constexpr (Tile::kGated) activate(work, sums);
    if constexpr (Tile::kActivation == GemmActivation::relu2) square(sums);
    if (params_.gemm.row_weight != nullptr) weigh(work, sums);
    if constexpr (Tile::kQuantizes) quantizer_.run(work, sums);
    if constexpr (Tile::kStoresWhole) {
      store_whole(work, sums, whole);
      return;
    }
#pragma unroll
    for (int rep = 0; rep < kOutReps; ++rep) {
      const uint32_t left = (Tile::left_group(warpgroup_idx_) * kOutReps + rep) * 64;
#pragma unroll
      for (int j = 0; j < kOutTiles; j += kStoreTiles) {
        if (Tile::kSplits > 1 && !place_.is_split(j / kStoreTiles)) continue;
        const uint32_t right = Tile::right_group(warpgroup_idx_) * Tile::kOutRights + j * 8;
        const uint32_t row = work.row + (Tile::kSwap ? right : left);
        const uint32_t column = work.column + (Tile::kSwap ? left : right);
        if constexpr (Tile::kStagesOutput) {
          stage(sums[rep], j);
          if constexpr (Tile::kQuantizes) {
            store_codes(work, row, column);
          } else if (whole) {
            store_box(row, column, work.batch);
          } else {
            store_rows(work, row, column);
          }
        } else {
          store_registers(work, row, column, sums[rep], j);
        }
      }
    }
  }

  // The CTA must not end before the copy engine has read its shared memory.
  __device__ __forceinline__ void finish() {
    if (Tile::kStagesOutput && thread_idx_ == 0) ptx::tma_store_wait_read();
  }

 private:
  // Scales and bias of a thread's two left rows, then of the right rows if they have any.
  __device__ __forceinline__ void scale(const GemmWork& work, int rep,
                                        float (&sums)[kTiles][4]) const {
    const uint32_t left =
        (Tile::left_group(warpgroup_idx_) * kReps + rep) * 64 + warp_idx_ * 16 + lane_idx_ / 4;
    const uint32_t right = Tile::right_group(warpgroup_idx_) * Tile::kRightRows + lane_idx_ % 4 * 2;
    const uint32_t n = params_.gemm.n;
    const bool has_bias = params_.gemm.bias != nullptr;
    const float all = finish_.factor(work);
    float factor[2], addend[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (Tile::kSwap) {
        const uint32_t column = work.row_of_b<Tile>(left + 8 * i, n);
        factor[i] = all * finish_.column_factor(work, column);
        addend[i] = finish_.addend(work, column);
      } else {
        factor[i] = all * finish_.row_factor(work, work.row + left + 8 * i);
      }
    }
    // Most products have no factor, and their multiplication would take as long as the rounding.
    if (Tile::kScale == GemmScale::token_channel || all != 1.f) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] *= factor[i / 2];
      }
    }
    if constexpr (Tile::kScale == GemmScale::token_channel) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t r = right + j * 8 + i;
          const float other = Tile::kSwap ? finish_.row_factor(work, work.row + r)
                                          : finish_.column_factor(work, work.row_of_b<Tile>(r, n));
          sums[j][i] *= other;
          sums[j][i + 2] *= other;
        }
      }
    }
    if (!has_bias) return;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float add =
            Tile::kSwap ? 0.f : finish_.addend(work, work.row_of_b<Tile>(right + j * 8 + i, n));
        sums[j][i] += Tile::kSwap ? addend[0] : add;
        sums[j][i + 2] += Tile::kSwap ? addend[1] : add;
      }
    }
  }

  // The first half of the sums becomes the activation of both halves.
  template <typename Sums>
  __device__ __forceinline__ void activate(const GemmWork& work, Sums& sums) const {
    const GemmGate constants = finish_.gate(work);
#pragma unroll
    for (int rep = 0; rep < kOutReps; ++rep) {
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j) {
        float (&first)[4] = sums[rep][j];
        const float (&second)[4] = Tile::kSwap ? sums[rep + 1][j] : sums[rep][j + kOutTiles];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          first[i] =
              activate_pair<Tile::kActivation, Tile::kQuantizes>(constants, first[i], second[i]);
      }
    }
  }

  template <typename Sums>
  __device__ __forceinline__ void square(Sums& sums) const {
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[rep][j][i] = squared_relu(sums[rep][j][i]);
      }
    }
  }

  template <typename Sums>
  __device__ __forceinline__ void weigh(const GemmWork& work, Sums& sums) const {
#pragma unroll
    for (int rep = 0; rep < kOutReps; ++rep) {
      const uint32_t left =
          (Tile::left_group(warpgroup_idx_) * kOutReps + rep) * 64 + warp_idx_ * 16 + lane_idx_ / 4;
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t right = Tile::right_group(warpgroup_idx_) * Tile::kOutRights + j * 8 +
                                 lane_idx_ % 4 * 2 + i % 2;
          sums[rep][j][i] *=
              finish_.row_weight(work, work.row + (Tile::kSwap ? right : left + i / 2 * 8));
        }
      }
    }
  }

  // Shared address of 16 bytes of a row of the box, swizzled as the map says.
  __device__ __forceinline__ uint32_t chunk(uint32_t row, uint32_t column) const {
    const uint32_t swizzle = row * kBoxBytes / 128 % kBoxChunks;
    return buffer_ + row * kBoxBytes + (column ^ swizzle) * 16;
  }

  // All boxes have a buffer each: nothing waits for a store but that of the tile before.
  template <typename Sums>
  __device__ __forceinline__ void store_whole(const GemmWork& work, const Sums& sums, bool whole) {
    constexpr int kRepBoxes = kOutTiles / kStoreTiles;
    if (thread_idx_ == 0) ptx::tma_store_wait_read();
    barrier();
#pragma unroll
    for (int box = 0; box < Tile::kStoreBoxes; ++box) {
      buffer_ = buffers_ + box * Tile::kStoreBytes;
      fill(sums[box / kRepBoxes], box % kRepBoxes * kStoreTiles);
    }
    ptx::async_proxy_fence();
    barrier();
    if (whole && thread_idx_ != 0) return;
#pragma unroll 1
    for (int box = 0; box < Tile::kStoreBoxes; ++box) {
      if (Tile::kThirds && box >= static_cast<int>(work.thirds)) break;
      buffer_ = buffers_ + box * Tile::kStoreBytes;
      const uint32_t row =
          work.row + (Tile::left_group(warpgroup_idx_) * kReps + box / kRepBoxes) * 64;
      const uint32_t column = work.column + Tile::right_group(warpgroup_idx_) * Tile::kOutRights +
                              box % kRepBoxes * Tile::kStoreRights;
      if (whole) {
        store_box(row, column, work.batch);
      } else {
        store_rows(work, row, column);
      }
    }
  }

  // Rounds sums into a buffer that is free.
  __device__ __forceinline__ void stage(const float (&sums)[kTiles][4], int first_tile) {
    if (Tile::kStoreBuffers == 2) {
      buffer_ = buffer_ == buffers_ ? buffers_ + Tile::kStoreBytes : buffers_;
    }
    if (thread_idx_ == 0) ptx::tma_store_wait_read<Tile::kStoreBuffers - 1>();
    barrier();
    fill(sums, first_tile);
    ptx::async_proxy_fence();
    barrier();
  }

  // Rounds the sums of right rows 8 first_tile... and puts them where a row of D is a row.
  __device__ __forceinline__ void fill(const float (&sums)[kTiles][4], int first_tile) const {
    const uint32_t matrix = lane_idx_ / 8, within = lane_idx_ % 8;
#pragma unroll
    for (int j = 0; j < kStoreTiles; j += 2) {
      uint32_t values[4];
      constexpr bool kOdd = kStoreTiles % 2 != 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (kOdd && j + i >= kStoreTiles) break;
        const float (&tile)[4] = sums[first_tile + j + i];
        values[2 * i] = PackedPair<typename Tile::Staged>::pack(tile[0], tile[1]);
        values[2 * i + 1] = PackedPair<typename Tile::Staged>::pack(tile[2], tile[3]);
      }
      const bool pair = !kOdd || j + 1 < kStoreTiles;
      if constexpr (Tile::kSwap) {
        const uint32_t row = (j + (pair ? matrix / 2 : 0)) * 8 + within;
        const uint32_t address = chunk(row, warp_idx_ * 2 + matrix % 2);
        if (pair) {
          ptx::stmatrix_x4_trans(address, values);
        } else {
          ptx::stmatrix_x2_trans(address, values[0], values[1]);
        }
      } else {
        const uint32_t row = warp_idx_ * 16 + matrix % 2 * 8 + within;
        const uint32_t address = chunk(row, j + (pair ? matrix / 2 : 0));
        if (pair) {
          ptx::stmatrix_x4(address, values);
        } else {
          ptx::stmatrix_x2(address, values[0], values[1]);
        }
      }
    }
  }

  __device__ __forceinline__ void store_box(uint32_t row, uint32_t column, uint32_t batch) {
    if (thread_idx_ != 0) return;
    ptx::tma_store(&params_.d, buffer_, column, row, batch);
    ptx::tma_store_commit();
  }

  // 16 bytes per thread where rows of D are aligned, else element by element.
  __device__ __forceinline__ void store_rows(const GemmWork& work, uint32_t row, uint32_t column) {
    constexpr int kChunks = Tile::kBoxColumns / 8;
    const GemmParams& params = params_.gemm;
    D* out = static_cast<D*>(params.d.data) + work.batch * params.d.stride_batch;
    for (int i = thread_idx_; i < Tile::kBoxRows * kChunks; i += 128) {
      const uint32_t r = row + i / kChunks, c = column + i % kChunks * 8;
      if (r < work.row_begin || r >= work.row_end || c >= num_columns()) continue;
      const uint4 values = ptx::load_shared_16(chunk(i / kChunks, i % kChunks));
      D* target = out + r * params.d.stride_row + c;
      if (c + 8 <= num_columns() && reinterpret_cast<uint64_t>(target) % 16 == 0) {
        *reinterpret_cast<uint4*>(target) = values;
      } else {
        const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (c + e < num_columns())
            target[e].bits = static_cast<uint16_t>(words[e / 2] >> e % 2 * 16);
        }
      }
    }
  }

  // 8 codes per thread. Rows of D begin at multiples of 8 bytes.
  __device__ __forceinline__ void store_codes(const GemmWork& work, uint32_t row, uint32_t column) {
    constexpr int kChunks = Tile::kBoxColumns / 8;
    const GemmParams& params = params_.gemm;
    auto* out = static_cast<uint8_t*>(params.d.data) + work.batch * params.d.stride_batch;
    for (int i = thread_idx_; i < Tile::kBoxRows * kChunks; i += 128) {
      const uint32_t r = row + i / kChunks, c = column + i % kChunks * 8;
      if (r < work.row_begin || r >= work.row_end || c >= num_columns()) continue;
      const uint4 values = ptx::load_shared_16(chunk(i / kChunks, i % kChunks));
      *reinterpret_cast<uint2*>(out + r * params.d.stride_row + c) =
          make_uint2(codes(values.x, values.y), codes(values.z, values.w));
    }
  }

  // The codes of four 16-bit numbers.
  __device__ __forceinline__ static uint32_t codes(uint32_t low, uint32_t high) {
    const auto pair = [](uint32_t bits) -> uint32_t {
      return PackedPair<D>::pack(to_float(dtype::float16{static_cast<uint16_t>(bits)}),
                                 to_float(dtype::float16{static_cast<uint16_t>(bits >> 16)}));
    };
    return pair(low) | pair(high) << 16;
  }

  __device__ __forceinline__ void store_registers(const GemmWork& work, uint32_t row,
                                                  uint32_t column, const float (&sums)[kTiles][4],
                                                  int first_tile) {
    const GemmParams& params = params_.gemm;
    D* out = static_cast<D*>(params.d.data) + work.batch * params.d.stride_batch;
#pragma unroll
    for (int j = 0; j < kStoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t left = warp_idx_ * 16 + lane_idx_ / 4 + i / 2 * 8;
        const uint32_t right = j * 8 + lane_idx_ % 4 * 2 + i % 2;
        const uint32_t r = row + (Tile::kSwap ? right : left);
        const uint32_t c = column + (Tile::kSwap ? left : right);
        if (r >= work.row_begin && r < work.row_end && c < num_columns()) {
          out[r * params.d.stride_row + c] = from_float<D>(sums[first_tile + j][i]);
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t num_columns() const {
    return Tile::kGated ? params_.gemm.n / 2 : params_.gemm.n;
  }

  __device__ __forceinline__ void barrier() const {
    ptx::named_barrier_sync(1 + warpgroup_idx_, 128);
  }

  const GemmKernelParams& params_;
  const GemmFinish<Tile> finish_;
  const GemmQuantizer<Tile> quantizer_;
  const GemmPlace<Tile> place_;
  uint32_t buffers_, buffer_;
  int warpgroup_idx_, thread_idx_, warp_idx_, lane_idx_;
};

}  // namespace flashinfer
