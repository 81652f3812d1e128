"""Mamba: selective state spaces, token by token and (Mamba-2) in chunks."""

from .checkpointing_ssu import allocate_checkpointing_ssu_scratch, checkpointing_ssu
from .replayssm_materialize import replayssm_materialize
from .selective_state_update import selective_state_update
from .ssd_combined import SSDCombined, ssd_combined_fwd

__all__ = [
    "SSDCombined",
    "allocate_checkpointing_ssu_scratch",
    "checkpointing_ssu",
    "replayssm_materialize",
    "selective_state_update",
    "ssd_combined_fwd",
]
