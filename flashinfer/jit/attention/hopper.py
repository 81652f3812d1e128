"""The attention kernel for Hopper (backend ``"fa3"``): what it serves, and its tiles."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ..._common.dtypes import FLOAT8, short_name
from .variant import AttentionVariant

TARGET_FLAGS = ("-gencode=arch=compute_90a,code=sm_90a",)
"""wgmma and TMA multicasts exist for this target alone, whatever list of targets there is."""

DTYPES = (torch.float16, torch.bfloat16, *FLOAT8)
"""Of queries; keys and values are of the same, or of 8 bits."""

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""Sizes (qk, vo) of the heads there are instructions' shapes and shared memory for."""


@functools.cache
def hopper_tile_q(head_dim_qk: int, head_dim_vo: int, dtype_q: torch.dtype = torch.bfloat16) -> int:
    """Packed query rows of a tile: 64 for each warpgroup that multiplies.

    Three of them, where their registers suffice, keep the tensor cores busy while each makes its
    exponentials: 64 columns took 518 instead of 386 TFLOP/s (causal, 8192 tokens, one H200), of
    e4m3 heads of 96, 128 and 192/128 803, 975 and 1093 instead of 753, 926 and 1059.
    """
    most = 128 if dtype_q.itemsize == 1 else 64
    return 192 if head_dim_vo <= most else 128


@functools.cache
def is_widened(dtype_q: torch.dtype, dtype_kv: torch.dtype) -> bool:
    """Whether keys and values of 8 bits become 16 on their way to the tensor cores."""
    return dtype_kv in FLOAT8 and dtype_q.itemsize == 2


def serves_dtypes(dtype_q: torch.dtype, dtype_kv: torch.dtype) -> bool:
    """Whether there is a kernel for queries of one type, and keys and values of another."""
    return dtype_q in DTYPES and dtype_kv in (dtype_q, *FLOAT8)


class KernelFeatures(NamedTuple):
    """What decides whether the kernel serves a launch.

    An ``AttentionConfig`` and a spec's ``KernelOptions`` have these fields as well.
    """

    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    head_dim_qk: int
    head_dim_vo: int
    pos_encoding: str = "none"


@functools.lru_cache(maxsize=256)
def missing_on_hopper(
    features: Any, two_shapes: bool = False, variant: AttentionVariant | None = None
) -> str | None:
    """What of a configuration the kernel does not serve; None if it serves all of it.

    Parameters
    ----------
    features : KernelFeatures
        Element types, head sizes and positional encoding; anything with its fields.
    two_shapes : bool
        Whether the launch has tiles of a second shape.
    variant : AttentionVariant, optional
        The user's variant; by default that of `features`, if it has one.
    """
    dtype_q, dtype_kv = features.dtype_q, features.dtype_kv
    head_dims = features.head_dim_qk, features.head_dim_vo
    if variant is None:
        variant = getattr(features, "variant", None)
    if dtype_q not in DTYPES:
        return f"`q_data_type` {short_name(dtype_q)}"
    if not serves_dtypes(dtype_q, dtype_kv):
        return (
            f"`kv_data_type` {short_name(dtype_kv)} with `q_data_type` {short_name(dtype_q)}: it "
            "must be the same, or of 8 bits"
        )
    if getattr(features, "dtype_o", None) == torch.float8_e4m3fn:
        return "`o_data_type` float8_e4m3fn"
    if head_dims not in HEAD_DIMS:
        served = ", ".join(f"{qk}/{vo}" for qk, vo in HEAD_DIMS)
        return f"`head_dim_qk`/`head_dim_vo` {head_dims[0]}/{head_dims[1]}: there are {served}"
    if features.pos_encoding == "rope_llama":
        return "`pos_encoding_mode` ROPE_LLAMA: rotate queries and keys before"
    if getattr(features, "mask_mode", None) == "draft":
        return "masks of drafts"
    if two_shapes:
        return "launches of prefill and decode together"
    if variant is not None and variant.transforms_operands:
        return "a variant with QueryTransform or KeyTransform"
    if variant is not None and not variant.has_softmax and dtype_q.itemsize == 1:
        return "a variant without softmax of 8-bit queries: 8 bits hold weights, not logits"
    return None


def check_hopper(missing: str | None) -> None:
    """Refuse backend ``"fa3"`` for what `missing_on_hopper` found."""
    if missing is not None:
        raise ValueError(f"`backend` must be 'auto' or 'fa2', got 'fa3', which lacks {missing}")
