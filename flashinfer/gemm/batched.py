"""Products of batches of 8-bit matrices with one scale per operand."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from .._common.checks import cuda_tensors
from .._common.checks import dtype as check_out_dtype
from .._common.checks import same_device as check_same_device
from .._common.checks import tensor as check_tensor
from .._common.checks import tensors as check_tensors
from .._common.dtypes import FLOAT8, check_dtype
from .._instrument.decorator import flashinfer_api
from ..autotuner.autotuner import AutoTuner
from ..compat.backends import backend_requirement, supported_compute_capability
from ..trace.templates.gemm import bmm_fp8_trace
from ._checks import aligned_scale, check_out
from ._choice import GemmProblem
from ._launch import NAMES, TRANSPOSED_B, get_gemm_kernel, launch
from ._tuning import choose_product

_ALIGNMENT = 16  # elements: the bytes that cuBLASLt wants every row of an 8-bit operand to begin on


def _check_operands(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> bool:
    check_tensors(A=A, B=B, A_scale=A_scale, B_scale=B_scale)
    for name, operand in (("A", A), ("B", B)):
        check_dtype(name, operand.dtype, FLOAT8)
        check_tensor(name, operand, 3)
    if A.dtype == B.dtype == torch.float8_e5m2:
        raise ValueError("`A` or `B` must have dtype float8_e4m3fn, got float8_e5m2 for both")
    batch, m, k = A.shape
    if B.shape[:2] != (batch, k):
        raise ValueError(f"`B` must have shape [{batch}, {k}, n] for `A`, got {list(B.shape)}")
    n = B.shape[2]
    if k == 0 or k % _ALIGNMENT or n % _ALIGNMENT:
        raise ValueError(
            f"`A` and `B` must have k and n that are multiples of {_ALIGNMENT} and k above 0, "
            f"got k = {k}, n = {n}"
        )
    for name, operand, major in (("A", A, A), ("B", B, B.transpose(1, 2))):
        rows = major.stride(1) if major.shape[1] > 1 else k
        aligned = rows % _ALIGNMENT == 0 and rows >= k and operand.data_ptr() % _ALIGNMENT == 0
        aligned = aligned and (batch < 2 or operand.stride(0) % _ALIGNMENT == 0)
        if operand.numel() and (major.stride(2) != 1 or not aligned):
            order = "row-major" if name == "A" else "column-major (the transpose of [b, n, k])"
            raise ValueError(
                f"`{name}` must be {order}, its vectors of k elements on 16 bytes, "
                f"got strides {list(operand.stride())}"
            )
    for name, scale in (("A_scale", A_scale), ("B_scale", B_scale)):
        check_dtype(name, scale.dtype, (torch.float32,))
        if scale.numel() != 1:
            raise ValueError(f"`{name}` must have one element, got shape {list(scale.shape)}")
    check_out_dtype("dtype", dtype, (torch.bfloat16, torch.float16))
    check_out(out, (batch, m, n), dtype)
    check_same_device(A=A, B=B, A_scale=A_scale, B_scale=B_scale, out=out)
    return True


@supported_compute_capability([89, 90, 100, 103, 110, 120, 121])
def _check_cublas(A: torch.Tensor) -> bool:
    return True


@supported_compute_capability([90])
def _check_own(A: torch.Tensor) -> bool:
    return True


def _rank_backends(suitable_backends: Sequence[str]) -> Sequence[str]:
    return suitable_backends


@backend_requirement(
    {"cublas": _check_cublas, "cudnn": _check_own},
    common_check=_check_operands,
    heuristic_func=_rank_backends,
)
@flashinfer_api(trace=bmm_fp8_trace)
def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: Literal["cudnn", "cublas", "cutlass", "cute-dsl", "auto"] = "cublas",
) -> torch.Tensor:
    """``out[i] = A_scale * B_scale * (A[i] @ B[i])`` for 8-bit matrices.

    Parameters
    ----------
    A : torch.Tensor
        ``[b, m, k]``, float8_e4m3fn or float8_e5m2, row-major, on a GPU.
    B : torch.Tensor
        ``[b, k, n]``, float8_e4m3fn or float8_e5m2 (not both operands), column-major: the transpose
        of a contiguous ``[b, n, k]``. k and n are multiples of 16.
    A_scale, B_scale : torch.Tensor
        One float32 element each, on the GPU: what the operand is multiplied by.
    dtype : torch.dtype
        Type of the result: bfloat16 or float16.
    out : torch.Tensor, optional
        ``[b, m, n]``, contiguous, of `dtype`: receives the result.
    backend : {"cublas", "cudnn", "auto"}
        ``"cublas"``: cuBLASLt, whose sums keep about 14 bits on Hopper. ``"cudnn"``: this library's
        kernel for Hopper, which adds up sums of 128 products in float32. ``"auto"``: cuBLASLt,
        unless the tuner found this library's kernel faster. The other names of FlashInfer's
        backends are refused.

    Returns
    -------
    torch.Tensor
        ``[b, m, n]``; `out` if it was given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the backend does not exist or the GPU has no 8-bit products (compute
        capability below 8.9).

    Examples
    --------
    >>> A = torch.randn(2, 48, 64, device="cuda").to(torch.float8_e4m3fn)
    >>> B = torch.randn(2, 80, 64, device="cuda").to(torch.float8_e4m3fn).transpose(1, 2)
    >>> one = torch.ones(1, device="cuda")
    >>> flashinfer.bmm_fp8(A, B, one, one, torch.bfloat16).shape
    torch.Size([2, 48, 80])
    """
    cuda_tensors(A=A, B=B, A_scale=A_scale, B_scale=B_scale)
    if out is None:
        out = torch.empty(A.shape[0], A.shape[1], B.shape[2], dtype=dtype, device=A.device)
    if out.numel() and backend == "cudnn":
        launch(_problem(out, A, B), "A", out, A, B, (A_scale, B_scale), layout=TRANSPOSED_B)
    elif out.numel():
        scales = (A_scale, B_scale, None)
        arguments = (NAMES["A"], out, A, B, scales, None, 1.0, None, None, TRANSPOSED_B, 0, None)
        product = _cublas
        if backend == "auto" and not AutoTuner.get().is_idle:
            product = _choose(arguments)
        product(*arguments)
    return out


def _problem(out: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> GemmProblem:
    batches, rows, columns = out.shape
    return GemmProblem(A.dtype, B.dtype, out.dtype, rows, columns, A.shape[2], batches)


def _choose(arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """cuBLASLt's products, or on Hopper this library's, where the tuner found them faster."""
    _, out, A, B, *_ = arguments
    problem = _problem(out, A, B)
    return choose_product(problem, arguments, get_gemm_kernel, _cublas, prefers_library=True)


def _cublas(
    names: int,
    out: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor, None],
    *_: Any,
) -> None:
    """The products by cuBLASLt, one after the other."""
    factors = aligned_scale(scales[0]), aligned_scale(scales[1])
    for a, b, product in zip(A, B, out, strict=True):
        torch._scaled_mm(a, b, *factors, out_dtype=out.dtype, use_fast_accum=True, out=product)
