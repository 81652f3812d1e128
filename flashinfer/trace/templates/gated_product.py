"""Template and reference of the product whose gated activation has 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Tensor, Var
from ..template import TraceTemplate
from .gemm import _with_scales_of_rows
from .quantization import _group_quant_8bit

_E4M3 = "float8_e4m3fn"


def _fp8_blockscale_gemm_swiglu_sm90_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """g, u = the halves of (input input_scale) @ (weight weight_scale).T; y = silu(g) u.

    Then scale = max(amax of 128 columns, 1e-10) / 448 and codes of y / scale. Source: DeepSeek-AI,
    "DeepSeek-V3 Technical Report", 2024, section 3.3.2; N. Shazeer, "GLU Variants Improve
    Transformer", 2020.
    """
    left, right = (
        _with_scales_of_rows(input, input_scale),
        _with_scales_of_rows(weight, weight_scale),
    )
    gate, up = (left @ right.T).chunk(2, dim=-1)
    y = (gate * torch.sigmoid(gate) * up).float()
    return _group_quant_8bit(y, 128, 1e-10, torch.float8_e4m3fn, False)


def _close(expected: Any, actual: Any) -> bool:
    """Whether scales and codes agree as far as sums of 14 bits let them.

    Codes may be neighbours, and what is small beside the others of its group may differ as a whole.
    """
    (q, s), (actual_q, actual_s) = expected, actual
    if q.shape != actual_q.shape or q.dtype != actual_q.dtype or s.shape != actual_s.shape:
        return False
    q, s = q.to(actual_q.device), s.to(actual_s.device)
    if not bool(((actual_s - s).abs() <= 0.01 * s).all()):
        return False
    groups = (*s.shape, 128)
    wanted = q.float().reshape(groups) * s[..., None]
    got = actual_q.float().reshape(groups) * actual_s[..., None]
    room = (2 * torch.finfo(q.dtype).eps + 0.02) * wanted.abs() + 2.0 * s[..., None]
    return bool(((got - wanted).abs() <= room).all())


def _init(arguments: dict[str, Any]) -> dict[str, Any]:
    device, generator = arguments["input"].device, torch.Generator().manual_seed(1)
    codes = {
        name: torch.randn(shape, generator=generator).to(device, torch.float8_e4m3fn)
        for name, shape in {"input": (5, 256), "weight": (512, 256)}.items()
    }
    scales = {
        name: torch.rand(shape, generator=generator).to(device) * 0.1 + 0.05
        for name, shape in {"input_scale": (5, 2), "weight_scale": (4, 2)}.items()
    }
    return codes | scales


fp8_blockscale_gemm_swiglu_sm90_trace = TraceTemplate(
    "gemm_fp8",
    axes={
        "m": Var("Rows of the left operand."),
        "n": Const("Rows of the weight: gates, then values. A multiple of 256.", abbrev="n"),
        "k": Const("Terms of each sum, a multiple of 128.", abbrev="k"),
        "k_blocks": Const("Scales of a row.", abbrev="", derive=lambda sizes: sizes["k"] // 128),
        "n_blocks": Const("Blocks of rows.", abbrev="", derive=lambda sizes: sizes["n"] // 128),
        "half": Const("Columns of the result.", abbrev="", derive=lambda sizes: sizes["n"] // 2),
        "groups": Const(
            "Scales of a row of the result.", abbrev="", derive=lambda sizes: sizes["n"] // 256
        ),
    },
    inputs={
        "input": Tensor(["m", "k"], dtype=_E4M3, description="Left operand."),
        "weight": Tensor(["n", "k"], dtype=_E4M3, description="Right operand."),
        "input_scale": Tensor(
            ["m", "k_blocks"], dtype="float32", description="Factors of 128 elements of a row."
        ),
        "weight_scale": Tensor(
            ["n_blocks", "k_blocks"],
            dtype="float32",
            description="Factors of 128 by 128 elements.",
        ),
    },
    outputs={
        "out": Tensor(["m", "half"], dtype=_E4M3),
        "out_scale": Tensor(["m", "groups"], dtype="float32"),
    },
    name_prefix="fp8_blockscale_gemm_swiglu_sm90",
    constraints=["n % 256 == 0 and k % 128 == 0"],
    tags=["status:verified", "fused", "quantize"],
    reference=_fp8_blockscale_gemm_swiglu_sm90_reference,
    check=_close,
    init=_init,
    hints=["weight_ready"],
    description="Product of 8-bit matrices, its gated activation, and codes of that.",
)
