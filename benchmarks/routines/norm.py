"""RMSNorm and LayerNorm, with residual addition and fp8 output."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from flashinfer.testing import make_tensor

from .base import (
    Arguments,
    Backend,
    Flag,
    Routine,
    dtype_name,
    not_negative,
    positive,
    register,
    torch_dtype,
)

_SHAPE = [
    Flag("batch_size", positive, 1024, "rows (tokens)"),
    Flag(
        "hidden_size", positive, 4096, "elements that one norm covers (the head dimension in 3-D)"
    ),
]
_HEADS = [Flag("num_heads", not_negative, 0, "heads of a 3-D input; 0 for a 2-D input")]
_DTYPE = [Flag("input_dtype", dtype_name, "bfloat16", "dtype of the input")]
_EPS = [Flag("eps", float, 1e-6, "added to the mean square or variance")]
_PDL = [Flag("enable_pdl", bool, False, "programmatic dependent launch")]
_QUANT = [
    Flag("out_dtype", dtype_name, "float8_e4m3fn", "dtype of the quantised output"),
    Flag("scale", float, 0.02, "dequantisation scale of the output"),
]


def _draw(case: Namespace, device: str) -> Mapping[str, Callable[[], Any]]:
    """How to make each argument that a norm may have."""
    dtype = torch_dtype(case.input_dtype)
    hidden, heads = case.hidden_size, getattr(case, "num_heads", 0)
    shape = (case.batch_size, heads, hidden) if heads else (case.batch_size, hidden)
    return {
        "out": lambda: torch.empty(
            shape, device=device, dtype=torch_dtype(getattr(case, "out_dtype", case.input_dtype))
        ),
        "input": lambda: make_tensor(*shape, dtype=dtype, device=device),
        "residual": lambda: make_tensor(*shape, dtype=dtype, device=device),
        "weight": lambda: make_tensor(hidden, dtype=dtype, device=device, mean=1.0, std=0.1),
        "gemma": lambda: make_tensor(hidden, dtype=torch.float32, device=device, mean=1.0, std=0.1),
        "beta": lambda: make_tensor(hidden, dtype=torch.float32, device=device),
        "scale": lambda: torch.tensor([case.scale], device=device),
        "eps": lambda: case.eps,
        "enable_pdl": lambda: case.enable_pdl,
    }


def _norm(
    name: str,
    arguments: str,
    *,
    reads: str,
    writes: str,
    flags: list[Flag],
    peer: Backend | None = None,
    cute_dsl: str | Callable[..., Any] = "",
) -> None:
    """Register one norm. ``arguments``, ``reads`` and ``writes`` are names separated by blanks.

    ``cute_dsl`` is its counterpart in CuTe-DSL, which needs that extra: ``--backends cute-dsl``.
    """

    def build(case: Namespace, device: str) -> Arguments:
        draw = _draw(case, device)
        return {argument: draw[argument]() for argument in arguments.split()}

    api = f"flashinfer.norm:{name}"
    backends = {"cuda": Backend(api)}
    if cute_dsl:
        backends["cute-dsl"] = Backend(cute_dsl)
    if peer:
        backends["torch"] = peer
    register(
        Routine(
            name=name,
            api=api,
            flags=[*_SHAPE, *_DTYPE, *flags, *_EPS],
            build=build,
            reads=reads.split(),
            writes=writes.split(),
            backends=backends,
        )
    )


def _cute_dsl_rmsnorm(input: torch.Tensor, out: torch.Tensor, **others: Any) -> torch.Tensor:
    from flashinfer.cute_dsl import rmsnorm_cute

    rmsnorm_cute(input, out=out, **others)
    return out


def _cute_dsl_layernorm(
    input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float
) -> torch.Tensor:
    from flashinfer.cute_dsl import layernorm_cute

    out = torch.empty_like(input)
    layernorm_cute(out, input, gemma, beta, eps)
    return out


def _torch_rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(input, weight.shape, weight, eps)


def _torch_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    residual.add_(input)
    input.copy_(F.rms_norm(residual, weight.shape, weight, eps))


_norm(
    "rmsnorm",
    "input weight eps out enable_pdl",
    reads="input weight",
    writes="out",
    flags=[*_HEADS, *_PDL],
    cute_dsl=_cute_dsl_rmsnorm,
    peer=Backend(_torch_rmsnorm, omits=("out", "enable_pdl"), roundings=2),
)
_norm(
    "gemma_rmsnorm",
    "input weight eps out enable_pdl",
    reads="input weight",
    writes="out",
    flags=[*_HEADS, *_PDL],
)
_norm(
    "fused_add_rmsnorm",
    "input residual weight eps enable_pdl",
    reads="input residual weight",
    writes="input residual",
    flags=_PDL,
    cute_dsl="flashinfer.cute_dsl:fused_add_rmsnorm_cute",
    peer=Backend(_torch_fused_add_rmsnorm, omits=("enable_pdl",), roundings=3),
)
_norm(
    "gemma_fused_add_rmsnorm",
    "input residual weight eps enable_pdl",
    reads="input residual weight",
    writes="input residual",
    flags=_PDL,
)
_norm(
    "layernorm",
    "input gemma beta eps",
    reads="input gemma beta",
    writes="input",
    flags=[],
    cute_dsl=_cute_dsl_layernorm,
)
_norm(
    "rmsnorm_quant",
    "out input weight scale eps enable_pdl",
    reads="input weight scale",
    writes="out",
    flags=[*_HEADS, *_QUANT, *_PDL],
    cute_dsl="flashinfer.cute_dsl:rmsnorm_quant_cute",
)
_norm(
    "fused_add_rmsnorm_quant",
    "out input residual weight scale eps enable_pdl",
    reads="input residual weight scale",
    writes="out residual",
    flags=[*_QUANT, *_PDL],
    cute_dsl="flashinfer.cute_dsl:fused_add_rmsnorm_quant_cute",
)
_norm(
    "layernorm_quant",
    "out input gemma beta scale eps",
    reads="input gemma beta scale",
    writes="out",
    flags=_QUANT,
)
