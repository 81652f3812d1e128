// Tokens per KV tile of the attention kernels, which the planner of their work needs as well.
#pragma once

#include <cstdint>

namespace flashinfer {

// The portable kernel's tile.
inline constexpr int kTileKV = 64;

// Operands of the Hopper kernel's products. Widened 8-bit keys and values become 16-bit first.
enum class OperandForm { k16Bit, k8Bit, kWidened };

// Tokens per tile and tiles in flight. A consumer's registers hold the output, the logits and their
// weights. Shared memory holds two stages of 64 tokens for 256 columns, or of 128 tokens for fewer.
// Widened or transposed 8-bit tiles need space for both forms, and a third consumer leaves fewer
// registers: with three consumers of 96 or 128 columns, 96 tokens are the most that fit.
struct HopperStages {
  int tile_kv, stages;
};
inline constexpr HopperStages hopper_stages(OperandForm products, int consumers, int head_dim_qk,
                                            int head_dim_vo) {
  if (products == OperandForm::k8Bit) {
    if (head_dim_vo > 128) return {64, 2};  // two consumers
    if (head_dim_vo == 64) return {128, 3};
    return {96, head_dim_vo != 96 && head_dim_qk > 128 ? 2 : 3};
  }
  const bool widens = products == OperandForm::kWidened;
  const bool is_small =
      head_dim_qk > (widens ? 128 : 192) || head_dim_vo > 128 || (widens && consumers == 3);
  return {is_small ? 64 : 128, 2};
}

// Tokens by which a plan cuts keys: those of a tile, or the next power of two.
inline constexpr int hopper_plan_tile(OperandForm products, int consumers, int head_dim_qk,
                                      int head_dim_vo) {
  int tokens = 64;
  while (tokens < hopper_stages(products, consumers, head_dim_qk, head_dim_vo).tile_kv) tokens *= 2;
  return tokens;
}

}  // namespace flashinfer
