"""Norms with gates, of the residual stream and of heads, and modulated layer norms."""

from __future__ import annotations

from argparse import Namespace

import torch

from flashinfer.testing import make_tensor

from .base import Arguments, Flag, Routine, dtype_name, positive, register, torch_dtype

_DTYPE = Flag("input_dtype", dtype_name, "bfloat16", "dtype of the input")


def _shape(hidden_size: int) -> list[Flag]:
    return [
        Flag("batch_size", positive, 1024, "rows (tokens)"),
        Flag("hidden_size", positive, hidden_size, "elements that one norm covers"),
        _DTYPE,
    ]


def _stream(case: Namespace, device: str) -> Arguments:
    rows, hidden = case.batch_size, case.hidden_size
    dtype = torch_dtype(case.input_dtype)
    columns = {
        name: make_tensor(hidden, dtype=torch.float32, device=device) for name in ("alpha", "beta")
    }
    return {
        "branch": make_tensor(rows, hidden, dtype=dtype, device=device),
        "residual": make_tensor(rows, hidden, dtype=torch.float32, device=device),
        **columns,
        "weight": make_tensor(hidden, dtype=dtype, device=device),
        "out": torch.empty(rows, hidden, device=device),
    }


def _stream_and_next(case: Namespace, device: str) -> Arguments:
    arguments = _stream(case, device)
    weight, out = arguments.pop("weight"), arguments.pop("out")
    normed = torch.empty_like(arguments["branch"])
    return {**arguments, "next_weight": weight, "residual_out": out, "ffn_input": normed}


def _heads(case: Namespace, device: str) -> Arguments:
    shape, dtype = (case.batch_size, case.num_heads, case.head_dim), torch_dtype(case.input_dtype)
    return {name: make_tensor(*shape, dtype=dtype, device=device) for name in ("input", "gate")}


def _video(case: Namespace, device: str) -> Arguments:
    dtype, hidden = torch_dtype(case.input_dtype), case.hidden_size
    names = ("input", "residual", "gate", "scale", "shift")
    rows = {
        name: make_tensor(1, case.batch_size, hidden, dtype=dtype, device=device) for name in names
    }
    results = {name: torch.empty_like(rows["input"]) for name in ("residual_out", "norm_out")}
    return {**rows, **results}


def _plain_video(case: Namespace, device: str) -> Arguments:
    arguments = _video(case, device)
    del arguments["gate"]
    return arguments


def _affine_video(case: Namespace, device: str) -> Arguments:
    arguments = _video(case, device)
    del arguments["scale"], arguments["shift"]
    columns = {
        name: make_tensor(case.hidden_size, dtype=torch.float32, device=device)
        for name in ("gamma", "beta")
    }
    return {**arguments, **columns}


_GATES = "branch residual alpha beta"
_SUMS = "input residual gate"
for _name, _flags, _build, _reads, _writes in (
    ("gated_residual_rmsnorm", _shape(8192), _stream, f"{_GATES} weight", "out"),
    (
        "gated_residual_next_rmsnorm",
        _shape(8192),
        _stream_and_next,
        f"{_GATES} next_weight",
        "residual_out ffn_input",
    ),
    (
        "rmsnorm_sigmoid_gate",
        [
            _shape(0)[0],
            Flag("num_heads", positive, 32, "heads of a row"),
            Flag("head_dim", positive, 64, "elements of a head"),
            _DTYPE,
        ],
        _heads,
        "input gate",
        "input",
    ),
    (
        "fused_dit_gate_residual_layernorm_gamma_beta",
        _shape(3072),
        _affine_video,
        f"{_SUMS} gamma beta",
        "residual_out norm_out",
    ),
    (
        "fused_dit_gate_residual_layernorm_scale_shift",
        _shape(3072),
        _video,
        f"{_SUMS} scale shift",
        "residual_out norm_out",
    ),
    (
        "fused_dit_residual_layernorm_scale_shift",
        _shape(3072),
        _plain_video,
        "input residual scale shift",
        "residual_out norm_out",
    ),
):
    register(
        Routine(
            name=_name,
            api=f"flashinfer.norm:{_name}",
            flags=_flags,
            build=_build,
            reads=_reads.split(),
            writes=_writes.split(),
        )
    )
