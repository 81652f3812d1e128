"""Attention modules: what selects one, users' variants, the planner."""

from .config import AttentionConfig, choose_tile_q
from .customize import (
    gen_batch_attention_module,
    gen_batch_decode_module,
    gen_batch_pod_module,
    gen_batch_prefill_attention_sink_module,
    gen_batch_prefill_module,
    gen_customize_batch_decode_module,
    gen_customize_batch_prefill_module,
    gen_customize_single_decode_module,
    gen_customize_single_prefill_module,
    gen_pod_module,
    gen_single_decode_module,
    gen_single_prefill_module,
    get_batch_attention_uri,
    get_batch_decode_uri,
    get_batch_prefill_attention_sink_uri,
    get_batch_prefill_uri,
    get_pod_uri,
    get_single_decode_uri,
    get_single_prefill_uri,
)
from .mla import gen_batch_mla_module, get_batch_mla_uri
from .modules import AttentionModule, gen_attention_module, get_attention_module
from .plan import gen_attention_plan_module
from .ranges import gen_batch_prefill_bidirectional_ranges_module
from .variant import AttentionVariant, make_variant

__all__ = [
    "AttentionConfig",
    "AttentionModule",
    "AttentionVariant",
    "choose_tile_q",
    "gen_attention_module",
    "gen_attention_plan_module",
    "gen_batch_attention_module",
    "gen_batch_decode_module",
    "gen_batch_mla_module",
    "gen_batch_pod_module",
    "gen_batch_prefill_attention_sink_module",
    "gen_batch_prefill_bidirectional_ranges_module",
    "gen_batch_prefill_module",
    "gen_customize_batch_decode_module",
    "gen_customize_batch_prefill_module",
    "gen_customize_single_decode_module",
    "gen_customize_single_prefill_module",
    "gen_pod_module",
    "gen_single_decode_module",
    "gen_single_prefill_module",
    "get_attention_module",
    "get_batch_attention_uri",
    "get_batch_decode_uri",
    "get_batch_mla_uri",
    "get_batch_prefill_attention_sink_uri",
    "get_batch_prefill_uri",
    "get_pod_uri",
    "get_single_decode_uri",
    "get_single_prefill_uri",
    "make_variant",
]
