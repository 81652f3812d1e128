"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) over paged caches."""

from __future__ import annotations

from .metadata import MLAHeadDimensions, MLALayerDimensions, MLAPlanMetadata
from .module import get_batch_mla_module
from .wrapper import BatchMLAPagedAttentionWrapper

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "MLAPlanMetadata",
    "get_batch_mla_module",
]
