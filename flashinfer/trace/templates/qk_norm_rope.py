"""Templates and reference of the norm and rotation of the Q and K of video tokens.

The reference computes in float64 and returns unrounded results, limited to the range of 8 bits
where those are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._common.checks import choice
from ..specs import FLOATING, Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .rope import _rotate


def _axis_angles(
    position: torch.Tensor, channels: int, base: float, factor: float, low: float, high: float
) -> torch.Tensor:
    """position * frequency_j of the pairs of one axis, with YaRN's blend of the frequencies."""
    pair = torch.arange(channels // 2, dtype=torch.float64, device=position.device)
    frequency = base ** (-2 * pair / max(channels, 1))
    if factor != 1:
        ramp = ((pair - low) / (high - low if high > low else 1e-3)).clamp(0, 1)
        frequency = (1 - ramp) * frequency + ramp * frequency / factor
    return position.double()[:, None] * frequency


def _video_angles(
    num_tokens: int,
    device: torch.device,
    patches: tuple[int, int, int],
    channels: tuple[int, int, int],
    numbers: tuple[float, float, float, float],
) -> torch.Tensor:
    """Angles of all pairs of a head; a token counts columns, then rows, then frames."""
    token = torch.arange(num_tokens, device=device)
    frames, rows, columns = patches
    positions = token // (rows * columns) % frames, token // columns % rows, token % columns
    parts = [
        _axis_angles(position, count, *numbers)
        for position, count in zip(positions, channels, strict=True)
    ]
    return torch.cat(parts, -1)


def _fused_qk_rmsnorm_rope_reference(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k = rope(x / sqrt(mean(x^2) + eps) * weight) with the mean over all heads; v as it is.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019; J. Su et al.,
    "RoFormer", 2021; B. Peng et al., "YaRN", 2023.
    """
    if low > high:
        raise ValueError(f"`low` must be at most `high`, {high}, got {low}")
    rows = qkv.reshape(-1, qkv.shape[-1]).double()
    patches = ppf, pph, ppw
    channels = num_frame_channels, num_height_channels, num_width_channels
    numbers = base, factor, low, high
    angle = _video_angles(len(rows), rows.device, patches, channels, numbers)
    cos, sin = attention_factor * angle.cos(), attention_factor * angle.sin()
    counts = num_heads_q, num_heads_k, num_heads_v
    parts = list(rows.split([count * head_dim for count in counts], dim=-1))
    for i, weight in enumerate((q_weight, k_weight)):
        if is_qk_norm:
            mean_square = parts[i].square().mean(dim=-1, keepdim=True)
            parts[i] = parts[i] * torch.rsqrt(mean_square + eps) * weight.double()
        parts[i] = _rotate(parts[i].reshape(-1, counts[i], head_dim), cos, sin, interleave)
    if output_fp8:
        scales = output_quant_scale, output_quant_scale, v_quant_scale
        parts = [(x * scale).clamp(-448, 448) for x, scale in zip(parts, scales, strict=True)]
    q, k, v = (
        x.reshape(*qkv.shape[:-1], count, head_dim) for x, count in zip(parts, counts, strict=True)
    )
    return q, k, v


def _count(description: str, abbrev: str = "") -> Const:
    return Const(description, abbrev=abbrev)


_AXES: dict[str, Axis] = {
    "num_tokens": Var("Tokens of all videos."),
    "qkv_dim": _count("Columns of the projection."),
    "q_dim": _count("Elements of a token's query."),
    "k_dim": _count("Elements of a token's key."),
    "num_heads_q": _count("Heads of the query.", "q"),
    "num_heads_k": _count("Heads of the key.", "k"),
    "num_heads_v": _count("Heads of the value.", "v"),
    "head_dim": _count("Elements of a head.", "d"),
    "num_frame_channels": _count("Elements of a head that turn with the frame.", "f"),
    "num_height_channels": _count("Elements of a head that turn with the row.", "h"),
    "num_width_channels": _count("Elements of a head that turn with the column.", "w"),
    "ppf": _count("Frames of a video.", "ppf"),
    "pph": _count("Rows of a frame, in patches.", "pph"),
    "ppw": _count("Columns of a frame, in patches.", "ppw"),
}
_CONSTRAINTS = [
    "ppf >= 1 and pph >= 1 and ppw >= 1",
    "num_heads_q >= 1 and num_heads_k >= 1 and num_heads_v >= 1",
    "2 <= head_dim <= 512",
    "num_frame_channels >= 0 and num_frame_channels % 2 == 0",
    "num_height_channels >= 0 and num_height_channels % 2 == 0",
    "num_width_channels >= 0 and num_width_channels % 2 == 0",
    "head_dim == num_frame_channels + num_height_channels + num_width_channels",
    "qkv_dim == (num_heads_q + num_heads_k + num_heads_v) * head_dim",
    "q_dim == num_heads_q * head_dim",
    "k_dim == num_heads_k * head_dim",
    "num_tokens % (ppf * pph * ppw) == 0",
]
_NUMBERS: dict[str, Value] = {
    "eps": Scalar(minimum=0, description="Added to the mean square under the root."),
    "base": Scalar(above=0, description="Base of the wavelengths."),
    "factor": Scalar(above=0, description="Divisor of the frequencies after `high`."),
    "low": Scalar(minimum=0, description="Pair from which on frequencies are divided a little."),
    "high": Scalar(minimum=0, description="Pair from which on they are divided by `factor`."),
    "attention_factor": Scalar(above=0, description="Factor of cosines and sines."),
}
_SCALES: dict[str, Value] = {
    "output_quant_scale": Scalar(above=0, description="Factor of the results of q and k."),
    "v_quant_scale": Scalar(above=0, description="Factor of the result of v."),
}


def _example(output_fp8: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Two videos of 2 x 3 x 4 patches, heads of 16 channels."""

    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        qkv = arguments["qkv"]
        generator = torch.Generator().manual_seed(7)
        values = {
            name: torch.randn(shape, generator=generator).to(qkv.device, qkv.dtype)
            for name, shape in (("qkv", (48, 96)), ("q_weight", (48,)), ("k_weight", (32,)))
        }
        sizes = {"ppf": 2, "pph": 3, "ppw": 4, "head_dim": 16}
        channels = {"num_frame_channels": 8, "num_height_channels": 6, "num_width_channels": 2}
        heads = {"num_heads_q": 3, "num_heads_k": 2, "num_heads_v": 1}
        numbers = {"base": 50.0, "factor": 2.0, "low": 1.0, "high": 4.0, "attention_factor": 1.5}
        scales = {"output_quant_scale": 2.0, "v_quant_scale": 3.0} if output_fp8 else {}
        flag = {"output_fp8": output_fp8}
        return {**values, **sizes, **channels, **heads, **numbers, **scales, **flag}

    return init


def _out(heads: str, param: str, output_fp8: bool) -> Tensor:
    kind: dict[str, Any] = {"dtype": "float8_e4m3fn"} if output_fp8 else {"dtype_from": "qkv"}
    return Tensor(["num_tokens", heads, "head_dim"], param=param, layout="matrix", **kind)


def _template(output_fp8: bool) -> TraceTemplate:
    options: dict[str, tuple[Any, ...]] = {
        "interleave": (True, False),
        "is_qk_norm": (True, False),
        "output_fp8": (output_fp8,),
    }
    if not output_fp8:
        options |= {name: (1.0, 1) for name in _SCALES}
    return TraceTemplate(
        op_type="qk_norm_rope",
        name_prefix="fused_qk_rmsnorm_rope" + ("_fp8" if output_fp8 else ""),
        description="RMS norm over all heads of q and k, rotation along three axes; v is copied.",
        axes=_AXES,
        inputs={
            "qkv": Tensor(
                ["num_tokens", "qkv_dim"], dtypes=FLOATING, ranks=(2, 3), layout="matrix"
            ),
            "q_weight": Tensor(["q_dim"], dtype_from="qkv", layout="rows"),
            "k_weight": Tensor(["k_dim"], dtype_from="qkv", layout="rows"),
            **_NUMBERS,
            **(_SCALES if output_fp8 else {}),
        },
        outputs={
            "q": _out("num_heads_q", "q_out", output_fp8),
            "k": _out("num_heads_k", "k_out", output_fp8),
            "v": _out("num_heads_v", "v_out", output_fp8),
        },
        constraints=_CONSTRAINTS,
        options=options,
        tags=["status:verified", "fused", *(["quantize"] if output_fp8 else [])],
        reference=_fused_qk_rmsnorm_rope_reference,
        init=_example(output_fp8),
    )


_PLAIN, _FP8 = _template(False), _template(True)


def _trace(**arguments: Any) -> TraceTemplate:
    output_fp8 = arguments.get("output_fp8", False)
    choice("output_fp8", output_fp8, (False, True))
    return _FP8 if output_fp8 else _PLAIN


fused_qk_rmsnorm_rope_trace: Callable[..., TraceTemplate] = _trace
fused_qk_rmsnorm_rope_trace.templates = [_PLAIN, _FP8]  # type: ignore[attr-defined]
