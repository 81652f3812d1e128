"""Norm and rotation of the Q and K of video tokens in one kernel; `flashinfer.norm` exports it."""

from typing import Any, cast

import torch

from .._common import checks
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._common.numbers import plain
from .._instrument.decorator import flashinfer_api
from .._instrument.questions import says_where_it_runs, since
from ..jit.qk_norm_rope import QkNormRopeConfig, gen_qk_norm_rope_module
from ..trace.templates.qk_norm_rope import fused_qk_rmsnorm_rope_trace


def _get_kernel(dtype: torch.dtype, out_dtype: torch.dtype, interleave: bool, norm: bool) -> Kernel:
    config = QkNormRopeConfig(dtype, out_dtype, interleave, norm)
    return cast(Kernel, gen_qk_norm_rope_module(config).build_and_load().qk_norm_rope)


_kernels = KernelTable(_get_kernel)


def _check_unused_scales(**scales: Any) -> None:
    for name, scale in scales.items():
        if checks.number(name, scale) != 1:
            raise ValueError(f"`{name}` must be 1 unless `output_fp8` is True, got {scale}")


def _room(qkv: torch.Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Room for a result; None where the sizes are none, for the kernel to refuse them by name."""
    heads, head_dim = plain(heads), plain(head_dim)
    if type(heads) is not int or type(head_dim) is not int or heads < 1 or head_dim < 1:
        return None
    return torch.empty((*qkv.shape[:-1], heads, head_dim), dtype=dtype, device=qkv.device)


@says_where_it_runs(since(75))
@flashinfer_api(trace=fused_qk_rmsnorm_rope_trace)
def fused_qk_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Operands of a video transformer's self-attention from the rows of its QKV projection.

    Q and K are normalised over all their heads together, ``x / sqrt(mean(x^2) + eps) * weight``,
    and rotated; V is copied. Token ``t`` of a video is the patch in frame ``t // (pph * ppw)``, row
    ``t // ppw % pph`` and column ``t % ppw``. The first `num_frame_channels` channels of a head
    turn with the frame, the next `num_height_channels` with the row, the others with the column:
    pair ``j`` of an axis of ``c`` channels by position times ``base ** (-2 j / c)``. Everything is
    computed in float32, with exact angles, and rounded once.

    Parameters
    ----------
    qkv : torch.Tensor
        ``[batch, tokens, columns]`` or ``[tokens, columns]`` with ``columns = (num_heads_q +
        num_heads_k + num_heads_v) * head_dim``, float16, bfloat16 or float32. The last dimension is
        contiguous, the leading ones fold into one: whole videos of ``ppf * pph * ppw`` tokens.
    q_weight, k_weight : torch.Tensor
        ``[num_heads_q * head_dim]`` and ``[num_heads_k * head_dim]``, contiguous, dtype of `qkv`.
    ppf, pph, ppw : int
        Frames, rows and columns of a video in patches.
    num_frame_channels, num_height_channels, num_width_channels : int
        Channels of a head that follow each axis: even, `head_dim` together.
    num_heads_q, num_heads_k, num_heads_v, head_dim : int
        Sizes of the projection; `head_dim` at most 512.
    eps : float
        Added to the mean square; finite, not negative.
    base : float
        Base of the wavelengths; positive, finite.
    interleave : bool
        Pairs of a head are ``(2 p, 2 p + 1)``; False: ``(p, p + head_dim / 2)``, where the pairs of
        the three axes follow one another.
    factor, low, high : float
        YaRN: the frequency ``f`` of pair ``j`` of an axis becomes ``(1 - r) * f + r * f / factor``,
        where ``r`` rises from 0 at ``j = low`` to 1 at ``j = high``. A factor of 1 leaves ``f``.
    attention_factor : float
        Factor of all cosines and sines (YaRN's temperature); positive, finite.
    is_qk_norm : bool
        False: Q and K are only rotated; the weights are not read.
    output_fp8 : bool
        Results are ``saturate(value * scale)`` in float8_e4m3fn.
    output_quant_scale, v_quant_scale : float
        Scales of Q and K, and of V; positive, finite, and 1 unless `output_fp8`.
    q_out, k_out, v_out : torch.Tensor, optional
        Results, contiguous; shapes as below.

    Returns
    -------
    q_out, k_out, v_out : torch.Tensor
        The shape of `qkv` with ``[heads, head_dim]`` in place of the columns.

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above, or
        a number is out of range.

    Notes
    -----
    J. Su et al., "RoFormer", 2021; B. Zhang and R. Sennrich, "Root Mean Square Layer
    Normalization", 2019; B. Peng et al., "YaRN", 2023; Wan Team, "Wan: Open and Advanced
    Large-Scale Video Generative Models", 2025, for the three axes.

    Examples
    --------
    >>> qkv = torch.randn(2 * 3 * 4, 3 * 12 * 128, dtype=torch.bfloat16, device="cuda")
    >>> weight = torch.ones(12 * 128, dtype=torch.bfloat16, device="cuda")
    >>> q, k, v = flashinfer.norm.fused_qk_rmsnorm_rope(
    ...     qkv, weight, weight, ppf=2, pph=3, ppw=4, num_frame_channels=44,
    ...     num_height_channels=42, num_width_channels=42, num_heads_q=12, num_heads_k=12,
    ...     num_heads_v=12, head_dim=128)
    """
    interleave = checks.flag("interleave", interleave)
    is_qk_norm = checks.flag("is_qk_norm", is_qk_norm)
    output_fp8 = checks.flag("output_fp8", output_fp8)
    checks.tensor("qkv", qkv)
    if not output_fp8:
        _check_unused_scales(output_quant_scale=output_quant_scale, v_quant_scale=v_quant_scale)
    out_dtype = torch.float8_e4m3fn if output_fp8 else qkv.dtype
    try:
        kernel = _kernels[qkv.dtype, out_dtype, interleave, is_qk_norm]
    except NOT_LOADED:
        kernel = _kernels.load(out_dtype, interleave, is_qk_norm, qkv=qkv)
    outs = (
        _room(qkv, num_heads_q, head_dim, out_dtype) if q_out is None else q_out,
        _room(qkv, num_heads_k, head_dim, out_dtype) if k_out is None else k_out,
        _room(qkv, num_heads_v, head_dim, out_dtype) if v_out is None else v_out,
    )
    kernel(
        qkv,
        q_weight,
        k_weight,
        (ppf, pph, ppw, num_frame_channels, num_height_channels, num_width_channels),
        (num_heads_q, num_heads_k, num_heads_v, head_dim),
        eps,
        (base, factor, low, high),
        attention_factor,
        (output_quant_scale, v_quant_scale),
        outs,
    )
    return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", outs)
