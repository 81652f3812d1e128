"""Calls of attention functions that plan and run at once, for the tests of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer import cudnn, decode, mla, prefill
from flashinfer.xqa import xqa

Call = tuple[Callable[..., Any], dict[str, Any]]
DIM, RANK, ROPE = 64, 512, 64


def _lengths(device: str) -> dict[str, torch.Tensor]:
    """Three requests of one query token and 3, 9 and 16 keys, in pages of four."""
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)
    return {
        "block_tables": table.to(device),
        "seq_lens": torch.tensor([3, 9, 16], dtype=torch.int32, device=device),
    }


def _rows(device: str) -> dict[str, torch.Tensor]:
    return {
        "cum_seq_lens_q": torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device),
        "cum_seq_lens_kv": torch.tensor([0, 3, 12, 28], dtype=torch.int32, device=device),
    }


def _vision(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
    """Three sequences whose lengths the host knows."""
    return {
        "q": q,
        "k_cache": keys,
        "v_cache": values,
        "scale": 0.125,
        "max_token_per_sequence": 1,
        "max_sequence_kv": 16,
        "actual_seq_lens_q": torch.ones(3, dtype=torch.int32),
        "actual_seq_lens_kv": torch.tensor([3, 9, 16], dtype=torch.int32),
        "causal": True,
    }


def _one_token(q: torch.Tensor, pages: torch.Tensor, device: str) -> dict[str, Any]:
    """One token of three requests, over keys and values apart."""
    table = _lengths(device)
    return {
        "q": q,
        "k_cache": pages[:, 0].contiguous(),
        "v_cache": pages[:, 1].contiguous(),
        "page_table": table["block_tables"],
        "seq_lens": table["seq_lens"],
        "output": torch.zeros_like(q),
        "semaphores": torch.zeros(8, dtype=torch.int32, device=device),
        "num_kv_heads": 2,
        "page_size": 4,
    }


def calls(device: str) -> dict[str, Call]:
    """A call of each function, and some with other results."""

    def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def workspace_of(size: int) -> dict[str, torch.Tensor]:
        """Checks of operators copy it several times; the references need none."""
        size = size if device == "cuda" else 1 << 12
        return {"workspace_buffer": torch.zeros(size, dtype=torch.uint8, device=device)}

    workspace = workspace_of(1 << 23)
    pages = workspace | _lengths(device) | {"query": normal(3, 4, DIM)}
    hnd, nhd = normal(12, 2, 2, 4, DIM), normal(12, 2, 4, 2, DIM)
    many = {**pages, **_rows(device), "batch_size": 3, "bmm1_scale": 0.125, "bmm2_scale": 1.0}
    decoded = {**pages, "kv_cache": hnd, "max_seq_len": 16, "bmm1_scale": 0.125}
    prefilled = {**many, "kv_cache": hnd, "max_q_len": 1, "max_kv_len": 16}
    flat = {name: prefilled[name] for name in prefilled if name not in ("block_tables", "kv_cache")}
    keys, values = normal(28, 2, DIM), normal(28, 2, DIM)
    ragged = {
        **flat,
        "key": keys,
        "value": values,
        "o_sf_scale": 1.0,
        "window_left": -1,
        "enable_pdl": None,
        "is_causal": True,
        "return_lse": True,
    }
    tensors = {"qkv": (flat.pop("query"), keys, values), "input_layout": "SEPARATE_Q_K_V"}
    # Work lists of latent attention are as long as all CTAs of the device need.
    latent = {
        **workspace_of(1 << 26),
        **_lengths(device),
        "query": normal(3, 1, 4, RANK + ROPE, dtype=torch.bfloat16),
        "kv_cache": normal(12, 4, RANK + ROPE, dtype=torch.bfloat16),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "max_seq_len": 16,
        "bmm1_scale": 0.1,
    }
    vision = workspace | _vision(normal(3, 4, DIM), keys, values)
    one_token = workspace | _one_token(normal(3, 1, 4, DIM), nhd, device)
    given = {"out": normal(3, 4, DIM), "lse": normal(3, 4, dtype=torch.float32)}
    plain = decode.trtllm_batch_decode_with_kv_cache
    of_latent = mla.trtllm_batch_decode_with_kv_cache_mla
    return {
        "decode": (plain, decoded),
        "decode, sums": (plain, {**decoded, "return_lse": True}),
        "decode, given": (plain, {**decoded, **given, "return_lse": True}),
        "decode, bfloat16": (plain, {**decoded, "out_dtype": torch.bfloat16}),
        "xqa decode": (decode.xqa_batch_decode_with_kv_cache, {**decoded, "kv_cache": nhd}),
        "xqa": (xqa, one_token),
        "context": (prefill.trtllm_batch_context_with_kv_cache, prefilled),
        "ragged": (prefill.trtllm_ragged_attention_deepseek, ragged),
        "fmha": (prefill.trtllm_fmha_v2_prefill, {**flat, **tensors}),
        "vision": (cudnn.cudnn_batch_prefill_with_kv_cache, {**vision, "return_lse": False}),
        "vision, sums": (cudnn.cudnn_batch_prefill_with_kv_cache, {**vision, "return_lse": True}),
        "latent": (of_latent, latent),
        "latent, sums": (of_latent, {**latent, "return_lse": True}),
        "xqa latent": (mla.xqa_batch_decode_with_kv_cache_mla, latent),
    }
