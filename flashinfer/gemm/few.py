"""Products of few rows, with what follows them."""

import torch

from .._common import checks
from .._instrument.decorator import flashinfer_api
from .._instrument.questions import says_where_it_runs
from ..jit.few_rows import ROWS, FewRowsOutput
from ..trace.templates.few_rows_product import mm_add_rmsnorm_bf16_trace, mm_silu_and_mul_bf16_trace
from ._few_rows import few_rows_kernel
from ._tuning import is_hopper
from .normed import need_hopper


@says_where_it_runs(is_hopper)
@flashinfer_api(trace=mm_silu_and_mul_bf16_trace)
def mm_silu_and_mul_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    weight_ready: bool = False,
) -> torch.Tensor:
    """``silu(a @ gate) * (a @ up)`` for up to 8 rows, where `b` is ``[gate, up]``, in one kernel.

    All sums are in float32, and the result is rounded once.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, bfloat16, on a Hopper GPU, with 1 to 8 rows that begin at multiples of 16 bytes.
        k is a multiple of 16.
    b : torch.Tensor
        ``[k, 2 n]``, bfloat16, rows contiguous and beginning at multiples of 16 bytes: columns of
        the gate, then of the values. n is a multiple of 64.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, rows contiguous: receives the result. It may not overlap `a` or `b`.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: yes. Changes no result.
    weight_ready : bool
        What wrote `b` had ended when the kernel before this one began, so that it may be loaded
        before that one ends. Changes no result.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Shazeer, "GLU Variants Improve Transformer", 2020.

    Examples
    --------
    >>> a = torch.randn(8, 4096, device="cuda").bfloat16()
    >>> b = torch.randn(4096, 28672, device="cuda").bfloat16()
    >>> flashinfer.gemm.mm_silu_and_mul_bf16(a, b).shape
    torch.Size([8, 14336])
    """
    _check("mm_silu_and_mul_bf16", a, b)
    ready = checks.flag("weight_ready", weight_ready)
    pdl = True if enable_pdl is None else checks.flag("enable_pdl", enable_pdl)
    if b.shape[1] % 128:
        raise ValueError(f"`b` must have a multiple of 128 columns, got shape {list(b.shape)}")
    out = a.new_empty(len(a), b.shape[1] // 2) if out is None else out
    kernel, splits = few_rows_kernel(a.device, b.shape[1], b.shape[0], FewRowsOutput.GATED)
    kernel(out, a, b, None, splits, pdl, ready)
    return out


@says_where_it_runs(is_hopper)
@flashinfer_api(trace=mm_add_rmsnorm_bf16_trace)
def mm_add_rmsnorm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    weight_ready: bool = False,
) -> torch.Tensor:
    """In place ``residual += a @ b`` for up to 8 rows; its RMS norm.

    Thread blocks divide k, and the kernel of the norm adds up what they leave, in a fixed order.
    Sums are in float32; the norm is that of the sum that has not been rounded.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, bfloat16, on a Hopper GPU, with 1 to 8 rows that begin at multiples of 16 bytes.
        k is a multiple of 16.
    b : torch.Tensor
        ``[k, n]``, bfloat16, rows contiguous and beginning at multiples of 16 bytes; n is a
        multiple of 256, at most 4096.
    residual : torch.Tensor
        ``[m, n]``, bfloat16, rows contiguous: receives the sum.
    norm_weight : torch.Tensor
        ``[n]``, bfloat16, contiguous.
    eps : float
        Under the norm's root. Finite, not negative.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, rows contiguous: receives the norm. Neither it nor `residual` may
        overlap another argument.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: yes. Changes no result.
    weight_ready : bool
        What wrote `b` and `norm_weight` had ended when the kernel before this one began, so that
        they may be loaded before that one ends. Changes no result.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Examples
    --------
    >>> a = torch.randn(8, 14336, device="cuda").bfloat16()
    >>> b = torch.randn(14336, 4096, device="cuda").bfloat16()
    >>> residual, weight = torch.randn(9, 4096, device="cuda").bfloat16().split([8, 1])
    >>> flashinfer.gemm.mm_add_rmsnorm_bf16(a, b, residual, weight[0]).shape
    torch.Size([8, 4096])
    """
    _check("mm_add_rmsnorm_bf16", a, b)
    ready = checks.flag("weight_ready", weight_ready)
    pdl = True if enable_pdl is None else checks.flag("enable_pdl", enable_pdl)
    rows, n = len(a), b.shape[1]
    out = a.new_empty(rows, n) if out is None else out
    kernel, splits = few_rows_kernel(a.device, n, b.shape[0], FewRowsOutput.NORM)
    parts = a.new_empty(splits, rows, n, dtype=torch.float32)
    norm = parts, residual, norm_weight, checks.number("eps", eps)
    kernel(out, a, b, None, splits, pdl, ready, norm)
    return out


def _check(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Number of rows, and the GPU."""
    checks.tensor("a", a, 2)
    checks.tensor("b", b, 2)
    if not 1 <= len(a) <= ROWS:
        raise ValueError(f"`a` must have 1 to {ROWS} rows, got shape {list(a.shape)}")
    if b.shape[1] == 0:
        raise ValueError(f"`b` must have columns, got shape {list(b.shape)}")
    need_hopper(name, a=a, b=b)
