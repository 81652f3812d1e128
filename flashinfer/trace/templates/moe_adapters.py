"""Templates and references of LoRA in mixtures of experts."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..specs import FLOATING, Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate

_HALF = ("bfloat16", "float16")
_INDEX = ("int32", "int64")


def _pair_products(
    x: torch.Tensor,
    weights: torch.Tensor,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    adapters: torch.Tensor,
) -> torch.Tensor:
    """Row p: x[p] times the matrix of pair p, rounded to its dtype; zeros where there is none."""
    num_adapters, num_experts, columns, _ = weights.shape
    out = x.new_zeros(x.shape[0], columns, dtype=torch.float64)
    chosen = torch.full_like(tokens, -1, dtype=torch.int64)
    known = (tokens >= 0) & (tokens < adapters.shape[0])
    chosen[known] = adapters[tokens[known].long()].long()
    for adapter, expert in torch.stack([chosen, experts.long()], -1).unique(dim=0).tolist():
        if 0 <= adapter < num_adapters and 0 <= expert < num_experts:
            rows = torch.where((chosen == adapter) & (experts == expert))[0]
            product = x[rows].double() @ weights[adapter, expert].double().T
            out[rows] = product.to(weights.dtype).double()
    return out


def _shrink_pairs_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    per_pair_input: bool = False,
) -> torch.Tensor:
    """y[s, p] += A x[token of p], where A is the matrix of the token's adapter and p's expert.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    rows = x
    if not per_pair_input:
        known = (sorted_token_ids >= 0) & (sorted_token_ids < x.shape[0])
        rows = x.new_zeros(sorted_token_ids.shape[0], x.shape[1])
        rows[known] = x[sorted_token_ids[known].long()]
    pairs = sorted_token_ids, expert_ids, lora_indices
    return torch.stack(
        [y[s].double() + _pair_products(rows, w, *pairs) for s, w in enumerate(weights)]
    )


def _expand_pairs_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    finalize: bool = True,
) -> torch.Tensor:
    """y[token of p] += topk_weights[p] B x[s, p], where B is p's matrix; without finalize y[p].

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    result = y.double()
    known = (sorted_token_ids >= 0) & (sorted_token_ids < lora_indices.shape[0])
    for s, (weight, start) in enumerate(zip(weights, slice_start_loc.tolist(), strict=True)):
        rows = _pair_products(
            x[s].to(weight.dtype), weight, sorted_token_ids, expert_ids, lora_indices
        )
        first, end = max(start, 0), max(min(start + weight.shape[2], y.shape[1]), 0)
        columns = result[:, first:end]
        rows = rows[:, first - start :][:, : columns.shape[1]]
        if finalize:
            weighted = rows[known] * topk_weights[known].double()[:, None]
            columns.index_add_(0, sorted_token_ids[known].long(), weighted)
        else:
            columns += rows
    return result


def _axes() -> dict[str, Axis]:
    return {
        "tokens": Var("Tokens."),
        "pairs": Var("Pairs of a token and an expert."),
        "slices": Const("Matrices of a pair, side by side.", abbrev=""),
        "adapters": Const("Adapters.", abbrev="l"),
        "experts": Const("Experts.", abbrev="e"),
        "rank": Const("Rank of the adapters.", abbrev="r"),
    }


def _pair_inputs() -> dict[str, Value]:
    return {
        "sorted_token_ids": Tensor(["pairs"], dtypes=_INDEX, description="Tokens."),
        "expert_ids": Tensor(["pairs"], dtypes=_INDEX, description="Experts."),
        "lora_indices": Tensor(
            ["tokens"], dtypes=_INDEX, description="Adapters of tokens; -1: none."
        ),
    }


def _weight_inputs(columns: list[str], k: str, dtype_from: str | None) -> dict[str, Value]:
    """The matrices of each slice; without `dtype_from` the first one's dtype is all others'."""
    result: dict[str, Value] = {}
    for s, rows in enumerate(columns):
        source = dtype_from or ("weight_0" if s > 0 else None)
        result[f"weight_{s}"] = Tensor(
            ["adapters", "experts", rows, k],
            param="weights",
            tuple_idx=s,
            dtypes=None if source else _HALF,
            dtype_from=source,
            layout="contiguous",
        )
    return result


def _init(arguments: dict[str, Any], slices: int, shrinks: bool, by_pair: bool) -> dict[str, Any]:
    """Two adapters of three experts; two tokens have none, and pairs come in any order."""
    device = arguments["y"].device
    generator = torch.Generator().manual_seed(11)
    tokens, top_k, adapters, experts, rank, wide = 7, 3, 2, 3, 16, 40
    pairs = tokens * top_k
    shapes = [(rank, wide)] * slices if shrinks else [(24 + 8 * s, rank) for s in range(slices)]
    total = sum(rows for rows, _ in shapes)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def number(high: int, count: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator).to(device)

    given: dict[str, Any] = {
        **arguments,
        "weights": [normal(adapters, experts, *shape).bfloat16() for shape in shapes],
        "sorted_token_ids": (torch.randperm(pairs, generator=generator) // top_k).to(device),
        "expert_ids": number(experts, pairs).int(),
        "lora_indices": number(adapters, tokens, low=-1),
    }
    if shrinks:
        given["x"] = normal(pairs if by_pair else tokens, wide).bfloat16()
        given["y"] = normal(slices, pairs, rank)
        return {**given, "per_pair_input": by_pair}
    starts = [sum(rows for rows, _ in shapes[:s]) for s in range(slices)]
    return {
        **given,
        "x": normal(slices, pairs, rank),
        "y": normal(pairs if by_pair else tokens, total),
        "topk_weights": normal(pairs),
        "slice_start_loc": torch.tensor(starts, device=device),
        "finalize": not by_pair,
    }


_CONSTRAINTS = ["rank % 8 == 0", "experts <= 1024"]


@functools.cache
def _shrink_template(slices: int, by_pair: bool) -> TraceTemplate:
    y = Tensor(["slices", "pairs", "rank"], dtype="float32", param="y", returned=False)
    return TraceTemplate(
        "moe_adapters",
        axes={**_axes(), "k": Const("Elements of a row.", abbrev="k")},
        inputs={
            "x": Tensor(["pairs" if by_pair else "tokens", "k"], dtypes=_HALF, layout="rows"),
            "y": y,
            **_weight_inputs(["rank"] * slices, "k", "x"),
            **_pair_inputs(),
        },
        outputs={"y": y},
        name_prefix=f"shrink_pairs_{slices}" + ("_by_pair" if by_pair else ""),
        reference=_shrink_pairs_reference,
        init=functools.partial(_init, slices=slices, shrinks=True, by_pair=by_pair),
        constraints=[*_CONSTRAINTS, f"slices == {slices}", "k % 8 == 0"],
        options={"per_pair_input": (by_pair,)},
        description="Adds each pair's row times the first matrix of its adapter and expert.",
    )


@functools.cache
def _expand_template(slices: int, by_pair: bool) -> TraceTemplate:
    columns = [f"columns_{s}" for s in range(slices)]
    sizes: dict[str, Axis] = {name: Const("Columns of a slice.", abbrev="n") for name in columns}
    rows = "pairs" if by_pair else "tokens"
    y = Tensor([rows, "columns"], dtype="float32", param="y", returned=False)
    return TraceTemplate(
        "moe_adapters",
        axes={**_axes(), **sizes, "columns": Const("Columns of the result.", abbrev="")},
        inputs={
            "x": Tensor(["slices", "pairs", "rank"], dtypes=FLOATING),
            "y": y,
            **_weight_inputs(columns, "rank", None),
            **_pair_inputs(),
            "topk_weights": Tensor(["pairs"], dtype="float32", description="Factors of pairs."),
            "slice_start_loc": Tensor(
                ["slices"], dtypes=_INDEX, description="First columns of the slices."
            ),
        },
        outputs={"y": y},
        name_prefix=f"expand_pairs_{slices}" + ("_by_pair" if by_pair else ""),
        reference=_expand_pairs_reference,
        init=functools.partial(_init, slices=slices, shrinks=False, by_pair=by_pair),
        constraints=[
            *_CONSTRAINTS,
            f"slices == {slices}",
            *(f"{name} % 8 == 0" for name in columns),
            *(f"{name} <= columns" for name in columns),
        ],
        options={"finalize": (not by_pair,)},
        description="Adds each pair's row times the second matrix of its adapter and expert.",
    )


def _slices(arguments: dict[str, Any]) -> int:
    weights = arguments.get("weights")
    return max(1, len(weights)) if isinstance(weights, (list, tuple)) else 1


def shrink_pairs_trace(**arguments: Any) -> TraceTemplate:
    """The template of a call's number of slices and input."""
    return _shrink_template(_slices(arguments), arguments.get("per_pair_input", False) is True)


def expand_pairs_trace(**arguments: Any) -> TraceTemplate:
    """The template of a call's number of slices and result."""
    return _expand_template(_slices(arguments), arguments.get("finalize", True) is False)


shrink_pairs_trace.templates = [  # type: ignore[attr-defined]
    _shrink_template(slices, by_pair) for slices in (1, 2) for by_pair in (False, True)
]
expand_pairs_trace.templates = [  # type: ignore[attr-defined]
    _expand_template(slices, by_pair) for slices in (1, 2) for by_pair in (False, True)
]
