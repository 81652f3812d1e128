"""What a set of options means, whatever the batch: :class:`AttentionSpec`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...jit.attention.config import tile_head_dim
from ...jit.attention.variant import AttentionVariant


class KernelOptions(NamedTuple):
    """The options that select code, as fields of ``AttentionConfig``."""

    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype
    head_dim_qk: int
    head_dim_vo: int
    pos_encoding: str
    logits_soft_cap: bool
    variant: AttentionVariant | None
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Heads, element types, scales and options of attention.

    A wrapper makes one for each set of options and keeps it: the hash and the kernel's options are
    computed once.

    Attributes
    ----------
    causal : bool
        Aligned to the end: query i sees keys up to ``i + kv_len - qo_len``. A mask in
        ``PlanTensors`` takes its place.
    window_left : int
        Keys further than this before the query are masked; negative: none are.
    logits_soft_cap : float
        0: none.
    sm_scale : float
        Logits are ``q.k * sm_scale``.
    pos_encoding_mode : str
        ``"NONE"``, ``"ROPE_LLAMA"`` or ``"ALIBI"``.
    variant : AttentionVariant or None
        The user's variant.
    backend : str
        The backend that the caller asks for: ``"auto"``, ``"fa2"`` or ``"fa3"``.
    profiled : bool
        Whether the kernel records its events.
    sinks : bool
        Whether every run has sinks; if not, a run that has some takes another module.
    mask_mode : str
        Mask of the kernel where no tensor is one, as in ``AttentionConfig``.
    kernel_options : KernelOptions
        The options that select code.
    tile_head_dim : int
        The head size that the tile depends on.

    Raises
    ------
    ValueError
        If query heads are not 1 to 64 times as many as KV heads.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype
    sm_scale: float
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    kv_layout: str = "NHD"
    variant: AttentionVariant | None = None
    backend: str = "auto"
    profiled: bool = False
    sinks: bool = False
    kernel_options: KernelOptions = field(init=False, repr=False, compare=False)
    group_size: int = field(init=False, repr=False, compare=False)
    tile_head_dim: int = field(init=False, repr=False, compare=False)
    mask_mode: str = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        q_heads, kv_heads = self.num_qo_heads, self.num_kv_heads
        if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads or q_heads // kv_heads > 64:
            raise ValueError(
                "`num_qo_heads` must be 1 to 64 times `num_kv_heads`, got "
                f"num_qo_heads={q_heads}, num_kv_heads={kv_heads}"
            )
        options = KernelOptions(
            self.q_data_type,
            self.kv_data_type,
            self.o_data_type,
            self.head_dim_qk,
            self.head_dim_vo,
            self.pos_encoding_mode.lower(),
            self.logits_soft_cap > 0.0,
            self.variant,
            self.profiled,
        )
        scalars = (
            self.sm_scale,
            self.causal,
            self.window_left,
            self.logits_soft_cap,
            self.rope_scale,
            self.rope_theta,
            self.kv_layout,
            self.backend,
        )
        object.__setattr__(self, "kernel_options", options)
        object.__setattr__(self, "group_size", q_heads // kv_heads)
        tile_dim = tile_head_dim(self.head_dim_qk, self.head_dim_vo)
        object.__setattr__(self, "tile_head_dim", tile_dim)
        object.__setattr__(self, "mask_mode", "causal" if self.causal else "none")
        object.__setattr__(self, "_hash", hash((q_heads, kv_heads, options, scalars)))

    def __hash__(self) -> int:
        return self._hash
