"""Attention of mixed batches: prefill and decode in one call, with attention sinks, and prompts
with ranges that are seen in both directions."""

from ._attention.wrappers.attention_sink import BatchAttentionWithAttentionSinkWrapper
from ._attention.wrappers.batch_attention import PROFILE_EVENTS, BatchAttention
from ._attention.wrappers.bidirectional_ranges import (
    BatchPrefillWithCausalBidirectionalRangesWrapper,
)
from .jit.attention import gen_batch_attention_module

__all__ = [
    "PROFILE_EVENTS",
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "gen_batch_attention_module",
]
