"""Packs and merges bands of heads around a Ulysses exchange."""

from __future__ import annotations

import torch

from .._common import checks
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from .graph_results import merge_results, pack_results


def check_band(name: str, heads: int, head_offset: int, head_count: int) -> None:
    """Refuse heads `head_offset` to ``head_offset + head_count`` beyond a rank's `heads`."""
    checks.count("head_offset", head_offset, 0)
    checks.count("head_count", head_count)
    if head_offset + head_count > heads:
        raise ValueError(
            f"`head_offset` + `head_count` must be at most {heads}, the heads of a rank in "
            f"`{name}`, got {head_offset} + {head_count}"
        )


@graph_operator("out", results=pack_results, in_graphs=True)
@flashinfer_api
def pack_ulysses_qkv_head_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    world_size: int,
    head_offset: int,
    head_count: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put the same band of every rank's heads of query, key and value beside each other.

    Parameters
    ----------
    query, key, value : torch.Tensor
        ``[B, S, H, D]``, any strides, same shape and dtype; `H` is a multiple of `world_size`.
    world_size : int
        Ranks; rank r has the heads from ``r * H / world_size`` on.
    head_offset, head_count : int
        The band among a rank's heads.
    out : torch.Tensor, optional
        The result, contiguous; None: made.

    Returns
    -------
    torch.Tensor
        ``[B, S, world_size * head_count, 3 * D]``, which `UlyssesCommunicator.scatter_heads` takes.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed.
    """
    batch, seq, heads, dim = checks.tensor("query", query, 4).shape
    for name, tensor in (("key", key), ("value", value)):
        if checks.tensor(name, tensor, 4).shape != query.shape or tensor.dtype != query.dtype:
            raise ValueError(
                f"`{name}` must have the shape and dtype of `query`, {list(query.shape)} and "
                f"{query.dtype}, got {list(tensor.shape)} and {tensor.dtype}"
            )
    if heads % checks.count("world_size", world_size):
        raise ValueError(f"`query` must have a multiple of {world_size} heads, got {heads}")
    check_band("query", heads // world_size, head_offset, head_count)
    shape = (batch, seq, world_size * head_count, 3 * dim)
    if out is None:
        out = query.new_empty(shape)
    elif tuple(out.shape) != shape or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(f"`out` must be contiguous with shape {list(shape)} and {query.dtype}")
    packed = out.view(batch, seq, world_size, head_count, 3, dim)
    for i, tensor in enumerate((query, key, value)):
        of_ranks = tensor.unflatten(2, (world_size, heads // world_size))
        packed[..., i, :] = of_ranks[:, :, :, head_offset : head_offset + head_count]
    return out


@graph_operator("out", results=merge_results, in_graphs=True)
@flashinfer_api
def merge_ulysses_output_head_chunk(
    received: torch.Tensor,
    *,
    world_size: int,
    local_heads: int,
    head_offset: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Put a band of every rank's heads where it belongs among all heads.

    Parameters
    ----------
    received : torch.Tensor
        ``[B, S, world_size * head_count, D]``: what `UlyssesCommunicator.gather_heads` returned.
    world_size, local_heads, head_offset : int
        Ranks, heads of a rank, and the first head of the band.
    out : torch.Tensor
        ``[B, S, world_size * local_heads, D]``; other heads stay.

    Returns
    -------
    torch.Tensor
        `out`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed.
    """
    batch, seq, heads, dim = checks.tensor("received", received, 4).shape
    if heads % checks.count("world_size", world_size):
        raise ValueError(f"`received` must have a multiple of {world_size} heads, got {heads}")
    check_band("out", checks.count("local_heads", local_heads), head_offset, heads // world_size)
    shape = [batch, seq, world_size * local_heads, dim]
    if list(checks.tensor("out", out, 4).shape) != shape or out.dtype != received.dtype:
        raise ValueError(f"`out` must have shape {shape} and dtype {received.dtype}")
    band = out.unflatten(2, (world_size, local_heads))
    count = heads // world_size
    band[:, :, :, head_offset : head_offset + count] = received.unflatten(2, (world_size, count))
    return out
