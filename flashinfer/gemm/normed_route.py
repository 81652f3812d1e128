"""Experts of a row that a norm makes."""

import torch

from .._common import checks
from .._instrument.decorator import flashinfer_api
from .._instrument.questions import says_where_it_runs
from ..jit.one_row import COLUMNS
from ..trace.templates.normed_route import add_rmsnorm_mm_route_bf16_trace
from ._one_row import route_kernel
from ._tuning import is_hopper
from .normed import check_normed_row, need_hopper

MOST_CHOICES = 32


@says_where_it_runs(is_hopper)
@flashinfer_api(trace=add_rmsnorm_mm_route_bf16_trace)
def add_rmsnorm_mm_route_bf16(
    input: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    b: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    residual_out: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    weight_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token's experts: the norm of a sum, logits and choice in one kernel.

    The logits are those of `add_rmsnorm_mm_bf16`. The experts with the largest ones are chosen, of
    equal ones those with the lower numbers, and weigh what the softmax over all experts gives them.

    Parameters
    ----------
    input, residual : torch.Tensor
        ``[1, k]``, bfloat16, on a Hopper GPU. k is a multiple of 8, at most 4096.
    norm_weight : torch.Tensor
        ``[k]``, bfloat16, contiguous.
    b : torch.Tensor
        ``[k, experts]``, bfloat16, rows contiguous and beginning at multiples of 16 bytes; a
        multiple of 8 experts, at most 128.
    top_k : int
        Experts to choose, at most 32.
    bias : torch.Tensor, optional
        ``[experts]``, bfloat16: added to the logits.
    eps : float
        Under the norm's root. Finite, not negative.
    renormalize : bool
        The weights sum to `routed_scaling_factor`.
    routed_scaling_factor : float
        Factor of all weights. Positive, finite.
    residual_out, normed_out : torch.Tensor, optional
        ``[1, k]``, bfloat16: receive the sum and its norm, and may not overlap an argument.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: yes. Changes no result.
    weight_ready : bool
        What wrote `norm_weight` and `b` had ended when the kernel before this one began, so that
        they may be loaded before that one ends. Changes no result.

    Returns
    -------
    tuple of torch.Tensor
        Weights and experts, ``[1, top_k]``, float32 and int32, from the best one on; the logits,
        the sum and its norm, bfloat16.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; N. Shazeer et al.,
    "Outrageously Large Neural Networks", 2017.

    Examples
    --------
    >>> x, residual = torch.randn(2, 1, 2048, device="cuda").bfloat16()
    >>> weight = torch.ones(2048, device="cuda").bfloat16()
    >>> b = torch.randn(2048, 128, device="cuda").bfloat16()
    >>> made = flashinfer.gemm.add_rmsnorm_mm_route_bf16(x, residual, weight, b, top_k=8)
    >>> made[1].shape
    torch.Size([1, 8])
    """
    check_normed_row(input, b)
    if not 1 <= b.shape[1] <= COLUMNS[-1]:
        raise ValueError(f"`b` must have 1 to {COLUMNS[-1]} columns, got shape {list(b.shape)}")
    chosen = checks.count("top_k", top_k, 1, min(MOST_CHOICES, b.shape[1]))
    ready = checks.flag("weight_ready", weight_ready)
    need_hopper("add_rmsnorm_mm_route_bf16", input=input, b=b)
    logits = input.new_empty(1, b.shape[1])
    weights = torch.empty(1, chosen, dtype=torch.float32, device=input.device)
    experts = torch.empty(1, chosen, dtype=torch.int32, device=input.device)
    residual_out = torch.empty_like(input) if residual_out is None else residual_out
    normed_out = torch.empty_like(input) if normed_out is None else normed_out
    kernel, splits = route_kernel(input.device, b.shape[1], b.shape[0])
    norm = residual_out, normed_out, residual, norm_weight, checks.number("eps", eps)
    route = weights, experts, renormalize, float(routed_scaling_factor)
    pdl = True if enable_pdl is None else checks.flag("enable_pdl", enable_pdl)
    kernel(logits, input, b, bias, splits, pdl, ready, norm, route)
    return weights, experts, logits, residual_out, normed_out
