// Arguments of the kernels that replay tokens on a state of Mamba-2. Plain C++: shared by kernels,
// launchers and bindings.
#pragma once

#include <cstdint>
#include <flashinfer/linear_attention/selective_state_params.h>

namespace flashinfer {

// Inputs of the tokens since a slot's state was written, in a ring: token i after `start` is in row
// (start + i) % rows. A slot is contiguous:
struct ReplayRings {
  void* x;    // [slots, heads, rows, dim]
  void* B;    // [slots, groups, rows, dstate]
  float* dt;  // [slots, heads, rows]: time steps as they enter the recurrence
  int64_t x_slot_stride, B_slot_stride, dt_slot_stride;
  int32_t rows;
};

// One step of sequences whose states lack the tokens of their rings: outputs of the new
// tokens, which are appended. Where `num_replayed` and the new tokens exceed the window, the state
// is written with the replayed tokens in it; the caller then moves `ring_start` by as many.
struct CheckpointingStateParams {
  SelectiveStateParams step;  // A is one number per head
  ReplayRings rings;
  const int32_t* ring_start;    // [slots]
  const int32_t* num_replayed;  // [slots]
  int32_t window;
};

// States of layers at tokens of their rings, from tables on the device of addresses and strides.
struct MaterializeStateParams {
  SelectiveStateParams step;  // sizes and rounding alone
  const int64_t *state, *state_slot_stride;
  const int64_t *x, *x_slot_stride, *B, *B_slot_stride, *dt, *dt_slot_stride;
  const int64_t* A;  // addresses of [heads]
  const int64_t *scale, *scale_slot_stride;
  const int32_t *source, *target;        // [layers, batch] slots
  const int32_t *ring_start, *num_used;  // [batch]
  const int32_t* active;                 // [batch] requests; from the first -1 on there are none
  int32_t num_layers;
  int32_t rows;
  int64_t pad_slot;
};

}  // namespace flashinfer
