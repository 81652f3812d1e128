"""Exchange of decode's partial results where ranks divide a context."""

from __future__ import annotations

from typing import Any

import torch

from .._common import checks
from .._common.dtypes import FLOAT
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..jit.comm import check_ranks
from . import head_exchange
from .comm_backend import TorchDistBackend
from .dlpack_utils import pack_strided_memory
from .graph_results import exchange_results
from .mapping import Mapping
from .mnnvl import MnnvlConfig
from .peer_workspace import PeerWorkspace, agree

_BYTES_TO_RANK = 4 << 20  # a larger call takes several kernels
_opened: dict[int, PeerWorkspace] = {}


def decode_cp_a2a_workspace_size(cp_size: int) -> int:
    """Bytes of a rank's workspace for a group of `cp_size` ranks, 2 to 16."""
    check_ranks(cp_size)
    return 2 * (cp_size - 1) * _BYTES_TO_RANK


def open_workspace(num_bytes: int, backend: Any) -> torch.Tensor:
    """The tensor of a new workspace of this rank. Collective."""
    check_ranks(backend.Get_size())
    agree(backend, "decode_cp_a2a", {"workspace_size": num_bytes})
    peers = PeerWorkspace(num_bytes // 2, backend)
    size = 2 * peers.half_bytes
    address, device = peers.struct.buffers[peers.rank], peers.device.index
    tensor = pack_strided_memory(address, size, size, 1, torch.int64, device)
    _opened[tensor.data_ptr()] = peers
    return tensor


def opened(workspace: Any, cp_rank: int, cp_size: int) -> PeerWorkspace:
    """The memory whose tensor `workspace` is."""
    peers = _opened.get(workspace.data_ptr()) if isinstance(workspace, torch.Tensor) else None
    if peers is None:
        raise ValueError("`workspace` must be of decode_cp_a2a_allocate_mnnvl_workspace, and open")
    peers.check_place(("cp_rank", "cp_size"), cp_rank, cp_size)
    return peers


def close_workspace(workspace: torch.Tensor) -> None:
    """Free a workspace. Collective; a second call does nothing."""
    peers = _opened.pop(workspace.data_ptr(), None)
    if peers is not None:
        peers.close()


def decode_cp_a2a_allocate_mnnvl_workspace(
    mapping: Mapping, *, mnnvl_config: MnnvlConfig | None = None
) -> torch.Tensor:
    """Memory of `decode_cp_a2a_alltoall`, shared over CUDA IPC. Collective.

    Parameters
    ----------
    mapping : Mapping
        `cp_size` ranks of one host, 2 to 16.
    mnnvl_config : MnnvlConfig, optional
        Its `comm_backend` sets up the ranks; None: ``torch.distributed``.

    Returns
    -------
    torch.Tensor
        int64 ``[1, n]``: this rank's memory, for the other functions.

    Raises
    ------
    ValueError
        If the ranks are on several hosts.
    """
    backend = mnnvl_config.comm_backend if mnnvl_config is not None else None
    if backend is None:
        backend = TorchDistBackend()
    if backend.Get_size() != mapping.cp_size:
        backend = backend.Split(mapping.cp_group[0], mapping.cp_rank)
    return open_workspace(decode_cp_a2a_workspace_size(mapping.cp_size), backend)


def decode_cp_a2a_init_workspace(workspace: torch.Tensor, cp_rank: int, cp_size: int) -> None:
    """Check a workspace; its memory is ready when it is allocated.

    Raises
    ------
    ValueError
        If it is not open, or of other ranks.
    """
    opened(workspace, cp_rank, cp_size)


def _blocks(name: str, tensor: Any, cp_size: int) -> torch.Tensor:
    """A tensor ``[..., cp_size, n]`` as ``[batch, cp_size, n]``."""
    if checks.tensor(name, tensor).ndim < 2 or tensor.shape[-2] != cp_size:
        raise ValueError(f"`{name}` must have shape [..., {cp_size}, n], got {list(tensor.shape)}")
    checks.contiguous(name, tensor)
    if tensor.shape[-1] * tensor.element_size() % 4:
        raise ValueError(
            f"`{name}` must have rows of whole 4 bytes, got {tensor.shape[-1]} elements"
        )
    return tensor.view(-1, cp_size, tensor.shape[-1])


@graph_operator("out", results=exchange_results)
@flashinfer_api
def decode_cp_a2a_alltoall(
    partial_o: torch.Tensor,
    softmax_stats: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    enable_pdl: bool | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each rank its block of every rank's partial results. Collective.

    Parameters
    ----------
    partial_o : torch.Tensor
        ``[..., cp_size, head_dim]``, contiguous, float16, bfloat16 or float32: ``[..., r, :]`` is
        for rank r.
    softmax_stats : torch.Tensor
        float32 ``[..., cp_size, s]``, contiguous, with the same leading sizes: LSE, or maximum and
        sum.
    workspace : torch.Tensor
        Made by `decode_cp_a2a_allocate_mnnvl_workspace`.
    cp_rank, cp_size : int
        The workspace's own.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the GPU has it.
    out : tuple of two torch.Tensor, optional
        The results; None: made.

    Returns
    -------
    o, stats : torch.Tensor
        The shapes of the inputs: ``[..., r, :]`` came from rank r. A NaN may change its payload.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call on the workspace has timed out.
    """
    peers = opened(workspace, cp_rank, cp_size)
    sources = (
        _blocks("partial_o", partial_o, cp_size),
        _blocks("softmax_stats", softmax_stats, cp_size),
    )
    checks.dtype("partial_o", partial_o.dtype, FLOAT)
    checks.dtype("softmax_stats", softmax_stats.dtype, (torch.float32,))
    if partial_o.shape[:-1] != softmax_stats.shape[:-1]:
        raise ValueError(
            f"`softmax_stats` must have the leading sizes of `partial_o`, "
            f"{list(partial_o.shape[:-1])}, got {list(softmax_stats.shape[:-1])}"
        )
    if out is None:
        out = torch.empty_like(partial_o), torch.empty_like(softmax_stats)
    elif not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"`out` must be a tuple of two tensors, got {type(out).__name__}")
    for name, given, like in (("out[0]", out[0], partial_o), ("out[1]", out[1], softmax_stats)):
        if checks.tensor(name, given).shape != like.shape or given.dtype != like.dtype:
            raise ValueError(f"`{name}` must have shape {list(like.shape)} and dtype {like.dtype}")
    targets = _blocks("out[0]", out[0], cp_size), _blocks("out[1]", out[1], cp_size)
    head_exchange.exchange_parts(peers, sources, targets, enable_pdl)
    return out
