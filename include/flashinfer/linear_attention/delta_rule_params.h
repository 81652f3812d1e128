// Arguments of the recurrent delta rule kernels. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/linear_attention/tensors.h>

namespace flashinfer {

// How a gate's input becomes the decay of a token.
enum class GateForm : int {
  kLinear = 0,      // the input is the decay
  kLog = 1,         // exp(input)
  kSoftplus = 2,    // exp(-exp(a_log) softplus(input + dt_bias))
  kLowerBound = 3,  // exp(lower_bound sigmoid(exp(a_log) (input + dt_bias)))
};

// One recurrence over the tokens of a sequence per state head:
//   S = S decay;  S += beta (v - S k) k^T;  out = scale S q
struct DeltaRuleParams {
  TokenHeads q, k;      // [.., q_heads or k_heads, head_dim_k]
  TokenHeads v, out;    // [.., v_heads or state_heads, head_dim_v]
  TokenHeads gate;      // [.., state_heads] or [.., state_heads, head_dim_k]; null: no decay
  TokenHeads beta;      // [.., state_heads]; null: 1
  const float* a_log;   // [state_heads]; kSoftplus, kLowerBound
  const void* dt_bias;  // [state_heads] or [state_heads, head_dim_k]; null: 0
  float scale;
  float lower_bound;
  GateForm gate_form;
  bool beta_is_logit;  // sigmoid(beta) is the learning rate
  bool normalize_qk;   // q and k are divided by their Euclidean norms

  StatePool state;              // [slots, state_heads, head_dim_v, head_dim_k]; null data: zeros
  SlotIndices read_slot;        // none of the pool's: the sequence is padding, its outputs are 0
  const int32_t* num_accepted;  // [batch]: the state is read from slot num_accepted - 1; or null

  StatePool state_out;     // null data: the state is not written
  SlotIndices write_slot;  // none of the pool's: not written
  bool write_every_token;  // token t to write_slot.at(batch, t); else the last state alone

  // States after every `snapshot_every` tokens: row snapshot_starts[b] + i of the pool, or
  // snapshots_per_batch * b + i. Null data: none.
  StatePool snapshots;
  const int64_t* snapshot_starts;
  int64_t snapshots_per_batch;
  int32_t snapshot_every;

  const void* cu_seqlens;  // [batch + 1] of num_tokens; null: num_tokens per sequence
  bool cu_seqlens_is_int64;
  int32_t batch_size;
  int32_t num_tokens;
  int32_t state_heads;
  FastDivisor q_group, k_group, v_group;  // state heads per head of q, k and v
  int32_t head_dim_v;
};

}  // namespace flashinfer
