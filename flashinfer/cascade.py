"""Merging attention over disjoint sets of keys into attention over all of them.

A state is the output `v` of attention over some keys and its log-sum-exp `s`: the logarithm *to the
base 2* of the sum of the exponentials of the logits, as the attention functions return it. A state
without keys has ``s = -inf``; its `v` is not used.
"""

from ._attention.functions.merge import (
    get_cascade_module,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from ._attention.wrappers.cascade import MultiLevelCascadeAttentionWrapper
from ._attention.wrappers.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from .jit.cascade import gen_cascade_module

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "gen_cascade_module",
    "get_cascade_module",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
