"""A product of rows that the ranks divide: others' rows travel while own ones are multiplied."""

from __future__ import annotations

from typing import Any

import torch

from .._common import checks
from .._common.dtypes import FLOAT, check_dtype
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..compat.backends import BackendSupportedError
from . import exchange_call, group_memory
from .graph_results import gather_matmul_results

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def _side_stream() -> torch.cuda.Stream:
    """A stream beside the current one, the same for each current one."""
    current = torch.cuda.current_stream()
    key = (current.device_index, current.cuda_stream)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream()
    return _streams[key]


@graph_operator(results=gather_matmul_results)
@flashinfer_api
def all_gather_matmul(
    inp: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    *,
    backend: str = "auto",
    verbose: bool = False,
) -> torch.Tensor:
    """``all_gather(inp) @ w``. Collective.

    Other ranks' rows come over peer memory on a stream of their own, while this rank's rows are
    multiplied.

    Parameters
    ----------
    inp : torch.Tensor
        ``[m, k]``, contiguous, float16, bfloat16 or float32; rows of whole 4 bytes. Alike on all
        ranks.
    w : torch.Tensor
        ``[k, n]``, same dtype, any strides.
    group : torch.distributed.ProcessGroup or CommBackend
        The ranks, 2 to 16 of one host. Memory is made at the first call, and when a call is larger
        than all before: make such a call before a graph is captured.
    backend : str
        ``"auto"``; there is one way here.
    verbose : bool
        Print the sizes.

    Returns
    -------
    torch.Tensor
        ``[world_size * m, n]``, rows in the order of the ranks.

    Raises
    ------
    BackendSupportedError
        If `backend` is another one.
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call of the group has timed out.
    """
    if backend != "auto":
        raise BackendSupportedError(f"`backend` must be 'auto', got {backend!r}")
    check_dtype("inp", checks.tensor("inp", inp, 2).dtype, FLOAT)
    checks.cuda_tensors(inp=inp, w=checks.tensor("w", w, 2))
    rows, inner = inp.shape
    if w.shape[0] != inner or w.dtype != inp.dtype or not inp.is_contiguous():
        raise ValueError(
            f"`inp` must be contiguous, and `w` [{inner}, n] of {inp.dtype}, got {list(w.shape)} "
            f"of {w.dtype}"
        )
    size = inp.numel() * inp.element_size()
    peers = group_memory.memory_of(
        "all_gather_matmul", group, lambda ranks: (ranks - 1) * (size + 256) + 256
    )
    rank, world_size = peers.rank, peers.world_size
    if verbose:
        print(f"all_gather_matmul: {world_size} x {rows} x {inner} by {list(w.shape)}", flush=True)
    gathered = inp.new_empty(world_size * rows, inner)
    out = inp.new_empty(world_size * rows, w.shape[1])
    if not inp.numel():
        return out.zero_()
    side, current = _side_stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        segment = exchange_call.Segment(inp, gathered, (1, 1, size), (0, 0, 0), (0, 0, size))
        exchange_call.run(peers, segment)
    first, last = rank * rows, (rank + 1) * rows
    torch.mm(inp, w, out=out[first:last])
    current.wait_stream(side)
    for begin, end in ((0, first), (last, world_size * rows)):
        if begin < end:
            torch.mm(gathered[begin:end], w, out=out[begin:end])
    for tensor in (inp, gathered):
        tensor.record_stream(side)
    return out
