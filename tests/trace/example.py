"""Call every operation once at a realistic shape, and write the definitions of the calls.

    rm -rf tests/trace/fi_trace_out && python tests/trace/example.py

The files are committed; ``test_definitions.py`` sees that they are what the code writes. This run
also writes their list, which is:

    append_paged_kv_cache_fused_hnd_ps16_kv8_d128.json
    append_paged_kv_cache_fused_ps16_kv8_d128.json
    append_paged_kv_cache_hnd_ps16_kv8_d128.json
    append_paged_kv_cache_ps16_kv8_d128.json
    append_paged_mla_kv_cache_ps64_ckv512_kpe64.json
    apply_llama31_rope_inplace_q32_kv8_d128_r128.json
    apply_llama31_rope_pos_ids_inplace_q32_kv8_d128_r128_pos_ids_int32.json
    apply_llama31_rope_pos_ids_q32_kv8_d128_r128_pos_ids_int32.json
    apply_llama31_rope_q32_kv8_d128_r128.json
    apply_rope_inplace_q32_kv8_d128_r128.json
    apply_rope_pos_ids_inplace_q32_kv8_d128_r128_pos_ids_int32.json
    apply_rope_pos_ids_q32_kv8_d128_r128_pos_ids_int32.json
    apply_rope_q32_kv8_d128_r128.json
    apply_rope_with_cos_sin_cache_heads_q32_kv8_d128_r128_positions_int32_cos_sin_cache_f32.json
    apply_rope_with_cos_sin_cache_inplace_heads_q32_kv8_d128_r128_positions_int32_cos_sin_cache_f32.json
    apply_rope_with_cos_sin_cache_inplace_q4096_kv1024_d128_r128_positions_int32_cos_sin_cache_f32.json
    apply_rope_with_cos_sin_cache_q4096_kv1024_d128_r128_positions_int32_cos_sin_cache_f32.json
    attention_sink_h32_kv8_d128_dv128_ps16_sinks_causal.json
    attention_sink_lse_h32_kv8_d128_dv128_ps16_sinks_causal.json
    batch_attention_h32_kv8_d128_dv128_ps16_causal.json
    batch_deepgemm_fp8_nt_groupwise_n1536_k2048_g8_e4m3_masked_m_int32_out_bf16.json
    batch_pod_h32_kv8_d128_dv128_ps16_causal_p.json
    batch_pod_lse_h32_kv8_d128_dv128_ps16_causal_p.json
    block_scale_interleave_b448_uint8.json
    block_sparse_attention_h32_kv8_d128_dv128.json
    block_sparse_attention_lse_h32_kv8_d128_dv128.json
    bmm_bf16_b128_n512_k128.json
    bmm_fp8_b128_n512_k128_e4m3_out_bf16.json
    cascade_attention_h32_kv8_d128_dv128_ps16_l2_causal.json
    chain_speculative_sampling_n3_v128256.json
    chunk_gated_delta_rule_final_q16_kh16_hv32_k128_v128_cu_seqlens_int64.json
    chunk_gated_delta_rule_initial_final_q16_kh16_hv32_k128_v128_cu_seqlens_int64_initial_state_f32_final_state_f32.json
    chunk_gated_delta_rule_initial_q16_kh16_hv32_k128_v128_cu_seqlens_int64_initial_state_f32.json
    chunk_gated_delta_rule_q16_kh16_hv32_k128_v128_cu_seqlens_int64.json
    concat_mla_k_h128_n128_r64.json
    convert_bsr_mask_layout_r16_c16.json
    e2m1_and_ufp8sf_scale_to_float_b3584_global_scale_tensor.json
    fp4_quantize_h7168_global_scale.json
    fp8_blockscale_gemm_sm90_n4096_k7168_scales32_e4m3_input_scale_weight_scale_out_bf16.json
    fp8_blockscale_gemm_sm90_n4096_k7168_scales32_weight_e4m3_weight_scale.json
    fused_add_rmsnorm_fp8_block_quant_h8192.json
    fused_add_rmsnorm_h4096.json
    fused_add_rmsnorm_quant_h8192_output_e4m3.json
    fused_qk_rmsnorm_rope_fp8_q40_k40_v40_d128_f44_h42_w42_ppf2_pph4_ppw4.json
    fused_qk_rmsnorm_rope_q40_k40_v40_d128_f44_h42_w42_ppf2_pph4_ppw4.json
    fused_rmsnorm_silu_h8192.json
    fused_rmsnorm_silu_h8192_output_e4m3.json
    gated_delta_rule_bf16_state_h16_hv32_k128_v128_a_bf16_q_bf16_k_bf16_v_bf16_b_bf16_initial_state_source_bf16_initial_state_indices_initial_state_indices_int32_output_bf16_initial_state_source_bf16.json
    gated_delta_rule_decode_h16_hv32_k128_v128_state_f32_dt_bias_f32_state_f32.json
    gated_delta_rule_mtp_h16_hv32_k128_v128_initial_state_f32_initial_state_indices_int32_dt_bias_f32_initial_state_f32_disable_state_update.json
    gelu_and_mul_d10240.json
    gelu_tanh_and_mul_d14336.json
    gemm_fp8_nt_blockscaled_k_by_block_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_blockscaled_mn_by_block_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_groupwise_k_by_block_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_groupwise_k_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_groupwise_mn_by_block_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_groupwise_mn_n1536_k2048_e4m3_out_bf16.json
    gemma_fused_add_rmsnorm_h3584.json
    gemma_rmsnorm_h3584.json
    get_batch_indices_positions_n32.json
    get_seq_lens_ps16.json
    gqa_paged_decode_h32_kv8_d128_dv128_ps16.json
    gqa_paged_decode_lse_h32_kv8_d128_dv128_ps16.json
    gqa_paged_decode_multi_h32_kv8_d128_dv128_ps16_causal.json
    gqa_paged_decode_multi_lse_h32_kv8_d128_dv128_ps16_causal.json
    gqa_paged_prefill_h32_kv8_d128_dv128_ps16_causal.json
    gqa_paged_prefill_lse_h32_kv8_d128_dv128_ps16_causal.json
    gqa_paged_prefill_lse_heads_first_h32_kv8_d128_dv128_ps16_causal.json
    gqa_ragged_prefill_h32_kv8_d128_dv128_causal.json
    gqa_ragged_prefill_lse_h32_kv8_d128_dv128_causal.json
    gqa_ragged_prefill_lse_heads_first_h32_kv8_d128_dv128_causal.json
    group_deepgemm_fp8_nt_groupwise_n1536_k2048_g8_e4m3_m_indices_int32_out_bf16.json
    group_gemm_fp8_nt_groupwise_k_n1536_k2048_g8_e4m3_m_indptr_int32_out_bf16.json
    group_gemm_fp8_nt_groupwise_mn_n1536_k2048_g8_e4m3_m_indptr_int32_out_bf16.json
    grouped_mm_bf16_n1536_k2048_g8_m_indptr_int32.json
    layernorm_h128.json
    layernorm_quant_h4096_output_e4m3.json
    merge_state_h32_d128.json
    merge_state_in_place_h32_d128.json
    merge_state_in_place_h32_d128_mask_mask_bool.json
    merge_states_h32_d128.json
    min_p_sampling_from_probs_v128256_f32.json
    mla_paged_h128_ckv512_kpe64_ps64_q_pe_kpe_cache_causal.json
    mla_paged_lse_h128_ckv512_kpe64_ps64_q_pe_kpe_cache_causal.json
    mla_rope_quantize_fp8_q16_r64_qn512_kn512_cos_sin_cache_f32_pos_ids_int32_q_rope_out_e4m3_k_rope_out_e4m3_q_nope_out_e4m3_k_nope_out_e4m3_no_is_neox.json
    mm_bf16_n6144_k4096.json
    mm_bf16_n6144_k4096_bias.json
    mxfp4_dequantize_b3584.json
    mxfp4_dequantize_host_b3584_g32.json
    mxfp4_quantize_h7168.json
    mxfp4_quantize_h7168_layout_linear.json
    mxfp8_dequantize_host_h7168_e4m3.json
    mxfp8_quantize_h7168.json
    nvfp4_block_scale_interleave_b448_uint8.json
    nvfp4_quantize_h7168.json
    packbits_bool.json
    per_token_group_quant_8bit_float8_e5m2_h7168_g128.json
    per_token_group_quant_8bit_h7168_g128.json
    per_token_group_quant_8bit_h7168_g128_column_major_scales_scale_tma_aligned_scale_ue8m0.json
    per_token_group_quant_8bit_int8_h7168_g128.json
    pod_h32_kv8_d128_dv128_ps16_causal_p.json
    pod_lse_d_h32_kv8_d128_dv128_ps16_causal_p.json
    pod_lse_p_h32_kv8_d128_dv128_ps16_causal_p.json
    pod_lse_p_lse_d_h32_kv8_d128_dv128_ps16_causal_p.json
    rmsnorm_fp8_block_quant_h8192.json
    rmsnorm_h128.json
    rmsnorm_h4096.json
    rmsnorm_h4096_f16.json
    rmsnorm_quant_h8192_output_e4m3.json
    rope_quantize_fp8_append_paged_kv_cache_hnd_q32_r128_qn0_kn0_kv8_ps16_v128_cos_sin_cache_f32_pos_ids_int32_k_cache_e4m3_v_cache_e4m3_q_rope_out_e4m3_q_nope_out_e4m3_k_cache_e4m3_v_cache_e4m3.json
    rope_quantize_fp8_append_paged_kv_cache_mla_q16_r64_qn512_kn512_ps16_q_nope_k_nope_cos_sin_cache_f32_pos_ids_int32_ckv_cache_e4m3_kpe_cache_e4m3_q_rope_out_e4m3_q_nope_out_e4m3_ckv_cache_e4m3_kpe_cache_e4m3.json
    rope_quantize_fp8_append_paged_kv_cache_q32_r128_qn0_kn0_kv8_ps16_v128_cos_sin_cache_f32_pos_ids_int32_k_cache_e4m3_v_cache_e4m3_q_rope_out_e4m3_q_nope_out_e4m3_k_cache_e4m3_v_cache_e4m3.json
    rope_quantize_fp8_one_head_q16_r64_qn512_kn512_q_nope_k_nope_cos_sin_cache_f32_pos_ids_int32_q_rope_out_e4m3_k_rope_out_e4m3_q_nope_out_e4m3_k_nope_out_e4m3.json
    rope_quantize_fp8_q32_r128_qn0_kn0_kv8_cos_sin_cache_f32_pos_ids_int32_q_rope_out_e4m3_k_rope_out_e4m3_q_nope_out_e4m3_k_nope_out_e4m3.json
    sampling_from_logits_v128256_f32.json
    sampling_from_probs_valid_v128256_f32.json
    segment_packbits_bool_indptr_int32_packed_indptr_int32_little.json
    selective_state_update_h64_g8_d64_n128_A_f32_D_f32_state_batch_indices_state_batch_indices_int32.json
    selective_state_update_tokens_h64_g8_d64_n128_A_f32_D_f32_state_batch_indices_state_batch_indices_int32.json
    silu_and_mul_d14336.json
    silu_and_mul_nvfp4_quantize_h4096.json
    silu_and_mul_per_token_group_quant_8bit_float8_e5m2_h4096_g128.json
    silu_and_mul_per_token_group_quant_8bit_h4096_g128.json
    silu_and_mul_per_token_group_quant_8bit_int8_h4096_g128.json
    single_decode_h32_kv8_d128_dv128.json
    single_decode_lse_h32_kv8_d128_dv128.json
    single_prefill_h32_kv8_d128_dv128_causal.json
    single_prefill_h32_kv8_d128_dv128_custom_mask.json
    single_prefill_lse_h32_kv8_d128_dv128_causal.json
    softmax_v128256_f32.json
    tinygemm_bf16_n256_k7168.json
    top_k_k2048_f32.json
    top_k_mask_logits_v128256_f32.json
    top_k_page_table_transform_k2048_p64_f32.json
    top_k_ragged_transform_k2048_f32.json
    top_k_renorm_probs_v128256_f32.json
    top_k_sampling_from_probs_v128256_f32.json
    top_k_top_p_sampling_from_logits_v128256_f32.json
    top_k_top_p_sampling_from_probs_v128256_f32.json
    top_k_top_p_sampling_from_probs_v128256_f32_joint.json
    top_p_renorm_probs_v128256_f32.json
    top_p_sampling_from_probs_v128256_f32.json
    variable_block_sparse_attention_h32_kv8_d128_dv128.json
    variable_block_sparse_attention_lse_h32_kv8_d128_dv128.json
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

NUM_TOKENS = 32


def main(folder: Path) -> None:
    """Make the calls with the dump on; on the reference backend where there is no GPU."""
    # The decorators read these when the package is imported.
    os.environ["FLASHINFER_TRACE_DUMP"] = "1"
    os.environ["FLASHINFER_TRACE_DUMP_DIR"] = str(folder)
    import torch

    import flashinfer

    on_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if on_gpu else "cpu")
    with contextlib.nullcontext() if on_gpu else flashinfer.reference_backend():
        call_norms(torch.bfloat16)
        call_quantized_norms(torch.bfloat16)
        call_activations(torch.bfloat16)
        call_quantization(torch.bfloat16)
        call_products(torch.bfloat16)
        call_linear_attention(torch.bfloat16)
        call_sampling(8, 128256)
        call_rope(torch.bfloat16)
        call_caches(torch.bfloat16)
        call_latent_attention(torch.bfloat16)
        call_attention(torch.bfloat16)
        call_planned_attention(torch.bfloat16)
        call_mixed_attention(torch.bfloat16)
        call_sparse_attention(torch.bfloat16)


def call_norms(dtype) -> None:
    import torch

    import flashinfer

    def rows(hidden_size: int):
        return torch.randn(NUM_TOKENS, hidden_size, dtype=dtype)

    flashinfer.rmsnorm(rows(4096), torch.ones(4096, dtype=dtype))
    flashinfer.rmsnorm(rows(4096).half(), torch.ones(4096, dtype=torch.float16))
    queries = torch.randn(NUM_TOKENS, 32, 128, dtype=dtype)
    flashinfer.rmsnorm(queries, torch.ones(128, dtype=dtype), out=queries)
    flashinfer.fused_add_rmsnorm(rows(4096), rows(4096), torch.ones(4096, dtype=dtype))
    flashinfer.gemma_rmsnorm(rows(3584), torch.zeros(3584, dtype=dtype))
    flashinfer.gemma_fused_add_rmsnorm(rows(3584), rows(3584), torch.zeros(3584, dtype=dtype))
    flashinfer.layernorm(rows(128), torch.ones(128), torch.zeros(128))


def call_quantized_norms(dtype) -> None:
    import torch

    import flashinfer

    rows, residual = torch.randn(2, NUM_TOKENS, 8192, dtype=dtype)
    weight = torch.ones(8192, dtype=dtype)
    out = torch.empty(NUM_TOKENS, 8192, dtype=torch.float8_e4m3fn)
    flashinfer.rmsnorm_quant(out, rows, weight, 0.02)
    flashinfer.fused_add_rmsnorm_quant(out, rows, residual, weight, 0.02)
    factor, offset = torch.ones(4096), torch.zeros(4096)
    flashinfer.layernorm_quant(out[:, :4096], rows[:, :4096], factor, offset, 0.02)
    scales = torch.empty(8192 // 128, NUM_TOKENS)
    normed = torch.empty_like(rows)
    flashinfer.fused_add_rmsnorm_fp8_block_quant(out, scales, normed, rows, residual, weight)
    flashinfer.norm.rmsnorm_fp8_block_quant(out, scales, rows, weight)
    call_video_norm(dtype)
    flashinfer.fused_rmsnorm_silu(rows, weight)
    flashinfer.fused_rmsnorm_silu(rows, weight, out=out)


def call_linear_attention(dtype) -> None:
    """A layer of Qwen3-Next and one of Mamba-2, with few sequences."""
    import torch

    from flashinfer import gdn_decode, gdn_prefill, mamba
    from flashinfer.gdn_kernels import gdn_decode_bf16_state

    def new(*shape: int):
        return torch.randn(*shape, dtype=dtype)

    q, v, b = new(2, 3, 16, 128), new(2, 3, 32, 128), new(2, 3, 32)
    state, gate = torch.randn(4, 32, 128, 128), torch.randn(32)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    one = [x[:, :1] for x in (q, q, v)]
    gdn_decode.gated_delta_rule_decode_pretranspose(*one, state[:2], gate, b[:, :1], gate, b[:, :1])
    gdn_decode.gated_delta_rule_mtp(
        q, q, v, state, slots, gate, b, gate, b, disable_state_update=True
    )
    gdn_decode_bf16_state.gated_delta_rule_mtp(
        gate, b, gate, q=q, k=q, v=v, b=b, initial_state_source=state.to(dtype),
        initial_state_indices=slots,
    )  # fmt: skip
    tokens, values, bounds = q.flatten(0, 1), v.flatten(0, 1), torch.tensor([0, 4, 6])
    for initial in ({}, {"initial_state": state[:2]}):
        for final in (False, True):
            gdn_prefill.chunk_gated_delta_rule(
                tokens, tokens, values, cu_seqlens=bounds, output_final_state=final, **initial
            )
    pool, A, D = new(4, 64, 64, 128), -torch.rand(64, 64, 128), torch.ones(64, 64)
    for steps in ((), (3,)):
        x, B = new(2, *steps, 64, 64), new(2, *steps, 8, 128)
        mamba.selective_state_update(pool, x, x, A, B, B, D, state_batch_indices=slots)


def call_products(dtype) -> None:
    """The first weights of an expert of DeepSeek V3, and a query projection of its MLA."""
    import torch

    import flashinfer

    x, weight = torch.randn(NUM_TOKENS, 7168, dtype=dtype), torch.randn(4096, 7168)
    scale = torch.ones(32, 56)
    codes = weight.to(torch.float8_e4m3fn)
    flashinfer.gemm.fp8_blockscale_gemm_sm90(x, codes, weight_scale=scale)
    x_scale = torch.ones(NUM_TOKENS, 56)
    flashinfer.gemm.fp8_blockscale_gemm_sm90(x.to(codes.dtype), codes, x_scale, scale)
    queries = torch.randn(128, NUM_TOKENS, 128).to(codes.dtype)
    latent = torch.randn(128, 512, 128).to(codes.dtype).transpose(1, 2)
    one = torch.ones(1)
    flashinfer.bmm_fp8(queries, latent, one, one, dtype)
    rows, wide = torch.randn(NUM_TOKENS, 4096, dtype=dtype), torch.randn(6144, 4096, dtype=dtype)
    flashinfer.mm_bf16(rows, wide.T)
    flashinfer.mm_bf16(rows, wide.T, bias=wide[:, 0].contiguous())
    flashinfer.bmm_bf16(queries.to(dtype), latent.to(dtype))
    gate = torch.randn(256, 7168, dtype=dtype)
    flashinfer.gemm.tinygemm_bf16(x, gate, torch.empty(NUM_TOKENS, 256, dtype=dtype))
    call_groupwise_products()


def call_groupwise_products() -> None:
    """The first weights of 8 experts of Qwen3 30B A3B; one of them with every layout of scales."""
    import torch

    from flashinfer import gemm

    def transposed(scale):
        return scale.transpose(-1, -2).contiguous()

    groups, padded = 8, 128
    a = torch.randn(groups, padded, 2048).to(torch.float8_e4m3fn)
    b = torch.randn(groups, 1536, 2048).to(torch.float8_e4m3fn)
    a_scale, b_scale = torch.ones(groups, padded, 16), torch.ones(groups, 12, 16)
    for mode, arrange in (("K", torch.clone), ("MN", transposed)):
        by_row, by_block, weight_scale = map(arrange, (a_scale[0], a_scale[0, :1], b_scale[0]))
        gemm.gemm_fp8_nt_groupwise(a[0], b[0], by_row, weight_scale, mode)
        gemm.gemm_fp8_nt_groupwise(
            a[0], b[0], by_block, weight_scale, mode, scale_granularity_mnk=(128, 128, 128)
        )
        gemm.gemm_fp8_nt_blockscaled(a[0], b[0], by_block, weight_scale, mode)

    starts = torch.arange(groups + 1, dtype=torch.int32) * padded
    rows, row_scale = a.flatten(0, 1), a_scale.flatten(0, 1)
    for mode, arrange in (("K", torch.clone), ("MN", transposed)):
        gemm.group_gemm_fp8_nt_groupwise(
            rows, b, arrange(row_scale), arrange(b_scale), starts, scale_major_mode=mode
        )
    expert = torch.arange(groups, dtype=torch.int32).repeat_interleave(padded)
    gemm.group_deepgemm_fp8_nt_groupwise(rows, b, row_scale, b_scale, expert)
    counts = torch.full((groups,), NUM_TOKENS, dtype=torch.int32)
    gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, counts, NUM_TOKENS)
    gemm.grouped_mm_bf16(rows.bfloat16(), b.bfloat16(), starts)


def call_video_norm(dtype) -> None:
    """Wan 2.1 14B: 40 heads of 128, a small video."""
    import torch

    import flashinfer

    qkv = torch.randn(2 * 4 * 4, 3 * 40 * 128, dtype=dtype)
    weight = torch.ones(40 * 128, dtype=dtype)
    sizes = {"ppf": 2, "pph": 4, "ppw": 4, "head_dim": 128}
    channels = {"num_frame_channels": 44, "num_height_channels": 42, "num_width_channels": 42}
    heads = {"num_heads_q": 40, "num_heads_k": 40, "num_heads_v": 40}
    for output_fp8 in (False, True):
        flashinfer.fused_qk_rmsnorm_rope(
            qkv, weight, weight, **sizes, **channels, **heads, output_fp8=output_fp8
        )


def call_activations(dtype) -> None:
    import torch

    import flashinfer

    for function, hidden_size in (
        (flashinfer.silu_and_mul, 14336),
        (flashinfer.gelu_and_mul, 10240),
        (flashinfer.gelu_tanh_and_mul, 14336),
    ):
        function(torch.randn(NUM_TOKENS, 2 * hidden_size, dtype=dtype))


def call_quantization(dtype) -> None:
    import torch

    from flashinfer import quantization as q

    rows = torch.randn(NUM_TOKENS, 7168, dtype=dtype)
    for dst_dtype in (None, torch.float8_e5m2, torch.int8):
        q.per_token_group_quant_8bit(rows, 128, dst_dtype=dst_dtype)
        q.silu_and_mul_per_token_group_quant_8bit(rows[:, :4096], 128, dst_dtype=dst_dtype)
    q.per_token_group_quant_8bit(
        rows, 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=True
    )
    q.mxfp8_dequantize_host(*q.mxfp8_quantize(rows))
    scale = torch.full((1,), 700.0)
    codes, scales = q.nvfp4_quantize(rows, scale)
    q.fp4_quantize(rows, scale)
    q.e2m1_and_ufp8sf_scale_to_float(codes, scales, 1 / scale)
    q.silu_and_mul_nvfp4_quantize(rows[:, :4096], scale)
    q.mxfp4_dequantize(*q.mxfp4_quantize(rows))
    q.mxfp4_dequantize_host(*q.mxfp4_quantize(rows, sfLayout=q.SfLayout.layout_linear))
    q.block_scale_interleave(scales)
    q.nvfp4_block_scale_interleave(scales)
    mask = torch.rand(4096) < 0.5
    q.packbits(mask)
    q.segment_packbits(mask, torch.tensor([0, 1000, 1024, 4096], dtype=torch.int32), "little")


def call_sampling(batch_size: int, vocab_size: int) -> None:
    import torch

    import flashinfer

    logits = torch.randn(batch_size, vocab_size) * 3
    probs = flashinfer.softmax(logits, torch.full((batch_size,), 0.7))
    number = torch.arange(batch_size)
    key = {"seed": number, "offset": number + 1}
    top_k, top_p = (number + 40).int(), torch.full((batch_size,), 0.9)
    flashinfer.sampling_from_probs(probs, return_valid=True, **key)
    flashinfer.sampling_from_logits(logits, **key)
    flashinfer.top_p_sampling_from_probs(probs, top_p, **key)
    flashinfer.top_k_sampling_from_probs(probs, top_k, **key)
    flashinfer.min_p_sampling_from_probs(probs, top_p / 9, **key)
    flashinfer.top_k_top_p_sampling_from_probs(probs, top_k, top_p, **key)
    flashinfer.top_k_top_p_sampling_from_probs(
        probs, top_k, top_p, filter_apply_order="joint", **key
    )
    flashinfer.top_k_top_p_sampling_from_logits(logits, top_k, top_p, **key)
    flashinfer.top_k_renorm_probs(probs, top_k)
    flashinfer.top_p_renorm_probs(probs, top_p)
    flashinfer.top_k_mask_logits(logits, top_k)
    tokens = torch.ones(2, 3, dtype=torch.int32)
    chain = (probs[:6].view(2, 3, -1), tokens, probs.view(2, 4, -1))
    flashinfer.chain_speculative_sampling(*chain, seed=number[:2], offset=number[:2])

    lengths = (number * 4096 + 1024).int()
    flashinfer.top_k(logits, 2048)
    pages = torch.arange(batch_size * 2048).view(batch_size, 2048).int()
    flashinfer.top_k_page_table_transform(logits, pages, lengths, 2048, page_size=64)
    flashinfer.top_k_ragged_transform(logits, lengths, lengths, 2048)


def call_rope(dtype) -> None:
    """Llama 3.1 8B; DeepSeek V3 with one of 8 shards of its heads."""
    import torch

    from flashinfer import rope

    q, k = (
        torch.randn(NUM_TOKENS, 32, 128, dtype=dtype),
        torch.randn(NUM_TOKENS, 8, 128, dtype=dtype),
    )
    pos_ids = torch.arange(NUM_TOKENS, dtype=torch.int32)
    requests = torch.tensor([0, 20, NUM_TOKENS]).int(), torch.tensor([0, 100]).int()
    for name in ("apply_rope", "apply_llama31_rope"):
        for inplace in ("", "_inplace"):
            getattr(rope, f"{name}{inplace}")(q, k, *requests)
            getattr(rope, f"{name}_pos_ids{inplace}")(q, k, pos_ids)
    angle = torch.arange(4096.0)[:, None] * 1e4 ** (-torch.arange(64) / 64)
    cache = torch.cat([angle.cos(), angle.sin()], -1)
    half = torch.cat([angle[:, ::2].cos(), angle[:, ::2].sin()], -1)
    for query, key in ((q, k), (q.flatten(1), k.flatten(1))):
        rope.apply_rope_with_cos_sin_cache(pos_ids, query, key, 128, cache)
        rope.apply_rope_with_cos_sin_cache_inplace(pos_ids, query, key, 128, cache)

    heads = torch.randn(NUM_TOKENS, 16, 576, dtype=dtype)
    q_mla = heads[..., 512:], heads[..., :512]
    k_mla = heads[:, 0, 512:], heads[:, 0, :512]
    parts = q_mla[0], k_mla[0], q_mla[1], k_mla[1]
    rope.mla_rope_quantize_fp8(*parts, half, pos_ids, is_neox=False)
    rope.rope_quantize_fp8(*parts, half, pos_ids)
    rope.rope_quantize_fp8(q, k, None, None, cache, pos_ids)
    i32 = {"dtype": torch.int32}
    table = torch.tensor([3, 0, 1], **i32), torch.tensor([0, 3], **i32)
    where = torch.zeros(NUM_TOKENS, **i32), pos_ids
    fp8 = torch.float8_e4m3fn
    latent = torch.zeros(4, 16, 576).to(fp8)
    rope.rope_quantize_fp8_append_paged_kv_cache(
        *parts, None, half, pos_ids, (latent[..., :512], latent[..., 512:]), *table, *where
    )
    for kv_layout, inner in (("NHD", (16, 8)), ("HND", (8, 16))):
        caches = torch.zeros(4, 2, *inner, 128).to(fp8).unbind(1)
        rope.rope_quantize_fp8_append_paged_kv_cache(
            q, k, None, None, k, cache, pos_ids, caches, *table, *where, kv_layout=kv_layout
        )


def call_caches(dtype) -> None:
    """Llama 3.1 8B with pages of 16; latent attention of DeepSeek V3 with pages of 64."""
    import torch

    import flashinfer
    from flashinfer.concat_ops import concat_mla_k

    i32 = {"dtype": torch.int32}
    append_indptr = torch.tensor([0, 20, 30], **i32)
    seq_lens = torch.tensor([100, 10], **i32)
    where = flashinfer.get_batch_indices_positions(append_indptr, seq_lens, NUM_TOKENS)
    table = torch.arange(8, **i32), torch.tensor([0, 7, 8], **i32), torch.tensor([4, 10], **i32)
    flashinfer.get_seq_lens(*table[1:], 16)
    k, v = torch.randn(2, NUM_TOKENS, 8, 128, dtype=dtype)
    for kv_layout, inner in (("NHD", (16, 8)), ("HND", (8, 16))):
        fused = torch.zeros(8, 2, *inner, 128, dtype=dtype)
        for cache in (fused, fused.unbind(1)):
            flashinfer.append_paged_kv_cache(k, v, *where, cache, *table, kv_layout)
    latent = torch.zeros(8, 64, 576, dtype=dtype)
    rows = torch.randn(NUM_TOKENS, 576, dtype=dtype)
    parts = latent[..., :512], latent[..., 512:]
    flashinfer.append_paged_mla_kv_cache(rows[:, :512], rows[:, 512:], *where, *parts, *table)

    states, lse = torch.randn(NUM_TOKENS, 4, 32, 128, dtype=dtype), torch.randn(NUM_TOKENS, 4, 32)
    flashinfer.merge_states(states, lse)
    pair = states[:, 0], lse[:, 0], states[:, 1], lse[:, 1]
    flashinfer.merge_state(*pair)
    flashinfer.merge_state_in_place(*pair)
    flashinfer.merge_state_in_place(*pair, torch.ones(NUM_TOKENS, dtype=torch.bool))

    nope, shared = torch.randn(2, NUM_TOKENS, 128, 128, dtype=dtype).unbind()
    key = torch.empty(NUM_TOKENS, 128, 192, dtype=dtype)
    concat_mla_k(key, nope, shared[:, :1, :64])


def call_latent_attention(dtype) -> None:
    """DeepSeek V3 on one GPU, with pages of 64."""
    import torch

    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(workspace())
    starts, pages, _ = page_table(KV_LENS, 64)
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    sizes = (128, 512, 64, 64, True, 192**-0.5, dtype, dtype)
    wrapper.plan(indptr(QO_LENS), starts, pages, lengths, *sizes)
    query = torch.randn(NUM_TOKENS, 128, 576, dtype=dtype)
    cache = torch.randn(len(pages), 64, 576, dtype=dtype)
    for return_lse in (False, True):
        wrapper.run(query=query, kv_cache=cache, return_lse=return_lse)


HEADS = (32, 8, 128)  # of queries, of keys and values, elements: Llama 3.1 8B
QO_LENS, KV_LENS = (7, 1, 24), (40, 33, 24)


def workspace():
    import torch

    return torch.empty(32 << 20, dtype=torch.uint8)


def page_table(lengths, page_size=16):
    """First pages, page numbers and tokens in last pages of requests."""
    import torch

    pages = [-(-n // page_size) for n in lengths]
    last = [n - (count - 1) * page_size for n, count in zip(lengths, pages, strict=True)]
    return indptr(pages), torch.arange(sum(pages)).int(), torch.tensor(last).int()


def indptr(lengths):
    import torch

    return torch.tensor([0, *lengths]).cumsum(0).int()


def call_attention(dtype) -> None:
    import torch

    import flashinfer

    q, (k, v) = torch.randn(7, 32, 128, dtype=dtype), torch.randn(2, 40, 8, 128, dtype=dtype)
    for return_lse in (False, True):
        flashinfer.single_decode_with_kv_cache(q[0], k, v, return_lse=return_lse)
        flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=return_lse)
    mask = torch.ones(7, 40, dtype=torch.bool)
    flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)


def call_planned_attention(dtype) -> None:
    import torch

    import flashinfer

    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    cache = torch.randn(9, 2, 16, 8, 128, dtype=dtype)
    table = page_table(KV_LENS)
    q = torch.randn(NUM_TOKENS, 32, 128, dtype=dtype)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(*table, *HEADS, 16, **dtypes)
    decode.run(q[:3], cache)
    decode.run(q[:3], cache, return_lse=True)
    decode.plan(*table, *HEADS, 16, q_len_per_req=4, **dtypes)
    decode.run(q[:12], cache)
    decode.run(q[:12], cache, return_lse=True)

    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    paged.plan(indptr(QO_LENS), *table, *HEADS, 16, causal=True, **dtypes)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(indptr(QO_LENS), indptr(KV_LENS), *HEADS, causal=True, **dtypes)
    k, v = torch.randn(2, sum(KV_LENS), 8, 128, dtype=dtype)
    for lse in ({}, {"return_lse": True}, {"return_lse": True, "lse_layout": "HN"}):
        paged.run(q, cache, **lse)
        ragged.run(q, k, v, **lse)


def call_mixed_attention(dtype) -> None:
    """Prefill and decode in one launch; levels of shared keys; sinks."""
    import torch

    import flashinfer

    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    cache = torch.randn(9, 2, 16, 8, 128, dtype=dtype)
    table = page_table(KV_LENS)
    q = torch.randn(NUM_TOKENS, 32, 128, dtype=dtype)
    mixed = flashinfer.BatchAttention(device=str(q.device))
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    sizes = (*HEADS, 128, 16)
    mixed.plan(indptr(QO_LENS), *table[:2], lengths, *sizes, causal=True, **dtypes)
    mixed.run(q, cache)

    sinks = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(), **dtypes)
    sinks.plan(indptr(QO_LENS), *table, *HEADS, 16, causal=True, **dtypes)
    for return_lse in (False, True):
        sinks.run(q, cache, torch.zeros(32), return_lse=return_lse)

    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    queries = [indptr([NUM_TOKENS]), indptr(QO_LENS)]
    levels = zip(page_table([64]), table, strict=True)
    cascade.plan(queries, *map(list, levels), *HEADS, 16, causal=True, **dtypes)
    cascade.run(q, cache)

    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    pod.plan(*table, *HEADS, 16, **dtypes)
    k, v = torch.randn(2, 40, 8, 128, dtype=dtype)
    for p in (False, True):
        for d in (False, True):
            lse = {"return_lse_p": p, "return_lse_d": d}
            pod.run(q[:29], k, v, q[29:], cache, causal_p=True, **lse)
    pods = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    pods.plan(indptr(QO_LENS), *table, indptr([1] * 3), *table, *HEADS, 16, **dtypes)
    for return_lse in (False, True):
        pods.run(q, cache, q[:3], cache, causal_p=True, return_lse=return_lse)


def call_sparse_attention(dtype) -> None:
    import torch

    from flashinfer.sparse import (
        BlockSparseAttentionWrapper,
        VariableBlockSparseAttentionWrapper,
        convert_bsr_mask_layout,
    )

    convert_bsr_mask_layout(torch.ones(3, 16, 16, dtype=torch.bool), torch.tensor([0, 2, 3]).int())
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    q, (k, v) = torch.randn(32, 32, 128, dtype=dtype), torch.randn(2, 64, 8, 128, dtype=dtype)
    blocks = BlockSparseAttentionWrapper(workspace())
    table = torch.tensor([0, 2, 3]).int(), torch.tensor([0, 3, 2]).int()
    blocks.plan(*table, 32, 64, 16, 16, *HEADS, **dtypes, o_data_type=dtype)
    variable = VariableBlockSparseAttentionWrapper(workspace())
    seen = torch.ones(8, 2, 2, dtype=torch.bool)
    rows, columns = (torch.tensor([sizes] * 8).int() for sizes in ([20, 12], [10, 54]))
    variable.plan(seen, rows, columns, *HEADS, **dtypes)
    for return_lse in (False, True):
        blocks.run(q, k, v, return_lse=return_lse)
        heads_first = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        variable.run(*heads_first, return_lse=return_lse)


def list_files(folder: Path) -> None:
    """Write the names of the definitions into the docstring of this file."""
    here = Path(__file__)
    head, listed, rest = here.read_text().partition("which is:\n\n")
    names = "".join(f"    {path.name}\n" for path in sorted(folder.iterdir()))
    here.write_text(head + listed + names + rest[rest.index('"""') :])


if __name__ == "__main__":
    committed = Path(__file__).parent / "fi_trace_out"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else committed)
    if len(sys.argv) == 1:
        list_files(committed)
