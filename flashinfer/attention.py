"""Attention of mixed batches: prefill and decode in one call, and with attention sinks."""

from ._attention.wrappers.attention_sink import BatchAttentionWithAttentionSinkWrapper
from ._attention.wrappers.batch_attention import BatchAttention
from .jit.attention import gen_batch_attention_module

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "gen_batch_attention_module",
]
