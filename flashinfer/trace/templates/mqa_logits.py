"""Templates and references of the scores by which sparse attention chooses tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate


def _paged_reference(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
) -> torch.Tensor:
    """logits[b next_n + t, p] = scale[p] sum_h weights[h] relu(q[b, t, h] . k[p]) below a limit.

    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025, equation (1).
    """
    batch, next_n, heads, dim = q.shape
    pages, page_size = kv_fused.shape[:2]
    fused = kv_fused.reshape(pages, page_size * (dim + 4))
    codes = fused[:, : page_size * dim].contiguous().view(torch.float8_e4m3fn)
    scales = fused[:, page_size * dim :].contiguous().view(torch.float32)
    width = min(max_seq_len, block_tables.shape[1] * page_size)
    positions = torch.arange(width, device=q.device)
    limits = seq_lens[:, None] - next_n + 1 + torch.arange(next_n, device=q.device)
    seen = positions < limits[..., None]
    slots = block_tables.long()[:, positions // page_size] * page_size + positions % page_size
    slots = torch.where(seen[:, -1], slots, 0)
    keys = codes.reshape(pages * page_size, dim).double()[slots]
    products = torch.einsum("bthd,bpd->bthp", q.double(), keys).relu()
    by_head = weights.double().reshape(batch, next_n, heads, 1)
    scored = (products * by_head).sum(2) * scales.reshape(-1).double()[slots][:, None]
    scored = scored.masked_fill(~seen, -math.inf).reshape(batch * next_n, width)
    return torch.nn.functional.pad(scored, (0, max_seq_len - width), value=-math.inf)


def _ragged_reference(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
) -> torch.Tensor:
    """logits[i, p] = scale[p] sum_h weights[i, h] relu(q[i, h] . k[p]) for ks[i] <= p < ke[i].

    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025, equation (1).
    """
    keys, scales = kv
    positions = torch.arange(keys.shape[0], device=q.device)
    hidden = (positions < ks[:, None]) | (positions >= ke[:, None])
    products = torch.einsum("qhd,kd->qhk", q.double(), keys.double()).relu()
    scored = torch.einsum("qhk,qh->qk", products, weights.double()) * scales.double()
    return scored.masked_fill(hidden, -math.inf)


def _check(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> bool:
    """Where a query sees a token; tensor cores sum 8-bit products with some 14 bits."""
    wanted, got = expected[0].double(), actual[0].double()
    seen = torch.isfinite(wanted)
    error = (wanted[seen] - got[seen]).norm()
    return bool(error <= 4e-3 * wanted[seen].norm() + 1e-6)


def _draw(arguments: dict[str, Any]) -> dict[str, Any]:
    """Two requests over pages of 64, or 40 queries of a causal prefill, with finite codes."""
    generator = torch.Generator().manual_seed(5)
    device = arguments["q"].device

    def codes(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator)
        return values.to(device).to(torch.float8_e4m3fn)

    if "ks" in arguments:
        ends = torch.arange(300, 340, dtype=torch.int32, device=device)
        scales = torch.rand(340, generator=generator).to(device)
        weights = torch.randn(40, 64, generator=generator).to(device)
        drawn: dict[str, Any] = {"kv": (codes(340, 128), scales), "ks": ends - 300, "ke": ends}
        return {**arguments, **drawn, "q": codes(40, 64, 128), "weights": weights}
    scales = torch.rand(8, 64, generator=generator).to(device)
    parts = [codes(8, 64, 128).view(torch.uint8).flatten(1), scales.view(torch.uint8)]
    drawn = {
        "q": codes(2, 2, 64, 128),
        "kv_fused": torch.cat(parts, 1).view(8, 64, 1, 132),
        "weights": torch.randn(4, 64, generator=generator).to(device),
        "block_tables": torch.randperm(8, generator=generator).view(2, 4).int().to(device),
        "seq_lens": torch.tensor([77, 256], dtype=torch.int32, device=device),
        "max_seq_len": 256,
    }
    return {**arguments, **drawn, "schedule_meta": None}


_AXES: dict[str, Axis] = {
    "num_heads": Const("Heads of the queries.", abbrev="h"),
    "head_dim": Const("Columns of queries and keys.", abbrev="d"),
}
_PAGED: dict[str, Value] = {
    "q": Tensor(["batch_size", "next_n", "num_heads", "head_dim"], dtype="float8_e4m3fn"),
    "kv_fused": Tensor(
        ["num_pages", "page_size", "one", "key_bytes"],
        dtype="uint8",
        description="Per page its e4m3 keys, and behind them a float32 scale for each.",
    ),
    "weights": Tensor(["num_queries", "num_heads"], dtype="float32", layout="rows"),
    "block_tables": Tensor(["batch_size", "max_pages"], dtype="int32", layout="rows"),
    "seq_lens": Tensor(["batch_size"], dtype="int32", description="Tokens of each request."),
    "max_seq_len": Scalar("int32", minimum=0, description="Columns of the result."),
    "schedule_meta": Tensor(
        ["parts", "two"], dtype="int32", optional=True, description="How SMs share the work."
    ),
}

fp8_paged_mqa_logits_trace = TraceTemplate(
    "mqa_logits",
    axes={
        "batch_size": Var("Requests."),
        "next_n": Const("Query tokens of a request.", abbrev="n"),
        **_AXES,
        "num_pages": Var("Pages of the cache."),
        "page_size": Const("Tokens of a page.", abbrev="ps"),
        "one": Const("Heads of the keys.", abbrev="", value=1),
        "key_bytes": Const("Bytes of a key with its scale.", abbrev=""),
        "num_queries": Var("Query tokens of all requests."),
        "max_pages": Var("Columns of the block table."),
        "parts": Var("SMs and one."),
        "two": Const("Request and unit.", abbrev="", value=2),
        "columns": Var("Columns of the result.", from_values=True),
    },
    inputs=_PAGED,
    outputs={
        "logits": Tensor(
            ["num_queries", "columns"],
            param="out",
            dtype_from_scalar="output_dtype",
            dtype_default="float32",
            dtypes=("float32", "float16", "bfloat16"),
        )
    },
    name_prefix="fp8_paged_mqa_logits",
    reference=_paged_reference,
    check=_check,
    init=_draw,
    options={
        "output_dtype": (torch.float32, torch.float16, torch.bfloat16),
        "epi_dtype": (torch.float32,),
        "acc_dtype": (torch.float32,),
    },
    constraints=["head_dim == 128", "key_bytes == 132", "next_n * num_heads <= 256"],
    tags=["status:verified", "stage:decode"],
    description="Scores of a paged cache's tokens for sparse attention.",
)

fp8_mqa_logits_trace = TraceTemplate(
    "mqa_logits",
    axes={
        "num_queries": Var("Query tokens."),
        **_AXES,
        "num_keys": Var("Keys."),
    },
    inputs={
        "q": Tensor(["num_queries", "num_heads", "head_dim"], dtype="float8_e4m3fn"),
        "keys": Tensor(["num_keys", "head_dim"], dtype="float8_e4m3fn", param="kv", tuple_idx=0),
        "scales": Tensor(["num_keys"], dtype="float32", param="kv", tuple_idx=1),
        "weights": Tensor(["num_queries", "num_heads"], dtype="float32", layout="rows"),
        "ks": Tensor(["num_queries"], dtype="int32", description="First key of a query."),
        "ke": Tensor(["num_queries"], dtype="int32", description="Key after a query's last."),
    },
    outputs={"logits": Tensor(["num_queries", "num_keys"], dtype="float32")},
    name_prefix="fp8_mqa_logits",
    reference=_ragged_reference,
    check=_check,
    init=_draw,
    options={"clean_logits": (False, True), "max_seqlen_k": (0,), "sm_count": (None,)},
    constraints=["head_dim == 128"],
    tags=["status:verified", "stage:prefill"],
    description="Scores of a range of keys per query for sparse attention.",
)
