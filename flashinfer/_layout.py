"""Names of cache layouts, as public functions take them."""

from __future__ import annotations


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
