// Writes a warp's registers to the output or, for an item that saw only part of a tile's keys, to
// the workspace.
#pragma once

#include <flashinfer/attention/portable/products.cuh>
#include <flashinfer/attention/row_writer.cuh>
#include <flashinfer/ptx/progress.cuh>

namespace flashinfer {

// Writes the rows of one item: to the output if the item saw all keys of the row, otherwise as
// unscaled sums to the workspace.
template <typename Traits, typename Params>
class OutputWriter : RowWriter<Traits, Params> {
  using Base = RowWriter<Traits, Params>;
  using Base::finish, Base::for_each_value, Base::is_finished, Base::partial_row, Base::output_row,
      Base::query_row, Base::scale_of, Base::store_floats;
  using Base::item_, Base::kv_head_, Base::num_rows_, Base::params_, Base::shared_, Base::tensors_;
  using typename Base::O;
  using typename Base::Tile;
  using typename Base::Variant;
  using typename Base::View;

 public:
  // `shared` holds the query rows, which only their own warp still reads; `stages` held K and V.
  __device__ __forceinline__ OutputWriter(const Params& params, const AttentionTensors& tensors,
                                          const WorkItem& item, uint32_t kv_head, int num_rows,
                                          Variant& variant, const View& view, char* shared,
                                          char* stages)
      : Base(params, tensors, item, kv_head, num_rows, variant, view, shared), stages_(stages) {}

  __device__ __forceinline__ void write(const WarpState<Tile>& state) {
    if constexpr (Tile::kSplitKV) {
      write_merged(state);
    } else {
      write_rows(state);
    }
  }

  // Merges the rows of a split tile if this was the last of their parts to be written.
  __device__ __forceinline__ void merge_if_last() {
    if constexpr (kMerges) {
      if (is_finished() || params_.counters == nullptr) return;
      const int number = item_.merge_or_taken;
      const MergeItem& merge = params_.merges[number];
      bool& is_last = *reinterpret_cast<bool*>(stages_);
      __syncthreads();  // all have written their rows
      if (threadIdx.x == 0) {
        uint32_t* const counter =
            params_.counters + number * params_.num_kv_heads.divisor + kv_head_;
        ptx::release();
        const uint32_t parts = ptx::count_and_see(counter, 1) + 1;
        is_last = parts == static_cast<uint32_t>(merge.slot_end - merge.slot_begin);
        if (is_last) *counter = 0;  // for the next launch
      }
      __syncthreads();
      if (!is_last) return;
      for (int row = threadIdx.x / 32; row < num_rows_; row += kAttentionWarps) {
        merge_row(row, merge.slot_begin, merge.slot_end);
      }
    }
  }

 private:
  static constexpr bool kMerges = Tile::kSplitKV && Tile::kNumOutputParts == 1 &&
                                  !Params::kReadsLengths && !Params::kHasSecondVariant;

  // Finished rows of 16-bit outputs pass through the warp's own query rows in shared memory and
  // leave as whole lines; the mma layout alone would store 16 bytes of a row at a time.
  static constexpr bool kStageOutput =
      !Tile::kSplitKV && sizeof(O) == 2 && Tile::kOutputDim <= Tile::kHeadDimQK;

  static_assert(Tile::kSplitKV || !kIsCode<O>, "a row's scale is found where a warp has it whole");

  // Writes rows that belong to one warp.
  __device__ __forceinline__ void write_rows(const WarpState<Tile>& state) {
    if constexpr (kStageOutput) __syncwarp();  // the last ldmatrix of q has finished
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row<Tile>() + 16 * i + 8 * h;
        if (row >= num_rows_) continue;
        const bool is_first_lane = threadIdx.x % 4 == 0;
        const float largest = state.largest[i][h], sum = state.sum[i][h];
        if (is_finished()) {
          const QueryRow query = query_row(row);
          O* output;
          if constexpr (kStageOutput) {
            output = reinterpret_cast<O*>(shared_ + row * Tile::kPitchQ);
          } else {
            output = output_row(query);
          }
          auto target = finish(output, query, largest, sum, is_first_lane);
          for_each_value(state, i, h,
                         [&](int column, const auto& values) { target.store(column, values); });
        } else {
          float* const partial = partial_row(row, largest, sum, is_first_lane);
          for_each_value(state, i, h, [&](int column, const auto& values) {
            store_floats(partial + column, values);
          });
        }
      }
    }
    if constexpr (kStageOutput) {
      if (is_finished()) copy_staged_rows();
    }
  }

  __device__ __forceinline__ void copy_staged_rows() const {
    constexpr int kChunks = Tile::kOutputDim / 8;
    __syncwarp();
    const int lane_idx = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * Tile::kWarpRows;
    const int64_t own_offset =
        output_row(query_row(warp_row + lane_idx)) - static_cast<O*>(tensors_.o);
#pragma unroll
    for (int i = 0; i < Tile::kWarpRows * kChunks / 32; ++i) {
      const int chunk = i * 32 + lane_idx;
      const int row = chunk / kChunks, column = chunk % kChunks * 8;
      const int64_t offset = __shfl_sync(0xffffffffu, own_offset, row);
      const uint4 values =
          *reinterpret_cast<const uint4*>(shared_ + (warp_row + row) * Tile::kPitchQ + column * 2);
      if (warp_row + row < num_rows_) {
        *reinterpret_cast<uint4*>(static_cast<O*>(tensors_.o) + offset + column) = values;
      }
    }
  }

  __device__ __forceinline__ void merge_row(int row, int begin, int end) const {
    using Parts = MergedParts<Variant::use_softmax, Tile::kHeadDimVO>;
    Parts parts;
    parts.add(params_, kv_head_, row, begin, 1, begin, end);
    const QueryRow query = query_row(row);
    auto target = finish(output_row(query), query, parts.largest, parts.sum, threadIdx.x % 32 == 0);
    const auto for_each_vector = [&](const auto& store) {
#pragma unroll
      for (int i = 0; i < Parts::kVectors; ++i) {
        const float4& x = parts.output[i];
        const float values[4] = {x.x, x.y, x.z, x.w};
        if (Parts::column(i) < Tile::kHeadDimVO) store(Parts::column(i), values);
      }
    };
    target.store_row(for_each_vector, scale_of(query));
  }

  // Column of the transposed output's element in the upper (0) or lower (1) half of the rows of
  // output tile `tile`.
  __device__ __forceinline__ static int narrow_column(int tile, int half) {
    const int row = threadIdx.x % 32 / 4;
    if constexpr (Tile::kInterleavedTiles == 4) {
      return tile / 2 * 32 + 4 * row + tile % 2 * 2 + half;
    }
    return tile * 16 + (Tile::kInterleavedTiles == 2 ? 2 * row + half : row + 8 * half);
  }

  // Adds the warps' parts of the same rows in shared memory, in order of the warps.
  __device__ __forceinline__ void write_merged(const WarpState<Tile>& state) {
    constexpr int kRows = Tile::kTileQ, kPitch = Tile::kPitchExchange;
    constexpr int kParts = Tile::kTokenWarps;
    float* const outputs = reinterpret_cast<float*>(stages_);  // [kParts, kRows, kPitch]
    float2* const sums = reinterpret_cast<float2*>(outputs + kParts * kRows * kPitch);
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int part = warp_idx / Tile::kColumnWarps, column_warp = warp_idx % Tile::kColumnWarps;
    __syncthreads();  // every warp has finished reading K and V
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = thread_row<Tile>(0, h);
      if (row >= num_rows_) continue;
      constexpr int kLanesOfRows = Tile::kTileQ / 2;  // of a narrow tile
      if (column_warp == 0 && (Tile::kNarrow ? lane_idx < kLanesOfRows : lane_idx % 4 == 0)) {
        sums[part * kRows + row] = float2{state.largest[0][h], state.sum[0][h]};
      }
      if constexpr (!Tile::kNarrow) {
        float* const target = outputs + (part * kRows + row) * kPitch;
        for_each_value(state, 0, h, [&](int column, const auto& values) {
          store_floats(target + column, values);
        });
      }
    }
    if constexpr (Tile::kNarrow) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = thread_row<Tile>(0, e % 2);
        if (row >= num_rows_) continue;
        // Of a row that stands twice, each copy has the values of its half of the columns alone.
        if (Tile::kDoublesRows && lane_idx % 4 / 2 != lane_idx / 16) continue;
        float* const target =
            outputs + (part * kRows + row) * kPitch + column_warp * Tile::kWarpDimVO;
#pragma unroll
        for (int j = 0; j < Tile::kOutputTiles; ++j) {
          target[narrow_column(j, e / 2)] = state.output[0][j][e];
        }
      }
    }
    __syncthreads();
    // Each warp writes one row at a time.
    for (int row = warp_idx; row < num_rows_; row += kAttentionWarps) {
      float largest = -math::inf, sum = 0.f;
      float weights[kParts];
      combine_sums<Variant::use_softmax>([&](int w) { return sums[w * kRows + row]; }, weights,
                                         largest, sum);
      const auto for_each_vector = [&](const auto& store) {
        for (int column = lane_idx * 4; column < Tile::kOutputDim; column += 128) {
          float values[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int w = 0; w < kParts; ++w) {
            const float4 part =
                *reinterpret_cast<const float4*>(outputs + (w * kRows + row) * kPitch + column);
            values[0] = fmaf(part.x, weights[w], values[0]);
            values[1] = fmaf(part.y, weights[w], values[1]);
            values[2] = fmaf(part.z, weights[w], values[2]);
            values[3] = fmaf(part.w, weights[w], values[3]);
          }
          store(column, values);
        }
      };
      const QueryRow query = query_row(row);
      if (is_finished()) {
        auto target = finish(output_row(query), query, largest, sum, lane_idx == 0);
        target.store_row(for_each_vector, scale_of(query));
      } else {
        float* const partial = partial_row(row, largest, sum, lane_idx == 0);
        for_each_vector(
            [&](int column, const auto& values) { store_floats(partial + column, values); });
      }
    }
  }

  char* const stages_;
};

}  // namespace flashinfer
