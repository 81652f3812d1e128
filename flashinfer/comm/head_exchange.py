"""Exchanges of blocks with strides, which context parallelism is made of."""

from __future__ import annotations

from typing import Any

import torch

from . import exchange_call
from .exchange_call import Segment
from .peer_workspace import PeerWorkspace


def blocks(total: int, block_bytes: int, room: int) -> list[tuple[int, int]]:
    """Parts of `total` blocks that fit `room` bytes each: begin and end."""
    each = room // block_bytes
    if each == 0:
        raise ValueError(
            f"`workspace` has room for {room} bytes to a rank, {block_bytes} are needed"
        )
    return [(begin, min(begin + each, total)) for begin in range(0, total, each)]


def scatter_heads(
    peers: PeerWorkspace, x: torch.Tensor, out: torch.Tensor, enable_pdl: bool | None = None
) -> None:
    """Part of a sequence ``[B, S, W * H, D]`` to part of the heads ``[B, W * S, H, D]``."""
    batch, seq, all_heads, dim = x.shape
    row = all_heads // peers.world_size * dim * x.element_size()
    _run(
        peers,
        Segment(
            x,
            out,
            (batch, seq, row),
            (seq * peers.world_size * row, peers.world_size * row, row),
            (peers.world_size * seq * row, row, seq * row),
        ),
        enable_pdl,
    )


def gather_heads(
    peers: PeerWorkspace,
    x: torch.Tensor,
    out: torch.Tensor,
    head_offset: int = 0,
    enable_pdl: bool | None = None,
) -> None:
    """The inverse of `scatter_heads`, into each rank's heads of `out` from `head_offset` on."""
    world_size, width = peers.world_size, x.element_size()
    batch, seq, heads, dim = x.shape[0], x.shape[1] // world_size, x.shape[2], x.shape[3]
    row, of_rank = heads * dim * width, out.shape[2] // world_size * dim * width
    _run(
        peers,
        Segment(
            x,
            out.view(-1)[head_offset * dim :],
            (batch, seq, row),
            (world_size * seq * row, row, seq * row),
            (seq * world_size * of_rank, world_size * of_rank, of_rank),
        ),
        enable_pdl,
    )


def exchange_parts(
    peers: PeerWorkspace,
    sources: tuple[torch.Tensor, ...],
    targets: tuple[torch.Tensor, ...],
    enable_pdl: bool | None = None,
) -> None:
    """Block r of one or two tensors ``[batch, world_size, n]`` goes to rank r.

    The received blocks stand in the order of the ranks. Calls take as much of the batch as fits.
    """
    rows = [t.shape[2] * t.element_size() for t in sources]
    batch = sources[0].shape[0]
    if batch == 0:
        return
    for begin, end in blocks(batch, sum(rows), exchange_call.room(peers)):
        segments: list[Any] = [
            Segment(
                source[begin:end],
                target[begin:end],
                (end - begin, 1, row),
                (peers.world_size * row, 0, row),
                (peers.world_size * row, 0, row),
            )
            for source, target, row in zip(sources, targets, rows, strict=True)
        ]
        exchange_call.run(peers, *segments, enable_pdl=enable_pdl)


def _run(peers: PeerWorkspace, segment: Segment, enable_pdl: bool | None) -> None:
    if segment.source.numel():
        exchange_call.run(peers, segment, enable_pdl=enable_pdl)
