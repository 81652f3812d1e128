"""Calls of ``example.py``: every operation but attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import flashinfer
from flashinfer import (
    ActivationType,
    cute_dsl,
    dense_mqa,
    dsv3_ops,
    fused_moe,
    gemm,
    rope,
)
from flashinfer import quantization as quant
from flashinfer.concat_ops import concat_mla_k

NUM_TOKENS = 32


def make_calls(dtype: torch.dtype) -> None:
    call_norms(dtype)
    call_quantized_norms(dtype)
    call_cute_dsl_norms(dtype)
    call_latent_parts(dtype)
    call_scores()
    # A definition has no values: without a GPU nothing multiplies these large matrices.
    with torch.device("cuda" if torch.cuda.is_available() else "meta"):
        call_products(dtype)
    call_activations(dtype)
    call_quantization(dtype)
    call_sampling(8, 128256)
    call_rope(dtype)
    call_caches(dtype)


def call_norms(dtype) -> None:
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


def call_cute_dsl_norms(dtype) -> None:
    """On the reference backend even where there is a GPU: the kernels need a compiler's extra."""
    with flashinfer.reference_backend(), torch.device("cpu"):
        rows, residual = (torch.randn(3, 4096).to(dtype) for _ in range(2))
        weight, out = torch.ones(4096, dtype=dtype), torch.empty(3, 4096, dtype=torch.float8_e4m3fn)
        heads = torch.randn(3, 8, 128).to(dtype)
        cute_dsl.rmsnorm_cute(rows, weight, torch.empty_like(rows))
        cute_dsl.qk_rmsnorm_cute(heads, weight[:128], heads, weight_bias=1.0)
        cute_dsl.rmsnorm_quant_cute(out, rows, weight, 0.02)
        cute_dsl.fused_add_rmsnorm_cute(rows, residual, weight)
        cute_dsl.fused_add_rmsnorm_quant_cute(out, rows, residual, weight, 0.02)
        factor, offset = torch.ones(4096), torch.zeros(4096)
        cute_dsl.layernorm_cute(torch.empty_like(rows), rows, factor, offset)
        call_cute_dsl_mixture()


def call_cute_dsl_mixture() -> None:
    """A layer of DeepSeek-V3 with two experts, to the sum of four tokens' rows."""
    codes = torch.float8_e4m3fn
    counts = torch.tensor([3, 4], dtype=torch.int32)
    x, w1 = torch.randn(2, 4, 7168).to(codes), torch.randn(2, 4096, 7168).to(codes)
    w2 = torch.randn(2, 7168, 2048).to(codes)
    scale1, scale2 = torch.rand(2, 32, 56), torch.rand(2, 56, 16)
    first = cute_dsl.moe_grouped_gemm_cutedsl(x, w1, torch.rand(56, 8), scale1, counts)
    middle, scale = cute_dsl.moe_activation(first, counts)
    second = cute_dsl.moe_grouped_gemm_cutedsl(middle, w2, scale, scale2, counts)
    entries = torch.arange(8, dtype=torch.int32).view(4, 2)
    cute_dsl.moe_finalize(second.flatten(0, 1), entries, torch.rand(4, 2))


def call_quantized_norms(dtype) -> None:
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


def call_latent_parts(dtype) -> None:
    """Projected keys and values of DeepSeek V3 on the way to an 8-bit prefill."""
    projected, rope = torch.randn(NUM_TOKENS, 128, 256, dtype=dtype), torch.randn(NUM_TOKENS, 64)
    flashinfer.concat_mla_kv_quant_fp8(projected, rope.to(dtype))


def call_scores() -> None:
    """The indexer of DeepSeek V3.2: a decode step of two tokens, and queries of a prefill."""
    seq_lens = torch.tensor([100, 500], dtype=torch.int32)
    cache = torch.zeros(20, 64, 1, 132, dtype=torch.uint8)
    q = torch.randn(4, 64, 128).to(torch.float8_e4m3fn)
    weights, tables = torch.randn(4, 64), torch.arange(20, dtype=torch.int32).view(2, 10)
    paged = q.view(2, 2, 64, 128)
    flashinfer.compute_paged_mqa_logits_schedule(seq_lens)
    flashinfer.fp8_paged_mqa_logits(paged, cache, weights, tables, seq_lens, 640)
    keys, ends = torch.randn(16, 128).to(q.dtype), torch.arange(13, 17, dtype=torch.int32)
    dense_mqa.fp8_mqa_logits(q, (keys, torch.ones(16)), weights, ends * 0, ends)


def call_products(dtype) -> None:
    """The first weights of an expert of DeepSeek V3, and a query projection of its MLA."""
    x, weight = torch.randn(NUM_TOKENS, 7168, dtype=dtype), torch.randn(4096, 7168)
    scale = torch.ones(32, 56)
    codes = weight.to(torch.float8_e4m3fn)
    flashinfer.gemm.fp8_blockscale_gemm_sm90(x, codes, weight_scale=scale)
    x_scale = torch.ones(NUM_TOKENS, 56)
    flashinfer.gemm.fp8_blockscale_gemm_sm90(x.to(codes.dtype), codes, x_scale, scale)
    flashinfer.gemm.fp8_blockscale_gemm_swiglu_sm90(x.to(codes.dtype), codes, x_scale, scale)
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
    row, norm = torch.randn(1, 2048, dtype=dtype), torch.ones(2048, dtype=dtype)
    router = torch.randn(2048, 128, dtype=dtype)
    flashinfer.gemm.add_rmsnorm_mm_bf16(row, row.clone(), norm, router)
    flashinfer.gemm.add_rmsnorm_mm_route_bf16(row, row.clone(), norm, router, 8)
    call_heads_of_a_row(row, norm)
    down, few = torch.randn(14336, 4096, dtype=dtype), torch.randn(8, 14336, dtype=dtype)
    residual, norm = torch.randn(8, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
    flashinfer.gemm.mm_add_rmsnorm_bf16(few, down, residual, norm)
    flashinfer.gemm.mm_silu_and_mul_bf16(residual, torch.randn(4096, 28672, dtype=dtype))
    call_groupwise_products()
    call_weight_only_products()
    call_mixtures(dtype)


def call_heads_of_a_row(row, norm) -> None:
    """Attention of Qwen3 30B A3B: the first token of a request, with pages of 16."""
    qkv, weights = row.new_zeros(2048, 5120), row.new_ones(2, 128).unbind()
    zero, pages = torch.zeros(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    for layout, inner in (("NHD", (16, 4)), ("HND", (4, 16))):
        caches = row.new_zeros(2, 2, *inner, 128).unbind()
        flashinfer.gemm.add_rmsnorm_mm_rope_append_bf16(
            *(row, row.clone(), norm, qkv, torch.zeros(100, 128), zero, caches),
            *(pages[:1], pages, zero, zero, *weights),
            kv_layout=layout,
        )


def call_mixtures(dtype) -> None:
    """Routing of DeepSeek V3 and V4, and 4 experts of Qwen3 30B A3B in every form of weights."""
    scores = torch.randn(NUM_TOKENS, 256)
    values, indices = torch.empty(NUM_TOKENS, 8), torch.empty(NUM_TOKENS, 8, dtype=torch.int32)
    fused_moe.fused_topk_deepseek(scores, torch.zeros(256), 8, 4, 8, 2.5, values, indices)
    table = torch.randint(0, 256, (1000, 6), dtype=torch.int32)
    ids = torch.randint(0, 1000, (NUM_TOKENS,))
    fused_moe.hash_topk(scores, ids, table)
    fused_moe.hash_topk(scores, ids, table, num_fused_shared_experts=1, routed_scaling_factor=2.5)

    x, half = torch.randn(NUM_TOKENS, 2048, dtype=dtype), indices % 4
    up_gate, down = torch.randn(4, 1536, 2048, dtype=dtype), torch.randn(4, 2048, 768, dtype=dtype)
    call = functools.partial(fused_moe.cutlass_fused_moe, output_dtype=dtype)
    call(x, half, values, up_gate, down, quant_scales=[])
    plain = up_gate[:, :768].contiguous()
    call(x, half, values, plain, down, quant_scales=[], activation_type=ActivationType.Relu2)
    codes = [weight.to(torch.float8_e4m3fn) for weight in (up_gate, down)]
    scales = [torch.ones(4, 12, 16), torch.ones(4, 16, 6)]
    call(x, half, values, *codes, quant_scales=scales, use_deepseek_fp8_block_scale=True)
    factors = [torch.ones(4), torch.ones(1), torch.ones(4), torch.ones(1)]
    call(x.to(torch.float8_e4m3fn), half, values, *codes, quant_scales=factors)
    call_routed_mixture(x, up_gate, down)
    call_adapters(x)
    call_four_bit_mixtures(functools.partial(call, x, half, values, use_w4_group_scaling=True))


def call_routed_mixture(x, up_gate, down) -> None:
    """The same mixture from its logits on."""
    codes = [weight.to(torch.float8_e4m3fn) for weight in (up_gate, down)]
    scales = [torch.ones(4, 12, 16), torch.ones(4, 16, 6)]
    logits = torch.randn(NUM_TOKENS, 4, dtype=x.dtype)
    fused_moe.mono_moe(x, logits, codes[0], scales[0], codes[1], scales[1], 2)


def call_adapters(x) -> None:
    """LoRA of rank 16 for gates and values of 4 experts, two of which each token has."""
    tokens, experts = torch.arange(2 * NUM_TOKENS) // 2, torch.arange(2 * NUM_TOKENS) % 4
    own, factors = torch.arange(NUM_TOKENS) % 3 - 1, torch.ones(2 * NUM_TOKENS)
    first = [torch.randn(2, 4, 16, 2048, dtype=x.dtype) for _ in range(2)]
    second = [torch.randn(2, 4, 768, 16, dtype=x.dtype) for _ in range(2)]
    fused_moe.bgmv_moe(x, first, second, tokens, experts, own, factors, 4)
    between, delta = torch.zeros(2, 2 * NUM_TOKENS, 16), torch.zeros(2 * NUM_TOKENS, 1536)
    pairs, starts = (tokens, experts), torch.tensor([0, 768])
    rows = x.repeat_interleave(2, 0)
    fused_moe.adapters.shrink_pairs(between, rows, first, *pairs, own, per_pair_input=True)
    fused_moe.adapters.expand_pairs(
        delta, between, second, *pairs, factors, own, starts, finalize=False
    )


def call_four_bit_mixtures(call: Callable[..., Any]) -> None:
    """The same mixture with weights of each 4-bit format."""
    codes = [torch.zeros(4, n, k // 2, dtype=torch.uint8) for n, k in ((1536, 2048), (2048, 768))]
    for group, dtype in ((128, torch.bfloat16), (32, torch.uint8), (16, torch.float8_e4m3fn)):
        scales = [torch.ones(4, n, k // group).to(dtype) for n, k in ((1536, 2048), (2048, 768))]
        factors = [torch.ones(4)] * 2 if group == 16 else []
        call(*codes, quant_scales=scales + factors)


def call_groupwise_products() -> None:
    """The first weights of 8 experts of Qwen3 30B A3B; one of them with every layout of scales."""

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
    segments = gemm.SegmentGEMMWrapper(torch.empty(1, dtype=torch.uint8))
    segments.run(rows.bfloat16(), b.bfloat16(), len(b), True, seg_indptr=starts)
    gemm.group_gemm_fp8_nt_groupwise_contiguous(rows, b, row_scale, b_scale, expert)
    gemm.grouped_mm_fp8(rows, b, starts)
    one = torch.ones(1)
    gemm.mm_fp8(a[0], b[0].T, one, backend="cublas")
    gemm.fp8_linear(a[0], b[0], torch.ones(padded), torch.ones(1536))


def call_weight_only_products() -> None:
    """The query projection of Llama 3.1 8B with weights of 4 and 8 bits; routers."""
    x = torch.randn(NUM_TOKENS, 4096, dtype=torch.bfloat16)
    codes = torch.randint(0, 256, (4096, 2048), dtype=torch.uint8)
    linear = gemm.weight_only_linear
    linear(x, codes, torch.ones(4096, 32, dtype=x.dtype), "int4")
    linear(x, codes.new_full((4096, 4096), 1).char(), torch.ones(4096, dtype=x.dtype), "int8")
    linear(x, codes, codes.new_full((4096, 128), 127), "mxfp4")
    scale = torch.ones(4096, 256).to(torch.float8_e4m3fn)
    linear(x, codes, scale, "nvfp4", torch.ones(1))
    for name in dsv3_ops.__dict__:
        if name.startswith("mm_"):
            k, n = (int(part[1:]) for part in name.removesuffix("_bf16").split("_")[3:])
            dtype = torch.bfloat16 if name.endswith("bf16") or n == 128 else torch.float32
            tokens, weight = (torch.randn(m, k, dtype=torch.bfloat16) for m in (8, n))
            getattr(dsv3_ops, name)(tokens, weight.T, torch.empty(8, n, dtype=dtype))


def call_video_norm(dtype) -> None:
    """Wan 2.1 14B: 40 heads of 128, a small video."""
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
    for function, hidden_size in (
        (flashinfer.silu_and_mul, 14336),
        (flashinfer.gelu_and_mul, 10240),
        (flashinfer.gelu_tanh_and_mul, 14336),
    ):
        function(torch.randn(NUM_TOKENS, 2 * hidden_size, dtype=dtype))


def call_quantization(dtype) -> None:
    rows = torch.randn(NUM_TOKENS, 7168, dtype=dtype)
    for dst_dtype in (None, torch.float8_e5m2, torch.int8):
        quant.per_token_group_quant_8bit(rows, 128, dst_dtype=dst_dtype)
        quant.silu_and_mul_per_token_group_quant_8bit(rows[:, :4096], 128, dst_dtype=dst_dtype)
    quant.per_token_group_quant_8bit(
        rows, 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=True
    )
    quant.mxfp8_dequantize_host(*quant.mxfp8_quantize(rows))
    scale = torch.full((1,), 700.0)
    codes, scales = quant.nvfp4_quantize(rows, scale)
    quant.fp4_quantize(rows, scale)
    quant.e2m1_and_ufp8sf_scale_to_float(codes, scales, 1 / scale)
    quant.silu_and_mul_nvfp4_quantize(rows[:, :4096], scale)
    experts, counts = rows.view(4, 8, 7168), torch.tensor([8, 0, 3, 5], dtype=torch.int32)
    quant.nvfp4_batched_quantize(experts, scale)
    quant.scaled_fp4_grouped_quantize(experts, counts, torch.ones(4))
    quant.silu_and_mul_scaled_nvfp4_experts_quantize(experts[..., :4096], counts, torch.ones(4))
    quant.mxfp8_grouped_quantize(experts, counts)
    quant.mxfp4_dequantize(*quant.mxfp4_quantize(rows))
    quant.mxfp4_dequantize_host(*quant.mxfp4_quantize(rows, sfLayout=quant.SfLayout.layout_linear))
    quant.block_scale_interleave(scales)
    quant.nvfp4_block_scale_interleave(scales)
    mask = torch.rand(4096) < 0.5
    quant.packbits(mask)
    quant.segment_packbits(mask, torch.tensor([0, 1000, 1024, 4096], dtype=torch.int32), "little")


def call_sampling(batch_size: int, vocab_size: int) -> None:
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
        kept = torch.zeros(4, 2, *inner, 128, dtype=dtype).unbind(1)
        weights = torch.ones(2, 128, dtype=dtype).unbind()
        for cached, norms in ((kept, weights), (caches, ())):
            rope.rope_append_paged_kv_cache(
                q, k, k, cache, pos_ids, cached, *table, *where, *norms, kv_layout=kv_layout
            )


def call_packed_caches(k, v, where, table) -> None:
    """Llama 3.1 8B with pages of 16 and caches of 4 bits."""
    cache, sf = (torch.zeros(8, 2, 16, 8, n, dtype=torch.uint8).unbind(1) for n in (64, 8))
    scale = torch.ones(1)
    flashinfer.nvfp4_quantize_append_paged_kv_cache(k, v, *where, cache, sf, *table, 1.0, 1.0)
    slots = torch.arange(NUM_TOKENS)
    flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        k, v, slots, cache, sf, scale, scale
    )
    tables, lengths = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([64, 10])
    out = torch.zeros(2, 2, 64, 8, 128, dtype=k.dtype)
    flashinfer.nvfp4_kv_dequantize_paged(
        cache, sf, tables, lengths.int(), scale, scale, out[0], out[1]
    )
    rows = k.reshape(-1, 128)
    flashinfer.nvfp4_kv_dequantize(*flashinfer.nvfp4_kv_quantize(rows, scale), scale)


def call_caches(dtype) -> None:
    """Llama 3.1 8B with pages of 16; latent attention of DeepSeek V3 with pages of 64."""
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
    call_packed_caches(k, v, where, table)

    states, lse = torch.randn(NUM_TOKENS, 4, 32, 128, dtype=dtype), torch.randn(NUM_TOKENS, 4, 32)
    flashinfer.merge_states(states, lse)
    pair = states[:, 0], lse[:, 0], states[:, 1], lse[:, 1]
    flashinfer.merge_state(*pair)
    flashinfer.merge_state_in_place(*pair)
    flashinfer.merge_state_in_place(*pair, torch.ones(NUM_TOKENS, dtype=torch.bool))

    nope, shared = torch.randn(2, NUM_TOKENS, 128, 128, dtype=dtype).unbind()
    key = torch.empty(NUM_TOKENS, 128, 192, dtype=dtype)
    concat_mla_k(key, nope, shared[:, :1, :64])
