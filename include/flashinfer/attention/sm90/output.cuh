// Writes finished rows of the Hopper attention kernel. A warp stages its 16 rows in its part of
// shared memory with stmatrix, and the copy engine writes them out while the warp starts its next
// item.
//
// Measurements, also of what lost: docs/tuning/attention_sm90_items.md.
#pragma once

#include <flashinfer/attention/row_writer.cuh>
#include <flashinfer/attention/sm90/producer.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/tma_boxes.cuh>

namespace flashinfer {

template <typename Traits, typename Params>
class HopperOutput : RowWriter<Traits, Params> {
  using Base = RowWriter<Traits, Params>;
  using Base::query_row;
  using typename Base::O;
  using typename Base::Tile;
  static constexpr int kRows = 16;
  static constexpr int kChunks = ceil_div(Tile::kHeadDimVO, 64);  // chunks of 128 bytes
  // If the output overwrites q, the next query would have to wait until the copy engine has read
  // the rows.
  static constexpr bool kStoresBoxes = !Tile::kOutputOverQ;
  static constexpr bool kOneBox = kStoresOneBox<Tile>;
  // Writes the LSE after the rows, whose factors then need no branch. With three warpgroups, or
  // with bit masks, ptxas lacks the registers (C7511).
  static constexpr bool kLseLast = Tile::kConsumers == 2 && Traits::kMask != MaskMode::custom;

 public:
  using Base::Base;

  __device__ __forceinline__ void write(const WarpState<Tile>& state, const TensorMap& map) {
    if (this->is_finished()) return write_finished(state, map);
    write_partial(state);
  }

 private:
  // Writes partial sums of rows whose other keys belong to other items.
  __device__ __forceinline__ void write_partial(const WarpState<Tile>& state) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row<Tile>() + 8 * h;
      if (row >= this->num_rows_) continue;
      float* const partial =
          this->partial_row(row, state.largest[0][h], state.sum[0][h], threadIdx.x % 4 == 0);
      this->for_each_value(state, 0, h, [&](int column, const auto& values) {
        this->store_floats(partial + column, values);
      });
    }
  }

  // No computation stands in a branch: rows after the last one repeat the last one.
  __device__ __forceinline__ void write_finished(const WarpState<Tile>& state,
                                                 const TensorMap& map) {
    const int lane_idx = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kRows;
    // Computed before the fence, because nothing may move across it.
    const QueryRow box_row = query_row(warp_row);
    const int box_token = this->item_.qo_begin + box_row.qo_idx, box_head = box_row.qo_head_idx;
    const auto finished_row = [&](int h) {
      const int row = first_row<Tile>() + 8 * h;
      return this->finish(nullptr, query_row(min(row, this->num_rows_ - 1)), state.largest[0][h],
                          state.sum[0][h],
                          !kLseLast && threadIdx.x % 4 == 0 && row < this->num_rows_);
    };
    auto first = finished_row(0), second = finished_row(1);
    char* const rows = this->shared_ + warp_row * kChunks * 128;
    const uint32_t staged = ptx::shared_address(rows);
    if constexpr (kStoresBoxes) ptx::tma_store_wait_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < Tile::kOutputTiles; j += 2) {
      if constexpr (Tile::kInterleavedTiles == 2) {  // a lane has four columns in a row
                                                     // (output_column<2>)
        const float (&a)[4] = state.output[0][j], (&b)[4] = state.output[0][j + 1];
        const auto store = [&](auto& row, int i, int rows_behind) {
          const int offset =
              swizzled_offset<kRows>(lane_idx / 4 + rows_behind, j + lane_idx % 4 / 2);
          *reinterpret_cast<uint2*>(rows + offset + lane_idx % 2 * 8) =
              uint2{PackedPair<O>::pack(row.value(a[i]), row.value(b[i])),
                    PackedPair<O>::pack(row.value(a[i + 1]), row.value(b[i + 1]))};
        };
        store(first, 0, 0);
        store(second, 2, 8);
      } else {
        uint32_t matrices[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float (&sums)[4] = state.output[0][j + i];
          matrices[2 * i] = PackedPair<O>::pack(first.value(sums[0]), first.value(sums[1]));
          matrices[2 * i + 1] = PackedPair<O>::pack(second.value(sums[2]), second.value(sums[3]));
        }
        ptx::stmatrix_x4(staged + swizzled_offset<kRows>(lane_idx % 16, j + lane_idx / 16),
                         matrices);
      }
    }
    if (kStoresBoxes && map.box_rows != 0 && warp_row + kRows <= this->num_rows_) {
      ptx::async_proxy_fence();
      __syncwarp();
      if (lane_idx < (kOneBox ? 1 : kChunks)) {
        if constexpr (kOneBox) {
          ptx::tma_store(&map.map, staged, 0, box_head, box_token, 0);
        } else {
          ptx::tma_store(&map.map, staged + lane_idx * kRows * 128, lane_idx * 64, box_head,
                         box_token);
        }
        ptx::tma_store_commit();
      }
    } else {
      __syncwarp();
      copy_rows(rows, warp_row);
    }
    if (kLseLast && this->tensors_.lse != nullptr) {
      write_lse(0, first.lse());
      write_lse(1, second.lse());
    }
  }

  __device__ __forceinline__ void write_lse(int h, float lse) const {
    const int row = first_row<Tile>() + 8 * h;
    if (threadIdx.x % 4 != 0 || row >= this->num_rows_) return;
    *this->lse_of(query_row(row)) = lse;
  }

  __device__ __forceinline__ void copy_rows(const char* rows, int warp_row) const {
    const int lane_idx = threadIdx.x % 32;
    O* const output = static_cast<O*>(this->tensors_.o);
    const int64_t own_offset = this->output_row(query_row(warp_row + lane_idx)) - output;
    constexpr int kVectors = Tile::kHeadDimVO / 8;  // vectors per row
#pragma unroll 2
    for (int i = 0; i < kRows * kVectors / 32; ++i) {
      const int index = i * 32 + lane_idx;
      const int row = index / kVectors, column = index % kVectors;
      const int64_t offset = __shfl_sync(0xffffffffu, own_offset, row) + column * 8;
      const uint4 values =
          *reinterpret_cast<const uint4*>(rows + swizzled_offset<kRows>(row, column));
      if (warp_row + row < this->num_rows_) *reinterpret_cast<uint4*>(output + offset) = values;
    }
  }
};

}  // namespace flashinfer
