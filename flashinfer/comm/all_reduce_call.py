"""One call of the all-reduce's kernels; the public functions only name its arguments."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from .._common import checks
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from ..jit.comm import AllReduceConfig, gen_all_reduce_module
from . import schedule as schedules
from .peer_workspace import PeerWorkspace


class Norm(NamedTuple):
    """Arguments of the steps after the sum, in the binding's order."""

    residual_in: torch.Tensor
    rms_gamma: torch.Tensor
    residual_out: torch.Tensor | None
    norm_out: torch.Tensor | None
    quant_out: torch.Tensor | None
    scale_out: torch.Tensor | None
    scale: torch.Tensor | float
    eps: float
    weight_bias: float


def _get_kernel(dtype: torch.dtype, world_size: int, input: str, output: str) -> Kernel:
    config = AllReduceConfig(dtype, world_size, input, output)
    return cast(Kernel, gen_all_reduce_module(config).build_and_load().all_reduce)


_kernels = KernelTable(_get_kernel)
_loading = threading.Lock()


def load(
    dtype: torch.dtype, world_size: int, source: str = "tensor", result: str = "sum"
) -> Kernel:
    """Build and load a kernel once, also where several threads are ranks."""
    with _loading:
        key = (dtype, world_size, source, result)
        if key not in _kernels:
            _kernels[key] = _get_kernel(*key)
        return _kernels[key]


def run(
    workspace: PeerWorkspace,
    input: torch.Tensor,
    output: torch.Tensor | None,
    norm: Norm | None = None,
    *,
    source: str = "tensor",
    result: str = "sum",
    moe: tuple[Any, ...] | None = None,
    use_oneshot: bool | None = None,
    enable_pdl: bool = False,
    completes_at_end: bool = True,
    schedule: schedules.Schedule | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Choose the schedule and launch; `names`: what the caller calls the binding's arguments."""
    try:
        kernel = _kernels[input.dtype, workspace.world_size, source, result]
    except NOT_LOADED:
        checks.cuda_tensors(input=input)
        kernel = load(input.dtype, workspace.world_size, source, result)
    if schedule is None:
        schedule = _choose(workspace, input, norm, use_oneshot)
    try:
        workspace.launch(
            kernel,
            input,
            output,
            None if norm is None else tuple(norm),
            moe,
            tuple(schedule),
            (enable_pdl, completes_at_end),
        )
    except (TypeError, ValueError) as error:
        if not names:
            raise
        with checks.named(**names):
            raise error


def _choose(
    workspace: PeerWorkspace, input: torch.Tensor, norm: Norm | None, use_oneshot: bool | None
) -> schedules.Schedule:
    rows = input if norm is None else norm.residual_in
    num_bytes = rows.numel() * rows.element_size()
    one_shot = use_oneshot
    if one_shot is None:
        one_shot = schedules.takes_one_shot(num_bytes, workspace.world_size)
    grid = (one_shot, workspace.world_size, workspace.max_ctas, workspace.is_shared_device)
    if norm is None:
        return schedules.flat_schedule(num_bytes, *grid)
    row_bytes = rows.shape[-1] * rows.element_size()
    if row_bytes > schedules.MAX_ROW_BYTES:
        raise ValueError(
            f"`residual_in` must have rows of at most {schedules.MAX_ROW_BYTES} bytes, got "
            f"{row_bytes}"
        )
    return schedules.row_schedule(rows.shape[0], row_bytes, *grid)
