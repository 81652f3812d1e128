"""Prefill and decode in one launch ("prefill on decode"): each has tensors of its own.

Prefill is bound by arithmetic and decode by memory; computed side by side they use both.
A. K. Kamath et al., "POD-Attention: Unlocking Full Prefill-Decode Overlap for Faster LLM
Inference", 2025. Here a launch has one work list: its items are of two kinds, each with its tile
and its tensors, and the planner spreads both over all CTAs.
"""

from ._attention.functions.jit_module import get_batch_pod_module, get_pod_module
from ._attention.wrappers.batch_pod import BatchPODWithPagedKVCacheWrapper
from ._attention.wrappers.pod import PODWithPagedKVCacheWrapper

__all__ = [
    "BatchPODWithPagedKVCacheWrapper",
    "PODWithPagedKVCacheWrapper",
    "get_batch_pod_module",
    "get_pod_module",
]
