"""Exchange of decode's partial results and their sum, weighted by LSE."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from .._attention.functions.merge import merge_states
from .._common import checks
from .._common.dtypes import FLOAT, check_dtype
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..jit.comm import check_ranks
from . import dcp_alltoall
from .comm_backend import resolve_backend
from .graph_results import lse_reduce_results


def decode_cp_a2a_lse_reduce_workspace_size(
    max_tokens: int, local_heads: int, cp_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of a rank's workspace.

    `max_tokens` and `local_heads`: of the largest call, heads that a rank keeps. `cp_size`: 2 to
    16.
    """
    check_ranks(cp_size)
    check_dtype("dtype", dtype, FLOAT)
    rows = checks.count("max_tokens", max_tokens) * checks.count("local_heads", local_heads)
    return 2 * ((cp_size - 1) * rows * (head_dim * dtype.itemsize + 4) + 256 * cp_size)


def decode_cp_a2a_lse_reduce_create_workspace(
    max_tokens: int,
    local_heads: int,
    cp_size: int,
    head_dim: int,
    dtype: torch.dtype,
    group: Any,
) -> torch.Tensor:
    """Memory of `decode_cp_a2a_lse_reduce`, shared over CUDA IPC. Collective.

    Parameters
    ----------
    max_tokens, local_heads, cp_size, head_dim, dtype
        As in `decode_cp_a2a_lse_reduce_workspace_size`.
    group : torch.distributed.ProcessGroup or CommBackend
        The ranks, of one host.

    Returns
    -------
    torch.Tensor
        int64 ``[1, n]``: this rank's memory.
    """
    size = decode_cp_a2a_lse_reduce_workspace_size(
        max_tokens, local_heads, cp_size, head_dim, dtype
    )
    backend = resolve_backend(None, group)
    if backend.Get_size() != cp_size:
        raise ValueError(
            f"`cp_size` must be that of the group, {backend.Get_size()}, got {cp_size}"
        )
    return dcp_alltoall.open_workspace(size, backend)


@graph_operator(results=lse_reduce_results)
@flashinfer_api
def decode_cp_a2a_lse_reduce(
    partial_o: torch.Tensor,
    partial_lse: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    lse_mode: Literal["base2", "basee"] = "base2",
) -> torch.Tensor:
    """Give each rank its heads, attended to the whole context. Collective.

    ``o = sum over r of softmax(lse)[r] * partial_o[r]`` over the ranks' results for this rank's
    block.

    Parameters
    ----------
    partial_o : torch.Tensor
        ``[..., cp_size, head_dim]``, contiguous, 16 or 32 bits: ``[..., r, :]`` is for rank r.
    partial_lse : torch.Tensor
        float32 ``[..., cp_size]``, contiguous: logarithm of the sum of exponentials; -inf where
        nothing was attended to.
    workspace : torch.Tensor
        Made by `decode_cp_a2a_lse_reduce_create_workspace`.
    cp_rank, cp_size : int
        The workspace's own.
    lse_mode : str
        Base of the logarithm: ``"base2"`` as attention here returns it, or ``"basee"``.

    Returns
    -------
    torch.Tensor
        ``[..., head_dim]``, dtype of `partial_o`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call on the workspace has timed out.
    """
    checks.choice("lse_mode", lse_mode, ("base2", "basee"))
    checks.tensor("partial_lse", partial_lse)
    o, lse = dcp_alltoall.decode_cp_a2a_alltoall(
        partial_o, partial_lse.unsqueeze(-1), workspace, cp_rank, cp_size
    )
    if lse_mode == "basee":
        lse = lse * math.log2(math.e)
    head_dim = o.shape[-1]
    merged, _ = merge_states(o.view(-1, cp_size, 1, head_dim), lse.view(-1, cp_size, 1))
    return merged.view(*partial_o.shape[:-2], head_dim)
