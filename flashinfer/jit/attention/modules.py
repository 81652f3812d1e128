"""Attention modules: described, compiled, loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .. import env as jit_env
from ..core import JitSpec, gen_jit_spec
from ..registry import register_generator
from . import hopper
from .config import TILES, AttentionConfig
from .variant import AttentionVariant


class CtaSlots(NamedTuple):
    """CTAs of a kernel that a device holds at a time, and a plan's ``lone_speed``."""

    num_ctas: int
    lone_speed: int


class AttentionModule:
    """A loaded module.

    Attributes
    ----------
    config : AttentionConfig
        The configuration that it was compiled for.
    variant : AttentionVariant or None
        The user's variant in it.
    launch_bytes : int
        Bytes of the tensor in which its launches are prepared.
    bind, bind_second, options, mask, items, second, head_scales, run : callable
        Exports of csrc/attention_jit_binding.cc, which says what they take.
    """

    def __init__(
        self, module: Any, config: AttentionConfig, variant: AttentionVariant | None
    ) -> None:
        self.config = config
        self.variant = variant
        self.bind: Callable[..., None] = module.attention_bind
        self.bind_second: Callable[..., None] = module.attention_bind_second
        self.options: Callable[..., None] = module.attention_options
        self.mask: Callable[..., None] = module.attention_mask
        self.items: Callable[..., None] = module.attention_items
        self.second: Callable[..., None] = module.attention_second
        self.head_scales: Callable[..., None] = module.attention_head_scales
        self.run: Callable[..., None] = module.attention_run
        self._ctas_per_sm: Callable[[torch.Tensor], int] = module.attention_ctas_per_sm
        self.launch_bytes: int = module.attention_launch_size()
        self._cta_slots: dict[int, CtaSlots] = {}

    def cta_slots(self, workspace: torch.Tensor) -> CtaSlots:
        """The CTAs that the device of `workspace` holds at a time.

        Decode with keys of 256 bytes has 96 KiB under way in a CTA: one on each multiprocessor
        keeps the memory of an H200 busy. With fewer bytes the products are what a CTA alone waits
        for.
        """
        device = workspace.device.index
        if device not in self._cta_slots:
            config, per_sm = self.config, self._ctas_per_sm(workspace)
            num_sms = torch.cuda.get_device_properties(workspace.device).multi_processor_count
            key_bytes = config.head_dim_qk * config.dtype_kv.itemsize
            is_bound_by_memory = config.tile_q <= 16 and config.tile_q_second == 0
            is_bound_by_memory &= key_bytes >= 256 and config.dtype_kv.itemsize == 2
            lone_speed = per_sm if is_bound_by_memory else 1
            self._cta_slots[device] = CtaSlots(per_sm * num_sms, lone_speed)
        return self._cta_slots[device]


def _aot_configs() -> Iterator[AttentionConfig]:
    for dtype in (torch.float16, torch.bfloat16):
        for dtype_kv in (dtype, torch.float8_e4m3fn):
            for tile_q in TILES[:2]:
                yield AttentionConfig(dtype, dtype_kv, dtype, 128, 128, tile_q)
        for paged in (False, True):
            tile_q = hopper.hopper_tile_q(128, 128, dtype)
            yield AttentionConfig(
                dtype,
                dtype,
                dtype,
                128,
                128,
                tile_q,
                paged=paged,
                mask_mode="causal",
                backend="fa3",
            )
            for tile_q in TILES:
                yield AttentionConfig(
                    dtype, dtype, dtype, 128, 128, tile_q, paged=paged, mask_mode="causal"
                )


def _llama_configs() -> Iterator[AttentionConfig]:
    for config in _aot_configs():
        if config.dtype_q == torch.bfloat16:
            yield config


@register_generator(aot=_aot_configs, presets={"llama-bf16": _llama_configs})
def gen_attention_module(
    config: AttentionConfig, variant: AttentionVariant | None = None
) -> JitSpec:
    """The module of csrc/attention.cu or csrc/attention_hopper.cu for one configuration.

    Parameters
    ----------
    config : AttentionConfig
        Its `custom_variant` says whether there is a `variant`.
    variant : AttentionVariant, optional
        A user's variant in place of the built-in one.
    """
    if config.custom_variant != (variant is not None):
        raise ValueError("`variant` must be given if and only if `config.custom_variant` is set")
    csrc = jit_env.FLASHINFER_CSRC_DIR
    name, folders = config.uri, []
    is_hopper = config.backend == "fa3"
    if variant is not None:
        if is_hopper:
            hopper.check_hopper(hopper.missing_on_hopper(config, variant=variant))
        folder = variant.write_headers()
        # The hash in the folder's name tells variants of one uri apart.
        name, folders = f"{folder.name}_{config.uri}", [folder]
    return gen_jit_spec(
        name,
        [
            csrc / ("attention_hopper.cu" if is_hopper else "attention.cu"),
            csrc / "attention_jit_binding.cc",
        ],
        extra_cuda_cflags=list(hopper.TARGET_FLAGS) if is_hopper else None,
        extra_include_paths=folders,
        use_fast_math=False,
        post_load_adapter=lambda module: AttentionModule(module, config, variant),
        config=config,
    )


@functools.cache
def get_attention_module(
    config: AttentionConfig, variant: AttentionVariant | None = None
) -> AttentionModule:
    """The loaded module, compiled first if need be; kept for the life of the process."""
    return gen_attention_module(config, variant).build_and_load()
