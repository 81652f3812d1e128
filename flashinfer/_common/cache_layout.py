"""Layouts of caches, as public functions take them."""

from __future__ import annotations

from typing import Any

import torch

from . import checks


def is_hnd(kv_layout: str) -> bool:
    """Whether heads come before the slots of a page.

    Raises
    ------
    TypeError, ValueError
        If `kv_layout` is neither ``"NHD"`` nor ``"HND"``.
    """
    if kv_layout == "NHD":
        return False
    if kv_layout == "HND":
        return True
    error = ValueError if isinstance(kv_layout, str) else TypeError
    raise error(f"`kv_layout` must be 'NHD' or 'HND', got {kv_layout!r}")


def of_pages(cache: Any, kv_layout: str) -> Any:
    """A paged cache, or tokens ``[tokens, heads, head_dim]`` as a view of pages of one.

    `cache` is a tensor of keys and values, of 4 dimensions for tokens, or a pair, of 3; what is
    neither comes back as it is.
    """
    axis = -2 if kv_layout == "HND" else -3
    if isinstance(cache, torch.Tensor):
        return cache.unsqueeze(axis) if cache.ndim == 4 else cache
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        k, v = cache
        if getattr(k, "ndim", 0) == 3 and getattr(v, "ndim", 0) == 3:
            return k.unsqueeze(axis), v.unsqueeze(axis)
    return cache


def split_cache(
    paged_kv_cache: Any, name: str = "paged_kv_cache"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values of a cache, None for values if it holds both.

    Raises
    ------
    TypeError
        If `paged_kv_cache`, the argument `name`, is no tensor or pair of them.
    """
    if isinstance(paged_kv_cache, torch.Tensor):
        return paged_kv_cache, None
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        raise TypeError(
            f"`{name}` must be a torch.Tensor or a tuple of two, got "
            f"{type(paged_kv_cache).__name__}"
        )
    k, v = paged_kv_cache
    for i, part in enumerate((k, v)):
        checks.tensor(f"{name}[{i}]", part)
    return k, v
