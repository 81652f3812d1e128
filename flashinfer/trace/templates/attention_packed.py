"""4-bit keys and values (NVFP4) in the form of the definitions: of the dtype of the queries.

The product of a code and its scale has six bits, so that both 16-bit types hold it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._common.dtypes import torch_name
from .block_scales import unpack_pairs

_PACKED = torch.uint8


def dtype_with_scales(spec: Any) -> torch.dtype:
    """Of planned keys and values, once their scales are multiplied into them."""
    dtype: torch.dtype = spec.q_data_type if spec.kv_data_type == _PACKED else spec.kv_data_type
    return dtype


def pair_of(kv_cache_sf: Any) -> tuple[Any, Any]:
    """Scales of keys and of values where these are tensors of their own."""
    if not isinstance(kv_cache_sf, (tuple, list)) or len(kv_cache_sf) != 2:
        raise TypeError(
            f"`kv_cache_sf` must be a tuple of two tensors, got {type(kv_cache_sf).__name__}"
        )
    return kv_cache_sf[0], kv_cache_sf[1]


def with_scales(
    kv_dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the dtype of `q` from 4-bit ones; others as they are.

    Parameters
    ----------
    kv_dtype : torch.dtype
        What keys and values must be if there are scales.
    q, k, v : torch.Tensor
        Rows in the last dimension.
    scales : sequence of torch.Tensor, optional
        Of keys and values, of whose shapes they are, with a sixteenth of the head size.

    Raises
    ------
    ValueError
        If there are scales without 4-bit keys, or the other way round.
    """
    if kv_dtype != _PACKED:
        if scales is not None:
            raise ValueError(f"`kv_cache_sf` must be left out: keys are {torch_name(kv_dtype)}")
        return k, v
    if scales is None:
        raise ValueError("`kv_cache_sf` must be given with 4-bit keys")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"`q` must be float16 or bfloat16 with 4-bit keys, got {q.dtype}")
    k_sf, v_sf = scales
    return _multiplied("k", k, k_sf, q.dtype), _multiplied("v", v, v_sf, q.dtype)


def _multiplied(name: str, codes: torch.Tensor, sf: torch.Tensor, dtype: torch.dtype) -> Any:
    if codes.dtype != _PACKED:
        raise ValueError(f"`{name}` must have dtype {_PACKED} as planned, got {codes.dtype}")
    shape = (*codes.shape[:-1], codes.shape[-1] // 8)
    if sf.dtype not in (torch.uint8, torch.float8_e4m3fn) or sf.shape != shape:
        raise ValueError(
            f"`kv_cache_sf` must be float8_e4m3fn or uint8 of shape {list(shape)}, got "
            f"{torch_name(sf.dtype)} of shape {list(sf.shape)}"
        )
    factors = sf.contiguous().view(torch.float8_e4m3fn).float()
    blocks = unpack_pairs(codes.contiguous()).unflatten(-1, (-1, 16)) * factors[..., None]
    return blocks.flatten(-2).to(dtype)
