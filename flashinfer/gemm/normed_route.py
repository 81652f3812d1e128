"""Experts of a row that a norm makes."""

import torch

from .._common import checks
from .._common.arch import get_compute_capability
from .._instrument.questions import says_where_it_runs
from ..compat.backends import BackendSupportedError
from ..jit.one_row import COLUMNS
from ._one_row import route_kernel
from ._tuning import HOPPER, is_hopper
from .normed import MOST_K

MOST_CHOICES = 32


@says_where_it_runs(is_hopper)
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
    """One token's experts, chosen in the kernel of its logits' product."""
    checks.tensor("input", input, 2)
    checks.tensor("b", b, 2)
    if input.shape[0] != 1 or input.shape[1] > MOST_K:
        raise ValueError(f"`input` must be [1, at most {MOST_K}], got shape {list(input.shape)}")
    if not 1 <= b.shape[1] <= COLUMNS[-1]:
        raise ValueError(f"`b` must have 1 to {COLUMNS[-1]} columns, got shape {list(b.shape)}")
    chosen = checks.count("top_k", top_k, 1, min(MOST_CHOICES, b.shape[1]))
    ready = checks.flag("weight_ready", weight_ready)
    checks.cuda_tensors(input=input, b=b)
    if get_compute_capability(input.device) != HOPPER:
        raise BackendSupportedError("`add_rmsnorm_mm_route_bf16` needs a Hopper GPU")
    logits = input.new_empty(1, b.shape[1])
    weights = torch.empty(1, chosen, dtype=torch.float32, device=input.device)
    experts = torch.empty(1, chosen, dtype=torch.int32, device=input.device)
    residual_out = torch.empty_like(input) if residual_out is None else residual_out
    normed_out = torch.empty_like(input) if normed_out is None else normed_out
    kernel, splits = route_kernel(input.device, b.shape[1], b.shape[0], "softmax")
    norm = residual_out, normed_out, residual, norm_weight, checks.number("eps", eps)
    route = weights, experts, renormalize, float(routed_scaling_factor)
    pdl = True if enable_pdl is None else checks.flag("enable_pdl", enable_pdl)
    kernel(logits, input, b, bias, splits, pdl, ready, norm, route)
    return weights, experts, logits, residual_out, normed_out
