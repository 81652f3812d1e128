"""Products of 1 to 16 tokens with the weights of a router, under the names that engines import."""

from collections.abc import Callable

import torch

from .._common.checks import flag as check_flag
from .._common.checks import tensors as check_tensors
from .._common.dtypes import check_dtype
from .._instrument.decorator import flashinfer_api
from ..compat.backends import backend_requirement, supported_compute_capability
from ..trace.templates import router as traces
from ._weight_kernels import choose_weight_config, get_weight_gemm_kernel

_MOST_TOKENS = 16


def _check(k: int, n: int, dtype: torch.dtype) -> Callable[..., bool]:
    """The check of a function for weights ``[k, n]`` and results of a type."""

    @supported_compute_capability([90, 100, 103, 110, 120, 121])
    def check(
        mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool
    ) -> bool:
        check_tensors(mat_a=mat_a, mat_b=mat_b, out=out)
        for name, tensor in (("mat_a", mat_a), ("mat_b", mat_b)):
            check_dtype(name, tensor.dtype, (torch.bfloat16,))
        m = mat_a.shape[0] if mat_a.ndim == 2 else 0
        if not 1 <= m <= _MOST_TOKENS or mat_a.shape[1] != k:
            raise ValueError(
                f"`mat_a` must have shape [m, {k}] with m from 1 to {_MOST_TOKENS}, got "
                f"{list(mat_a.shape)}"
            )
        if mat_b.shape != (k, n) or mat_b.stride(0) != 1:
            raise ValueError(
                f"`mat_b` must have shape [{k}, {n}] and be column-major, got "
                f"{list(mat_b.shape)} with strides {list(mat_b.stride())}"
            )
        if out.shape != (m, n):
            raise ValueError(f"`out` must have shape [{m}, {n}], got {list(out.shape)}")
        check_dtype("out", out.dtype, (dtype,))
        check_flag("launch_with_pdl", launch_with_pdl)
        return True

    return check


def _run(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool
) -> None:
    (m, k), n = mat_a.shape, mat_b.shape[1]
    config = choose_weight_config(
        mat_a.device, mat_a.dtype, out.dtype, "plain", mat_a.dtype, 0, m, n, k
    )
    kernel = get_weight_gemm_kernel(config)
    kernel(1, out, mat_a, mat_b.t(), None, None, None, None, None, launch_with_pdl)


@backend_requirement({}, common_check=_check(7168, 128, torch.bfloat16))
@flashinfer_api(trace=traces.mm_M1_16_K7168_N128_trace)
def mm_M1_16_K7168_N128(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True
) -> None:
    """``out = mat_a @ mat_b`` for the router of Mistral Large 3: k = 7168, n = 128.

    Parameters
    ----------
    mat_a : torch.Tensor
        ``[m, k]``, bfloat16, rows contiguous and beginning at multiples of 16 bytes, on a GPU of
        compute capability 9.0 or newer; m is from 1 to 16.
    mat_b : torch.Tensor
        ``[k, n]``, bfloat16, column-major: the transpose of a weight ``[n, k]``, whose rows begin
        at multiples of 16 bytes.
    out : torch.Tensor
        ``[m, n]``, bfloat16, rows contiguous: receives the result.
    launch_with_pdl : bool
        Programmatic dependent launch: the kernel may be scheduled before the one that precedes it
        ends. Changes no result.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is older.
    """
    _run(mat_a, mat_b, out, launch_with_pdl)


@backend_requirement({}, common_check=_check(7168, 256, torch.float32))
@flashinfer_api(trace=traces.mm_M1_16_K7168_N256_trace)
def mm_M1_16_K7168_N256(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True
) -> None:
    """`mm_M1_16_K7168_N128` for the router of DeepSeek V3: k = 7168, n = 256, float32 `out`."""
    _run(mat_a, mat_b, out, launch_with_pdl)


@backend_requirement({}, common_check=_check(7168, 256, torch.bfloat16))
@flashinfer_api(trace=traces.mm_M1_16_K7168_N256_bf16_trace)
def mm_M1_16_K7168_N256_bf16(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True
) -> None:
    """`mm_M1_16_K7168_N128` for the router of DeepSeek V3: k = 7168, n = 256, bfloat16 `out`."""
    _run(mat_a, mat_b, out, launch_with_pdl)


@backend_requirement({}, common_check=_check(6144, 256, torch.float32))
@flashinfer_api(trace=traces.mm_M1_16_K6144_N256_trace)
def mm_M1_16_K6144_N256(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True
) -> None:
    """`mm_M1_16_K7168_N128` for the router of GLM MoE DSA: k = 6144, n = 256, float32 `out`."""
    _run(mat_a, mat_b, out, launch_with_pdl)


@backend_requirement({}, common_check=_check(7168, 384, torch.float32))
@flashinfer_api(trace=traces.mm_M1_16_K7168_N384_trace)
def mm_M1_16_K7168_N384(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True
) -> None:
    """`mm_M1_16_K7168_N128` for the router of Kimi K2: k = 7168, n = 384, float32 `out`."""
    _run(mat_a, mat_b, out, launch_with_pdl)


@backend_requirement({}, common_check=_check(7168, 384, torch.bfloat16))
@flashinfer_api(trace=traces.mm_M1_16_K7168_N384_bf16_trace)
def mm_M1_16_K7168_N384_bf16(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True
) -> None:
    """`mm_M1_16_K7168_N128` for the router of Kimi K2: k = 7168, n = 384, bfloat16 `out`."""
    _run(mat_a, mat_b, out, launch_with_pdl)


@backend_requirement({}, common_check=_check(7168, 896, torch.float32))
@flashinfer_api(trace=traces.mm_M1_16_K7168_N896_trace)
def mm_M1_16_K7168_N896(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True
) -> None:
    """`mm_M1_16_K7168_N128` for the router of Kimi K3: k = 7168, n = 896, float32 `out`."""
    _run(mat_a, mat_b, out, launch_with_pdl)


@backend_requirement({}, common_check=_check(7168, 896, torch.bfloat16))
@flashinfer_api(trace=traces.mm_M1_16_K7168_N896_bf16_trace)
def mm_M1_16_K7168_N896_bf16(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True
) -> None:
    """`mm_M1_16_K7168_N128` for the router of Kimi K3: k = 7168, n = 896, bfloat16 `out`."""
    _run(mat_a, mat_b, out, launch_with_pdl)
