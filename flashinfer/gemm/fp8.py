"""Products of 8-bit matrices with a scale for the whole result, or one per row and per column."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from .._common.checks import choice as check_choice
from .._common.checks import cuda_tensors
from .._common.checks import dtype as check_out_dtype
from .._common.checks import same_device as check_same_device
from .._common.checks import tensor as check_tensor
from .._common.checks import tensors as check_tensors
from .._common.dtypes import FLOAT8, check_dtype
from .._instrument.decorator import flashinfer_api
from ..autotuner.autotuner import AutoTuner
from ..compat.backends import backend_requirement, supported_compute_capability
from ..trace.templates.fp8_products import fp8_linear_trace, grouped_mm_fp8_trace, mm_fp8_trace
from ._checks import aligned_scale, check_out
from ._choice import GemmProblem
from ._launch import NAMES, TRANSPOSED_B, get_gemm_kernel, launch
from ._tuning import choose_product

_OUT = (torch.bfloat16, torch.float16)
_WIDE = (*_OUT, torch.float32)
_FP8 = (torch.float8_e4m3fn,)
_MAX_E4M3 = 448.0
_MOST_TOKENS = 64  # up to which "auto" takes this library's kernel, as for 16 bits


def _check_alpha(alpha: torch.Tensor | None) -> None:
    if alpha is None:
        return
    check_tensor("alpha", alpha)
    check_dtype("alpha", alpha.dtype, (torch.float32,))
    if alpha.numel() != 1:
        raise ValueError(f"`alpha` must have one element, got shape {list(alpha.shape)}")


def _check_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> bool:
    check_tensors(a=a, b=b)
    for name, operand in (("a", a), ("b", b)):
        check_dtype(name, operand.dtype, _FP8)
        check_tensor(name, operand, 2)
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or k == 0 or k % 16 or n % 16:
        raise ValueError(
            f"`b` must have shape [{k}, n] for `a`, with k and n that are multiples of 16, got "
            f"{list(b.shape)}"
        )
    for name, rows in (("a", a), ("b", b.t())):
        if rows.stride(1) != 1 or rows.stride(0) % 16 or rows.data_ptr() % 16:
            order = "row-major" if name == "a" else "column-major (the transpose of [n, k])"
            raise ValueError(
                f"`{name}` must be {order}, its vectors of k elements on 16 bytes, got strides "
                f"{list(a.stride() if name == 'a' else b.stride())}"
            )
    _check_alpha(alpha)
    check_out_dtype("out_dtype", out_dtype, _OUT)
    check_out(out, (m, n), out_dtype)
    check_same_device(a=a, b=b, alpha=alpha, out=out)
    return True


@supported_compute_capability([89, 90, 100, 103, 110, 120, 121])
def _check_cublas(a: torch.Tensor) -> bool:
    return True


@supported_compute_capability([90])
def _check_own(a: torch.Tensor) -> bool:
    return True


def _rank(suitable_backends: Sequence[str], a: torch.Tensor) -> Sequence[str]:
    best = "cudnn" if a.shape[0] <= _MOST_TOKENS else "cublas"
    return sorted(suitable_backends, key=lambda name: name != best)


@backend_requirement(
    {"cublas": _check_cublas, "cudnn": _check_own}, common_check=_check_mm, heuristic_func=_rank
)
@flashinfer_api(trace=mm_fp8_trace)
def mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    backend: Literal[
        "trtllm_low_latency", "cutedsl_low_latency", "cublas", "cudnn", "cutlass", "auto"
    ] = "trtllm_low_latency",
) -> torch.Tensor:
    """``out = alpha * (a @ b)`` for 8-bit matrices.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, float8_e4m3fn, row-major, on a GPU. k is a multiple of 16.
    b : torch.Tensor
        ``[k, n]``, float8_e4m3fn, column-major: the transpose of a weight ``[n, k]``. n is a
        multiple of 16.
    alpha : torch.Tensor, optional
        One float32 element on the GPU: the product of both operands' scales. 1 if None.
    out_dtype : torch.dtype
        bfloat16 or float16.
    out : torch.Tensor, optional
        ``[m, n]``, contiguous, of `out_dtype`: receives the result.
    backend : {"cublas", "cudnn", "auto"}
        ``"cublas"``: cuBLASLt, whose sums keep about 14 bits on Hopper. ``"cudnn"``: this library's
        kernel for Hopper, which adds up sums of 128 products in float32. ``"auto"`` takes the
        second one up to 64 rows, or what the tuner found faster. FlashInfer's other names are
        refused, its default among them: that one expects weights in an order of Blackwell's.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; `out` if it was given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the backend does not exist or does not run on the GPU.
    """
    cuda_tensors(a=a, b=b)
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if out.numel() == 0:
        return out
    chosen = mm_fp8.suitable_auto_backends[0] if backend == "auto" else backend  # type: ignore[attr-defined]
    asks = backend == "auto" and not AutoTuner.get().is_idle
    if chosen == "cublas" and not asks:
        _cublas(NAMES["a"], out, a, b, (alpha, None, None))
        return out
    problem = GemmProblem(a.dtype, b.dtype, out.dtype, a.shape[0], b.shape[1], a.shape[1])
    if asks:
        return _run_fastest(problem, out, a, b, alpha, chosen == "cublas")
    return launch(problem, "a", out, a, b, (alpha, None), layout=TRANSPOSED_B)


def _run_fastest(
    problem: GemmProblem,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None,
    prefers_cublas: bool,
) -> torch.Tensor:
    """The product by what the tuner found fastest; without a result by what is preferred."""
    scales = (alpha, None, None)
    arguments = (NAMES["a"], out, a, b, scales, None, 1.0, None, None, TRANSPOSED_B, 0, None)
    product = choose_product(problem, arguments, get_gemm_kernel, _cublas, prefers_cublas)
    product(*arguments)
    return out


def _cublas(
    names: int,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor | None, None, None],
    *_: Any,
) -> None:
    """The product by cuBLASLt."""
    one = torch.ones((), dtype=torch.float32, device=a.device)
    scale = one if scales[0] is None else aligned_scale(scales[0])
    torch._scaled_mm(a, b, scale, one, out_dtype=out.dtype, use_fast_accum=True, out=out)


@supported_compute_capability([90])
def _check_linear(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    qkv_scale: Any,
    config: Any,
    out_dtype: torch.dtype,
    output_quant_scale: torch.Tensor | None,
    out: torch.Tensor | None,
) -> bool:
    check_tensors(a=a, weight=weight, a_scale=a_scale, weight_scale=weight_scale)
    for name, value in (("qkv_scale", qkv_scale), ("config", config)):
        if value is not None:
            raise ValueError(f"`{name}` must be None: it is for Blackwell's kernels, got {value!r}")
    for name, operand in (("a", a), ("weight", weight)):
        check_dtype(name, operand.dtype, FLOAT8)
        check_tensor(name, operand, 2)
    if weight.shape[1] != a.shape[1] or a.shape[1] == 0 or a.shape[1] % 16:
        raise ValueError(
            f"`weight` must have shape [n, {a.shape[1]}] for `a`, a multiple of 16, got "
            f"{list(weight.shape)}"
        )
    for name, scale, rows in (
        ("a_scale", a_scale, a.shape[0]),
        ("weight_scale", weight_scale, weight.shape[0]),
    ):
        check_dtype(name, scale.dtype, (torch.float32,))
        if scale.shape != (rows,):
            raise ValueError(f"`{name}` must have shape [{rows}], got {list(scale.shape)}")
    check_out_dtype("out_dtype", out_dtype, (*_WIDE, *_FP8))
    if (output_quant_scale is None) == (out_dtype in _FP8):
        raise ValueError(
            "`output_quant_scale` must be given for an `out_dtype` of float8_e4m3fn, and for no "
            f"other, got {out_dtype}"
        )
    if output_quant_scale is not None:
        check_tensor("output_quant_scale", output_quant_scale)
        check_dtype("output_quant_scale", output_quant_scale.dtype, (torch.float32,))
        if output_quant_scale.numel() != 1:
            raise ValueError(
                "`output_quant_scale` must have one element, got shape "
                f"{list(output_quant_scale.shape)}"
            )
    if bias is not None:
        check_tensor("bias", bias)
        check_dtype("bias", bias.dtype, _WIDE if out_dtype in _FP8 else (out_dtype,))
        if bias.shape != (weight.shape[0],):
            raise ValueError(f"`bias` must have shape [{weight.shape[0]}], got {[*bias.shape]}")
    check_out(out, (a.shape[0], weight.shape[0]), out_dtype)
    check_same_device(a=a, weight=weight, bias=bias, output_quant_scale=output_quant_scale, out=out)
    return True


@backend_requirement({}, common_check=_check_linear)
@flashinfer_api(trace=fp8_linear_trace)
def fp8_linear(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    qkv_scale: torch.Tensor | None = None,
    config: Any = None,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out = a_scale * weight_scale * (a @ weight.T) + bias``: scales per token and per channel.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, float8_e4m3fn or float8_e5m2, rows contiguous, on a Hopper GPU; k is a multiple
        of 16.
    weight : torch.Tensor
        ``[n, k]``, 8 bits, rows contiguous.
    a_scale, weight_scale : torch.Tensor
        ``[m]`` and ``[n]``, float32, contiguous.
    bias : torch.Tensor, optional
        ``[n]``, of `out_dtype`; of any of the other types where that is float8_e4m3fn.
    qkv_scale, config
        Arguments of Blackwell's kernels. None.
    out_dtype : torch.dtype
        bfloat16, float16, float32 or float8_e4m3fn.
    output_quant_scale : torch.Tensor, optional
        One float32 element that an 8-bit result is multiplied by before it is rounded; what is
        beyond 448 becomes 448. Required for, and only for, an 8-bit `out_dtype`.
    out : torch.Tensor, optional
        ``[m, n]``, contiguous, of `out_dtype`: receives the result.

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
    """
    (m, k), n = a.shape, weight.shape[0]
    rounds = out_dtype in _FP8
    dtype = torch.float32 if rounds else out_dtype
    product = a.new_empty((m, n), dtype=dtype) if out is None or rounds else out
    if product.numel():
        problem = GemmProblem(a.dtype, weight.dtype, dtype, m, n, k, scale="token_channel")
        scales = a_scale, weight_scale
        if rounds and bias is not None:
            bias = bias.float()
        launch(problem, "a_weight", product, a, weight, scales, bias=bias)
    if not rounds:
        return product
    assert output_quant_scale is not None
    product *= output_quant_scale.reshape(())
    codes = product.clamp_(-_MAX_E4M3, _MAX_E4M3).to(out_dtype)
    return codes if out is None else out.copy_(codes)


@supported_compute_capability([90])
def _check_grouped(
    a: torch.Tensor, b: torch.Tensor, m_indptr: torch.Tensor, alpha: torch.Tensor | None
) -> bool:
    check_tensors(a=a, b=b, m_indptr=m_indptr)
    for name, operand, rank in (("a", a, 2), ("b", b, 3)):
        check_dtype(name, operand.dtype, FLOAT8)
        check_tensor(name, operand, rank)
    _check_alpha(alpha)
    return True


@backend_requirement({}, common_check=_check_grouped)
@flashinfer_api(trace=grouped_mm_fp8_trace)
def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """``out[r] = alpha * (a[r] @ b[g].T)`` in 8 bits, for the rows r of each group g.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, float8_e4m3fn or float8_e5m2, rows contiguous, on a Hopper GPU; k is a multiple
        of 16.
    b : torch.Tensor
        ``[groups, n, k]``, 8 bits, rows contiguous, at most 1024 groups.
    m_indptr : torch.Tensor
        ``[groups + 1]``, int32 or int64: rows ``m_indptr[g]`` to ``m_indptr[g + 1]`` are group g's.
        Rows of no group are not written.
    alpha : torch.Tensor, optional
        One float32 element on the GPU; 1 if None.
    out, out_dtype, backend, tactic
        As for `grouped_mm_bf16`, which also lists the errors.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; `out` if it was given.
    """
    check_choice("backend", backend, ("cudnn", "auto"))
    check_out_dtype("out_dtype", out_dtype, (*_OUT, torch.float32))
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    check_tensor("out", out)
    check_dtype("out", out.dtype, (out_dtype,))
    (rows, k), (batches, columns, _) = a.shape, b.shape
    problem = GemmProblem(
        a.dtype, b.dtype, out.dtype, rows, columns, k, batches=batches, groups="offsets"
    )
    rows_of = (m_indptr, None, None, None)
    return launch(problem, "a", out, a, b, (alpha, None), rows=rows_of, tactic=tactic)
