"""Hyper-connections: the mapping of four streams before a layer, and that after it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from flashinfer.testing import CheckOptions, error_bound, make_tensor

from .base import Arguments, Flag, Routine, dtype_name, positive, register, torch_dtype

_SHAPE = [
    Flag("batch_size", positive, 1024, "tokens"),
    Flag("hidden_size", positive, 7168, "elements of a stream"),
    Flag("input_dtype", dtype_name, "bfloat16", "dtype of the streams"),
]


def _streams(case: Namespace, device: str) -> torch.Tensor:
    dtype = torch_dtype(case.input_dtype)
    return make_tensor(case.batch_size, 4, case.hidden_size, dtype=dtype, device=device)


def _post(case: Namespace, device: str) -> Arguments:
    tokens, dtype = case.batch_size, torch_dtype(case.input_dtype)
    return {
        "x": make_tensor(tokens, case.hidden_size, dtype=dtype, device=device),
        "residual": _streams(case, device),
        "post_layer_mix": torch.rand(tokens, 4, 1, device=device),
        "comb_res_mix": torch.rand(tokens, 4, 4, device=device),
    }


def _pre(case: Namespace, device: str) -> Arguments:
    shape = (case.num_splits, case.batch_size)
    return {
        "dot_mix": torch.randn(*shape, 24, device=device),
        "sqrsum": (torch.rand(*shape, device=device) + 0.5) * 4 * case.hidden_size,
        "residual": _streams(case, device),
        "mhc_scale": torch.rand(3, device=device),
        "mhc_base": torch.randn(24, device=device),
        "k": 4 * case.hidden_size,
        "num_splits": case.num_splits,
        "block_size": case.block_size,
    }


def _pre_with_prenorm(case: Namespace, device: str) -> Arguments:
    arguments = _pre(Namespace(**{**vars(case), "num_splits": 1}), device)
    return {key: arguments[key] for key in arguments.keys() - {"sqrsum", "k", "num_splits"}}


def _options(template: Any, arguments: Arguments) -> CheckOptions:
    """Four streams may cancel; their gates are exponentials of sums of a projection's parts."""
    dtype = arguments["residual"].dtype
    return CheckOptions(bound=error_bound(dtype, operations=512, magnitude=24.0))


def _fresh_streams(arguments: Arguments) -> int:
    return arguments["residual"].nbytes


def _fresh_row(arguments: Arguments) -> int:
    """The layer's input, and 20 weights for each token."""
    residual = arguments["residual"]
    return residual.nbytes // 4 + 20 * 4 * len(residual)


_BLOCK = Flag("block_size", int, 0, "threads for a token; 0: what suits the sizes")
for _name, _flags, _build, _reads, _fresh in (
    ("mhc_post", _SHAPE, _post, "x residual post_layer_mix comb_res_mix", _fresh_streams),
    (
        "mhc_pre_big_fuse",
        [*_SHAPE, Flag("num_splits", positive, 1, "parts of the projection"), _BLOCK],
        _pre,
        "dot_mix sqrsum residual",
        _fresh_row,
    ),
    (
        "mhc_pre_big_fuse_with_prenorm",
        [*_SHAPE, _BLOCK],
        _pre_with_prenorm,
        "dot_mix residual",
        _fresh_row,
    ),
):
    register(
        Routine(
            name=_name,
            api=f"flashinfer:{_name}",
            flags=_flags,
            build=_build,
            reads=_reads.split(),
            writes=[],
            fresh=_fresh,
            check_options=_options,
        )
    )
