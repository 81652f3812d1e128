"""Calls of a loaded variant: ``single_*_with_jit_module`` and the getters of modules."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._common.checks import tensor as check_tensor
from ..._compile.traced import graph_operator
from ...jit.attention.config import AttentionConfig
from ...jit.attention.customize import (
    gen_batch_decode_module,
    gen_batch_pod_module,
    gen_batch_prefill_module,
    gen_customize_batch_prefill_module,
    gen_pod_module,
    gen_single_decode_module,
    gen_single_prefill_module,
)
from ...jit.attention.modules import AttentionModule
from ...jit.attention.variant import AttentionVariant
from .graph_results import jit_module_results
from .single import new_lse, single_problem
from .single_plans import run_single


@graph_operator(results=jit_module_results)
def single_decode_with_kv_cache_with_jit_module(
    jit_module: AttentionModule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``single_decode_with_kv_cache`` with a user's variant.

    Parameters
    ----------
    jit_module : AttentionModule
        The result of ``gen_customize_single_decode_module(...).build_and_load()``.
    q : torch.Tensor
        ``[num_qo_heads, head_dim_qk]``, of the module's dtypes and head sizes as `k` and `v` are.
    k, v, kv_layout, window_left, return_lse
        As for ``single_decode_with_kv_cache``.
    *args
        The variant's additional tensors, then its scalars.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Output and, with `return_lse`, log-sum-exps.
    """
    check_tensor("q", q, 2)
    result = _run(jit_module, q[None], k, v, args, kv_layout, False, window_left, return_lse)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


@graph_operator(results=jit_module_results, fixed=("mask_mode",))
def single_prefill_with_kv_cache_with_jit_module(
    jit_module: AttentionModule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    mask_mode: int = 0,
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``single_prefill_with_kv_cache`` with a user's variant.

    Parameters
    ----------
    jit_module : AttentionModule
        The result of ``gen_customize_single_prefill_module(...).build_and_load()``.
    q : torch.Tensor
        ``[qo_len, num_qo_heads, head_dim_qk]``, of the module's dtypes and head sizes as `k` and
        `v` are.
    mask_mode : int
        0: none beside the variant's; 1: causal.
    k, v, kv_layout, window_left, return_lse
        As for ``single_prefill_with_kv_cache``.
    *args
        The variant's additional tensors, then its scalars.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Output and, with `return_lse`, log-sum-exps.
    """
    check_tensor("q", q, 3)
    check_count("mask_mode", mask_mode, 0, 1)
    return _run(jit_module, q, k, v, args, kv_layout, mask_mode == 1, window_left, return_lse)


def _parts(jit_module: Any) -> tuple[AttentionConfig, AttentionVariant]:
    if not isinstance(jit_module, AttentionModule):
        raise TypeError(
            "`jit_module` must be a loaded attention module, got " + type(jit_module).__name__
        )
    if jit_module.variant is None:
        raise ValueError("`jit_module` must be of a gen_customize_*_module: it has no variant")
    return jit_module.config, jit_module.variant


def _run(
    jit_module: AttentionModule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    args: tuple[Any, ...],
    kv_layout: str,
    causal: bool,
    window_left: int,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    config, variant = _parts(jit_module)
    mode = "ROPE_LLAMA" if config.pos_encoding == "rope_llama" else "NONE"
    problem = single_problem(
        q,
        k,
        v,
        kv_layout=kv_layout,
        o_dtype=config.dtype_o,
        causal=causal,
        pos_encoding_mode=mode,
        window_left=window_left,
        variant=variant,
        backend=config.backend,
    )
    spec = problem.spec
    for name, given, wanted in (
        ("q", (q.dtype, spec.head_dim_qk), (config.dtype_q, config.head_dim_qk)),
        ("v", (v.dtype, spec.head_dim_vo), (config.dtype_kv, config.head_dim_vo)),
    ):
        if given != wanted:
            raise ValueError(
                f"`{name}` must be {wanted[0]} with heads of {wanted[1]} as the module is, got "
                f"{given[0]} with heads of {given[1]}"
            )
    wanted_args = [*variant.tensor_names, *variant.scalar_names]
    if len(args) != len(wanted_args):
        raise TypeError(f"the variant needs {wanted_args} after `v`, got {len(args)} values")
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=config.dtype_o, device=q.device)
    lse = new_lse(q) if check_flag("return_lse", return_lse) else None
    run_single(problem, q, k, v, out, lse, q.shape[-1] ** -0.5, 1.0, args)
    return out if lse is None else (out, lse)


def get_single_decode_module(*args: Any) -> AttentionModule:
    """The loaded module of ``flashinfer.jit.attention.gen_single_decode_module(*args)``."""
    return gen_single_decode_module(*args).build_and_load()


def get_batch_decode_module(*args: Any) -> AttentionModule:
    """The loaded module of ``flashinfer.jit.attention.gen_batch_decode_module(*args)``."""
    return gen_batch_decode_module(*args).build_and_load()


def get_single_prefill_module(backend: str, *args: Any) -> AttentionModule:
    """The loaded module of ``gen_single_prefill_module(backend, *args)``."""
    return gen_single_prefill_module(backend, *args).build_and_load()


def get_batch_prefill_module(backend: str, *args: Any) -> AttentionModule:
    """The loaded module of ``gen_batch_prefill_module(backend, *args)``."""
    return gen_batch_prefill_module(backend, *args).build_and_load()


def get_batch_decode_jit_module(module_name: str, jit_module: AttentionModule) -> AttentionModule:
    """The loaded module of a variant, once it is known to be one.

    There is nothing to register: its functions are called as they are.

    Parameters
    ----------
    module_name : str
        The variant's `uri`.
    jit_module : AttentionModule
        The result of ``gen_customize_batch_decode_module(...).build_and_load()``.

    Returns
    -------
    AttentionModule
        `jit_module`.

    Raises
    ------
    TypeError, ValueError
        If `jit_module` is not a loaded module with a variant of this name.
    """
    uri = _parts(jit_module)[1].uri
    if module_name != uri:
        raise ValueError(f"`module_name` must be {uri!r} as the module's is, got {module_name!r}")
    return jit_module


get_batch_prefill_jit_module = get_batch_decode_jit_module


@functools.wraps(gen_customize_batch_prefill_module, assigned=())
def get_customize_batch_prefill_module(*args: Any, **kwargs: Any) -> AttentionModule:
    """The loaded module of ``gen_customize_batch_prefill_module`` with the same arguments."""
    return gen_customize_batch_prefill_module(*args, **kwargs).build_and_load()


def get_pod_module(*args: Any) -> AttentionModule:
    """The loaded module of ``flashinfer.jit.attention.gen_pod_module(*args)``."""
    return gen_pod_module(*args).build_and_load()


def get_batch_pod_module(*args: Any) -> AttentionModule:
    """The loaded module of ``flashinfer.jit.attention.gen_batch_pod_module(*args)``."""
    return gen_batch_pod_module(*args).build_and_load()
