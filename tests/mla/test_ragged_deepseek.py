"""Prefill of latent attention in one call, in chunks that are merged, and 8-bit operands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.prefill import trtllm_ragged_attention_deepseek
from tests.mla.batches import BF16, WORKSPACE_BYTES, indptr, randn

HEADS, QK, VO = 16, 192, 128
SCALE = QK**-0.5


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: tuple[list[int], list[int]],
    **more: Any,
) -> Any:
    rows = [indptr(part).to(q.device) for part in lens]
    options: dict[str, Any] = {"is_causal": True, "return_lse": True, **more}
    return trtllm_ragged_attention_deepseek(
        q, k, v, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device),
        torch.tensor(lens[1], dtype=torch.int32, device=q.device), max(lens[0]), max(lens[1]),
        SCALE, 1.0, 1.0, len(lens[0]), -1, rows[0], rows[1], None, **options,
    )  # fmt: skip


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: tuple[list[int], list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps of base 2, causal, in float64."""
    outs, lses, q0, k0 = [], [], 0, 0
    for n, m in zip(*lens, strict=True):
        logits = SCALE * torch.einsum(
            "qhd,khd->hqk", q[q0 : q0 + n].double(), k[k0 : k0 + m].double()
        )
        hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        logits = logits.masked_fill(hidden, -math.inf)
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[k0 : k0 + m].double()))
        lses.append(logits.logsumexp(-1).T / math.log(2))
        q0, k0 = q0 + n, k0 + m
    return torch.cat(outs), torch.cat(lses)


def operands(device: torch.device, lens: tuple[list[int], list[int]]) -> tuple[torch.Tensor, ...]:
    tokens = (sum(lens[0]), sum(lens[1]), sum(lens[1]))
    dims = (QK, QK, VO)
    return tuple(
        randn((n, HEADS, dim), BF16, device, i)
        for i, (n, dim) in enumerate(zip(tokens, dims, strict=True))
    )


@pytest.mark.parametrize("on_host", [False, True])
def test_one_call(device: torch.device, on_host: bool) -> None:
    lens = ([70, 1, 130], [70, 300, 257])
    q, k, v = operands(device, lens)
    more: dict[str, Any] = {}
    if on_host:
        more = {"q_seq_lens_cpu": torch.tensor(lens[0]), "kv_seq_lens_cpu": torch.tensor(lens[1])}
    out, lse = attend(q, k, v, lens, **more)
    right, right_lse = expected(q, k, v, lens)
    assert (out.double() - right).norm() < 6e-3 * right.norm()
    assert torch.allclose(lse.double(), right_lse, atol=2e-2)


def test_sinks(device: torch.device) -> None:
    """A sink of log-sum-exp s takes exp(s) of the softmax's sum."""
    lens = ([70, 1], [70, 300])
    q, k, v = operands(device, lens)
    sinks = torch.linspace(-2, 6, HEADS, device=device)
    out, lse = attend(q, k, v, lens, attention_sinks=sinks)
    right, right_lse = expected(q, k, v, lens)
    share = torch.sigmoid(right_lse * math.log(2) - sinks.double())
    right = right * share[..., None]
    assert (out.double() - right).norm() < 6e-3 * right.norm()
    assert torch.allclose(lse.double(), right_lse - share.log2(), atol=2e-2)


def test_chunks_are_merged(device: torch.device) -> None:
    """New tokens see the cached ones, whole, and each other, causally."""
    new, old = [60, 33], [500, 129]
    lens = (new, [a + b for a, b in zip(new, old, strict=True)])
    q, k, v = operands(device, lens)
    right, right_lse = expected(q, k, v, lens)
    begins = [0, lens[1][0]]
    parts = []
    for first, last in (([0, 0], old), (old, lens[1])):
        rows = torch.cat(
            [torch.arange(b + i, b + j) for b, i, j in zip(begins, first, last, strict=True)]
        ).to(device)
        chunk = [j - i for i, j in zip(first, last, strict=True)]
        causal = first == old
        parts.append(attend(q, k[rows], v[rows], (new, chunk), is_causal=causal))
    out, lse = flashinfer.merge_state(*parts[0], *parts[1])
    assert (out.double() - right).norm() < 8e-3 * right.norm()
    assert torch.allclose(lse.double(), right_lse, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_in_8_bits(device: torch.device, dtype: torch.dtype) -> None:
    kv_nope, k_pe = randn((9, 5, 256), dtype, device, 1) * 100, randn((9, 1, 64), dtype, device, 2)
    key, value = flashinfer.concat_mla_kv_quant_fp8(kv_nope, k_pe)
    whole = torch.cat([kv_nope[..., :128], k_pe.expand(-1, 5, -1)], -1)
    for got, wanted in ((key, whole), (value, kv_nope[..., 128:])):
        assert torch.equal(got.float(), wanted.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_refusals() -> None:
    q, k, v = operands(torch.device("cpu"), ([2], [3]))
    for name, value in (
        ("use_fp16_softmax", True),
        ("sage_attn_sfs", (torch.ones(1), None, None, None)),
        ("kv_seq_lens_cpu", torch.tensor([3, 4])),
    ):
        with pytest.raises(ValueError, match="batch_size" if "cpu" in name else name):
            attend(q, k, v, ([2], [3]), **{name: value})
