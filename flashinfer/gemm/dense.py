"""Products of matrices of 16 bits, alone and in batches."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from .._common.arch import as_number, get_compute_capability
from .._common.checks import cuda_tensors
from .._common.checks import dtype as check_out_dtype
from .._common.checks import flag as check_flag
from .._common.checks import same_device as check_same_device
from .._common.checks import tensor as check_tensor
from .._common.dtypes import check_dtype
from .._common.overlap import check_disjoint, extent
from .._instrument.decorator import flashinfer_api
from .._instrument.questions import Runs, says_where_it_runs, since
from ..autotuner.listeners import call_on_change
from ..compat.backends import BackendSupportedError
from ..trace.templates.gemm import bmm_bf16_trace, mm_bf16_trace, tinygemm_bf16_trace
from ._choice import GemmProblem
from ._few_rows import product_kernel, takes
from ._launch import NAMES, STARTS_EARLY, TRANSPOSED_B, get_gemm_kernel
from ._tuning import HOPPER, choose_product, choose_tiles, is_hopper, is_tuning

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
_MOST_TOKENS = 64
"""Rows up to which ``"auto"`` takes this library's kernel on Hopper, and cuBLAS beyond: measured
on one H200 over the shapes of docs/tuning/gemm.md."""

_Call = Callable[..., Any]
_products: dict[tuple[Any, ...], _Call] = {}  # empty while calls are tuned
call_on_change(_products.clear)
# Forms of result, operands and bias that cuBLASLt takes, with the bytes that each reaches over.
_checked: dict[tuple[Any, ...], tuple[int, ...]] = {}
_MOST_PRODUCTS = 1 << 14


_RUNS: dict[str, Runs] = {
    "tinygemm": is_hopper,
    "cublaslt": since(80),
    "cudnn": since(80),
    "auto": since(80),
}


_CALLED = {
    NAMES["a"]: ("a", "b", 2),
    NAMES["A"]: ("A", "B", 3),
    NAMES["input"]: ("input", "weight", 2),
}
"""What a function calls its operands, and their number of dimensions."""


def _check_operands(names: int, a: Any, b: Any) -> None:
    left, right, rank = _CALLED[names]
    for name, tensor in ((left, a), (right, b)):
        check_tensor(name, tensor, rank)
        check_dtype(name, tensor.dtype, (torch.bfloat16,))
    if a.shape[-1] > 1 and a.stride(-1) != 1:
        raise ValueError(f"`{left}` must have contiguous rows, got strides {list(a.stride())}")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"`{left}` and `{right}` must have the same k and batches, got shapes "
            f"{list(a.shape)} and {list(b.shape)}"
        )
    if min(b.shape[-2:]) > 1 and 1 not in b.stride()[-2:]:
        raise ValueError(f"`{right}` must be contiguous along k, got strides {list(b.stride())}")


def _check_results(
    names: int, out: Any, a: torch.Tensor, b: torch.Tensor, bias: Any, dtype: torch.dtype
) -> None:
    """Refuse what does not go with operands that have been checked."""
    columns = b.shape[-1]
    shape = (*a.shape[:-1], columns)
    check_tensor("out", out)
    check_dtype("out", out.dtype, (dtype,))
    if out.shape != shape:
        raise ValueError(f"`out` must have shape {list(shape)}, got {list(out.shape)}")
    leading = [step for size, step in zip(shape, out.stride(), strict=True) if size > 1]
    if columns > 1:
        leading.pop()
    overlaps = out.numel() > 0 and any(step < columns for step in leading)
    if overlaps or (columns > 1 and out.stride(-1) != 1):
        raise ValueError(
            f"`out` must have contiguous rows that do not overlap, got strides {list(out.stride())}"
        )
    if bias is not None:
        check_tensor("bias", bias)
        check_dtype("bias", bias.dtype, (dtype,))
        if bias.shape != (columns,) or (columns > 1 and bias.stride(0) != 1):
            raise ValueError(
                f"`bias` must have shape [{columns}] and be contiguous, got shape "
                f"{list(bias.shape)} with strides {list(bias.stride())}"
            )
    left, right, _ = _CALLED[names]
    check_same_device(**{left: a, right: b}, out=out, bias=bias)
    _check_apart(names, out, a, b, bias)


def _check_apart(names: int, out: Any, a: torch.Tensor, b: torch.Tensor, bias: Any) -> None:
    left, right, _ = _CALLED[names]
    check_disjoint("out", out, **{left: a, right: b}, bias=bias)


def _form(argument: Any) -> Any:
    """All of an argument that a check of it reads, in a third of the check's time."""
    if not isinstance(argument, torch.Tensor):
        return type(argument)
    return argument.shape, argument.stride(), argument.dtype, argument.device


def _choose(arguments: tuple[Any, ...], backend: str) -> _Call:
    """The call that computes ``out = a @ b`` of these shapes, kept for the next one."""
    names, out, a, b, *_ = arguments
    if not isinstance(backend, str):
        raise TypeError(f"`backend` must be a str, got {type(backend).__name__}")
    if backend not in _RUNS:
        raise BackendSupportedError(f"`backend` must be one of {[*_RUNS]}, got {backend!r}")
    left, right, _ = _CALLED[names]
    cuda_tensors(**{left: a, right: b}, out=out)
    capability = get_compute_capability(a.device)
    if not _RUNS[backend](as_number(capability)):
        raise BackendSupportedError(
            f"`backend` must be one that the GPU has, got {backend!r} for compute capability "
            f"{capability[0]}.{capability[1]}"
        )
    rows, k = a.shape[-2], a.shape[-1]
    if capability != HOPPER or backend == "cublaslt":
        return _cublas
    if k == 0:
        return _fill
    batches = a.shape[0] if a.ndim == 3 else 1
    problem = GemmProblem(a.dtype, b.dtype, out.dtype, rows, b.shape[-1], k, batches)
    if backend == "tinygemm" or out.dtype != torch.bfloat16:
        return get_gemm_kernel(choose_tiles(problem, arguments, get_gemm_kernel))
    return choose_product(problem, arguments, get_gemm_kernel, _cublas, rows > _MOST_TOKENS)


def _cublas(
    names: int,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: None,
    bias: Any,
    *_: Any,
) -> None:
    """The product by cuBLASLt."""
    form = names, *map(_form, (out, a, b, bias))
    extents = _checked.get(form)
    if extents is None:
        _check_operands(names, a, b)
        _check_results(names, out, a, b, bias, out.dtype)
        if out.dtype != a.dtype:
            raise ValueError(f"`out_dtype` must be torch.bfloat16 for cuBLASLt, got {out.dtype}")
        if len(_checked) > _MOST_PRODUCTS:
            _checked.clear()
        extents = (*map(extent, (out, a, b)), 0 if bias is None else extent(bias))
        _checked[form] = extents
    begin = out.data_ptr()
    end = begin + extents[0]
    for tensor, reach in zip((a, b, bias), extents[1:], strict=True):
        if tensor is not None and begin - reach < tensor.data_ptr() < end:
            _check_apart(names, out, a, b, bias)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or out.requires_grad):
        a, b, out = a.detach(), b.detach(), out.detach()  # torch differentiates into no result
    if bias is None:
        torch.matmul(a, b, out=out)
    else:  # in one step, which rounds once
        torch.addmm(bias.detach() if bias.requires_grad else bias, a, b, out=out)


def _fill(
    names: int,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: None,
    bias: Any,
    *_: Any,
) -> None:
    """The product without terms, k = 0, of which no kernel has a tile."""
    _check_operands(names, a, b)
    _check_results(names, out, a, b, bias, out.dtype)
    out.detach().copy_(out.new_zeros(()) if bias is None else bias.detach())


def _product(
    names: int,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    pdl: bool,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
    layout: int = TRANSPOSED_B,
) -> torch.Tensor:
    try:
        if out is None:
            out = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)
        elif out.dtype is not out_dtype:
            raise TypeError
        product = _products[names, a.shape, b.shape, out_dtype, backend, a.device]
    except (KeyError, AttributeError, IndexError, RuntimeError, TypeError):
        _check_operands(names, a, b)
        check_out_dtype("out_dtype", out_dtype, _OUTPUTS)
        if out is None:
            out = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)
        _check_results(names, out, a, b, bias, out_dtype)
        if len(_products) > _MOST_PRODUCTS:
            _products.clear()
        arguments = (names, out, a, b, None, bias, 1.0, None, None, layout, 0, pdl)
        product = _choose(arguments, backend)
        if not is_tuning():
            _products[names, a.shape, b.shape, out_dtype, backend, a.device] = product
    product(names, out, a, b, None, bias, 1.0, None, None, layout, 0, pdl)
    return out


@says_where_it_runs(since(80), _RUNS)
@flashinfer_api(trace=mm_bf16_trace)
def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: Literal[
        "cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cutile", "cute-dsl", "auto"
    ] = "cudnn",
    weight_ready: bool = False,
) -> torch.Tensor:
    """``out = a @ b + bias``, summed in float32 and rounded once.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, bfloat16, rows contiguous, on a GPU. k is a multiple of 8. Rows of operands
        begin at multiples of 16 bytes.
    b : torch.Tensor
        ``[k, n]``, bfloat16, column-major: the transpose of a weight ``[n, k]``. With up to 8
        rows of `a` on Hopper, k up to 32768 and bfloat16 results, rows may be contiguous instead,
        if they begin at multiples of 16 bytes: n is a multiple of 8 with one row of `a`, and of
        64 with more, k then of 16.
    bias : torch.Tensor, optional
        ``[n]``, of `out_dtype`: added to every row.
    pdl : bool
        Programmatic dependent launch of this library's kernel (compute capability 9.0): it may be
        scheduled before the kernel that precedes it ends. Changes no result.
    out : torch.Tensor, optional
        ``[m, n]``, of `out_dtype`, rows contiguous: receives the result. It may not overlap
        another argument.
    out_dtype : torch.dtype
        bfloat16; float16 and float32 by this library's kernel alone.
    backend : {"cudnn", "auto", "cublaslt", "tinygemm"}
        ``"tinygemm"``: this library's kernel for Hopper. ``"cublaslt"``: cuBLASLt. The others
        choose between both, by the tuner's result if there is one. The remaining names of
        FlashInfer's backends are refused.
    weight_ready : bool
        What wrote `b` and `bias` had ended when the kernel before this one began, so that they may
        be loaded before that one ends where `pdl` lets this kernel start. Changes no result.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or the GPU has no such backend.

    Examples
    --------
    >>> a = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    >>> w = torch.randn(6144, 4096, dtype=torch.bfloat16, device="cuda")
    >>> flashinfer.mm_bf16(a, w.t()).shape
    torch.Size([16, 6144])
    """
    layout = TRANSPOSED_B | (STARTS_EARLY if check_flag("weight_ready", weight_ready) else 0)
    check_flag("pdl", pdl)
    if backend != "cublaslt" and out_dtype == torch.bfloat16 and takes(a, b):
        return _few_rows(a, b, bias, pdl, out, backend, weight_ready)
    return _product(NAMES["a"], a, b, bias, pdl, out, out_dtype, backend, layout)


def _few_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    pdl: bool,
    out: torch.Tensor | None,
    backend: str,
    weight_ready: bool,
) -> torch.Tensor:
    """The product with contiguous rows of `b`."""
    capability = get_compute_capability(a.device)
    if capability != HOPPER or backend not in _RUNS:
        raise BackendSupportedError(
            f"`backend` must be 'cudnn', 'tinygemm' or 'auto' on Hopper for contiguous rows of "
            f"`b`, got {backend!r} for compute capability {capability[0]}.{capability[1]}"
        )
    if out is None:
        out = a.new_empty(len(a), b.shape[1])
    kernel, splits = product_kernel(a.device, len(a), b.shape[1], b.shape[0])
    kernel(out, a, b, bias, splits, pdl, weight_ready)
    return out


@says_where_it_runs(since(80), _RUNS)
@flashinfer_api(trace=bmm_bf16_trace)
def bmm_bf16(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: Literal["cudnn", "cutlass", "cutile", "tgv", "cake", "auto"] = "cudnn",
) -> torch.Tensor:
    """``out[i] = A[i] @ B[i]``, summed in float32 and rounded once.

    Parameters
    ----------
    A : torch.Tensor
        ``[b, m, k]``, bfloat16, rows contiguous, on a GPU. k is a multiple of 8.
    B : torch.Tensor
        ``[b, k, n]``, bfloat16, column-major: the transpose of weights ``[b, n, k]``.
    out : torch.Tensor, optional
        ``[b, m, n]``, of `out_dtype`, rows contiguous: receives the result.
    out_dtype, backend
        As for `mm_bf16`, which also lists the errors.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.
    """
    return _product(NAMES["A"], A, B, None, False, out, out_dtype, backend)


@says_where_it_runs(is_hopper)
@flashinfer_api(trace=tinygemm_bf16_trace)
def tinygemm_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> None:
    """``out = input @ weight.T + bias`` for few rows, on Hopper.

    Parameters
    ----------
    input : torch.Tensor
        ``[m, k]``, bfloat16, rows contiguous, on the GPU. k is a multiple of 8.
    weight : torch.Tensor
        ``[n, k]``, bfloat16, rows contiguous.
    out : torch.Tensor
        ``[m, n]``, bfloat16, rows contiguous: receives the result.
    bias : torch.Tensor, optional
        ``[n]``, bfloat16.
    use_pdl : bool
        Programmatic dependent launch: the kernel may be scheduled, and loads `weight`, before the
        kernel that precedes it ends. That one must therefore not write `weight` or `bias`.

    Raises
    ------
    TypeError, ValueError
        As `mm_bf16`.
    """
    check_tensor("weight", weight, 2)
    check_tensor("out", out)
    layout = TRANSPOSED_B | (STARTS_EARLY if check_flag("use_pdl", use_pdl) else 0)
    names, dtype = NAMES["input"], torch.bfloat16
    _product(names, input, weight.t(), bias, use_pdl, out, dtype, "tinygemm", layout)
