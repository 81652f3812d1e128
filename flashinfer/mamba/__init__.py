"""Mamba: selective state spaces, token by token and (Mamba-2) in chunks."""

from .selective_state_update import selective_state_update
from .ssd_combined import ssd_combined_fwd

__all__ = ["selective_state_update", "ssd_combined_fwd"]
