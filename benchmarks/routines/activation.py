"""Gated activations: the first half of each row, activated, times the second half."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable

import torch
import torch.nn.functional as F

from flashinfer.testing import make_tensor

from .base import Arguments, Backend, Flag, Routine, dtype_name, positive, register, torch_dtype

_FLAGS = [
    Flag("batch_size", positive, 1024, "rows (tokens)"),
    Flag(
        "hidden_size", positive, 14336, "elements of an output row; the input row has twice as many"
    ),
    Flag("input_dtype", dtype_name, "bfloat16", "dtype of input and output"),
    Flag("enable_pdl", bool, False, "programmatic dependent launch"),
]


def _build(case: Namespace, device: str) -> Arguments:
    dtype = torch_dtype(case.input_dtype)
    return {
        "input": make_tensor(case.batch_size, 2 * case.hidden_size, dtype=dtype, device=device),
        "out": torch.empty(case.batch_size, case.hidden_size, dtype=dtype, device=device),
        "enable_pdl": case.enable_pdl,
    }


def _act_and_mul(name: str, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def peer(input: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gate, up = input.chunk(2, dim=-1)
        return torch.mul(activation(gate), up, out=out)

    api = f"flashinfer.activation:{name}"
    register(
        Routine(
            name=name,
            api=api,
            flags=_FLAGS,
            build=_build,
            reads=["input"],
            writes=["out"],
            backends={
                "cuda": Backend(api),
                "torch": Backend(peer, omits=("enable_pdl",), roundings=2),
            },
        )
    )


_act_and_mul("silu_and_mul", F.silu)
_act_and_mul("gelu_and_mul", F.gelu)
_act_and_mul("gelu_tanh_and_mul", functools.partial(F.gelu, approximate="tanh"))
