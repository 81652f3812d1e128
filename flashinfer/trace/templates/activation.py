"""Templates and references of the gated activations.

The references compute in float64 and return unrounded results: whoever uses one rounds once, to
the dtype of the output. `enable_pdl` is a scheduling hint (programmatic dependent launch) and
changes no result; `out` receives the result and is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..specs import FLOATING, Const, Tensor, Var
from ..template import TraceTemplate


def _gate_and_up(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second half of the last dimension."""
    width = input.shape[-1] // 2
    return input[..., :width].double(), input[..., width:].double()


def _silu_and_mul_reference(input: torch.Tensor) -> torch.Tensor:
    """y = g * sigmoid(g) * u, where g and u are the halves of the last dimension.

    Source: N. Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU with beta 1).
    """
    gate, up = _gate_and_up(input)
    return gate * torch.sigmoid(gate) * up


def _gelu_and_mul_reference(input: torch.Tensor) -> torch.Tensor:
    """y = g/2 * (1 + erf(g / sqrt(2))) * u, where g and u are the halves of the last dimension.

    Source: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016; N. Shazeer, "GLU
    Variants Improve Transformer", 2020 (GEGLU).
    """
    gate, up = _gate_and_up(input)
    return 0.5 * gate * torch.special.erfc(-gate / math.sqrt(2.0)) * up


def _gelu_tanh_and_mul_reference(input: torch.Tensor) -> torch.Tensor:
    """y = g/2 * (1 + tanh(sqrt(2/pi) * (g + 0.044715 * g^3))) * u, g and u as in gelu_and_mul.

    (1 + tanh(z)) / 2 is computed as sigmoid(2 z), which does not cancel for negative z.
    Source: the tanh approximation of D. Hendrycks, K. Gimpel, "Gaussian Error Linear
    Units", 2016.
    """
    gate, up = _gate_and_up(input)
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(2.0 * inner) * up


def _gated(name: str, description: str, reference: Callable[..., torch.Tensor]) -> TraceTemplate:
    return TraceTemplate(
        op_type="activation",
        name_prefix=name,
        description=description,
        axes={
            "num_tokens": Var("Rows; all leading dimensions together."),
            "gate_up_size": Const("Elements of an input row: gate, then up.", abbrev=""),
            "hidden_size": Const(
                "Elements of an output row.",
                abbrev="d",
                derive=lambda axes: axes["gate_up_size"] // 2,
            ),
        },
        inputs={
            "gate_up": Tensor(
                ["num_tokens", "gate_up_size"],
                param="input",
                dtypes=FLOATING,
                ranks=range(1, 9),
                layout="matrix",
                description="Gate in the first half of each row, multiplier in the second.",
            ),
        },
        outputs={
            "output": Tensor(
                ["num_tokens", "hidden_size"], param="out", dtype_from="gate_up", layout="matrix"
            ),
        },
        constraints=["gate_up_size == 2 * hidden_size"],
        tags=["status:verified"],
        reference=reference,
        hints=["enable_pdl"],
    )


silu_and_mul_trace = _gated(
    "silu_and_mul", "SiLU of the gate, times the multiplier.", _silu_and_mul_reference
)
gelu_and_mul_trace = _gated(
    "gelu_and_mul",
    "GELU of the gate (by the error function), times the multiplier.",
    _gelu_and_mul_reference,
)
gelu_tanh_and_mul_trace = _gated(
    "gelu_tanh_and_mul",
    "GELU of the gate (by its tanh approximation), times the multiplier.",
    _gelu_tanh_and_mul_reference,
)
