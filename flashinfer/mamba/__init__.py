"""Mamba: decode of selective state spaces."""

from .selective_state_update import selective_state_update

__all__ = ["selective_state_update"]
