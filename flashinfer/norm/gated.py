"""Norms with gates, of the residual stream and of heads; `flashinfer.norm` exports them."""

from typing import cast

import torch

from .._common import checks
from .._common.dtypes import HALF
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.gated_norms import (
    GatedResidualConfig,
    SigmoidGateConfig,
    gen_gated_residual_module,
    gen_sigmoid_gate_module,
)
from ..trace.templates.gated_norms import (
    gated_residual_next_rmsnorm_trace,
    gated_residual_rmsnorm_trace,
    rmsnorm_sigmoid_gate_trace,
)

_MOST_COLUMNS = 8192  # of a branch: a CTA has a thread per eight
_MOST_OF_A_HEAD = 256  # a warp


def _get_residual_kernel(dtype: torch.dtype, next: bool) -> Kernel:
    module = gen_gated_residual_module(GatedResidualConfig(dtype, next)).build_and_load()
    return cast(Kernel, module.gated_residual)


def _get_gate_kernel(dtype: torch.dtype) -> Kernel:
    module = gen_sigmoid_gate_module(SigmoidGateConfig(dtype)).build_and_load()
    return cast(Kernel, module.sigmoid_gate)


_residual_kernels = KernelTable(_get_residual_kernel)
_gate_kernels = KernelTable(_get_gate_kernel)


def _residual_kernel(branch: torch.Tensor, next: bool) -> Kernel:
    try:
        return _residual_kernels[branch.dtype, next]
    except NOT_LOADED:
        return _residual_kernels.load(next, branch=branch)


@flashinfer_api(trace=gated_residual_rmsnorm_trace)
def gated_residual_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    gain_center: float = 0.0,
    out: torch.Tensor | None = None,
    *,
    enable_pdl: bool = True,
) -> torch.Tensor:
    """Add a normalised branch to the residual stream, each with a gate per column.

    ``b = branch * (weight + gain_center)``, or `branch` without a weight; then
    ``out = alpha * residual + beta * b / sqrt(mean(b^2) + eps)``, all in float32. The weight stands
    before the mean square, unlike `rmsnorm`'s.

    Parameters
    ----------
    branch : torch.Tensor
        ``[batch, hidden]``, float16 or bfloat16; hidden is a multiple of 8, at most 8192. Rows are
        contiguous and begin on 16 bytes, as those of `residual` and `out`.
    residual : torch.Tensor
        ``[batch, hidden]``, float32.
    weight : torch.Tensor, optional
        ``[hidden]``, contiguous, dtype of `branch`.
    alpha, beta : torch.Tensor
        ``[hidden]``, float32, contiguous: gates of `residual` and of the branch.
    eps : float
        Added to the mean square; finite, not negative.
    gain_center : float
        Added to `weight` in float32.
    out : torch.Tensor, optional
        Result, shape and dtype of `residual`; may be `residual` itself.
    enable_pdl : bool
        Programmatic dependent launch, which only compute capability 9.0 and later have. Changes no
        result.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above.

    See Also
    --------
    gated_residual_next_rmsnorm : The same with the norm that follows it.
    """
    kernel = _residual_kernel(branch, False)
    if out is None:
        checks.cuda_tensors(residual=residual)
        out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    checks.tensor("alpha", alpha)
    kernel(
        out,
        branch,
        residual,
        (alpha, beta),
        weight,
        (gain_center, eps),
        _launched_early(enable_pdl),
    )
    return out


@flashinfer_api(trace=gated_residual_next_rmsnorm_trace)
def gated_residual_next_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    post_eps: float = 1e-6,
    next_eps: float = 1e-6,
    next_gain_center: float = 0.0,
    residual_out: torch.Tensor | None = None,
    ffn_input: torch.Tensor | None = None,
    *,
    post_weight: torch.Tensor | None = None,
    post_gain_center: float = 0.0,
    enable_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a normalised branch to the gated residual stream, and normalise the sum.

    ``residual_out`` is `gated_residual_rmsnorm` of `branch` with `post_weight`, `post_gain_center`
    and `post_eps`; then ``ffn_input = residual_out / sqrt(mean(residual_out^2) + next_eps) *
    (next_weight + next_gain_center)``. Everything is float32; only `ffn_input` is rounded.

    Parameters
    ----------
    branch : torch.Tensor
        ``[batch, hidden]``, float16 or bfloat16; hidden is a multiple of 8, at most 8192. Rows are
        contiguous and begin on 16 bytes, as those of all matrices here.
    residual : torch.Tensor
        ``[batch, hidden]``, float32.
    next_weight : torch.Tensor
        ``[hidden]``, contiguous, dtype of `branch`.
    alpha : torch.Tensor or float
        Gate of `residual`: ``[hidden]``, float32, contiguous, or one number for all columns.
    beta : torch.Tensor
        ``[hidden]``, float32, contiguous: gate of the branch.
    post_eps, next_eps : float
        Added to the mean squares; finite, not negative.
    next_gain_center, post_gain_center : float
        Added to `next_weight` and `post_weight` in float32.
    residual_out : torch.Tensor, optional
        Shape and dtype of `residual`; may be `residual` itself.
    ffn_input : torch.Tensor, optional
        Shape and dtype of `branch`; may be `branch` itself.
    post_weight : torch.Tensor, optional
        ``[hidden]``, contiguous, dtype of `branch`: weight of the branch, before its mean square.
    enable_pdl : bool
        Programmatic dependent launch, which only compute capability 9.0 and later have. Changes no
        result.

    Returns
    -------
    tuple of torch.Tensor
        `residual_out` and `ffn_input`, or new tensors.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above.
    """
    kernel = _residual_kernel(branch, True)
    if residual_out is None:
        checks.cuda_tensors(residual=residual)
        residual_out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    if ffn_input is None:
        ffn_input = torch.empty_like(branch, memory_format=torch.contiguous_format)
    kernel(
        residual_out,
        ffn_input,
        branch,
        residual,
        (alpha, beta),
        post_weight,
        next_weight,
        (post_gain_center, post_eps),
        (next_gain_center, next_eps),
        _launched_early(enable_pdl),
    )
    return residual_out, ffn_input


@flashinfer_api(trace=rmsnorm_sigmoid_gate_trace)
def rmsnorm_sigmoid_gate(
    input: torch.Tensor, gate: torch.Tensor, eps: float = 1e-5, *, enable_pdl: bool = True
) -> None:
    """Normalise each head in place and gate it: ``x / sqrt(mean(x^2) + eps) * sigmoid(gate)``.

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, head_dim]`` or ``[rows, heads, head_dim]``, float16 or bfloat16; head_dim is a
        power of two from 8 to 256. Heads are adjacent, rows begin on 16 bytes. Overwritten.
    gate : torch.Tensor
        Shape, dtype and layout of `input`; its row stride is its own.
    eps : float
        Added to the mean square; finite, not negative.
    enable_pdl : bool
        Programmatic dependent launch, which only compute capability 9.0 and later have. Changes no
        result.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above.
    """
    try:
        kernel = _gate_kernels[input.dtype]
    except NOT_LOADED:
        kernel = _gate_kernels.load(input=input)
    kernel(input, gate, eps, _launched_early(enable_pdl))


def _launched_early(enable_pdl: bool) -> bool | None:
    """True, the default, stands for: where the device can."""
    return None if checks.flag("enable_pdl", enable_pdl) else False


def supports_gated_residual_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
) -> bool:
    """Whether `gated_residual_rmsnorm` takes these tensors on their device.

    Returns
    -------
    bool
        True for CUDA tensors of the shapes, dtypes and strides that it lists; nothing is raised.
    """
    return (
        isinstance(alpha, torch.Tensor)
        and _is_stream(branch, residual)
        and _are_columns(branch.shape[1], torch.float32, alpha, beta)
        and (weight is None or _are_columns(branch.shape[1], branch.dtype, weight))
    )


def supports_gated_residual_next_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    *,
    post_weight: torch.Tensor | None = None,
) -> bool:
    """Whether `gated_residual_next_rmsnorm` takes these tensors on their device.

    Returns
    -------
    bool
        True for CUDA tensors of the shapes, dtypes and strides that it lists; nothing is raised.
    """
    if not _is_stream(branch, residual):
        return False
    columns = branch.shape[1]
    gates = (alpha, beta) if isinstance(alpha, torch.Tensor) else (beta,)
    weights = (next_weight,) if post_weight is None else (next_weight, post_weight)
    return _are_columns(columns, torch.float32, *gates) and _are_columns(
        columns, branch.dtype, *weights
    )


def supports_rmsnorm_sigmoid_gate(
    dtype: torch.dtype, head_dim: int, device: torch.device | str | None = None
) -> bool:
    """Whether `rmsnorm_sigmoid_gate` takes heads of this kind.

    Parameters
    ----------
    dtype : torch.dtype
        The dtype of the heads.
    head_dim : int
        Elements of a head.
    device : torch.device or str, optional
        Where the heads are; the current CUDA device by default.

    Returns
    -------
    bool
        True for heads that it lists, on a GPU.
    """
    if dtype not in HALF or not 8 <= head_dim <= _MOST_OF_A_HEAD:
        return False
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    return on_gpu and head_dim & (head_dim - 1) == 0


def _is_stream(branch: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether these are a branch and a stream that the kernels take."""
    columns = branch.shape[-1] if branch.ndim == 2 else 0
    return (
        branch.is_cuda
        and branch.device == residual.device
        and branch.dtype in HALF
        and residual.dtype == torch.float32
        and residual.shape == branch.shape
        and 0 < columns <= _MOST_COLUMNS
        and columns % 8 == 0
        and _begin_on_16_bytes(branch, residual)
    )


def _are_columns(size: int, dtype: torch.dtype, *tensors: torch.Tensor) -> bool:
    return all(
        tensor.is_cuda and tensor.dtype == dtype and tensor.shape == (size,) for tensor in tensors
    ) and _begin_on_16_bytes(*tensors)


def _begin_on_16_bytes(*tensors: torch.Tensor) -> bool:
    return all(
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )
