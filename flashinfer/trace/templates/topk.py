"""Templates and references of top-k and of the index transforms that use it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...tllm_enums import TopKTieBreak
from ..specs import FLOATING, Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate


def _chosen(row: torch.Tensor, k: int, tie_break: int) -> torch.Tensor:
    """Indices of the k largest elements in increasing order; all if there are no more."""
    values = row.double().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf"))
    if tie_break == 2:
        order = len(values) - 1 - values.flip(0).sort(descending=True, stable=True).indices
    else:
        order = values.sort(descending=True, stable=True).indices
    return order[:k].sort().values


def _windows(
    input: torch.Tensor, lengths: torch.Tensor, row_starts: torch.Tensor | None
) -> list[torch.Tensor]:
    """The columns of each row that are looked at."""
    starts = [0] * len(input) if row_starts is None else row_starts.clamp(min=0).tolist()
    return [
        row[start : start + max(length, 0)]
        for row, start, length in zip(input, starts, lengths.tolist(), strict=True)
    ]


def _top_k_reference(
    input: torch.Tensor, k: int, sorted: bool = False, tie_break: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """indices = the k largest of each row in increasing order, values = input[indices].

    Source: the definition; ties as documented.
    """
    if not 1 <= k <= input.shape[1]:
        raise ValueError(f"`k` must be 1 to {input.shape[1]}, got {k}")
    rows = [_chosen(row, k, tie_break) for row in input]
    if sorted:
        rows = [i[row[i].double().sort(descending=True, stable=True).indices]
                for i, row in zip(rows, input, strict=True)]  # fmt: skip
    empty = torch.empty(0, k, dtype=torch.int64, device=input.device)
    indices = torch.stack(rows) if rows else empty
    return input.gather(1, indices).double(), indices


def _top_k_page_table_transform_reference(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    tie_break: int = 0,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out_raw_indices: torch.Tensor | None = None,
) -> Any:
    """slot = table[start + i // page_size] * page_size + i % page_size for the k largest i.

    Source: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025 (sparse attention reads the chosen positions).
    """
    if page_table_row_starts is None and row_starts is not None:
        if page_size != 1:
            raise ValueError("`page_table_row_starts` must be given beside `row_starts`")
        page_table_row_starts = row_starts
    slots = torch.full((len(input), k), -1, dtype=torch.int64, device=input.device)
    raw = slots.clone()
    for r, window in enumerate(_windows(input, lengths, row_starts)):
        i = _chosen(window, k, tie_break)
        raw[r, : len(i)] = i
        batch = r if row_to_batch is None else int(row_to_batch[r])
        start = 0 if page_table_row_starts is None else int(page_table_row_starts[r])
        entry = start + i // page_size
        known = (entry >= 0) & (entry < src_page_table.shape[1])
        if not 0 <= batch < len(src_page_table) or not known.any():
            continue
        pages = src_page_table[batch].long()[entry.where(known, 0)]
        slots[r, : len(i)] = (pages * page_size + i % page_size).where(known, -1)
    return slots if out_raw_indices is None else (slots, raw)


def _top_k_ragged_transform_reference(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    tie_break: int = 0,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """position = offset + i for the k largest i.

    Source: as top_k_page_table_transform.
    """
    positions = torch.full((len(input), k), -1, dtype=torch.int64, device=input.device)
    for r, window in enumerate(_windows(input, lengths, row_starts)):
        i = _chosen(window, k, tie_break)
        positions[r, : len(i)] = i + int(offsets[r])
    return positions


_HINTS = ["deterministic", "dsa_graph_safe"]
_TIES = {"tie_break": (*TopKTieBreak, *map(int, TopKTieBreak))}
_INPUT = Tensor(["num_rows", "size"], param="input", dtypes=FLOATING, layout="rows")


_K_AT_LEAST = "1 <= k"


def _axes(**more: Axis) -> dict[str, Axis]:
    return {
        "num_rows": Var("Rows of scores."),
        "size": Var("Columns of a row."),
        "k": Const("Elements that are chosen of a row.", abbrev="k"),
        **more,
    }


def _ints(description: str) -> Tensor:
    return Tensor(["num_rows"], dtype="int32", description=description, layout="rows")


top_k_trace = TraceTemplate(
    op_type="topk",
    name_prefix="top_k",
    description="The largest elements of each row and their indices.",
    axes=_axes(),
    inputs={"scores": _INPUT},
    outputs={
        "values": Tensor(["num_rows", "k"], dtype_from="scores"),
        "indices": Tensor(["num_rows", "k"], dtype="int64"),
    },
    constraints=["1 <= k <= size"],
    options={"sorted": (False, True), **_TIES},
    hints=_HINTS,
    tags=["status:verified"],
    reference=_top_k_reference,
    init=lambda arguments: {**arguments, "k": min(5, arguments["input"].shape[-1])},
)


def _example_windows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Row lengths around k, and offsets that are not negative."""
    rows, size = arguments["input"].shape
    number = torch.arange(rows, dtype=torch.int32, device=arguments["input"].device)
    result = {**arguments, "k": 5, "lengths": (number * 3 + 4).clamp(max=size).int()}
    if "offsets" in arguments:
        result["offsets"] = number * 100
    if "src_page_table" in arguments:
        entries = 2 * size
        table = torch.arange(rows * entries, dtype=torch.int32, device=number.device)
        result["src_page_table"] = table.flip(0).reshape(rows, entries)
    return result


@functools.cache
def _page_table_template(given: frozenset[str]) -> TraceTemplate:
    inputs: dict[str, Value] = {
        "scores": _INPUT,
        "src_page_table": Tensor(["num_batches", "num_entries"], dtype="int32", layout="rows"),
        "lengths": _ints("Columns of each row's window."),
    }
    optional = {
        "row_to_batch": _ints("Row of the page table."),
        "row_starts": _ints("First column of each row's window."),
        "page_table_row_starts": _ints("First entry of each row in the page table."),
    }
    inputs |= {name: spec for name, spec in optional.items() if name in given}
    outputs: dict[str, Value] = {
        "slots": Tensor(["num_rows", "k"], dtype="int32", param="out", layout="rows")
    }
    raw: dict[str, Value] = {
        "raw_indices": Tensor(
            ["num_rows", "k"],
            dtype="int32",
            param="out_raw_indices",
            returned=False,
            layout="rows",
        )
    }
    options: dict[str, tuple[Any, ...]] = {
        name: (None,) for name in (*optional, "out_raw_indices") if name not in given
    }
    return TraceTemplate(
        op_type="topk",
        name_prefix="top_k_page_table_transform",
        description="Slots of the largest scores of each row, through a page table.",
        axes=_axes(
            num_batches=Var("Rows of the page table."),
            num_entries=Var("Entries of a row of the page table."),
            page_size=Const("Slots of a page.", abbrev="p"),
        ),
        inputs=inputs,
        outputs={**outputs, **(raw if "out_raw_indices" in given else {})},
        constraints=[
            _K_AT_LEAST,
            "1 <= page_size",
            *([] if "row_to_batch" in given else ["num_batches == num_rows"]),
        ],
        options={**options, **_TIES},
        hints=_HINTS,
        tags=["status:verified"],
        reference=_top_k_page_table_transform_reference,
        init=lambda arguments: {**_example_windows(arguments), "page_size": 1},
    )


@functools.cache
def _ragged_template(with_starts: bool) -> TraceTemplate:
    inputs: dict[str, Value] = {
        "scores": _INPUT,
        "offsets": _ints("Position of each row's first element."),
        "lengths": _ints("Columns of each row's window."),
    }
    if with_starts:
        inputs["row_starts"] = _ints("First column of each row's window.")
    return TraceTemplate(
        op_type="topk",
        name_prefix="top_k_ragged_transform",
        description="Positions of the largest scores of each row in a ragged tensor.",
        axes=_axes(),
        inputs=inputs,
        outputs={"positions": Tensor(["num_rows", "k"], dtype="int32")},
        constraints=[_K_AT_LEAST],
        options={**({} if with_starts else {"row_starts": (None,)}), **_TIES},
        hints=_HINTS,
        tags=["status:verified"],
        reference=_top_k_ragged_transform_reference,
        init=_example_windows,
    )


def _page_table_dispatch() -> Callable[..., TraceTemplate]:
    names = ("row_to_batch", "row_starts", "page_table_row_starts", "out_raw_indices")

    def dispatch(**arguments: Any) -> TraceTemplate:
        return _page_table_template(
            frozenset(name for name in names if arguments.get(name) is not None)
        )

    dispatch.templates = [_page_table_template(frozenset())]  # type: ignore[attr-defined]
    return dispatch


def _ragged_dispatch() -> Callable[..., TraceTemplate]:
    def dispatch(**arguments: Any) -> TraceTemplate:
        return _ragged_template(arguments.get("row_starts") is not None)

    dispatch.templates = [_ragged_template(False)]  # type: ignore[attr-defined]
    return dispatch


top_k_page_table_transform_trace = _page_table_dispatch()
top_k_ragged_transform_trace = _ragged_dispatch()
