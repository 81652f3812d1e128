// Arguments of the normalisation kernels. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// A [num_rows, hidden_size] view of a 2-D or 3-D tensor whose last dimension is contiguous. Row r =
// (r / heads, r % heads) starts `(r / heads) * stride_outer + (r % heads) * stride_inner` elements
// after `data`, heads = NormParams::num_heads.
struct NormRows {
  void* data;
  int64_t stride_outer;  // elements
  int64_t stride_inner;  // elements; unused when num_heads == 1
};

struct NormParams {
  NormRows input;     // read only, unless `out` aliases it
  NormRows residual;  // read and written (sum rounded to the input's type); only with kAddResidual
  NormRows out;
  const void* weight;      // [hidden_size]
  const void* bias;        // [hidden_size]; layer norm only
  const float* out_scale;  // null: use out_scale_value
  float out_scale_value;
  float eps;
  float weight_offset;  // added to every weight: 1 for Gemma's norms, else 0
  uint32_t num_rows;
  uint32_t num_heads;  // >= 1
  uint32_t hidden_size;
  uint32_t rows_ahead;  // set at launch: see NormSchedule
};

// How rows are assigned to CTAs; see norm_kernel.
enum class NormSpread { kOnce, kLoop, kCluster };

inline constexpr uint32_t kMaxNormCluster =
    8;  // the largest cluster that every device must support

// How a launch divides rows among threads; see choose_norm_schedule.
struct NormSchedule {
  static constexpr int kElementwise = -1;
  static constexpr int kLooped = 0;

  // Number of 16-byte vectors of a row that a thread keeps in registers: 1, 2 or 4. kLooped: the
  // row is read again for each pass. kElementwise: the same by single elements.
  int vecs_per_thread;
  NormSpread spread;
  uint32_t threads_per_row;  // of one CTA; a power of two up to 32, or a multiple of 32
  uint32_t rows_per_cta;     // 1 where threads_per_row > 32
  uint32_t num_ctas;
  uint32_t cluster_size;  // 1 except for NormSpread::kCluster
  // With kLooped only: how many rows later than its own a CTA prefetches to L2; 0: none.
  uint32_t rows_ahead = 0;
};

}  // namespace flashinfer
