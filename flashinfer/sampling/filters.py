"""Softmax, and the filters top-k and top-p applied to whole rows."""

from typing import Any

import torch

from .._common import checks
from .._common.kernels import NOT_LOADED
from .._instrument.decorator import flashinfer_api
from ..jit.sampling import Filter, Output
from ..trace.templates.sampling import (
    softmax_trace,
    top_k_mask_logits_trace,
    top_k_renorm_probs_trace,
    top_p_renorm_probs_trace,
)
from ._inputs import row_floats, row_ints
from ._kernels import SamplingKernels, statistics_of

_softmax = SamplingKernels(Filter.NONE, Output.PROBS, logits=True)
_top_k_renorm = SamplingKernels(Filter.TOP_K, Output.PROBS, logits=False)
_top_p_renorm = SamplingKernels(Filter.TOP_P, Output.PROBS, logits=False)
_top_k_mask = SamplingKernels(Filter.TOP_K, Output.MASK, logits=True)


@flashinfer_api(trace=softmax_trace)
def softmax(
    logits: torch.Tensor,
    temperature: torch.Tensor | float | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""``softmax(logits / temperature)`` of each row, in float32.

    Parameters
    ----------
    logits : torch.Tensor
        ``[batch, vocab]``, float32, float16 or bfloat16, last dimension contiguous.
    temperature : float or torch.Tensor, optional
        Not negative; a float32 tensor ``[batch]`` has one per row. None is 1. At 0 the maxima share
        everything. A row whose temperature is negative or NaN becomes NaN.
    enable_pdl : bool, optional
        Programmatic dependent launch: the kernel may be scheduled before the previous one in
        the stream ends (it still waits for its data). None: where the device has it.

    Returns
    -------
    torch.Tensor
        ``[batch, vocab]``, float32. A row with a NaN, or of nothing but -inf, is NaN; +inf elements
        share everything.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype or stride not listed above, or if
        `temperature` is negative.

    Examples
    --------
    >>> logits = torch.randn(4, 128256, device="cuda")
    >>> probs = flashinfer.sampling.softmax(logits, temperature=0.7)
    >>> probs.sum(dim=-1).allclose(torch.ones(4, device="cuda"))
    True
    """
    if temperature is None:
        temperature = 1.0
    elif isinstance(temperature, torch.Tensor):
        temperature = row_floats("temperature", temperature)
    try:
        kernel = _softmax[logits.dtype]
    except NOT_LOADED:
        kernel = _softmax.load(logits=logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    statistics = statistics_of(kernel, logits, logits.shape[:1].numel())
    kernel.run(out, statistics, logits, temperature, enable_pdl)
    return out


def _filter_rows(kernels: SamplingKernels, rows: torch.Tensor, value: Any) -> torch.Tensor:
    try:
        kernel = kernels[rows.dtype]
    except NOT_LOADED:
        kernel = kernels.load(**{kernels.name: rows})
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    kernel.run(out, None, rows, value, None)
    return out


@flashinfer_api(trace=top_k_renorm_probs_trace)
def top_k_renorm_probs(
    probs: torch.Tensor, top_k: torch.Tensor | int, is_deterministic: bool = False
) -> torch.Tensor:
    """The `top_k` largest elements of each row divided by their sum, and zero elsewhere.

    Parameters
    ----------
    probs : torch.Tensor
        ``[batch, vocab]``, float32, float16 or bfloat16, last dimension contiguous.
    top_k : int or torch.Tensor
        How many elements to keep, with those equal to the last; a tensor ``[batch]`` has one per
        row. Less than 1, or the vocabulary's size: all.
    is_deterministic : bool
        Accepted for compatibility: results are always deterministic.

    Returns
    -------
    torch.Tensor
        Shape and dtype of `probs`. A row without positive weight is zero, one with a NaN is NaN.

    Raises
    ------
    TypeError, ValueError
        As for `softmax`.
    """
    checks.optional_flag("is_deterministic", is_deterministic)
    return _filter_rows(_top_k_renorm, probs, row_ints("top_k", top_k))


@flashinfer_api(trace=top_p_renorm_probs_trace)
def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    """The top-p kept set of each row divided by its sum, and zero elsewhere.

    Parameters
    ----------
    probs : torch.Tensor
        ``[batch, vocab]``, float32, float16 or bfloat16, last dimension contiguous.
    top_p : float or torch.Tensor
        Weight to keep, as a share of the row's; a tensor ``[batch]`` has one per row.
    is_deterministic : bool
        Accepted for compatibility: results are always deterministic.

    Returns
    -------
    torch.Tensor
        Shape and dtype of `probs`. A row without positive weight is zero, one with a NaN is NaN.

    Raises
    ------
    TypeError, ValueError
        As for `softmax`.
    """
    checks.optional_flag("is_deterministic", is_deterministic)
    return _filter_rows(_top_p_renorm, probs, row_floats("top_p", top_p))


@flashinfer_api(trace=top_k_mask_logits_trace)
def top_k_mask_logits(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """`logits` with all but the `top_k` largest elements of each row replaced by -inf.

    Parameters
    ----------
    logits : torch.Tensor
        ``[batch, vocab]``, float32, float16 or bfloat16, last dimension contiguous.
    top_k : int or torch.Tensor
        As for `top_k_renorm_probs`.

    Returns
    -------
    torch.Tensor
        Shape and dtype of `logits`. A row with a NaN is NaN.

    Raises
    ------
    TypeError, ValueError
        As for `softmax`.
    """
    return _filter_rows(_top_k_mask, logits, row_ints("top_k", top_k))


top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs
