"""Linear attention: the delta rule in decode and prefill, KDA's prefill, and Mamba-2's decode."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from flashinfer.testing import CheckOptions, ErrorBound, error_bound, make_tensor

from .base import Arguments, Flag, Routine, dtype_name, positive, register, torch_dtype

_BF16 = torch.bfloat16
_STATE = Flag("state_dtype", dtype_name, "bfloat16", "dtype of the states")


def _units(*shape: int, device: str) -> torch.Tensor:
    """Vectors of length 1, as queries and keys are."""
    return F.normalize(make_tensor(*shape, dtype=torch.float32, device=device), dim=-1).to(_BF16)


def _values(*shape: int, device: str, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return make_tensor(*shape, dtype=dtype, device=device)


def _build_decode(case: Namespace, device: str) -> Arguments:
    batch, heads, dim = case.batch_size, case.num_v_heads, case.head_dim
    keys = (batch, 1, case.num_heads, dim)
    gates = {name: _values(batch, 1, heads, device=device) for name in ("a", "b")}
    return {
        **{name: _units(*keys, device=device) for name in ("q", "k")},
        "v": _values(batch, 1, heads, dim, device=device),
        "state": _values(
            batch, heads, dim, dim, dtype=torch_dtype(case.state_dtype), device=device
        ),
        "A_log": -torch.rand(heads, device=device),
        "dt_bias": torch.rand(heads, device=device),
        **gates,
        "output": torch.empty(batch, 1, heads, dim, dtype=_BF16, device=device),
    }


def _build_prefill(case: Namespace, device: str) -> Arguments:
    tokens, heads, dim = case.batch_size * case.qo_len, case.num_v_heads, case.head_dim
    keys = (tokens, case.num_heads, dim)
    return {
        **{name: _units(*keys, device=device) for name in ("q", "k")},
        "v": _values(tokens, heads, dim, device=device),
        "g": torch.rand(tokens, heads, device=device) * 0.1 + 0.9,
        "beta": torch.rand(tokens, heads, device=device),
        "output_final_state": True,
        "cu_seqlens": torch.arange(case.batch_size + 1, device=device) * case.qo_len,
        "output": torch.empty(tokens, heads, dim, dtype=_BF16, device=device),
        "output_state": torch.empty(case.batch_size, heads, dim, dim, device=device),
    }


def _build_kda(case: Namespace, device: str) -> Arguments:
    tokens, heads, dim = case.batch_size * case.qo_len, case.num_heads, case.head_dim
    row = (1, tokens, heads)
    return {
        **{name: _units(*row, dim, device=device) for name in ("q", "k")},
        **{name: _values(*row, dim, device=device) for name in ("v", "g")},
        "beta": _values(*row, device=device),
        "A_log": -torch.rand(heads, device=device),
        "dt_bias": torch.rand(heads, dim, device=device),
        "output_final_state": True,
        "use_gate_in_kernel": True,
        "lower_bound": -5.0,
        "cu_seqlens": torch.arange(case.batch_size + 1, device=device) * case.qo_len,
        "output": torch.empty(*row, dim, dtype=_BF16, device=device),
        "beta_is_logit": True,
    }


def _build_mamba(case: Namespace, device: str) -> Arguments:
    batch, heads, dim, states = case.batch_size, case.num_heads, case.head_dim, case.state_size
    row = (batch, heads, dim)
    each_head = torch.rand(heads, device=device)
    groups = {n: _values(batch, case.num_groups, states, device=device) for n in ("B", "C")}
    return {
        "state": _values(
            batch, heads, dim, states, dtype=torch_dtype(case.state_dtype), device=device
        ),
        "x": _values(*row, device=device),
        "dt": torch.rand(batch, heads, device=device)[..., None].expand(row),
        "A": -each_head[:, None, None].expand(heads, dim, states),
        **groups,
        "D": torch.rand(heads, device=device)[:, None].expand(heads, dim),
        "dt_softplus": True,
        "out": torch.empty(*row, dtype=_BF16, device=device),
    }


def _flops(case: Namespace) -> int:
    """Products with a state by the recurrence, which chunks replace by fewer, larger ones."""
    heads: int = getattr(case, "num_v_heads", case.num_heads)
    return 6 * case.batch_size * case.qo_len * heads * case.head_dim**2


def _check_decode(template: Any, arguments: Mapping[str, Any]) -> CheckOptions:
    """Sums are float32, and rounded once; the terms of an output have a few units."""
    dim = arguments["state"].shape[-1]
    kinds = (_BF16, arguments["state"].dtype)
    coarse = max(kinds, key=lambda dtype: torch.finfo(dtype).eps)
    return CheckOptions(bound=error_bound(coarse, dim, magnitude=8.0))


def _check_prefill(template: Any, arguments: Mapping[str, Any]) -> CheckOptions:
    """Products within a chunk have operands of 16 bits (docs/linear_attention.md)."""
    return CheckOptions(bound=ErrorBound(2.0**-7, 2.0**-5, 1e-2), check_bias=False)


_HEADS = [
    Flag("num_heads", positive, 16, "heads of queries and keys"),
    Flag("num_v_heads", positive, 32, "heads of values and states"),
    Flag("head_dim", positive, 128, "elements of a key and of a value"),
]

register(
    Routine(
        name="gated_delta_rule_decode_pretranspose",
        api="flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose",
        flags=[Flag("batch_size", positive, 64, "sequences, a token each"), *_HEADS, _STATE],
        build=_build_decode,
        reads=["q", "k", "v", "a", "b", "state"],
        writes=["state", "output"],
        check_options=_check_decode,
    )
)
register(
    Routine(
        name="chunk_gated_delta_rule",
        api="flashinfer.gdn_prefill:chunk_gated_delta_rule",
        flags=[
            Flag("batch_size", positive, 1, "sequences"),
            Flag("qo_len", positive, 8192, "tokens of each sequence"),
            *_HEADS,
        ],
        build=_build_prefill,
        reads=["q", "k", "v", "g", "beta"],
        writes=["output", "output_state"],
        flops=_flops,
        check_options=_check_prefill,
    )
)
register(
    Routine(
        name="recurrent_kda",
        api="flashinfer.kda:recurrent_kda",
        flags=[
            Flag("batch_size", positive, 1, "sequences"),
            Flag("qo_len", positive, 8192, "tokens of each sequence"),
            Flag("num_heads", positive, 32, "heads"),
            Flag("head_dim", positive, 128, "elements of a key and of a value"),
        ],
        build=_build_kda,
        reads=["q", "k", "v", "g", "beta"],
        writes=["output"],
        flops=_flops,
        check_options=_check_prefill,
    )
)
register(
    Routine(
        name="selective_state_update",
        api="flashinfer.mamba:selective_state_update",
        flags=[
            Flag("batch_size", positive, 64, "sequences, a token each"),
            Flag("num_heads", positive, 64, "heads"),
            Flag("num_groups", positive, 8, "groups of B and C"),
            Flag("head_dim", positive, 128, "elements of a head"),
            Flag("state_size", positive, 128, "elements of a state's row"),
            _STATE,
        ],
        build=_build_mamba,
        reads=["x", "B", "C", "state"],
        writes=["state", "out"],
        check_options=_check_decode,
    )
)
