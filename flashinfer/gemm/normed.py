"""Products of a row that a norm makes."""

import torch

from .._common import checks
from .._common.arch import get_compute_capability
from .._instrument.decorator import flashinfer_api
from .._instrument.questions import says_where_it_runs
from ..compat.backends import BackendSupportedError
from ..trace.templates.normed_product import add_rmsnorm_mm_bf16_trace
from ._one_row import one_row_kernel
from ._tuning import HOPPER, is_hopper

MOST_K = 4096
"""Columns of the row: each thread block holds all of them."""


def need_hopper(function: str, **tensors: torch.Tensor) -> None:
    """The tensors are on GPUs, the first one on a Hopper."""
    checks.cuda_tensors(**tensors)
    if get_compute_capability(next(iter(tensors.values())).device) != HOPPER:
        raise BackendSupportedError(f"`{function}` needs a Hopper GPU")


def check_normed_row(input: torch.Tensor, b: torch.Tensor) -> None:
    """One row, of whose sum with another a norm is multiplied by `b`."""
    checks.tensor("input", input, 2)
    checks.tensor("b", b, 2)
    if input.shape[0] != 1 or input.shape[1] > MOST_K:
        raise ValueError(f"`input` must be [1, at most {MOST_K}], got shape {list(input.shape)}")


@says_where_it_runs(is_hopper)
@flashinfer_api(trace=add_rmsnorm_mm_bf16_trace)
def add_rmsnorm_mm_bf16(
    input: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    weight_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``rmsnorm(input + residual) @ b + bias`` for one row, in one kernel.

    The norm is that of `fused_add_rmsnorm`: of the sum that has not been rounded, rounded once
    before it is multiplied. Each thread block computes it, which takes less time than a kernel of
    its own. Products are summed in float32 and rounded once.

    Parameters
    ----------
    input, residual : torch.Tensor
        ``[1, k]``, bfloat16, on a Hopper GPU. k is a multiple of 8, at most 4096.
    norm_weight : torch.Tensor
        ``[k]``, bfloat16, contiguous.
    b : torch.Tensor
        ``[k, n]``, bfloat16, rows contiguous and beginning at multiples of 16 bytes; n is a
        multiple of 8.
    bias : torch.Tensor, optional
        ``[n]``, bfloat16.
    eps : float
        Under the norm's root. Finite, not negative.
    out : torch.Tensor, optional
        ``[1, n]``, bfloat16: receives the product. None of the results may overlap an argument.
    residual_out, normed_out : torch.Tensor, optional
        ``[1, k]``, bfloat16: receive the sum and its norm.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: yes. Changes no result.
    weight_ready : bool
        What wrote `norm_weight` and `b` had ended when the kernel before this one began, so that
        they may be loaded before that one ends. Changes no result.

    Returns
    -------
    (torch.Tensor, torch.Tensor, torch.Tensor)
        The product, the sum and its norm.

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
    >>> x, residual = torch.randn(2, 1, 2048, device="cuda").bfloat16()
    >>> weight = torch.ones(2048, device="cuda").bfloat16()
    >>> b = torch.randn(2048, 128, device="cuda").bfloat16()
    >>> out, total, normed = flashinfer.gemm.add_rmsnorm_mm_bf16(x, residual, weight, b)
    >>> out.shape
    torch.Size([1, 128])
    """
    check_normed_row(input, b)
    if b.shape[1] == 0:
        raise ValueError(f"`b` must have columns, got shape {list(b.shape)}")
    ready = checks.flag("weight_ready", weight_ready)
    need_hopper("add_rmsnorm_mm_bf16", input=input, b=b)
    if out is None:
        out = input.new_empty(1, b.shape[1])
    residual_out = torch.empty_like(input) if residual_out is None else residual_out
    normed_out = torch.empty_like(input) if normed_out is None else normed_out
    kernel, splits = one_row_kernel(input.device, b.shape[1], b.shape[0], True)
    norm = residual_out, normed_out, residual, norm_weight, checks.number("eps", eps)
    pdl = True if enable_pdl is None else checks.flag("enable_pdl", enable_pdl)
    kernel(out, input, b, bias, splits, pdl, ready, norm)
    return out, residual_out, normed_out
