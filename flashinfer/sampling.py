"""Softmax, sampling, and the filters top-k, top-p and min-p on rows of logits or probabilities.

What holds for every function here:

- Rows are ``[batch, vocab]`` in float32, float16 or bfloat16, last dimension contiguous, any row
  stride, 1 to 524288 columns. Probabilities need not be normalised; negative ones count as zero.
- A filter keeps the elements that are at least a threshold, so equal values are all kept or all
  dropped, and the kept set is that of a sort:

  - top-k: threshold is the k-th largest value. ``k < 1`` and ``k >= vocab`` keep the whole row.
  - top-p: the largest threshold whose kept weight is at least ``p`` times the row's weight.
    ``p >= 1`` keeps the whole row, ``p <= 0`` the maximum.
  - min-p: threshold is ``min_p`` times the largest probability. ``min_p > 1`` counts as 1.

- `top_k`, `top_p`, `min_p` and `temperature` are numbers, or tensors with one per input row.
- Weights are summed as 64-bit integers (fixed point; steps of 2^-44 of the largest weight), so a
  result does not depend on the order of a sum: a row gives the same bits in any batch, at any
  position, on any number of multiprocessors. Every search ends after a fixed number of steps.
- A row with a NaN, with a NaN parameter, or without positive weight has no distribution. Its token
  is 0 and its `valid` flag is False; other rows are not affected.

Random numbers: one draw of Philox4x32-10 per row, keyed by ``(seed, offset)``. With a seed per row
nothing else enters: the row's token does not depend on where it is in the batch. One seed for all
rows is combined with the row's number. Without `seed`, seed and offset come from `generator` (the
device's default one), which is advanced. Tensors are read when the kernel runs, so a captured CUDA
graph draws anew when their contents change.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ._kernels import UNUSUAL, Kernel, KernelTable, check_cuda_tensors
from .api_logging import flashinfer_api
from .dtypes import check_dtype
from .jit.sampling import Filter, Output, SamplingConfig, gen_sampling_module
from .jit.speculative import SpeculativeConfig, gen_speculative_module
from .trace.templates.sampling import (
    chain_speculative_sampling_trace,
    min_p_sampling_from_probs_trace,
    sampling_from_logits_trace,
    sampling_from_probs_trace,
    softmax_trace,
    top_k_mask_logits_trace,
    top_k_renorm_probs_trace,
    top_k_sampling_from_probs_trace,
    top_k_top_p_sampling_from_logits_trace,
    top_k_top_p_sampling_from_probs_trace,
    top_p_renorm_probs_trace,
    top_p_sampling_from_probs_trace,
)

__all__ = [
    "chain_speculative_sampling",
    "gen_sampling_module",
    "get_sampling_module",
    "get_seed_and_offset",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

Seed = int | torch.Tensor | None


class _TokenKernels(KernelTable):
    """Kernels that draw one token per row."""

    def __init__(self, filter: Filter, logits: bool) -> None:
        def get_kernel(dtype: torch.dtype) -> Kernel:
            config = SamplingConfig(dtype, torch.float32, logits, filter, Output.TOKEN)
            return cast(Kernel, gen_sampling_module(config).build_and_load().sampling)

        super().__init__(get_kernel)
        self.name = "logits" if logits else "probs"
        self.filter = filter
        # Most draw in passes, of which the first leaves statistics in a workspace.
        self.leaves_statistics = filter is not Filter.MIN_P and not (
            logits and filter is Filter.TOP_P
        )


def _row_kernels(filter: Filter, output: Output, logits: bool) -> KernelTable:
    def get_kernel(dtype: torch.dtype) -> Kernel:
        out_dtype = torch.float32 if filter is Filter.NONE else dtype
        config = SamplingConfig(dtype, out_dtype, logits, filter, output)
        return cast(Kernel, gen_sampling_module(config).build_and_load().sampling)

    return KernelTable(get_kernel)


_softmax = _row_kernels(Filter.NONE, Output.PROBS, logits=True)
_top_k_renorm = _row_kernels(Filter.TOP_K, Output.PROBS, logits=False)
_top_p_renorm = _row_kernels(Filter.TOP_P, Output.PROBS, logits=False)
_top_k_mask = _row_kernels(Filter.TOP_K, Output.MASK, logits=True)
_from_probs = {filter: _TokenKernels(filter, logits=False) for filter in Filter}
_from_logits: dict[Filter, _TokenKernels] = {
    filter: _TokenKernels(filter, logits=True) for filter in Filter if filter is not Filter.MIN_P
}


def _speculative_kernel(dtype: torch.dtype) -> Kernel:
    check_dtype("draft_probs", dtype, (torch.float32,))
    module = gen_speculative_module(SpeculativeConfig()).build_and_load()
    return cast(Kernel, module.chain_speculative)


_chain_speculative = KernelTable(_speculative_kernel)


def get_sampling_module() -> Any:
    """The module of `sampling_from_probs` for float32, compiled if need be."""
    config = SamplingConfig(torch.float32, torch.float32, False, Filter.NONE, Output.TOKEN)
    return gen_sampling_module(config).build_and_load()


def get_seed_and_offset(
    increment: int,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> tuple[int, int]:
    """Seed and offset of a CUDA generator, which is then advanced.

    Parameters
    ----------
    increment : int
        How far; rounded up to a multiple of 4, which PyTorch asks of an offset.
    generator : torch.Generator, optional
        By default the default generator of `device`.
    device : torch.device, optional
        By default the current device.

    Returns
    -------
    tuple of int
        ``(seed, offset)`` as they were before.

    Raises
    ------
    RuntimeError
        While a CUDA graph is captured: the numbers would be frozen into it. Pass `seed` and
        `offset` as tensors instead.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "seed and offset of a generator would be frozen into the CUDA graph that is being "
            "captured; pass `seed` and `offset` as tensors"
        )
    if generator is None:
        torch.cuda.init()
        index = device.index if device is not None and device.index is not None else None
        index = torch.cuda.current_device() if index is None else index
        generator = torch.cuda.default_generators[index]
    if generator.device.type != "cuda":
        raise ValueError(f"`generator` must be a CUDA generator, got one on {generator.device}")
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + (increment + 3) // 4 * 4)
    return seed, offset


def _as_int64(name: str, value: Any) -> Any:
    """An unsigned 64-bit integer as the signed one with the same bits; tensors pass."""
    if isinstance(value, int) and value >= 1 << 63:
        if value >= 1 << 64:
            raise ValueError(f"`{name}` must be less than 2^64, got {value}")
        return value - (1 << 64)
    return value


def _resolve_seed(
    seed: Seed, offset: Seed, generator: torch.Generator | None, device: torch.device
) -> tuple[Any, Any]:
    if seed is None:
        if offset is not None:
            raise ValueError("`offset` needs a `seed`, got None")
        return get_seed_and_offset(4, generator, device)
    if generator is not None:
        raise ValueError("`generator` and `seed` exclude each other, got both")
    return _as_int64("seed", seed), 0 if offset is None else _as_int64("offset", offset)


def _row_floats(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype != torch.float32:
        return value.to(torch.float32)
    return value


def _row_ints(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype != torch.int32:
        if value.is_floating_point():
            raise ValueError(f"`top_k` must have an integer dtype, got {value.dtype}")
        return value.clamp(-1, 2**31 - 1).to(torch.int32)
    return value


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, (bool, type(None))):
        raise TypeError(f"`{name}` must be True, False or None, got {type(value).__name__}")


def _refuse_nan(name: str, rows: torch.Tensor) -> None:
    if bool(torch.isnan(rows).any()):
        raise ValueError(f"`{name}` must not contain NaN (`check_nan` is set)")


def _workspace_bytes(filter: Filter, rows: torch.Tensor, num_outputs: int) -> int:
    """What `workspace_bytes` in sampling_params.h asks for."""
    if rows.dim() != 2:
        return 0  # the binding refuses it
    num_tiles = -(-rows.shape[1] // 4096)
    if filter is Filter.TOP_P:
        num_pending = num_outputs if 8 <= num_outputs <= 1024 else 0
        return 16 + 516 * num_tiles * rows.shape[0] + (32 + 4 * 8192) * num_pending
    return (16 if filter is Filter.NONE else 144) * num_tiles * rows.shape[0]


def _sample(
    kernels: _TokenKernels,
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
    except UNUSUAL as error:
        kernel = kernels.load(error, **{kernels.name: rows})
    _check_flag("deterministic", deterministic)
    if check_nan:
        _refuse_nan(kernels.name, rows)
    device = rows.device
    if indices is None:
        samples = torch.empty(rows.shape[:1], dtype=torch.int32, device=device)
    else:
        check_cuda_tensors(indices=indices)
        samples = torch.empty(indices.shape, dtype=indices.dtype, device=device)
    valid = torch.empty(samples.shape, dtype=torch.bool, device=device) if return_valid else None
    outputs: tuple[Any, ...] = (samples, valid)
    if kernels.leaves_statistics:
        nbytes = _workspace_bytes(kernels.filter, rows, len(samples))
        outputs += (torch.empty(nbytes, dtype=torch.uint8, device=device),)
    seed, offset = _resolve_seed(seed, offset, generator, device)
    kernel(*outputs, rows, indices, *parameters, seed, offset, None)
    return (samples, valid) if return_valid else samples


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
        Programmatic dependent launch: the kernel may be scheduled before the one ahead of it in
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
    >>> flashinfer.sampling.softmax(logits, temperature=0.7).sum(dim=-1)
    tensor([1., 1., 1., 1.], device='cuda:0')
    """
    if temperature is None:
        temperature = 1.0
    elif isinstance(temperature, torch.Tensor):
        temperature = _row_floats(temperature)
    try:
        kernel = _softmax[logits.dtype]
    except UNUSUAL as error:
        kernel = _softmax.load(error, logits=logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    nbytes = _workspace_bytes(Filter.NONE, logits, 0)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=logits.device)
    kernel(out, workspace, logits, temperature, enable_pdl)
    return out


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
        Source of seed and offset when `seed` is None; see `get_seed_and_offset`.
    check_nan : bool
        Look for NaN first, which waits for the GPU, and raise ``ValueError``.
    seed, offset : int or torch.Tensor, optional
        Key of the random numbers: integers, or int64 or uint64 tensors ``[batch]`` with one per
        output (or ``[1]`` for all). `offset` defaults to 0.
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
        is given without `seed`, or `generator` with it.

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


@flashinfer_api(trace=top_p_sampling_from_probs_trace)
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
    kernels, parameters = _from_probs[Filter.TOP_P], (_row_floats(top_p),)
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


@flashinfer_api(trace=top_k_sampling_from_probs_trace)
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
    kernels, parameters = _from_probs[Filter.TOP_K], (_row_ints(top_k),)
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


@flashinfer_api(trace=min_p_sampling_from_probs_trace)
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
    kernels, parameters = _from_probs[Filter.MIN_P], (_row_floats(min_p),)
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
        raise ValueError(
            f"`filter_apply_order` must be 'top_k_first' or 'joint', got {filter_apply_order!r}"
        ) from None


def _both_filters(
    filter_apply_order: str, probs: torch.Tensor, top_k: Any, top_p: Any
) -> tuple[Filter, tuple[Any, ...]]:
    """Filter and its parameters; a top-k that keeps everything is left out, as top-p alone has a
    kernel that reads the row once."""
    filter = _ordered_filter(filter_apply_order)
    is_matrix = isinstance(probs, torch.Tensor) and probs.dim() == 2
    if is_matrix and type(top_k) is int and not 1 <= top_k < probs.shape[1]:
        return Filter.TOP_P, (_row_floats(top_p),)
    return filter, (_row_ints(top_k), _row_floats(top_p))


@flashinfer_api(trace=top_k_top_p_sampling_from_probs_trace)
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
    filter, parameters = _both_filters(filter_apply_order, probs, top_k, top_p)
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
    filter, parameters = _both_filters(filter_apply_order, logits, top_k, top_p)
    kernels = _from_logits[filter]
    return _sample(
        kernels, logits, parameters, indices, deterministic, generator, check_nan, seed, offset
    )


def _filter_rows(kernels: KernelTable, name: str, rows: torch.Tensor, value: Any) -> torch.Tensor:
    try:
        kernel = kernels[rows.dtype]
    except UNUSUAL as error:
        kernel = kernels.load(error, **{name: rows})
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    kernel(out, rows, value, None)
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
    _check_flag("is_deterministic", is_deterministic)
    return _filter_rows(_top_k_renorm, "probs", probs, _row_ints(top_k))


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
    _check_flag("is_deterministic", is_deterministic)
    return _filter_rows(_top_p_renorm, "probs", probs, _row_floats(top_p))


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
    return _filter_rows(_top_k_mask, "logits", logits, _row_ints(top_k))


top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs


@flashinfer_api(trace=chain_speculative_sampling_trace)
def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep draft tokens while the target model agrees, then draw one token of its own.

    Draft token ``x`` at position ``i`` is accepted with probability
    ``min(1, target_probs[:, i, x] / draft_probs[:, i, x])``. Drafts before the first that is not
    accepted are emitted, then a token from ``max(target_probs - draft_probs, 0)`` at that
    position; from the target's last position if all drafts were accepted. What is emitted is
    distributed as the target model's own tokens.

    Parameters
    ----------
    draft_probs : torch.Tensor
        ``[batch, num_drafts, vocab]``, float32, contiguous: what the drafts were drawn from.
    draft_token_ids : torch.Tensor
        ``[batch, num_drafts]``, int32, contiguous. A token out of range is not accepted.
    target_probs : torch.Tensor
        ``[batch, num_drafts + 1, vocab]``, float32, contiguous.
    maybe_output_accepted_token_num : torch.Tensor, optional
        ``[batch]``, int32: the number of drafts that are accepted, each looked at on its own, is
        added to it. By default to zeros.
    maybe_output_emitted_draft_token_num : torch.Tensor, optional
        ``[batch]``, int32: the number of drafts that are emitted is added to it. By default to
        zeros.
    deterministic, generator, seed, offset
        As for `sampling_from_probs`; a seed per row of the batch.

    Returns
    -------
    tuple of torch.Tensor
        Emitted tokens ``[batch, num_drafts + 1]``, int32, -1 behind the last one; and the two
        counts. A position without positive weight, or with a NaN, emits token 0.

    Raises
    ------
    TypeError, ValueError
        As for `sampling_from_probs`.

    Notes
    -----
    C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """
    try:
        kernel = _chain_speculative[draft_probs.dtype]
    except UNUSUAL as error:
        kernel = _chain_speculative.load(error, draft_probs=draft_probs)
    check_cuda_tensors(draft_token_ids=draft_token_ids, target_probs=target_probs)
    device, batch = draft_probs.device, draft_probs.shape[:1]
    token_ids = torch.empty(target_probs.shape[:2], dtype=torch.int32, device=device)
    accepted = maybe_output_accepted_token_num
    if accepted is None:
        accepted = torch.zeros(batch, dtype=torch.int32, device=device)
    emitted = maybe_output_emitted_draft_token_num
    if emitted is None:
        emitted = torch.zeros(batch, dtype=torch.int32, device=device)
    _check_flag("deterministic", deterministic)
    seed, offset = _resolve_seed(seed, offset, generator, device)
    inputs = (draft_probs, draft_token_ids, target_probs)
    kernel(token_ids, accepted, emitted, *inputs, seed, offset, None)
    return token_ids, accepted, emitted
