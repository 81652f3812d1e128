"""Which kernel a plan takes: the backend that is forced or faster, and its tiles."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ..._common.arch import is_sm90a_supported
from ...jit.attention import hopper
from ...jit.attention.config import (
    FLOAT16,
    PACKED_FLOAT4,
    TILES_SECOND,
    choose_tile_q,
    decode_tile_q,
)
from ...jit.attention.hopper import hopper_tile_q
from .no_kernel import NO_MODULE, is_computed_from_plans
from .planner import KernelEstimate, estimate_kernels
from .requests import AttentionProblem, Requests
from .spec import AttentionSpec
from .speeds import kernel_model

BACKENDS = ("auto", "fa2", "fa3")
_ROWS_FOR_HOPPER = 64  # of a request that decodes: with fewer, tiles of Hopper's are nearly empty


class KernelChoice(NamedTuple):
    """The kernel of a launch.

    Attributes
    ----------
    backend : str
        ``"fa2"``, the portable kernel, or ``"fa3"``, the one for Hopper.
    tile_q : int
        Packed query rows of a tile.
    tile_q_second : int
        Rows of a tile of the second shape in a launch of the portable kernel; 0: one shape.
    """

    backend: str
    tile_q: int
    tile_q_second: int = 0


def choose_kernel(
    problem: AttentionProblem,
    device: torch.device,
    *,
    second: AttentionProblem | None = None,
    fixed_split_size: bool = False,
) -> KernelChoice:
    """The kernel that the caller forces, or that takes less time.

    Parameters
    ----------
    problem : AttentionProblem
        The requests; the backend of its spec is what the caller wants.
    device : torch.device
        Device of the plan. A device that is no GPU lacks no architecture.
    second : AttentionProblem, optional
        Requests of the same launch that have tensors of their own.
    fixed_split_size : bool
        Whether results must not depend on the batch, as the choice would.

    Raises
    ------
    ValueError
        If ``"fa3"`` is wanted, or needed, where it does not run; the message says what is missing.
        If index tensors describe no batch, the message is the planner's.
    """
    spec, requests = problem.spec, problem.requests
    if second is not None and spec.kv_data_type == PACKED_FLOAT4:
        raise ValueError("`kv_data_type` must not be uint8 (4 bits) in launches of two parts")
    decodes = requests.qo_indptr is None
    rows = requests.tokens_per_request * spec.group_size if decodes else 0
    fills_tiles = rows >= _ROWS_FOR_HOPPER and spec.q_data_type in FLOAT16 and not fixed_split_size
    has_few_rows = decodes and not fills_tiles
    backend = possible_backend(spec, device, has_few_rows, second is not None, fixed_split_size)
    if backend == "fa3":
        return hopper_choice(spec)
    second_tile = 0 if second is None else _second_tile(second)
    tile_q = decode_tile_q(rows, spec.tile_head_dim, spec.kv_data_type) if decodes else 0
    if backend == "auto" or not decodes:
        found = estimate(spec, requests, 0, fixed_split_size, backend == "auto")
        if found.hopper_us < found.portable_us:
            return hopper_choice(spec)
        tile_q = tile_q or found.tile_q
    return KernelChoice("fa2", tile_q, second_tile)


def hopper_choice(spec: AttentionSpec) -> KernelChoice:
    """The kernel for Hopper, which has one tile for each head size."""
    tile_q = hopper_tile_q(spec.head_dim_qk, spec.head_dim_vo, spec.q_data_type)
    return KernelChoice("fa3", tile_q)


def _second_tile(decode: AttentionProblem) -> int:
    """Tile of the second requests: the smallest that holds each of them, if there is one."""
    lengths = decode.requests.qo_lengths()
    rows = int(lengths.max()) * decode.spec.group_size if len(lengths) else 0
    few, more = TILES_SECOND
    return few if rows <= few or decode.spec.tile_head_dim > 256 else more


def estimate(
    spec: AttentionSpec,
    requests: Requests,
    tile_q_second: int,
    fixed_split_size: bool,
    with_hopper: bool,
) -> KernelEstimate:
    """`estimate_kernels` of a batch; with nothing to compile it, a launch of the portable kernel.

    Parameters
    ----------
    spec, requests
        The problem.
    tile_q_second : int
        Second tile of the portable kernel, for the requests that fit it; 0: there is none.
    fixed_split_size : bool
        Whether the tile must not depend on the batch.
    with_hopper : bool
        Whether the kernel for Hopper serves the launch.
    """
    try:
        page_size = requests.page_size
        model = kernel_model(spec, page_size, tile_q_second, fixed_split_size, with_hopper)
        return estimate_kernels(model, requests)
    except NO_MODULE:
        if not is_computed_from_plans():
            raise
        tile_q = choose_tile_q(0, 0, spec.tile_head_dim, fixed_split_size)
        return KernelEstimate(tile_q, 0.0, math.inf, math.inf, 0)


def possible_backend(
    spec: AttentionSpec,
    device: torch.device,
    has_few_rows: bool = False,
    two_parts: bool = False,
    fixed_split_size: bool = False,
) -> str:
    """The only backend that can be taken, or ``"auto"`` where the batch decides.

    Parameters
    ----------
    spec : AttentionSpec
        Its backend is what the caller wants.
    device : torch.device
        Device of the plan.
    has_few_rows : bool
        Whether requests only decode, with so few query rows that most of a tile is empty.
    two_parts : bool
        Whether the launch has two sets of tensors.
    fixed_split_size : bool
        Whether results must not depend on the batch.
    """
    wanted = spec.backend
    if wanted == "fa2":
        return "fa2"
    if wanted == "auto" and (has_few_rows or not is_hopper(device)):
        return "fa2"
    missing = hopper.missing_on_hopper(spec.kernel_options, two_parts)
    if wanted == "fa3":
        if missing is None and device.type == "cuda" and not is_hopper(device):
            missing = f"a GPU of compute capability 9.0: {device} is none"
        hopper.check_hopper(missing)
        return "fa3"
    if missing is not None:
        return "fa2"
    if fixed_split_size:
        return "fa3"  # the kernel must not depend on the batch either
    # The portable kernel multiplies 8-bit queries at the speed of 16-bit ones.
    return "auto" if spec.q_data_type in FLOAT16 else "fa3"


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the kernel for Hopper runs on a device."""
    return device.type == "cuda" and is_sm90a_supported(device)
