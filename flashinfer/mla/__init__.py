"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) over paged caches."""

from __future__ import annotations

from .call import PROFILE_EVENTS
from .metadata import MLAHeadDimensions, MLALayerDimensions, MLAPlanMetadata
from .module import get_batch_mla_module
from .one_call import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from .wrapper import BatchMLAPagedAttentionWrapper

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "MLAPlanMetadata",
    "PROFILE_EVENTS",
    "get_batch_mla_module",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]
