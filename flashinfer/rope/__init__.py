"""Rotary position embedding of queries and keys.

Pair ``j`` of a head turns by ``position * frequency_j``. The pairs are ``(j, j + rotary_dim / 2)``
("neox"), or ``(2 j, 2 j + 1)`` when interleaved. Frequencies are computed (exactly at any position:
angles are kept as integer fractions of a turn), or cosines and sines are read from a cache.
Everything is computed in float32 and rounded once. Some functions also quantise the result,
and append it to a cache.
"""

from ..jit.rope import gen_rope_module as gen_rope_module
from .append import rope_append_paged_kv_cache as rope_append_paged_kv_cache
from .quantize import mla_rope_quantize_fp8 as mla_rope_quantize_fp8
from .quantize import rope_quantize_fp8 as rope_quantize_fp8
from .quantize import (
    rope_quantize_fp8_append_paged_kv_cache as rope_quantize_fp8_append_paged_kv_cache,
)
from .rotate import apply_llama31_rope as apply_llama31_rope
from .rotate import apply_llama31_rope_inplace as apply_llama31_rope_inplace
from .rotate import apply_llama31_rope_pos_ids as apply_llama31_rope_pos_ids
from .rotate import apply_llama31_rope_pos_ids_inplace as apply_llama31_rope_pos_ids_inplace
from .rotate import apply_rope as apply_rope
from .rotate import apply_rope_inplace as apply_rope_inplace
from .rotate import apply_rope_pos_ids as apply_rope_pos_ids
from .rotate import apply_rope_pos_ids_inplace as apply_rope_pos_ids_inplace
from .rotate import apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache
from .rotate import apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace
from .rotate import get_rope_module as get_rope_module

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "gen_rope_module",
    "get_rope_module",
    "mla_rope_quantize_fp8",
    "rope_append_paged_kv_cache",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]
