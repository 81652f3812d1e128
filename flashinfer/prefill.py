"""Prefill attention: any number of query tokens per request, over paged or ragged keys and values.

``o_i = sum_j softmax_j(s_ij) v_j`` with ``s_ij = sm_scale * q_i . k_j``, over the keys that query i
may see. Log-sum-exps are base 2: ``log2(sum_j exp(s_ij))``. A query that sees no key gives 0 and
-inf.
"""

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

from ._attention.functions.block_tables import trtllm_batch_context_with_kv_cache
from ._attention.functions.cudnn import cudnn_batch_prefill_with_kv_cache
from ._attention.functions.fmha import trtllm_fmha_v2_prefill
from ._attention.functions.jit_module import (
    get_batch_prefill_jit_module,
    get_batch_prefill_module,
    get_customize_batch_prefill_module,
    get_single_prefill_module,
    single_prefill_with_kv_cache_with_jit_module,
)
from ._attention.functions.ragged import trtllm_ragged_attention_deepseek
from ._attention.functions.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from ._attention.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from ._attention.wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from .jit.attention import gen_batch_prefill_module, gen_single_prefill_module

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "gen_batch_prefill_module",
    "gen_single_prefill_module",
    "make_hashable_cache",
    "get_batch_prefill_jit_module",
    "get_batch_prefill_module",
    "get_customize_batch_prefill_module",
    "get_single_prefill_module",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]


def make_hashable_cache(func: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the results of a function that takes lists, which are compared as tuples.

    Parameters
    ----------
    func : callable
        Its positional and keyword arguments are hashable, or lists of such; in its calls, lists
        have become tuples.

    Returns
    -------
    callable
        The function, called once for each set of arguments.
    """
    kept = cache(func)

    @wraps(func)
    def cached(*args: Any, **kwargs: Any) -> Any:
        return kept(*map(_hashable, args), **{k: _hashable(v) for k, v in kwargs.items()})

    return cached


def _hashable(value: Any) -> Any:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return tuple(map(_hashable, value)) if is_list else value
