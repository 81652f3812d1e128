"""Which backend attention takes: questions that serving engines ask before they build wrappers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..._common.arch import is_sm90a_supported
from ..._common.dtypes import torch_name
from ...jit.attention import hopper
from ...jit.attention.config import FLOAT16, POS_ENCODINGS, choose_tile_q
from ...jit.attention.hopper import hopper_tile_q
from ...jit.attention.plan import Estimate, estimate_kernels
from ...jit.errors import ToolchainError
from ...reference_backend import is_active
from .problem import AttentionProblem
from .speeds import kernel_model

BACKENDS = ("auto", "fa2", "fa3")
_PORTABLE_CAPABILITY, _HOPPER_CAPABILITY = 80, 90


def choose_kernel(
    problem: AttentionProblem,
    device: torch.device,
    *,
    two_parts: bool = False,
    fixed_split_size: bool = False,
) -> tuple[str, int]:
    """Backend and query tile of a plan: what the caller forces, or what takes less time.

    Parameters
    ----------
    problem : AttentionProblem
        The requests; its `backend` is what the caller wants.
    device : torch.device
        Of the plan. One that is no GPU (with the reference backend) lacks no architecture.
    two_parts : bool
        Whether the launch has two sets of tensors.
    fixed_split_size : bool
        Whether results must not depend on the batch, as the choice would.

    Raises
    ------
    ValueError
        If ``"fa3"`` is wanted, or needed, where it does not run; the message says what is missing.
        Of index tensors that are no batch, the message of the planner.
    """
    backend = possible_backend(problem, device, two_parts, fixed_split_size)
    if backend == "fa3":
        head_dims = (problem.head_dim_qk, problem.head_dim_vo)
        return backend, hopper_tile_q(*head_dims, problem.q_data_type)
    if problem.qo_indptr is None:
        rows = problem.tokens_per_request * problem.group_size
        return "fa2", choose_tile_q(rows, rows, problem.head_dim_vo)
    found = estimate(problem, 0, fixed_split_size, backend == "auto")
    if found.hopper_us < found.portable_us:
        return "fa3", hopper_tile_q(problem.head_dim_qk, problem.head_dim_vo)
    return "fa2", int(found.tile_q)


def estimate(
    problem: AttentionProblem, tile_q_second: int, fixed_split_size: bool, with_hopper: bool
) -> Estimate:
    """`estimate_kernels` of a batch; with nothing to compile it, a launch of the portable kernel.

    Parameters
    ----------
    problem : AttentionProblem
        The requests.
    tile_q_second : int
        Second tile of the portable kernel, for the requests that fit it; 0: there is none.
    fixed_split_size : bool
        Whether the tile must not depend on the batch.
    with_hopper : bool
        Whether the kernel for Hopper serves the launch.
    """
    model = kernel_model(
        *(problem.num_kv_heads, problem.group_size, problem.head_dim_qk, problem.head_dim_vo),
        *(problem.q_data_type, problem.kv_data_type, problem.page_size),
        *(tile_q_second, fixed_split_size, with_hopper),
    )
    try:
        return estimate_kernels(model, problem.group())
    except ToolchainError:
        if not is_active():
            raise
        tile_q = choose_tile_q(0, 0, problem.head_dim_vo, fixed_split_size)
        return Estimate(tile_q, 0.0, math.inf, math.inf, 0)


def possible_backend(
    problem: AttentionProblem,
    device: torch.device,
    two_parts: bool = False,
    fixed_split_size: bool = False,
) -> str:
    """The only one, or ``"auto"`` where the batch decides; parameters of `choose_kernel`."""
    wanted = problem.backend
    is_needed = problem.q_data_type not in FLOAT16  # the other has no queries of 8 bits
    if is_needed and wanted == "fa2":
        _refuse_queries(problem, "backend 'fa2'")
    if wanted == "fa2" or (wanted == "auto" and not is_needed and not is_hopper(device)):
        return "fa2"
    missing = hopper.missing_on_hopper(
        problem.q_data_type,
        problem.kv_data_type,
        problem.head_dim_qk,
        problem.head_dim_vo,
        problem.pos_encoding_mode.lower(),
        two_parts,
        problem.variant is not None and problem.variant.transforms_operands,
        problem.variant is None or problem.variant.has_softmax,
    )
    if wanted == "fa3" or is_needed:
        if missing is None and device.type == "cuda" and not is_hopper(device):
            missing = f"a GPU of compute capability 9.0: {device} is none"
        if missing is None and is_needed and problem.qo_indptr is None:
            missing = "decode wrappers"
        if missing is not None and is_needed:
            _refuse_queries(problem, f"backend 'fa3', which lacks {missing}")
        hopper.check_hopper(missing)
        return "fa3"
    # Tiles of Hopper's would be empty but for a row or two where requests only decode.
    serves = missing is None and not fixed_split_size and problem.qo_indptr is not None
    return "auto" if serves else "fa2"


def _refuse_queries(problem: AttentionProblem, reason: str) -> None:
    name = torch_name(problem.q_data_type)
    raise ValueError(f"`q_data_type` must be float16 or bfloat16, got {name} with {reason}")


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the kernel for Hopper runs on a device."""
    return device.type == "cuda" and is_sm90a_supported(device)


def determine_attention_backend(
    device: torch.device,
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    *,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
) -> str:
    """The backend that ``backend="auto"`` takes.

    Parameters
    ----------
    device : torch.device
        Where attention will run.
    pos_encoding_mode : int
        0: none, 1: rotation in the kernel, 2: ALiBi.
    use_fp16_qk_reductions, use_custom_mask : bool
        Options of the call.
    dtype_q, dtype_kv : torch.dtype
        Of queries, and of keys and values.
    head_dim_qk, head_dim_vo : int, optional
        Head sizes.

    Returns
    -------
    str
        ``"fa3"`` where `is_fa3_backend_supported` says so, the device is Hopper and there are
        kernels for the head sizes, if these are given; else ``"fa2"``. A plan takes ``"fa2"`` also
        where queries are too few for the tiles of the other.
    """
    options = (pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv)
    if not (is_fa3_backend_supported(*options) and is_hopper(device)):
        return "fa2"
    known = [size for size in (head_dim_qk, head_dim_vo) if size is not None]
    if known and not is_fa3_prefill_head_dim_supported(known[0], known[-1]):
        return "fa2"
    return "fa3"


def is_fa3_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """Whether the kernel for Hopper has these options; parameters of `determine_attention_backend`.

    It has every mask, and ALiBi. It does not rotate queries and keys; both are of one type of 16
    bits, or float8_e4m3fn, or keys are of 8 bits and queries of 16.
    """
    modes = [mode for mode, name in enumerate(POS_ENCODINGS) if name != "rope_llama"]
    types = hopper.serves_dtypes(dtype_q, dtype_kv)
    return types and not use_fp16_qk_reductions and pos_encoding_mode in modes


def is_fa3_prefill_head_dim_supported(head_dim_qk: int, head_dim_vo: int) -> bool:
    """Whether the kernel for Hopper has heads of these sizes."""
    return (head_dim_qk, head_dim_vo) in hopper.HEAD_DIMS


def is_cutlass_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """False: there are no CUTLASS kernels."""
    return False


def is_backend_supported(backend: str, cc: int | tuple[int, int] | None = None) -> bool:
    """Whether attention has a backend, and whether it runs on a compute capability.

    Parameters
    ----------
    backend : str
        Such as ``"fa2"``. ``"fa3"`` is for prefill, on Hopper alone.
    cc : int or tuple of int, optional
        Such as 90 or ``(9, 0)``.
    """
    if backend not in BACKENDS:
        return False
    if isinstance(cc, tuple):
        cc = 10 * cc[0] + cc[1]
    if backend == "fa3":
        return cc is None or cc == _HOPPER_CAPABILITY
    return cc is None or cc >= _PORTABLE_CAPABILITY


def check_lse_base(lse_base: str) -> None:
    """Refuse another base of log-sum-exps than 2 (``"log2"``) and e (``"ln"``)."""
    if lse_base not in ("log2", "ln"):
        raise ValueError(f"`lse_base` must be 'log2' or 'ln', got {lse_base!r}")


def check_lse_layout(lse_layout: str) -> None:
    """Refuse another layout of log-sum-exps than ``"NH"`` (tokens, heads) and ``"HN"``."""
    if lse_layout not in ("NH", "HN"):
        raise ValueError(f"`lse_layout` must be 'NH' or 'HN', got {lse_layout!r}")


def prepare_jit_additional_args(
    jit_additional_tensor_names: Sequence[str],
    known_bufs: dict[str, Any],
    user_args: tuple[Any, ...],
) -> list[Any]:
    """Values of a variant's additional tensors and scalars.

    Parameters
    ----------
    jit_additional_tensor_names : sequence of str
        Its tensors, in order.
    known_bufs : dict
        Those that the caller has already, by name.
    user_args : tuple
        The other tensors, then the scalars.

    Raises
    ------
    ValueError
        If `user_args` are fewer than the other tensors.
    """
    wanted = [name for name in jit_additional_tensor_names if name not in known_bufs]
    if len(user_args) < len(wanted):
        raise ValueError(f"`user_args` must begin with {wanted}, got {len(user_args)} values")
    given = iter(user_args)
    tensors = [
        known_bufs[name] if name in known_bufs else next(given)
        for name in jit_additional_tensor_names
    ]
    return [*tensors, *given]
