"""TensorRT-LLM's names of the fused all-reduce, over the same kernels as `allreduce_fusion`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .._common import checks
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..jit.comm import check_ranks
from . import all_reduce_call, patterns
from . import schedule as schedules
from .comm_backend import resolve_backend
from .cuda_ipc import CudaRTLibrary
from .fusion_names import (
    AllReduceFusionOp,
    AllReduceFusionPattern,
    AllReduceStrategyConfig,
    AllReduceStrategyType,
    QuantizationSFLayout,
)
from .graph_results import FUSION_OUTPUTS
from .peer_workspace import SENTINEL, PeerWorkspace

__all__ = [
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "QuantizationSFLayout",
    "check_trtllm_allreduce_fusion_workspace_metadata",
    "compute_fp4_swizzled_layout_sf_size",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_custom_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_lamport_initialize",
    "trtllm_lamport_initialize_all",
]

# Open workspaces by the address of their tensor of pointers, and by that of the rank's buffer.
_by_tensor: dict[int, PeerWorkspace] = {}
_by_buffer: dict[int, tuple[PeerWorkspace, torch.Tensor]] = {}


def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Scales of a swizzled layout: rows padded to 128 and columns of scales to 4."""
    return -(-total_row // 128) * 128 * (-(-total_column // 4) * 4)


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: Any | None = None,
    create_metadata: bool = False,
    comm_backend: Any | None = None,
    use_symm_dev_mem: bool = False,
) -> tuple[Any, ...]:
    """Create the memory of `trtllm_allreduce_fusion` and its kin. Collective.

    Parameters
    ----------
    tp_rank, tp_size : int
        This process's place in the group, and the size of the group: 2 to 16 ranks of one host.
    max_token_num, hidden_dim : int
        The largest tensor that will be reduced.
    use_fp32_lamport : bool
        Room for float32; else for 16-bit types.
    group : torch.distributed.ProcessGroup, optional
        The ranks; None: all processes.
    create_metadata : bool
        Also return a dictionary of the sizes, which calls check.
    comm_backend : CommBackend, optional
        The ranks, instead of `group`.
    use_symm_dev_mem : bool
        Must be False: memory comes from CUDA IPC.

    Returns
    -------
    ipc_handles : list of list of int
        Addresses of the ranks' buffers and flags; for the destruction.
    workspace_ptrs : torch.Tensor
        The same on the GPU, int64; calls take it.
    metadata : dict
        Only with `create_metadata`.

    Raises
    ------
    ValueError
        If an argument is not allowed.
    """
    check_ranks(checks.count("tp_size", tp_size))
    checks.count("tp_rank", tp_rank, 0, tp_size - 1)
    checks.count("max_token_num", max_token_num)
    checks.count("hidden_dim", hidden_dim)
    if use_symm_dev_mem:
        raise ValueError("`use_symm_dev_mem` must be False: the memory is shared through CUDA IPC")
    num_bytes = max_token_num * hidden_dim * (4 if use_fp32_lamport else 2)
    backend = resolve_backend(comm_backend, group)
    if (tp_rank, tp_size) != (backend.Get_rank(), backend.Get_size()):
        raise ValueError(
            f"`tp_rank` and `tp_size` must be those of the group, {backend.Get_rank()} and "
            f"{backend.Get_size()}, got {tp_rank} and {tp_size}"
        )
    peers = PeerWorkspace(schedules.half_bytes(num_bytes, tp_size), backend)
    handles = [
        [address for address in addresses[:tp_size]]
        for addresses in (peers.struct.buffers, peers.struct.flags)
    ]
    pointers = torch.tensor(sum(handles, []), dtype=torch.int64, device=peers.device)
    _by_tensor[pointers.data_ptr()] = peers
    _by_buffer[handles[0][tp_rank]] = (peers, pointers)
    if not create_metadata:
        return handles, pointers
    metadata = {
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "max_token_num": max_token_num,
        "hidden_dim": hidden_dim,
        "use_fp32_lamport": use_fp32_lamport,
        "buffer_bytes": 2 * peers.half_bytes,
    }
    return handles, pointers, metadata


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: list[list[int]], group: Any | None = None
) -> None:
    """Free what `trtllm_create_ipc_workspace_for_all_reduce_fusion` returned first. Collective.

    Raises
    ------
    ValueError
        If `workspace` is not open.
    """
    found = [_by_buffer.pop(address, None) for address in workspace[0]]
    opened = [each for each in found if each is not None]
    if len(opened) != 1:
        raise ValueError("`workspace` is not open")
    peers, pointers = opened[0]
    del _by_tensor[pointers.data_ptr()]
    peers.close()


trtllm_create_ipc_workspace_for_all_reduce = trtllm_create_ipc_workspace_for_all_reduce_fusion
trtllm_destroy_ipc_workspace_for_all_reduce = trtllm_destroy_ipc_workspace_for_all_reduce_fusion


def trtllm_lamport_initialize(buffer_ptr: int, size: int, dtype: torch.dtype) -> None:
    """Fill a receive buffer with the sentinel of this project's protocol, all bits set.

    Workspaces do it at their creation. `size` counts elements of `dtype`.
    """

    CudaRTLibrary().cudaMemset(ctypes.c_void_p(buffer_ptr), SENTINEL, size * dtype.itemsize)


def trtllm_lamport_initialize_all(
    buffer_0_ptr: int, buffer_1_ptr: int, buffer_2_ptr: int, size: int, dtype: torch.dtype
) -> None:
    """`trtllm_lamport_initialize` of three buffers."""
    for pointer in (buffer_0_ptr, buffer_1_ptr, buffer_2_ptr):
        trtllm_lamport_initialize(pointer, size, dtype)


def check_trtllm_allreduce_fusion_workspace_metadata(
    token_num: int, hidden_dim: int, world_size: int, dtype: torch.dtype, metadata: dict[str, Any]
) -> None:
    """Raise a ValueError unless a tensor fits the workspace of `metadata`."""
    if world_size != metadata["tp_size"]:
        raise ValueError(f"`world_size` must be {metadata['tp_size']}, got {world_size}")
    width = 4 if metadata["use_fp32_lamport"] else 2
    room = metadata["max_token_num"] * metadata["hidden_dim"] * width
    needed = token_num * hidden_dim * dtype.itemsize
    if needed > room:
        raise ValueError(
            f"`token_num` times `hidden_dim` must be at most {room} bytes of the workspace, got "
            f"{token_num} x {hidden_dim}: {needed}"
        )


def opened(workspace_ptrs: Any, world_size: int, world_rank: int) -> PeerWorkspace:
    checks.tensor("workspace_ptrs", workspace_ptrs, 1)
    peers = _by_tensor.get(workspace_ptrs.data_ptr())
    if peers is None:
        raise ValueError(
            "`workspace_ptrs` must be of trtllm_create_ipc_workspace_for_all_reduce_fusion, and "
            "open"
        )
    peers.check_place(("world_rank", "world_size"), world_rank, world_size)
    return peers


def rows_of(name: str, tensor: Any, token_num: int, hidden_dim: int) -> Any:
    """A tensor seen as ``[token_num, hidden_dim]``, or None."""
    if tensor is None:
        return None
    if checks.tensor(name, tensor).numel() != token_num * hidden_dim:
        raise ValueError(
            f"`{name}` must have {token_num} x {hidden_dim} elements, got shape "
            f"{list(tensor.shape)}"
        )
    return tensor.view(token_num, hidden_dim)


_NAMES = {"input": "allreduce_in", "output": "allreduce_out", "workspace": "workspace_ptrs"}


@graph_operator("allreduce_out", *FUSION_OUTPUTS)
@flashinfer_api
def trtllm_allreduce_fusion(
    allreduce_in: torch.Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: AllReduceFusionPattern,
    use_oneshot: bool | None,
    allreduce_out: torch.Tensor | None,
    residual_in: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    rms_gamma: torch.Tensor | None,
    rms_eps: float | None,
    scale_factor: torch.Tensor | float | None,
    layout_code: QuantizationSFLayout | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """`allreduce_fusion` on a workspace of `trtllm_create_ipc_workspace_for_all_reduce_fusion`.

    Parameters and errors are those of `allreduce_fusion`; row tensors may be flat, ``[token_num *
    hidden_dim]``, and nothing is made: `allreduce_out` is needed by kAllReduce.
    """
    peers = opened(workspace_ptrs, world_size, world_rank)
    if metadata is not None:
        check_trtllm_allreduce_fusion_workspace_metadata(
            token_num, hidden_dim, world_size, allreduce_in.dtype, metadata
        )
    rows = {
        name: rows_of(name, tensor, token_num, hidden_dim)
        for name, tensor in (
            ("allreduce_in", allreduce_in),
            ("allreduce_out", allreduce_out),
            ("residual_in", residual_in),
            ("residual_out", residual_out),
            ("norm_out", norm_out),
        )
    }
    pattern = patterns.pattern_of(pattern_code)
    launch = patterns.Launch(use_oneshot, launch_with_pdl, trigger_completion_at_end)
    if pattern == AllReduceFusionPattern.kAllReduce:
        checks.tensor("allreduce_out", allreduce_out)

        all_reduce_call.run(
            peers,
            rows["allreduce_in"],
            rows["allreduce_out"],
            use_oneshot=use_oneshot,
            enable_pdl=launch_with_pdl,
            completes_at_end=trigger_completion_at_end,
            names=_NAMES,
        )
        return
    if pattern in patterns.TAKES_EXPERTS:
        raise ValueError(
            f"`pattern_code` {pattern.name} has functions of its own: "
            "trtllm_moe_allreduce_fusion, trtllm_moe_finalize_allreduce_fusion"
        )
    patterns.fused(
        peers,
        patterns.Source(rows["allreduce_in"], names=_NAMES),
        pattern,
        patterns.Outputs(
            rows["allreduce_out"], rows["residual_out"], rows["norm_out"], quant_out, scale_out
        ),
        rows["residual_in"],
        rms_gamma,
        eps=1e-6 if rms_eps is None else rms_eps,
        weight_bias=0.0 if weight_bias is None else weight_bias,
        scale=scale_factor,
        layout=layout_code,
        launch=launch,
    )


_PLAIN_STRATEGIES = {
    AllReduceStrategyType.AUTO: None,
    AllReduceStrategyType.MIN_LATENCY: None,
    AllReduceStrategyType.ONESHOT: True,
    AllReduceStrategyType.TWOSHOT: False,
}


@graph_operator("out")
@flashinfer_api
def trtllm_custom_all_reduce(
    inp: torch.Tensor,
    out: torch.Tensor,
    tp_size: int,
    tp_rank: int,
    workspace_ptrs: torch.Tensor,
    strategy_code: AllReduceStrategyType = AllReduceStrategyType.AUTO,
    launch_with_pdl: bool = False,
) -> None:
    """Plain all-reduce by the names of the older interface.

    Parameters
    ----------
    inp, out : torch.Tensor
        Same shape and dtype, contiguous; `out` may be `inp`.
    tp_size, tp_rank : int
        The workspace's own.
    workspace_ptrs : torch.Tensor
        Made by `trtllm_create_ipc_workspace_for_all_reduce`.
    strategy_code : AllReduceStrategyType
        AUTO, MIN_LATENCY, ONESHOT or TWOSHOT.
    launch_with_pdl : bool
        Programmatic dependent launch.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed.
    """

    peers = opened(workspace_ptrs, tp_size, tp_rank)
    if strategy_code not in _PLAIN_STRATEGIES:
        raise ValueError(f"`strategy_code` must be AUTO, ONESHOT or TWOSHOT, got {strategy_code!r}")
    one_shot = _PLAIN_STRATEGIES[AllReduceStrategyType(strategy_code)]
    names = {"input": "inp", "output": "out", "workspace": "workspace_ptrs"}
    all_reduce_call.run(
        peers, inp, out, use_oneshot=one_shot, enable_pdl=launch_with_pdl, names=names
    )
