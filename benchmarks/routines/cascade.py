"""Merges of attention states, and the concatenation of latent attention's keys."""

from __future__ import annotations

from argparse import Namespace

import torch

from flashinfer.testing import make_tensor

from .base import Arguments, Flag, Routine, dtype_name, positive, register, torch_dtype

_TOKENS = Flag("batch_size", positive, 4096, "tokens")
_HEADS = [
    Flag("num_heads", positive, 32, "heads"),
    Flag("head_dim", positive, 128, "elements of a head"),
]
_DTYPE = Flag("input_dtype", dtype_name, "bfloat16", "dtype of the attention outputs")
_STATES = Flag("num_states", positive, 2, "states that are merged into one")


def _state(case: Namespace, device: str, *states: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (case.batch_size, *states, case.num_heads)
    dtype = torch_dtype(case.input_dtype)
    v = make_tensor(*shape, case.head_dim, dtype=dtype, device=device)
    return v, torch.randn(shape, device=device)


def _build_states(case: Namespace, device: str) -> Arguments:
    v, s = _state(case, device, case.num_states)
    return {"v": v, "s": s}


def _build_pair(case: Namespace, device: str) -> Arguments:
    (v, s), (v_other, s_other) = _state(case, device), _state(case, device)
    return {"v": v, "s": s, "v_other": v_other, "s_other": s_other}


def _build_two(case: Namespace, device: str) -> Arguments:
    (v_a, s_a), (v_b, s_b) = _state(case, device), _state(case, device)
    return {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b}


def _merged_bytes(arguments: Arguments) -> int:
    v, s = arguments["v"], arguments["s"]
    return (v.nbytes + s.nbytes) // v.shape[1]


register(
    Routine(
        name="merge_states",
        api="flashinfer.cascade:merge_states",
        flags=[_TOKENS, _STATES, *_HEADS, _DTYPE],
        build=_build_states,
        reads=["v", "s"],
        writes=[],
        fresh=_merged_bytes,
    )
)
register(
    Routine(
        name="merge_state",
        api="flashinfer.cascade:merge_state",
        flags=[_TOKENS, *_HEADS, _DTYPE],
        build=_build_two,
        reads=["v_a", "s_a", "v_b", "s_b"],
        writes=[],
        fresh=lambda arguments: arguments["v_a"].nbytes + arguments["s_a"].nbytes,
    )
)
register(
    Routine(
        name="merge_state_in_place",
        api="flashinfer.cascade:merge_state_in_place",
        flags=[_TOKENS, *_HEADS, _DTYPE],
        build=_build_pair,
        reads=["v", "s", "v_other", "s_other"],
        writes=["v", "s"],
    )
)


def _build_concat(case: Namespace, device: str) -> Arguments:
    dtype = torch_dtype(case.input_dtype)
    heads = (case.batch_size, case.num_heads)
    return {
        "k": torch.empty(*heads, case.nope_dim + case.rope_dim, dtype=dtype, device=device),
        "k_nope": make_tensor(*heads, case.nope_dim, dtype=dtype, device=device),
        "k_rope": make_tensor(case.batch_size, 1, case.rope_dim, dtype=dtype, device=device),
    }


register(
    Routine(
        name="concat_mla_k",
        api="flashinfer.concat_ops:concat_mla_k",
        flags=[
            _TOKENS,
            Flag("num_heads", positive, 128, "heads"),
            Flag("nope_dim", positive, 128, "elements of a head's own part"),
            Flag("rope_dim", positive, 64, "elements of the part that all heads share"),
            _DTYPE,
        ],
        build=_build_concat,
        reads=["k_nope", "k_rope"],
        writes=["k"],
    )
)
