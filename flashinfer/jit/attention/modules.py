"""Attention modules: described, compiled, loaded."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._compile.handles import Planned
from .. import env as jit_env
from ..core import JitSpec, gen_jit_spec
from ..registry import register_generator
from ..spec import ModuleSpec
from . import hopper
from .config import (
    DECODE_TILES,
    PACKED_DECODE_TILES,
    PACKED_FLOAT4,
    TILES,
    AttentionConfig,
    tile_rules,
)
from .variant import AttentionVariant


class CtaSlots(NamedTuple):
    """CTAs of a kernel that a device holds at a time, and a plan's ``lone_speed``."""

    num_ctas: int
    lone_speed: int


class AttentionModule(Planned):
    """A loaded module.

    Attributes
    ----------
    config : AttentionConfig
        The configuration that it was compiled for.
    variant : AttentionVariant or None
        The user's variant in it.
    launch_bytes : int
        Bytes of the tensor in which its launches are prepared.
    bind, bind_second, options, mask, items, second, head_scales, block_scales, run : callable
        Exports of csrc/attention_jit_binding.cc, which says what they take.
    lengths, profile, output_scale : callable
        Others, of modules with `device_lengths`, of `profiled` ones, and of those with `CODES`.
    """

    def __init__(
        self, module: Any, config: AttentionConfig, variant: AttentionVariant | None
    ) -> None:
        self.config = config
        self.variant = variant
        if variant is not None and variant.members:
            _describe(module, variant.members)
        self.bind: Callable[..., None] = module.attention_bind
        self.bind_second: Callable[..., None] = module.attention_bind_second
        self.options: Callable[..., None] = module.attention_options
        self.mask: Callable[..., None] = module.attention_mask
        self.items: Callable[..., None] = module.attention_items
        self.lengths: Callable[..., None] = module.attention_lengths
        self.second: Callable[..., None] = module.attention_second
        self.head_scales: Callable[..., None] = module.attention_head_scales
        self.block_scales: Callable[..., None] = module.attention_block_scales
        self.output_scale: Callable[..., None] = module.attention_output_scale
        self.profile: Callable[..., None] = module.attention_profile
        self.run: Callable[..., None] = module.attention_run
        self._ctas_per_sm: Callable[[torch.Tensor], int] = module.attention_ctas_per_sm
        self.launch_bytes: int = module.attention_launch_size()
        self._cta_slots: dict[tuple[int, int | None], CtaSlots] = {}

    def cta_slots(self, workspace: torch.Tensor, num_sms: int | None = None) -> CtaSlots:
        """The CTAs that the multiprocessors of the device of `workspace`, or some, hold at a time.

        Decode with keys of 256 bytes has 96 KiB under way in a CTA: one on each multiprocessor
        keeps the memory of an H200 busy. With fewer bytes the products are what a CTA alone waits
        for.
        """
        place = workspace.device.index, num_sms
        if place not in self._cta_slots:
            config, per_sm = self.config, self._ctas_per_sm(workspace)
            key_bytes = config.head_dim_qk * config.dtype_kv.itemsize
            is_bound_by_memory = config.tile_q <= 16 and config.tile_q_second == 0
            is_bound_by_memory &= key_bytes >= 256 and config.dtype_kv.itemsize == 2
            lone_speed = per_sm if is_bound_by_memory else 1
            if num_sms is None:
                num_sms = torch.cuda.get_device_properties(workspace.device).multi_processor_count
            self._cta_slots[place] = CtaSlots(per_sm * num_sms, lone_speed)
        return self._cta_slots[place]


def _describe(module: Any, members: str) -> None:
    """Say to a host part, which serves all variants, what run() takes; another module knows."""
    if (describe := getattr(module, "attention_variant_members", None)) is not None:
        describe(torch.frombuffer(bytearray(members.encode()), dtype=torch.uint8))


def _aot_configs() -> Iterator[AttentionConfig]:
    for dtype in (torch.float16, torch.bfloat16):
        for dtype_kv in (dtype, torch.float8_e4m3fn):
            for tile_q, device_lengths in itertools.product(DECODE_TILES, (False, True)):
                yield AttentionConfig(
                    dtype, dtype_kv, dtype, 128, 128, tile_q, device_lengths=device_lengths
                )
        for dtype_kv, paged in ((dtype, False), (dtype, True), (torch.float8_e4m3fn, True)):
            shape = (dtype, dtype_kv, dtype, 128, 128)
            fields: dict[str, Any] = {"paged": paged, "mask_mode": "causal"}
            tile_q = hopper.hopper_tile_q(128, 128, dtype)
            yield AttentionConfig(*shape, tile_q, backend="fa3", **fields)
            for tile_q in TILES:
                yield AttentionConfig(*shape, tile_q, **fields)


def _packed_configs() -> Iterator[AttentionConfig]:
    """Decode over caches of 4 bits."""
    bf16 = torch.bfloat16
    for tile_q, device_lengths in itertools.product(PACKED_DECODE_TILES, (False, True)):
        yield AttentionConfig(
            bf16, PACKED_FLOAT4, bf16, 128, 128, tile_q, device_lengths=device_lengths
        )


def _paged_configs(head_dim: int, **options: Any) -> Iterator[AttentionConfig]:
    """Decode and prompts over a paged cache of bfloat16."""
    bf16 = torch.bfloat16
    shape = (bf16, bf16, bf16, head_dim, head_dim)
    for tile_q in DECODE_TILES:
        yield AttentionConfig(*shape, tile_q, **options)
    options |= {"mask_mode": "causal"}
    for rule in tile_rules(head_dim):
        yield AttentionConfig(*shape, rule.tile_q, **options)
    tile_q = hopper.hopper_tile_q(head_dim, head_dim, bf16)
    yield AttentionConfig(*shape, tile_q, backend="fa3", **options)


def _small_head_configs() -> Iterator[AttentionConfig]:
    """Heads of 64, which Llama 3.2 1B and Qwen2 0.5B have."""
    yield from _paged_configs(64)
    bf16 = torch.bfloat16
    for tile_q in DECODE_TILES:
        yield AttentionConfig(bf16, bf16, bf16, 64, 64, tile_q, device_lengths=True)


def _gemma_configs() -> Iterator[AttentionConfig]:
    """Heads of 256: Gemma's layers have windows or not, Gemma 2's capped logits as well."""
    for window, cap in itertools.product((False, True), (False, True)):
        yield from _paged_configs(256, sliding_window=window, logits_soft_cap=cap)


def _all_configs() -> Iterator[AttentionConfig]:
    yield from _aot_configs()
    yield from _packed_configs()
    yield from _small_head_configs()
    yield from _gemma_configs()


def _llama_configs() -> Iterator[AttentionConfig]:
    for config in _aot_configs():
        if config.dtype_q == torch.bfloat16:
            yield config
    yield from _small_head_configs()


def _host_configs(custom_variant: bool) -> Iterator[AttentionConfig]:
    """The usual calls of models of 16 bits: each tile, with each mask that it is used with."""
    for dtype, head_dim, paged in itertools.product(
        (torch.float16, torch.bfloat16), (64, 128, 256), (False, True)
    ):
        shape = (dtype, dtype, dtype, head_dim, head_dim)
        fields: dict[str, Any] = {"paged": paged, "custom_variant": custom_variant}
        for tile_q, mask_mode in itertools.product(TILES, ("none", "causal", "custom")):
            config = AttentionConfig(*shape, tile_q, mask_mode=mask_mode, **fields)
            yield config
            is_of_tables = paged and not custom_variant and mask_mode != "custom"
            if is_of_tables and tile_q in DECODE_TILES:
                yield dataclasses.replace(config, device_lengths=True)
        tile_q = hopper.hopper_tile_q(head_dim, head_dim, dtype)
        for mask_mode in ("none", "causal"):
            yield AttentionConfig(*shape, tile_q, mask_mode=mask_mode, backend="fa3", **fields)


def _host_specs() -> Iterator[ModuleSpec]:
    for config in _host_configs(custom_variant=False):
        yield gen_attention_module(config)
    for config in _host_configs(custom_variant=True):
        yield _host_twin(config)


def _host_twin(config: AttentionConfig) -> ModuleSpec:
    """The module whose host part serves all users' variants of a configuration."""
    csrc = jit_env.FLASHINFER_CSRC_DIR
    stand_in = csrc / "nvrtc" / "variant"
    return ModuleSpec(
        f"variant_{config.uri}",
        [*_sources(config), stand_in / "attention_members_jit_binding.cc"],
        extra_cuda_cflags=_cuda_flags(config),
        extra_include_paths=[stand_in],
        config=config,
    )


def _sources(config: AttentionConfig) -> list[Path]:
    launcher = "attention_hopper.cu" if config.backend == "fa3" else "attention.cu"
    return [jit_env.FLASHINFER_CSRC_DIR / name for name in (launcher, "attention_jit_binding.cc")]


def _cuda_flags(config: AttentionConfig) -> list[str] | None:
    return list(hopper.TARGET_FLAGS) if config.backend == "fa3" else None


@register_generator(
    aot=_all_configs,
    presets={"llama-bf16": _llama_configs, "gemma": _gemma_configs, "fp4": _packed_configs},
    hosts=_host_specs,
)
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
    name, folders = config.uri, []
    if variant is not None:
        if config.backend == "fa3":
            hopper.check_hopper(hopper.missing_on_hopper(config, variant=variant))
        folder = variant.write_headers()
        # The hash in the folder's name tells variants of one uri apart.
        name, folders = f"{folder.name}_{config.uri}", [folder]
    spec = gen_jit_spec(
        name,
        _sources(config),
        extra_cuda_cflags=_cuda_flags(config),
        extra_include_paths=folders,
        use_fast_math=False,
        post_load_adapter=lambda module: AttentionModule(module, config, variant),
        config=config,
    )
    if variant is not None and variant.has_host_part:
        spec.host_twin = _host_twin(config)
    return spec


@functools.cache
def get_attention_module(
    config: AttentionConfig, variant: AttentionVariant | None = None
) -> AttentionModule:
    """The loaded module, compiled first if need be; kept for the life of the process."""
    return gen_attention_module(config, variant).build_and_load()
