"""Decode attention: one query token per request (or a few) over paged keys and values.

The arithmetic is that of ``flashinfer.prefill``; these functions take the arguments that decoding
has. Log-sum-exps are base 2. A request without keys gives 0 and -inf.
"""

from ._attention.functions.block_tables import trtllm_batch_decode_with_kv_cache
from ._attention.functions.cudnn import cudnn_batch_decode_with_kv_cache
from ._attention.functions.jit_module import (
    get_batch_decode_jit_module,
    get_batch_decode_module,
    get_single_decode_module,
    single_decode_with_kv_cache_with_jit_module,
)
from ._attention.functions.single import single_decode_with_kv_cache
from ._attention.functions.xqa import xqa_batch_decode_with_kv_cache
from ._attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from ._attention.wrappers.graph_decode import (
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from .jit.attention import gen_batch_decode_module, gen_single_decode_module

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "gen_batch_decode_module",
    "gen_single_decode_module",
    "get_batch_decode_jit_module",
    "get_batch_decode_module",
    "get_single_decode_module",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]
