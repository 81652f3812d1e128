// Shared by the output writers of both implementations: finds where the rows of an item go, in the
// output or, if the item saw only part of a tile's keys, in the workspace.
#pragma once

#include <flashinfer/attention/finalize.cuh>
#include <flashinfer/attention/state.cuh>

namespace flashinfer {

template <typename Traits, typename Params>
class RowWriter {
 public:
  using Tile = typename Traits::Tile;
  using O = typename Tile::O;
  using Variant = typename Traits::Variant;
  using View = RequestParams<OptionsOf<Traits::kKind, Params>>;

  __device__ __forceinline__ RowWriter(const Params& params, const AttentionTensors& tensors,
                                       const WorkItem& item, uint32_t kv_head, int num_rows,
                                       Variant& variant, const View& view, char* shared)
      : params_(params),
        tensors_(tensors),
        item_(item),
        kv_head_(kv_head),
        num_rows_(num_rows),
        variant_(variant),
        view_(view),
        shared_(shared) {}

 protected:
  __device__ __forceinline__ bool is_finished() const { return item_.partial_slot < 0; }

  // Address in o of a row's first column of this item.
  __device__ __forceinline__ O* output_row(const QueryRow& row) const {
    const int64_t token = item_.qo_begin + int64_t{row.qo_idx};
    return static_cast<O*>(tensors_.o) + token * tensors_.o_stride_token +
           row.qo_head_idx * tensors_.o_stride_head + blockIdx.y * Tile::kOutputDim;
  }

  __device__ __forceinline__ float* scale_of(const QueryRow& row) const {
    return scale_of_row<O>(params_.o_scale, item_.qo_begin + int64_t{row.qo_idx}, row.qo_head_idx);
  }

  // Address of a row's LSE; called only if LSE is wanted.
  __device__ __forceinline__ float* lse_of(const QueryRow& row) const {
    const int64_t token = item_.qo_begin + int64_t{row.qo_idx};
    return tensors_.lse + token * params_.variant.num_qo_heads + row.qo_head_idx;
  }

  __device__ __forceinline__ FinishedRow<O, Variant, View> finish(O* output, const QueryRow& row,
                                                                  float largest, float sum,
                                                                  bool writes_lse) const {
    float* lse = nullptr;
    if (tensors_.lse != nullptr && writes_lse && blockIdx.y == 0) lse = lse_of(row);
    using Row = FinishedRow<O, Variant, View>;
    return Row(output, lse, variant_, view_, item_.request, row.qo_idx, row.qo_head_idx, largest,
               sum, output_scale<Variant>(tensors_, kv_head_));
  }

  // Returns where the row's partial output goes in the workspace, and writes its softmax sums.
  __device__ __forceinline__ float* partial_row(int row, float largest, float sum,
                                                bool writes_sums) const {
    const int64_t partial =
        (int64_t{item_.partial_slot} * params_.num_kv_heads.divisor + kv_head_) *
            params_.rows_per_slot +
        row;
    if (writes_sums && blockIdx.y == 0) params_.partial_sums[partial] = float2{largest, sum};
    return params_.partial_o + partial * Tile::kHeadDimVO + blockIdx.y * Tile::kOutputDim;
  }

  // Returns the query row at a row of the tile. Recomputed here, so that the loop over keys need
  // not keep it.
  __device__ __forceinline__ QueryRow query_row(int row) const {
    return make_query_row<MaskMode::none, false>(item_, item_.row_begin + row, params_.group_size,
                                                 kv_head_, -1);
  }

  // Visits the consecutive columns that this thread holds of one row.
  template <typename Store>
  __device__ __forceinline__ static void for_each_value(const WarpState<Tile>& state, int i, int h,
                                                        const Store& store) {
    constexpr int kTiles = Tile::kInterleavedTiles;
#pragma unroll
    for (int j = 0; j < Tile::kOutputTiles; j += kTiles) {
      float values[2 * kTiles];
#pragma unroll
      for (int c = 0; c < 2 * kTiles; ++c) {
        values[c] = state.output[i][j + c % kTiles][2 * h + c / kTiles];
      }
      store(output_column<kTiles>(j, 0), values);
    }
  }

  template <int N>
  __device__ __forceinline__ static void store_floats(float* address, const float (&values)[N]) {
    Vector<float, N> vector;
    vector.from_floats(values);
    vector.store(address);
  }

  const Params& params_;
  const AttentionTensors& tensors_;
  const WorkItem& item_;
  const uint32_t kv_head_;
  const int num_rows_;
  Variant& variant_;
  const View& view_;
  char* const shared_;
};

}  // namespace flashinfer
