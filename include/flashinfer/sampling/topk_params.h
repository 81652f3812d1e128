// Arguments of the top-k kernel. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>

namespace flashinfer {

// The output for the element at index i of a row's window.
enum class TopKOutput {
  kValues,     // the value, and i
  kPageTable,  // the slot of position i: page_table[batch][start + i / page_size] * page_size + i %
               // page_size
  kRagged,     // offsets[row] + i
};

// Long rows are selected in passes (top_k/stream.cuh), which need a workspace.
struct TopKStream {
  static constexpr uint32_t kTileSize = 4096;
  static constexpr uint32_t kSampleSize = 4096;
  static constexpr uint32_t kCapacity = 5120;  // elements of a row's list
  // With these limits the list of a row without structure holds everything that the sample's bound
  // lets through, at four standard deviations.
  static constexpr int64_t kMinCols = 16384, kMaxCols = 262144, kMaxK = 2048;

  // Each row has its own line of L2, since the tiles of all rows count at once.
  struct Row {
    float bound;
    uint32_t count;  // elements that reach the bound; those beyond kCapacity are not listed
    uint32_t padding[30];
  };
  struct Element {
    float value;
    uint32_t index;
  };

  // The largest element alone takes one kernel (top_k/largest.cuh).
  static constexpr bool suits(TopKOutput output, int64_t num_cols, int64_t k) {
    if (output == TopKOutput::kValues && k == 1) return false;
    return num_cols >= kMinCols && num_cols <= kMaxCols && k <= kMaxK;
  }

  // A window may begin inside a vector of 16 bytes, of at most 8 elements.
  static constexpr uint32_t num_tiles(uint32_t num_cols) {
    return ceil_div(num_cols + 7, kTileSize);
  }

  static constexpr uint64_t workspace_bytes(uint64_t num_rows) {
    return num_rows * (sizeof(Row) + kCapacity * sizeof(Element));
  }
};

struct TopKParams {
  const void* input;          // [num_rows, num_cols], last dimension contiguous
  int64_t input_stride;       // elements
  const int32_t* row_starts;  // [num_rows], nullable: first column of a row's window
  const int32_t* lengths;     // [num_rows], nullable: columns of a row's window
  void* indices;         // [num_rows, k] int32 or int64; -1 where the window has no more elements
  void* values;          // [num_rows, k]; kValues
  int32_t* raw_indices;  // [num_rows, k], nullable; kPageTable: i itself
  const int32_t* page_table;    // [num_batches, num_entries]; kPageTable
  int64_t page_table_stride;    // elements
  const int32_t* row_to_batch;  // [num_rows], nullable: row of the page table; null: the same row
  const int32_t* page_starts;   // [num_rows], nullable: first entry of a row in the page table
  const int32_t* offsets;       // [num_rows]; kRagged
  uint32_t num_rows;
  uint32_t num_cols;
  uint32_t num_batches;
  uint32_t num_entries;
  uint32_t page_size;
  uint32_t k;
  bool indices_are_64bit;
  bool prefer_large_index;  // among elements equal to the k-th largest, take the last ones
  uint32_t max_cluster;     // CTAs per row; 0: only the device limits them
  uint32_t max_vecs;        // set by the launch
  void* workspace;          // may be null: see TopKStream
  int64_t first_row;  // first row of a launch that takes a part of the rows; set by the launch
};

}  // namespace flashinfer
