"""All-reduce whose data cross the link in 8 bits."""

from __future__ import annotations

import threading
from typing import Any, cast

import torch

from .._common import checks
from .._common.dtypes import FLOAT, check_dtype
from .._common.kernels import Kernel
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..jit.comm import SCALE_GROUPS, QuantizedAllReduceConfig, gen_quantized_all_reduce_module
from . import group_memory
from .graph_results import quantized_results

SCALE_GROUP_DEFAULT = 128
_PURPOSE = "quantized_all_reduce"
_MIN_BYTES = 1 << 20
_kernels: dict[QuantizedAllReduceConfig, Kernel] = {}
_loading = threading.Lock()


def load(config: QuantizedAllReduceConfig) -> Kernel:
    """Build and load a kernel once, also where several threads are ranks."""
    with _loading:
        if config not in _kernels:
            module = gen_quantized_all_reduce_module(config).build_and_load()
            _kernels[config] = cast(Kernel, module.quantized_all_reduce)
        return _kernels[config]


def reset() -> None:
    """Free the memory of all groups. Collective in each."""
    group_memory.free(_PURPOSE)


@graph_operator("output", results=quantized_results)
@flashinfer_api
def quantized_all_reduce(
    inp: torch.Tensor,
    group: Any,
    *,
    scale_group: int = SCALE_GROUP_DEFAULT,
    block_size: int | None = None,
    num_warps: int | None = None,
    max_num_blocks: int | None = None,
    p2p_phase3: bool | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum a tensor over the ranks by two-shot in float8_e4m3fn. Collective.

    Each rank rounds what it sends, and owners round the sums: two errors of at most 2^-4 of a
    value. Values far below the largest one of their group lose more. All ranks hold the same bits.

    Parameters
    ----------
    inp : torch.Tensor
        Contiguous, float16, bfloat16 or float32; a multiple of 16 elements. Alike on all ranks.
    group : torch.distributed.ProcessGroup or CommBackend
        The ranks, 2 to 16 of one host. Memory is made at the first call, and when a call is larger
        than all before: make such a call before a graph is captured.
    scale_group : int
        Elements that share a float32 scale: 32, 64, 128, 256 or 512.
    block_size, num_warps, max_num_blocks, p2p_phase3 : optional
        Must be None: the launch follows from the size.
    output : torch.Tensor, optional
        Shape and dtype of `inp`; it may be `inp`. None: made.

    Returns
    -------
    torch.Tensor
        The sum, taken in float32 in the order of the ranks.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call of the group has timed out.
    """
    for name, value in (
        ("block_size", block_size),
        ("num_warps", num_warps),
        ("max_num_blocks", max_num_blocks),
        ("p2p_phase3", p2p_phase3),
    ):
        if value is not None:
            raise ValueError(
                f"`{name}` must be None: the launch follows from the size, got {value!r}"
            )
    check_dtype("inp", checks.tensor("inp", inp).dtype, FLOAT)
    checks.cuda_tensors(inp=inp)
    if output is None:
        output = torch.empty_like(inp)
    checks.choice("scale_group", scale_group, SCALE_GROUPS)
    groups = -(-inp.numel() // scale_group)

    def needed(ranks: int) -> int:
        """Codes and scales of all groups, dealt to the ranks in whole ones, from both shots."""
        return max(2 * ranks * -(-groups // ranks) * (scale_group + 4), _MIN_BYTES)

    peers = group_memory.memory_of(_PURPOSE, group, needed)
    config = QuantizedAllReduceConfig(inp.dtype, peers.world_size, scale_group)
    kernel = _kernels.get(config) or load(config)
    peers.launch(kernel, inp, output, None)
    return output
