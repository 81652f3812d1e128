"""Template and reference of top-k over rows of different lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..specs import FLOATING, Const, Tensor, Value, Var
from ..template import TraceTemplate


def _top_k_varlen_reference(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    compress_ratio: int = 1,
    next_n: int = 1,
    return_values: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """indices = the top_k largest of the first (seq_len - next_n + t + 1) // compress_ratio.

    Source: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025 (sparse attention reads the chosen positions).
    """
    indices = torch.full((len(logits), top_k), -1, dtype=torch.int64, device=logits.device)
    values = torch.full((len(logits), top_k), -torch.inf, dtype=torch.float64, device=logits.device)
    for r, row in enumerate(logits.double()):
        length = int(seq_lens[r // next_n]) - next_n + r % next_n + 1
        window = row[: max(length, 0) // compress_ratio].nan_to_num(
            nan=torch.inf, posinf=torch.inf, neginf=-torch.inf
        )
        chosen = window.sort(descending=True, stable=True).indices[:top_k].sort().values
        indices[r, : len(chosen)] = chosen
        values[r, : len(chosen)] = row[chosen]
    return (indices, values) if return_values else indices


def _example(arguments: dict[str, Any]) -> dict[str, Any]:
    """Lengths around top_k."""
    rows, size = arguments["logits"].shape
    number = torch.arange(rows, dtype=torch.int32, device=arguments["logits"].device)
    lengths = (number * 3 + 4).clamp(max=size).int()
    return {**arguments, "top_k": 5, "seq_lens": lengths, "next_n": 1, "compress_ratio": 1}


def _nest(with_values: bool) -> Callable[[tuple[Any, ...]], Any]:
    return lambda results: tuple(results) if with_values else (*results, None)


@functools.cache
def _template(with_values: bool, with_guess: bool) -> TraceTemplate:
    outputs: dict[str, Value] = {
        "indices": Tensor(
            ["num_rows", "top_k"], param="out_indices", dtype="int32", layout="matrix"
        )
    }
    if with_values:
        outputs["values"] = Tensor(
            ["num_rows", "top_k"], param="out_values", dtype_from="logits", layout="rows"
        )
    inputs: dict[str, Value] = {
        "logits": Tensor(["num_rows", "max_len"], dtypes=FLOATING, layout="rows"),
        "seq_lens": Tensor(["num_requests"], dtype="int32", layout="rows"),
    }
    if with_guess:
        inputs["pre_idx"] = Tensor(["num_requests", "top_k"], dtype="int32", layout="rows")
    options: dict[str, tuple[Any, ...]] = {
        "return_values": (with_values,),
        "backend": ("auto", "radix_cutlass"),
        "workspace": (None,),
    }
    if not with_values:
        options["out_values"] = (None,)
    if not with_guess:
        options["pre_idx"] = (None,)
    return TraceTemplate(
        op_type="topk_varlen",
        name_prefix="top_k_varlen" + ("_values" if with_values else ""),
        description="Indices of the largest logits of each row within its length.",
        axes={
            "num_rows": Var("Rows of logits."),
            "max_len": Var("Columns of a row."),
            "num_requests": Var("Requests."),
            "top_k": Const("Logits that are chosen of a row.", abbrev="k"),
            "next_n": Const("Rows of a request.", abbrev="n"),
            "compress_ratio": Const("Tokens that a logit stands for.", abbrev="c"),
        },
        inputs=inputs,
        outputs=outputs,
        constraints=[
            "1 <= top_k",
            "1 <= next_n",
            "1 <= compress_ratio",
            "num_requests * next_n == num_rows",
        ],
        options=options,
        hints=["load_balance"],
        tags=["status:verified"],
        reference=_top_k_varlen_reference,
        init=_example,
        nest=_nest(with_values),
    )


def _trace(**arguments: Any) -> TraceTemplate:
    return _template(bool(arguments.get("return_values")), arguments.get("pre_idx") is not None)


top_k_varlen_trace: Callable[..., TraceTemplate] = _trace
top_k_varlen_trace.templates = [_template(False, False)]  # type: ignore[attr-defined]
