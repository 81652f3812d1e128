"""Products of 8-bit matrices with scales of 128 elements along k, alone and in groups."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from .._common.checks import choice as check_choice
from .._common.checks import count as check_count
from .._common.checks import dtype as check_out_dtype
from .._common.checks import flag as check_flag
from .._common.checks import tensor as check_tensor
from .._common.checks import tensors as check_tensors
from .._common.dtypes import FLOAT8, check_dtype
from .._instrument.decorator import flashinfer_api
from ..compat.backends import backend_requirement, supported_compute_capability
from ..trace.templates.groupwise import (
    batch_deepgemm_fp8_nt_groupwise_trace,
    gemm_fp8_nt_blockscaled_trace,
    gemm_fp8_nt_groupwise_trace,
    group_deepgemm_fp8_nt_groupwise_trace,
    group_gemm_fp8_nt_groupwise_contiguous_trace,
    group_gemm_fp8_nt_groupwise_trace,
)
from ._choice import GemmProblem
from ._launch import SCALES_BY_BLOCK, SCALES_BY_K, launch

_OUT = (torch.bfloat16, torch.float16)
_Mode = Literal["MN", "K"]


@supported_compute_capability([90])
def _check(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> bool:
    check_tensors(a=a, b=b, a_scale=a_scale, b_scale=b_scale)
    for name, operand in (("a", a), ("b", b)):
        check_dtype(name, operand.dtype, FLOAT8)
        if operand.ndim not in (2, 3):
            raise ValueError(f"`{name}` must have 2 or 3 dimensions, got {list(operand.shape)}")
    if out is not None:
        check_tensor("out", out)
        check_dtype("out", out.dtype, _OUT)
    if out_dtype is not None:
        check_out_dtype("out_dtype", out_dtype, _OUT)
        if out is not None:
            check_dtype("out", out.dtype, (out_dtype,))
    return True


def _check_groups(rank: int) -> Callable[..., bool]:
    """The check of a function of several matrices `b` and an `a` of `rank` dimensions."""

    @supported_compute_capability([90])
    def check(
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor,
        b_scale: torch.Tensor,
        out: torch.Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> bool:
        _check(a, b, a_scale, b_scale, out, out_dtype)
        check_tensor("a", a, rank)
        check_tensor("b", b, 3)
        return True

    return check


_check_grouped, _check_masked = _check_groups(2), _check_groups(3)


def _check_mode(mode: object, granularity: Any, allowed: tuple[Any, ...]) -> int:
    """Bits of the launch's layout."""
    check_choice("scale_major_mode", mode, ("MN", "K"))
    if isinstance(granularity, list):
        granularity = tuple(granularity)
    check_choice("scale_granularity_mnk", granularity, allowed)
    by_block = SCALES_BY_BLOCK if granularity[0] == 128 else 0
    return (SCALES_BY_K if mode == "MN" else 0) | by_block


_BY_ROW, _BY_BLOCK = (1, 128, 128), (128, 128, 128)


def _run(
    names: str,
    groups: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor | None,
    layout: int,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    typical_rows: int | None = None,
) -> torch.Tensor:
    if out is None:
        out = a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype or torch.bfloat16)
    batches = b.shape[0] if b.ndim == 3 else 1
    problem = GemmProblem(
        a.dtype,
        b.dtype,
        out.dtype,
        rows=typical_rows or a.shape[-2],
        columns=b.shape[-2],
        k=a.shape[-1],
        batches=batches,
        scale="block",
        groups=groups,
    )
    index = (rows, None, None, None) if rows is not None else None
    return launch(problem, names, out, a, b, scales, rows=index, layout=layout)


@backend_requirement({}, common_check=_check)
@flashinfer_api(trace=gemm_fp8_nt_groupwise_trace)
def gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: _Mode | None = None,
    mma_sm: int = 1,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Literal["cutlass", "trtllm", "cutile"] = "cutlass",
) -> torch.Tensor:
    """``out = a @ b.T`` in 8 bits, with scales of blocks.

    Sums over 128 elements of k are multiplied by both scales and added up in float32.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, float8_e4m3fn or float8_e5m2, rows contiguous, on a Hopper GPU; k is a multiple
        of 128.
    b : torch.Tensor
        ``[n, k]``, 8 bits, rows contiguous; n is a multiple of 8.
    a_scale : torch.Tensor
        float32, what the elements of `a` are multiplied by: ``[m, k / 128]``, for a granularity of
        128 rows ``[ceil(m / 128), k / 128]``; in mode ``"MN"`` with both dimensions exchanged.
    b_scale : torch.Tensor
        ``[ceil(n / 128), k / 128]``, float32; in mode ``"MN"`` with both dimensions exchanged.
    scale_major_mode : {"K", "MN"}
        Order of the scales' dimensions. In mode ``"MN"`` the last one may be longer than is read,
        as scales are whose rows are padded.
    mma_sm : int
        1 or 2: CTAs of a product on Blackwell; changes nothing here.
    scale_granularity_mnk : tuple of int
        ``(1, 128, 128)`` or ``(128, 128, 128)``.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16 or float16: receives the result.
    out_dtype : torch.dtype, optional
        Type of the result, bfloat16 if None.
    backend : str
        ``"cutlass"`` and ``"cutile"`` mean this library's kernel; ``"trtllm"`` is refused.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; `out` if it was given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    if backend not in ("cutlass", "cutile"):
        raise ValueError(f"`backend` must be 'cutlass' or 'cutile', got {backend!r}")
    if mma_sm not in (1, 2):
        raise ValueError(f"`mma_sm` must be 1 or 2, got {mma_sm!r}")
    layout = _check_mode(scale_major_mode, scale_granularity_mnk, (_BY_ROW, _BY_BLOCK))
    return _run("a", "batch", a, b, (a_scale, b_scale), None, layout, out, out_dtype)


@backend_requirement({}, common_check=_check)
@flashinfer_api(trace=gemm_fp8_nt_blockscaled_trace)
def gemm_fp8_nt_blockscaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: _Mode | None = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`gemm_fp8_nt_groupwise` with a scale for each block of 128 by 128 elements of both operands.

    Arguments, result and errors as there, with ``scale_granularity_mnk=(128, 128, 128)``.
    """
    if mma_sm not in (1, 2):
        raise ValueError(f"`mma_sm` must be 1 or 2, got {mma_sm!r}")
    layout = _check_mode(scale_major_mode, _BY_BLOCK, (_BY_BLOCK,))
    return _run("a", "batch", a, b, (a_scale, b_scale), None, layout, out, out_dtype)


@backend_requirement({}, common_check=_check_grouped)
@flashinfer_api(trace=group_gemm_fp8_nt_groupwise_trace)
def group_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    scale_major_mode: _Mode = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Literal["trtllm", "cutile"] = "trtllm",
    segment_alignment: int = 1,
) -> torch.Tensor:
    """``out[r] = a[r] @ b[g].T`` in 8 bits, for the rows r of each group g.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, 8 bits, rows contiguous, on a Hopper GPU; k is a multiple of 128.
    b : torch.Tensor
        ``[groups, n, k]``, 8 bits, at most 1024 groups.
    a_scale : torch.Tensor
        ``[m, k / 128]`` (``"K"``) or ``[k / 128, m]`` (``"MN"``), float32.
    b_scale : torch.Tensor
        ``[groups, ceil(n / 128), k / 128]`` (``"K"``) or with the last two exchanged (``"MN"``).
    m_indptr : torch.Tensor
        ``[groups + 1]``, int32 or int64: rows ``m_indptr[g]`` to ``m_indptr[g + 1]`` are group g's.
        Rows of no group are not written.
    scale_granularity_mnk : tuple of int
        ``(1, 128, 128)``.
    scale_major_mode, mma_sm, out, out_dtype
        As for `gemm_fp8_nt_groupwise`, which also lists the errors.
    backend : str
        Both names mean this library's kernel.
    segment_alignment : int
        Alignment of the groups' rows; any is right here.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; `out` if it was given.
    """
    check_choice("backend", backend, ("trtllm", "cutile"))
    check_choice("mma_sm", mma_sm, (1, 2))
    check_count("segment_alignment", segment_alignment)
    layout = _check_mode(scale_major_mode, scale_granularity_mnk, (_BY_ROW,))
    check_tensor("m_indptr", m_indptr)
    return _run("a", "offsets", a, b, (a_scale, b_scale), m_indptr, layout, out, out_dtype)


@backend_requirement({}, common_check=_check_grouped)
@flashinfer_api(trace=group_deepgemm_fp8_nt_groupwise_trace)
def group_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``out[r] = a[r] @ b[m_indices[r]].T`` in 8 bits.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, 8 bits, rows contiguous, on a Hopper GPU; k is a multiple of 128.
    b : torch.Tensor
        ``[groups, n, k]``, 8 bits.
    a_scale, b_scale : torch.Tensor
        ``[m, k / 128]`` and ``[groups, ceil(n / 128), k / 128]``, float32.
    m_indices : torch.Tensor
        ``[m]``, int32 or int64: group of each row. Rows 128 i to 128 i + 127 are of the group of
        the first of them: groups are padded to multiples of 128 rows. Blocks of 128 rows whose
        first number is negative are not computed.
    scale_granularity_mnk : tuple of int
        ``(1, 128, 128)``.
    out, out_dtype
        As for `gemm_fp8_nt_groupwise`, which also lists the errors.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; `out` if it was given.
    """
    layout = _check_mode("K", scale_granularity_mnk, (_BY_ROW,))
    check_tensor("m_indices", m_indices)
    scales = a_scale, b_scale
    return _run("m_indices", "indices", a, b, scales, m_indices, layout, out, out_dtype)


@supported_compute_capability([90])
def check_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    validate_indices: bool,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> bool:
    """Refuse operands of a grouped product; numbers of groups are read only if that is asked for.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """
    _check_grouped(a, b, a_scale, b_scale, out, out_dtype)
    check_tensor("m_indices", m_indices)
    if not check_flag("validate_indices", validate_indices) or m_indices.numel() == 0:
        return True
    blocks = torch.nn.functional.pad(m_indices, (0, -m_indices.numel() % 128)).view(-1, 128)
    rows = torch.arange(blocks.numel(), device=blocks.device).view(-1, 128) < m_indices.numel()
    first = blocks[:, :1]
    if bool(((blocks != first) & rows & ((blocks >= 0) | (first < 0))).any()):
        raise ValueError("`m_indices` must name one group for rows 128 i to 128 i + 127")
    if int(m_indices.max()) >= b.shape[0]:
        raise ValueError(
            f"`m_indices` must name groups below {b.shape[0]}, got {int(m_indices.max())}"
        )
    return True


@backend_requirement({}, common_check=check_groups)
@flashinfer_api(trace=group_gemm_fp8_nt_groupwise_contiguous_trace)
def group_gemm_fp8_nt_groupwise_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = _BY_ROW,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    validate_indices: bool = False,
) -> torch.Tensor:
    """`group_deepgemm_fp8_nt_groupwise`, which can look at the numbers of groups first.

    Parameters
    ----------
    a, b, a_scale, b_scale, m_indices, scale_granularity_mnk, out, out_dtype
        As for `group_deepgemm_fp8_nt_groupwise`, which also lists the errors.
    validate_indices : bool
        Whether numbers that name no group, or differ within 128 rows, are refused (a ValueError).
        The numbers then come to the host.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; `out` if it was given.
    """
    layout = _check_mode("K", scale_granularity_mnk, (_BY_ROW,))
    scales = a_scale, b_scale
    return _run("m_indices", "indices", a, b, scales, m_indices, layout, out, out_dtype)


@backend_requirement({}, common_check=_check_masked)
@flashinfer_api(trace=batch_deepgemm_fp8_nt_groupwise_trace)
def batch_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Literal["deepgemm", "cake"] = "deepgemm",
) -> torch.Tensor:
    """``out[g, r] = a[g, r] @ b[g].T`` in 8 bits, for the first ``masked_m[g]`` rows r.

    Parameters
    ----------
    a : torch.Tensor
        ``[groups, m, k]``, 8 bits, rows contiguous, on a Hopper GPU; k is a multiple of 128.
    b : torch.Tensor
        ``[groups, n, k]``, 8 bits, at most 1024 groups.
    a_scale, b_scale : torch.Tensor
        ``[groups, m, k / 128]`` and ``[groups, ceil(n / 128), k / 128]``, float32.
    masked_m : torch.Tensor
        ``[groups]``, int32 or int64: rows that are computed. The others are not written.
    expected_m : int
        Rows that a group typically has: what the tile is chosen for. It changes no result.
    scale_granularity_mnk : tuple of int
        ``(1, 128, 128)``.
    out, out_dtype
        As for `gemm_fp8_nt_groupwise`, which also lists the errors.
    backend : {"deepgemm"}
        This library's kernel; ``"cake"`` is for Blackwell and is refused.

    Returns
    -------
    torch.Tensor
        ``[groups, m, n]``; `out` if it was given.
    """
    check_choice("backend", backend, ("deepgemm",))
    check_count("expected_m", expected_m)
    layout = _check_mode("K", scale_granularity_mnk, (_BY_ROW,))
    check_tensor("masked_m", masked_m)
    scales, rows = (a_scale, b_scale), min(expected_m, max(a.shape[-2], 1))
    return _run("masked_m", "masked", a, b, scales, masked_m, layout, out, out_dtype, rows)
