// Arguments of Mamba's recurrent kernel. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/linear_attention/tensors.h>

namespace flashinfer {

// Scales of a pool whose rows are stored divided by one: [slots, heads, dim]; null data: none.
struct RowScales {
  float* data;
  int64_t slot_stride;
  int64_t head_stride;
};

// One recurrence over the tokens of a sequence per head, for each of `dim` channels:
//   S = exp(A dt) S + (dt x) B;  out = (S C + D x) silu(z)
struct SelectiveStateParams {
  TokenHeads x, z, out;  // [.., heads, dim]; z null: no gate
  TokenHeads dt;         // [.., heads, dim], where dt_dim_stride may be 0
  TokenHeads B, C;       // [.., groups, dstate]
  const void* A;         // [heads, dim, dstate]
  const void* D;         // [heads, dim]; null: 0
  const void* dt_bias;   // [heads, dim]; null: 0
  int64_t dt_dim_stride;
  int64_t A_head_stride, A_dim_stride, A_state_stride;
  int64_t D_head_stride, D_dim_stride;
  int64_t bias_head_stride, bias_dim_stride;
  bool dt_softplus;
  bool A_rows_are_vectors;  // rows of A are contiguous and aligned

  StatePool state;  // [slots, heads, dim, dstate]
  RowScales state_scale;
  SlotIndices read_slot;  // pad_slot or none of the pool's: padding, whose outputs are zeros
  int64_t pad_slot;
  const int32_t* num_accepted;  // [batch]: the state is read from slot num_accepted - 1; or null
  bool write_state;
  SlotIndices write_slot;
  bool write_every_token;  // token t to write_slot.at(batch, t); else the last state alone

  StatePool
      intermediate;  // [rows, heads, dim, dstate] at row snapshot_slot.at(b) * steps + t, if any
  RowScales intermediate_scale;
  SlotIndices snapshot_slot;
  int64_t steps;

  const int64_t* seed;  // stochastic rounding; null: to nearest
  int32_t philox_rounds;

  const void* cu_seqlens;  // [batch + 1] of num_tokens; null: num_tokens per sequence
  bool cu_seqlens_is_int64;
  int32_t batch_size;
  int32_t num_tokens;
  int32_t num_heads;
  FastDivisor heads_per_group;
  int32_t dim;
};

}  // namespace flashinfer
