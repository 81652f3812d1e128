"""All-gather and reduce-scatter of small tensors inside a host."""

from __future__ import annotations

from typing import Any

import torch

from .._common import checks
from .._compile.handles import Planned
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..jit.comm import check_ranks
from . import exchange_call
from .comm_backend import resolve_backend
from .graph_results import gather_results, scatter_results
from .peer_workspace import PeerWorkspace, agree


class ExchangeWorkspace(Planned):
    """Memory of `all_gather` and `reduce_scatter`. Creation and destruction are collective.

    Parameters
    ----------
    max_bytes : int
        Bytes of the largest block that a rank sends to another.
    comm_backend : CommBackend, optional
        The ranks, 2 to 16 of one host; None: `group`.
    group : torch.distributed.ProcessGroup, optional
        The ranks; None: all processes.

    Raises
    ------
    ValueError
        If the ranks call with different sizes, or are on several hosts.
    """

    def __init__(
        self, max_bytes: int, comm_backend: Any | None = None, group: Any | None = None
    ) -> None:
        backend = resolve_backend(comm_backend, group)
        checks.count("max_bytes", max_bytes, 1, 1 << 40)
        check_ranks(backend.Get_size())
        agree(backend, "ExchangeWorkspace", {"max_bytes": max_bytes})
        half = (backend.Get_size() - 1) * (max_bytes + 256) + 256
        self.peers = PeerWorkspace(half, backend)
        self.rank, self.world_size = self.peers.rank, self.peers.world_size

    def set_timeout(self, seconds: float) -> None:
        """How long kernels wait for another rank, also those of captured graphs."""
        self.peers.set_timeout(seconds)

    def destroy(self) -> None:
        """Free the memory. Collective; a second call does nothing."""
        self.peers.close()


@graph_operator("output", results=gather_results)
@flashinfer_api
def all_gather(
    input: torch.Tensor, workspace: ExchangeWorkspace, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Collect a tensor of every rank. Collective.

    Parameters
    ----------
    input : torch.Tensor
        ``[n, ...]``, contiguous, float16, bfloat16 or float32; whole 4 bytes. All ranks' alike.
    workspace : ExchangeWorkspace
        For at least `input`'s bytes.
    output : torch.Tensor, optional
        ``[world_size * n, ...]``; None: made.

    Returns
    -------
    torch.Tensor
        The ranks' tensors one after the other. A NaN may change its payload.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call on the workspace has timed out.
    """
    checks.contiguous("input", input)
    world_size = workspace.world_size
    shape = [world_size * input.shape[0], *input.shape[1:]] if input.ndim else [world_size]
    output = exchange_call.output("output", output, shape, input)
    size = input.numel() * input.element_size()
    if size:
        segment = exchange_call.Segment(input, output, (1, 1, size), (0, 0, 0), (0, 0, size))
        exchange_call.run(workspace.peers, segment)
    return output


@graph_operator("output", results=scatter_results)
@flashinfer_api
def reduce_scatter(
    input: torch.Tensor, workspace: ExchangeWorkspace, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Add a tensor over the ranks; each rank keeps its part. Collective.

    Parameters
    ----------
    input : torch.Tensor
        ``[world_size * n, ...]``, contiguous, float16, bfloat16 or float32. All ranks' alike.
    workspace : ExchangeWorkspace
        For at least `output`'s bytes.
    output : torch.Tensor, optional
        ``[n, ...]``; whole 4 bytes; None: made.

    Returns
    -------
    torch.Tensor
        Rows ``rank * n`` to ``(rank + 1) * n`` of the sum, taken in float32 in the order of the
        ranks and rounded once.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call on the workspace has timed out.
    """
    checks.contiguous("input", input)
    world_size = workspace.world_size
    if input.ndim == 0 or input.shape[0] % world_size:
        raise ValueError(
            f"`input` must have a multiple of {world_size} rows, got shape {list(input.shape)}"
        )
    shape = [input.shape[0] // world_size, *input.shape[1:]]
    output = exchange_call.output("output", output, shape, input)
    size = output.numel() * output.element_size()
    if size:
        segment = exchange_call.Segment(input, output, (1, 1, size), (0, 0, size), (0, 0, 0))
        exchange_call.run(workspace.peers, segment, adds=True)
    return output
