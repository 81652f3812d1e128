"""Tables of addresses of weights: which tensors they stand for.

Kernels here read tensors, which have bounds. So a table remembers the weights that its rows were
filled with, keeps them alive as long as its own memory lives, and stands for nothing else: not for
addresses that others write, nor for a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .._common import checks

_ATTRIBUTE = "_flashinfer_weight_tables"


@dataclass
class _Rows:
    """The weights of the tables in one storage, by the rows' addresses, and its version."""

    version: int = -1
    weights: dict[int, torch.Tensor] = field(default_factory=dict)


def _row(table: torch.Tensor, slice_id: int) -> torch.Tensor:
    """A slice's addresses; a table of one dimension is a slice."""
    return table if table.ndim == 1 else table[slice_id]


def check(name: str, table: torch.Tensor, num_experts: int | None = None) -> int:
    """The number of slices of a table, ``[slices, experts]`` or ``[experts]``."""
    checks.tensor(name, table, 1, 2)
    checks.dtype(name, table.dtype, (torch.int64,))
    checks.contiguous(name, table)
    if num_experts is not None and table.shape[-1] != num_experts:
        raise ValueError(f"`{name}` must have {num_experts} columns, got {list(table.shape)}")
    if table.is_inference():
        raise ValueError(
            f"`{name}` must not be made in inference mode, where changes are not counted"
        )
    return table.shape[0] if table.ndim == 2 else 1


def fill(table: torch.Tensor, weights: torch.Tensor, slice_id: int) -> None:
    """Let a slice of a checked table stand for ``[adapters, experts, rows, columns]``.

    Its elements become the addresses of the first adapter's experts, as callers expect.
    """
    storage, row = table.untyped_storage(), _row(table, slice_id)
    rows = getattr(storage, _ATTRIBUTE, None)
    if rows is None or rows.version != table._version:
        rows = _Rows()  # what others have written into is trusted no more
        setattr(storage, _ATTRIBUTE, rows)
    steps = torch.arange(row.shape[0], device=row.device)
    row.copy_(steps * (weights.stride(1) * weights.element_size()) + weights.data_ptr())
    rows.weights[row.data_ptr()] = weights.detach()
    rows.version = table._version


def weights_of(name: str, table: torch.Tensor) -> list[torch.Tensor]:
    """The weights that the slices of a table stand for.

    Raises
    ------
    TypeError, ValueError
        If it is no table, or a slice is not what `fill` has written.
    """
    slices = check(name, table)
    rows = getattr(table.untyped_storage(), _ATTRIBUTE, None) or _Rows()
    if rows.version != table._version and rows.weights:
        raise ValueError(
            f"`{name}` must not be written to after fill_w_ptr, which gives it weights"
        )
    found = [rows.weights.get(_row(table, i).data_ptr()) for i in range(slices)]
    result = [weights for weights in found if weights is not None]
    if len(result) < slices or any(w.shape[1] != table.shape[-1] for w in result):
        raise ValueError(
            f"`{name}` must be a table whose {slices} slices fill_w_ptr has filled, or a view of "
            f"whole slices; a copy is none, got shape {list(table.shape)}"
        )
    return result
