"""Attention modules: what selects one, users' variants, the planner."""

from .config import AttentionConfig, choose_tile_q
from .modules import AttentionModule, gen_attention_module, get_attention_module
from .variant import AttentionVariant, make_variant

__all__ = [
    "AttentionConfig",
    "AttentionModule",
    "AttentionVariant",
    "choose_tile_q",
    "gen_attention_module",
    "get_attention_module",
    "make_variant",
]
