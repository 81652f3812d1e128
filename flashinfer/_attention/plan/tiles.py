"""Tiles of the portable kernel."""

from __future__ import annotations

PORTABLE_TILE_KV = 64  # tokens
