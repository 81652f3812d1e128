"""Templates and references of the routers' products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..specs import Const, Tensor, Var
from ..template import TraceTemplate


def _router_reference(mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = mat_a @ mat_b. Source: BLAS Technical Forum, the general matrix product."""
    return mat_a.double() @ mat_b.double()


def _init(k: int, n: int, dtype: torch.dtype) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        device = arguments["mat_a"].device
        generator = torch.Generator().manual_seed(k + n)
        rows = [torch.randn(size, k, generator=generator) for size in (5, n)]
        a, weight = (part.to(device, torch.bfloat16) for part in rows)
        return {
            "mat_a": a,
            "mat_b": weight.T,
            "out": torch.empty(5, n, dtype=dtype, device=device),
        }

    return init


def _template(name: str, k: int, n: int, dtype: torch.dtype) -> TraceTemplate:
    result = str(dtype).removeprefix("torch.")
    return TraceTemplate(
        "gemm_bf16",
        axes={
            "m": Var("Tokens, at most 16."),
            "n": Const("Experts.", abbrev="n"),
            "k": Const("Terms of each sum.", abbrev="k"),
        },
        inputs={
            "mat_a": Tensor(["m", "k"], dtype="bfloat16", layout="rows", description="Tokens."),
            "mat_b": Tensor(["k", "n"], dtype="bfloat16", description="Weights, column-major."),
        },
        outputs={"out": Tensor(["m", "n"], param="out", dtype=result, layout="rows")},
        name_prefix=name,
        reference=_router_reference,
        init=_init(k, n, dtype),
        hints=["launch_with_pdl"],
        description="Product of few tokens with the weights of a router.",
    )


_BF16, _FLOAT = torch.bfloat16, torch.float32
mm_M1_16_K7168_N128_trace = _template("mm_M1_16_K7168_N128", 7168, 128, _BF16)
mm_M1_16_K7168_N256_trace = _template("mm_M1_16_K7168_N256", 7168, 256, _FLOAT)
mm_M1_16_K7168_N256_bf16_trace = _template("mm_M1_16_K7168_N256_bf16", 7168, 256, _BF16)
mm_M1_16_K6144_N256_trace = _template("mm_M1_16_K6144_N256", 6144, 256, _FLOAT)
mm_M1_16_K7168_N384_trace = _template("mm_M1_16_K7168_N384", 7168, 384, _FLOAT)
mm_M1_16_K7168_N384_bf16_trace = _template("mm_M1_16_K7168_N384_bf16", 7168, 384, _BF16)
mm_M1_16_K7168_N896_trace = _template("mm_M1_16_K7168_N896", 7168, 896, _FLOAT)
mm_M1_16_K7168_N896_bf16_trace = _template("mm_M1_16_K7168_N896_bf16", 7168, 896, _BF16)
