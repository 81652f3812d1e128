"""Draws of one token per row, from probabilities or logits, with or without a filter."""

from typing import Any, Literal, overload

import torch

from .._common import checks
from .._common.kernels import NOT_LOADED
from .._common.numbers import plain
from .._instrument.decorator import flashinfer_api
from ..jit.sampling import Filter, Output
from ..trace.templates.sampling import (
    min_p_sampling_trace,
    sampling_from_logits_trace,
    sampling_from_probs_trace,
    top_k_sampling_trace,
    top_k_top_p_sampling_from_logits_trace,
    top_k_top_p_sampling_trace,
    top_p_sampling_trace,
)
from ._inputs import Seed, refuse_nan, resolve_seed, row_floats, row_ints
from ._kernels import SamplingKernels, statistics_of

_from_probs = {f: SamplingKernels(f, Output.TOKEN, logits=False) for f in Filter}
_from_logits: dict[Filter, SamplingKernels] = {
    f: SamplingKernels(f, Output.TOKEN, logits=True) for f in Filter if f is not Filter.MIN_P
}


def _sample(
    kernels: SamplingKernels,
    rows: torch.Tensor,
    parameters: tuple[Any, ...],
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Seed,
    offset: Seed,
    return_valid: bool = False,
) -> Any:
    """One token per row (or per entry of `indices`)."""
    try:
        kernel = kernels[rows.dtype]
    except NOT_LOADED:
        kernel = kernels.load(**{kernels.name: rows})
    checks.optional_flag("deterministic", deterministic)
    if check_nan:
        checks.optional_flag("check_nan", check_nan)
        refuse_nan(kernels.name, rows)
    if return_valid:
        checks.optional_flag("return_valid", return_valid)
    device = rows.device
    if indices is None:
        samples = torch.empty(rows.shape[:1], dtype=torch.int32, device=device)
    else:
        checks.cuda_tensors(indices=indices)
        samples = torch.empty(indices.shape, dtype=indices.dtype, device=device)
    valid = torch.empty(samples.shape, dtype=torch.bool, device=device) if return_valid else None
    statistics = statistics_of(kernel, rows, samples.numel())
    seed, offset = resolve_seed(seed, offset, generator, device)
    kernel.run(samples, valid, statistics, rows, indices, *parameters, seed, offset, None)
    return (samples, valid) if return_valid else samples


@overload
def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    *,
    return_valid: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@flashinfer_api(trace=sampling_from_probs_trace)
def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One index per row, drawn with probability proportional to the row's values.

    Parameters
    ----------
    probs : torch.Tensor
        ``[num_rows, vocab]``, float32, float16 or bfloat16, last dimension contiguous; see the
        module's notes.
    indices : torch.Tensor, optional
        ``[batch]``, int32 or int64: output ``i`` is drawn from row ``indices[i]``. None: one output
        per row. An index out of range gives an invalid row.
    deterministic : bool
        Accepted for compatibility: results are always deterministic.
    generator : torch.Generator, optional
        Source of seed and offset when `seed` is None, else not used; see `get_seed_and_offset`.
    check_nan : bool
        Look for NaN first, which waits for the GPU, and raise ``ValueError``.
    seed, offset : int or torch.Tensor, optional
        Key of the random numbers: integers, or int64 or uint64 tensors ``[batch]`` with one per
        output (or ``[1]`` for all). The number of the output in the batch counts, too, unless
        `seed` is a column, ``[batch, 1]``. `offset` defaults to 0.
    return_valid : bool
        Return a second tensor: which rows had a distribution to draw from.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Tokens ``[batch]``, int32 or the dtype of `indices`; with `return_valid` also a bool tensor
        ``[batch]``. The token of an invalid row is 0.

    Raises
    ------
    TypeError
        If an argument has a wrong type.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype or stride not listed above; if `offset`
        is given without `seed`.

    Notes
    -----
    Inverse transform sampling on exact integer sums.

    Examples
    --------
    >>> probs = torch.softmax(torch.randn(4, 128256, device="cuda"), dim=-1)
    >>> seeds = torch.tensor([1, 2, 3, 4], device="cuda")
    >>> tokens = flashinfer.sampling.sampling_from_probs(probs, seed=seeds)
    """
    kernels = _from_probs[Filter.NONE]
    return _sample(
        kernels, probs, (), indices, deterministic, generator, check_nan, seed, offset, return_valid
    )


@flashinfer_api(trace=sampling_from_logits_trace)
def sampling_from_logits(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """One index per row, drawn from ``softmax(logits)``, which is not written out.

    Arguments, result and errors as for `sampling_from_probs`. +inf elements share everything; a row
    of nothing but -inf is invalid.
    """
    kernels = _from_logits[Filter.NONE]
    return _sample(kernels, logits, (), indices, deterministic, generator, check_nan, seed, offset)


@overload
def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    *,
    return_valid: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@flashinfer_api(trace=top_p_sampling_trace)
def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One index per row, drawn from the nucleus: the top-p kept set (see the module's notes).

    Parameters
    ----------
    top_p : float or torch.Tensor
        Weight to keep, as a share of the row's; a tensor ``[num_rows]`` has one per row of `probs`.
    probs, indices, deterministic, generator, check_nan, seed, offset, return_valid
        As for `sampling_from_probs`, which also lists result and errors.

    Notes
    -----
    A. Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019. A token is drawn from
    the nucleus and what is within a factor of 1.5 of its smallest element, whose exact value is
    looked for only if the token is that small; a token that is not in the nucleus is replaced by
    one from just the nucleus. Whatever comes out is distributed as the nucleus is.
    """
    kernels, parameters = _from_probs[Filter.TOP_P], (row_floats("top_p", top_p),)
    return _sample(
        kernels,
        probs,
        parameters,
        indices,
        deterministic,
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
    )


@overload
def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    *,
    return_valid: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@flashinfer_api(trace=top_k_sampling_trace)
def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One index per row, drawn from its `top_k` largest elements (see the module's notes).

    Parameters
    ----------
    top_k : int or torch.Tensor
        How many elements to keep; a tensor ``[num_rows]`` has one per row of `probs`.
    probs, indices, deterministic, generator, check_nan, seed, offset, return_valid
        As for `sampling_from_probs`, which also lists result and errors.
    """
    kernels, parameters = _from_probs[Filter.TOP_K], (row_ints("top_k", top_k),)
    return _sample(
        kernels,
        probs,
        parameters,
        indices,
        deterministic,
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
    )


@overload
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    *,
    return_valid: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@flashinfer_api(trace=min_p_sampling_trace)
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One index per row, drawn from the elements of at least `min_p` times the largest.

    Parameters
    ----------
    min_p : float or torch.Tensor
        Share of the row's largest probability; a tensor ``[num_rows]`` has one per row of `probs`.
    probs, indices, deterministic, generator, check_nan, seed, offset, return_valid
        As for `sampling_from_probs`, which also lists result and errors.

    Notes
    -----
    M. Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs",
    2024.
    """
    kernels, parameters = _from_probs[Filter.MIN_P], (row_floats("min_p", min_p),)
    return _sample(
        kernels,
        probs,
        parameters,
        indices,
        deterministic,
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
    )


def _ordered_filter(filter_apply_order: str) -> Filter:
    orders = {"top_k_first": Filter.TOP_K_TOP_P, "joint": Filter.TOP_K_TOP_P_JOINT}
    try:
        return orders[filter_apply_order]
    except (KeyError, TypeError):
        error = ValueError if isinstance(filter_apply_order, str) else TypeError
        raise error(
            f"`filter_apply_order` must be 'top_k_first' or 'joint', got {filter_apply_order!r}"
        ) from None


def _both_filters(
    filter_apply_order: str, rows: torch.Tensor, top_k: Any, top_p: Any, logits: bool
) -> tuple[Filter, tuple[Any, ...]]:
    """Filter and its parameters; a top-k that keeps everything is left out, as top-p alone has a
    faster kernel.

    Which must draw the token that a tensor of the same numbers draws. Without any filter logits
    are weighed tile by tile, which rounds differently: top-p alone only takes what is below 1.
    """
    filter = _ordered_filter(filter_apply_order)
    top_k, top_p = plain(top_k), plain(top_p)
    is_matrix = isinstance(rows, torch.Tensor) and rows.dim() == 2
    if is_matrix and type(top_k) is int and not 1 <= top_k < rows.shape[1]:
        if not logits or (type(top_p) is float and not top_p >= 1):
            return Filter.TOP_P, (row_floats("top_p", top_p),)
        if type(top_p) in (int, float) and top_p >= 1:
            return Filter.NONE, ()
    return filter, (row_ints("top_k", top_k), row_floats("top_p", top_p))


@overload
def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    *,
    return_valid: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@flashinfer_api(trace=top_k_top_p_sampling_trace)
def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One index per row, drawn after top-k and top-p.

    Parameters
    ----------
    top_k, top_p
        As for `top_k_sampling_from_probs` and `top_p_sampling_from_probs`.
    filter_apply_order : str
        ``"top_k_first"``: top-p takes its share of what top-k has left. ``"joint"``: both look at
        the whole row, and what both keep is kept.
    probs, indices, deterministic, generator, check_nan, seed, offset, return_valid
        As for `sampling_from_probs`, which also lists result and errors.
    """
    filter, parameters = _both_filters(filter_apply_order, probs, top_k, top_p, logits=False)
    kernels = _from_probs[filter]
    return _sample(
        kernels,
        probs,
        parameters,
        indices,
        deterministic,
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
    )


@flashinfer_api(trace=top_k_top_p_sampling_from_logits_trace)
def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """As `top_k_top_p_sampling_from_probs` on ``softmax(logits)``, which is not written out.

    +inf elements share everything; a row of nothing but -inf is invalid.
    """
    filter, parameters = _both_filters(filter_apply_order, logits, top_k, top_p, logits=True)
    kernels = _from_logits[filter]
    return _sample(
        kernels, logits, parameters, indices, deterministic, generator, check_nan, seed, offset
    )
