"""Templates and references of matrix products."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Scalar, Tensor, Var
from ..template import TraceTemplate
from .quantization import _group_quant_8bit

_FP8 = ("float8_e4m3fn", "float8_e5m2")


def _bmm_fp8_reference(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """out[i] = A_scale * B_scale * (A[i] @ B[i]). Source: as bmm_bf16."""
    scale = float(A_scale) * float(B_scale)
    return (A.double() @ B.double()) * scale


def _bmm_fp8_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["A"].device
    generator = torch.Generator().manual_seed(arguments["A"].numel())
    A, B = torch.randn(3, 5, 48, generator=generator), torch.randn(3, 32, 48, generator=generator)
    return {
        "A": A.to(device, torch.float8_e4m3fn),
        "B": B.to(device, torch.float8_e4m3fn).transpose(1, 2),
        "A_scale": torch.tensor([0.5], device=device),
        "B_scale": torch.tensor([3.0], device=device),
        "dtype": torch.bfloat16,
    }


bmm_fp8_trace = TraceTemplate(
    "gemm_fp8",
    axes={
        "b": Const("Matrices of the batch.", abbrev="b"),
        "m": Var("Rows of each left operand."),
        "n": Const("Columns of each right operand.", abbrev="n"),
        "k": Const("Terms of each sum.", abbrev="k"),
    },
    inputs={
        "A": Tensor(["b", "m", "k"], dtypes=_FP8, description="Left operands, row-major."),
        "B": Tensor(["b", "k", "n"], dtypes=_FP8, description="Right operands, column-major."),
        "A_scale": Scalar("float32", tensor=True, description="Factor of the left operands."),
        "B_scale": Scalar("float32", tensor=True, description="Factor of the right operands."),
    },
    outputs={
        "out": Tensor(["b", "m", "n"], dtype_from_scalar="dtype", dtypes=("bfloat16", "float16")),
    },
    name_prefix="bmm_fp8",
    reference=_bmm_fp8_reference,
    init=_bmm_fp8_init,
    options={"backend": ("cublas", "cudnn", "auto")},
    description="Products of a batch of 8-bit matrices, multiplied by one scale per operand.",
)


def _with_scales_of_rows(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Values of `x` [rows, k]: 8-bit ones times their scales, others as they are after rounding."""
    if scale is None:
        codes, scale = _group_quant_8bit(x.float(), 128, 1e-10, torch.float8_e4m3fn, False)
    else:
        codes = x
    if scale.shape[0] != x.shape[0]:
        scale = scale.repeat_interleave(128, dim=0)[: x.shape[0]]
    return codes.double() * scale.double().repeat_interleave(128, dim=1)


def _fp8_blockscale_gemm_sm90_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i, j] = sum over k of input[i, k] input_scale[i, k / 128] weight[j, k] weight_scale[..].

    A bfloat16 operand is quantised first, with one scale for 128 elements of a row. Source:
    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    return _with_scales_of_rows(input, input_scale) @ _with_scales_of_rows(weight, weight_scale).T


def _fp8_blockscale_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["input"].device
    generator = torch.Generator().manual_seed(arguments["input"].numel())
    numbers = {
        name: torch.randn(shape, generator=generator)
        for name, shape in {"input": (5, 256), "weight": (144, 256)}.items()
    }
    scales = {
        name: torch.rand(shape, generator=generator) + 0.5
        for name, shape in {"input_scale": (5, 2), "weight_scale": (2, 2)}.items()
    }
    codes = {name: value.to(device, torch.float8_e4m3fn) for name, value in numbers.items()}
    return codes | {name: value.to(device) for name, value in scales.items()}


fp8_blockscale_gemm_sm90_trace = TraceTemplate(
    "gemm_fp8",
    axes={
        "m": Var("Rows of the left operand."),
        "n": Const("Rows of the weight.", abbrev="n"),
        "k": Const("Terms of each sum, a multiple of 128.", abbrev="k"),
        "k_blocks": Const("Scales of a row.", abbrev="", derive=lambda sizes: sizes["k"] // 128),
        "weight_scales": Const(
            "n / 128, rounded up, for scales of blocks; n for scales of rows.",
            abbrev="scales",
            derive=lambda sizes: -(-sizes["n"] // 128),
        ),
    },
    inputs={
        "input": Tensor(
            ["m", "k"], dtypes=("float8_e4m3fn", "bfloat16"), description="Left operand."
        ),
        "weight": Tensor(
            ["n", "k"], dtypes=("float8_e4m3fn", "bfloat16"), description="Right operand."
        ),
        "input_scale": Tensor(
            ["m", "k_blocks"],
            dtype="float32",
            optional=True,
            description="Factors of 128 elements of a row; absent for bfloat16, quantised here.",
        ),
        "weight_scale": Tensor(
            ["weight_scales", "k_blocks"],
            dtype="float32",
            optional=True,
            description="Factors of the weight's blocks or rows; absent for bfloat16.",
        ),
    },
    outputs={
        "out": Tensor(["m", "n"], dtype_from_scalar="out_dtype", dtype_default="bfloat16"),
    },
    name_prefix="fp8_blockscale_gemm_sm90",
    reference=_fp8_blockscale_gemm_sm90_reference,
    init=_fp8_blockscale_init,
    hints=["weight_ready"],
    description="Product of 8-bit matrices with scales of 128 elements along the sum.",
)


def _mm_bf16_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = a @ b + bias. Source: BLAS Technical Forum, the general matrix product."""
    product = a.double() @ b.double()
    return product if bias is None else product + bias.double()


def _bmm_bf16_reference(
    A: torch.Tensor,
    B: torch.Tensor,
) -> torch.Tensor:
    """out[i] = A[i] @ B[i]. Source: BLAS Technical Forum, the general matrix product."""
    return A.double() @ B.double()


def _tinygemm_bf16_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = input @ weight.T + bias. Source: as mm_bf16."""
    product = input.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def _random(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes]


def _mm_init(arguments: dict[str, Any]) -> dict[str, Any]:
    a, b = _random(arguments["a"].device, (5, 64), (24, 64))
    return {"a": a, "b": b.T}


def _tinygemm_init(arguments: dict[str, Any]) -> dict[str, Any]:
    input, weight = _random(arguments["input"].device, (3, 64), (24, 64))
    return {"input": input, "weight": weight, "out": input.new_empty(3, 24)}


def _bmm_init(arguments: dict[str, Any]) -> dict[str, Any]:
    A, B = _random(arguments["A"].device, (3, 5, 64), (3, 24, 64))
    return {"A": A, "B": B.transpose(1, 2)}


_GEMM_AXES: dict[str, Var | Const] = {
    "m": Var("Rows of the left operand."),
    "n": Const("Columns of the result.", abbrev="n"),
    "k": Const("Terms of each sum.", abbrev="k"),
}
_BACKENDS = ("cudnn", "auto", "cublaslt", "tinygemm")
_WIDE = ("bfloat16", "float16", "float32")

mm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=dict(_GEMM_AXES),
    inputs={
        "a": Tensor(["m", "k"], dtype="bfloat16", layout="rows", description="Left operand."),
        "b": Tensor(["k", "n"], dtype="bfloat16", description="Right operand, column-major."),
        "bias": Tensor(
            ["n"], dtype_from_scalar="out_dtype", optional=True, description="Added to every row."
        ),
    },
    outputs={
        "out": Tensor(["m", "n"], dtype_from_scalar="out_dtype", dtypes=_WIDE, layout="rows"),
    },
    name_prefix="mm_bf16",
    reference=_mm_bf16_reference,
    init=_mm_init,
    hints=["pdl", "weight_ready"],
    options={"backend": _BACKENDS},
    description="Product of two bfloat16 matrices.",
)

bmm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes={"b": Const("Matrices of the batch.", abbrev="b"), **_GEMM_AXES},
    inputs={
        "A": Tensor(["b", "m", "k"], dtype="bfloat16", layout="rows", description="Left operands."),
        "B": Tensor(["b", "k", "n"], dtype="bfloat16", description="Right ones, column-major."),
    },
    outputs={
        "out": Tensor(["b", "m", "n"], dtype_from_scalar="out_dtype", dtypes=_WIDE, layout="rows"),
    },
    name_prefix="bmm_bf16",
    reference=_bmm_bf16_reference,
    init=_bmm_init,
    options={"backend": _BACKENDS},
    description="Products of a batch of bfloat16 matrices.",
)

tinygemm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=dict(_GEMM_AXES),
    inputs={
        "input": Tensor(["m", "k"], dtype="bfloat16", layout="rows", description="Left operand."),
        "weight": Tensor(["n", "k"], dtype="bfloat16", layout="rows", description="Weight."),
        "bias": Tensor(["n"], dtype="bfloat16", optional=True, description="Added to every row."),
    },
    outputs={"out": Tensor(["m", "n"], param="out", dtype="bfloat16", layout="rows")},
    name_prefix="tinygemm_bf16",
    reference=_tinygemm_bf16_reference,
    init=_tinygemm_init,
    hints=["use_pdl"],
    description="Product of few rows with a weight.",
)
