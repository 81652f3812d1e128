"""RoPE inside attention over keys of 8 bits, which are widened before they are rotated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from tests.attention.batches import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    Batch,
    check,
    check_paged,
    plan_decode,
    ragged_kv,
)
from tests.attention.calls import FUNCTIONS, make_call

ROPE = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e4, "rope_scale": 2.0}
LENGTHS = (700, 64, 129)
TYPES = {
    "bf16-e4m3": {"dtype": BF16, "kv_dtype": E4M3},
    "fp16-e5m2": {"dtype": FP16, "kv_dtype": E5M2},
    "e5m2": {"dtype": E5M2, "kv_dtype": E5M2, "o_dtype": BF16},
}
# Tiles of 8 and 16 rows, of 64 with large heads, of 128; one token and rows of tokens.
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "decode": ("decode", (1, 1, 1), {"group": 4}),
    "decode of 16 rows": ("decode", (1, 1, 1), {"group": 16, "head_dim_qk": 64, "head_dim_vo": 64}),
    "decode of 512": ("decode", (1, 1, 1), {"head_dim_qk": 512, "head_dim_vo": 512}),
    "pages": ("paged", (200, 5, 31), {"page_size": 3}),
    "pages of 256": ("paged", (40, 5, 31), {"head_dim_qk": 256, "head_dim_vo": 256}),
    "rows": ("ragged", (200, 5, 31), {"head_dim_qk": 192}),
    "one decode": ("single_decode", (1,), {}),
    "one prefill": ("single_prefill", (300,), {"kv_layout": "HND"}),
}
# `single_decode_with_kv_cache` has the output of its queries.
PAIRS = [
    (name, types) for name in CASES for types in TYPES if (name, types) != ("one decode", "e5m2")
]


@pytest.mark.parametrize(("name", "types"), PAIRS)
def test_against_the_reference(name: str, types: str, device: torch.device):
    path, qo_lens, sizes = CASES[name]
    batch = Batch(qo_lens, LENGTHS[: len(qo_lens)], **{**TYPES[types], **sizes})
    options: dict[str, Any] = {} if "decode" in path else {"causal": True}
    if path in FUNCTIONS and batch.o_dtype is not None:
        options["o_dtype"] = batch.o_dtype
    call = make_call(path, batch, device, **ROPE, **options)
    call.with_run(k_scale=0.5, return_lse=True).check()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_the_largest_keys_stay_finite(dtype: torch.dtype, device: torch.device):
    """A rotated pair of the largest e5m2 exceeds the largest float16."""
    batch = Batch((1,), (300,), dtype=dtype, kv_dtype=E5M2)
    k, v = ragged_kv(batch, device)
    k = torch.full_like(k.float(), 57344.0).to(E5M2)
    q = (batch.query(device)[0].float() * 2.0**-14).to(dtype)
    options = {"pos_encoding_mode": "ROPE_LLAMA", "return_lse": True}
    check(flashinfer.single_decode_with_kv_cache, q=q, k=k, v=v, **options)


def test_scales_of_heads_and_a_window(device: torch.device):
    batch = Batch((1, 1), (700, 64), dtype=FP16, kv_dtype=E4M3)
    wrapper = plan_decode(batch, device, **ROPE, window_left=100)
    scales = torch.tensor([0.5, 1.5], device=device)
    check_paged(wrapper, batch, device, k_scale=scales)
