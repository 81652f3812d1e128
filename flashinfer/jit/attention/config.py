"""Selects the code of an attention module."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..._common.dtypes import FLOAT8, check_dtype, short_name, torch_name
from ..config import ModuleConfig
from .hopper import check_hopper, hopper_tile_q, missing_on_hopper

FLOAT16 = (torch.float16, torch.bfloat16)
QUERIES = (*FLOAT16, *FLOAT8)
CODES = torch.float8_e4m3fn
"""Of outputs: each row of a head has a scale, as products of 8-bit blocks take them."""
CODE_BLOCK = 128
PACKED_FLOAT4 = torch.uint8
"""Of keys and values: two 4-bit codes (e2m1) a byte, beside scales of 16 of them (NVFP4)."""

MASK_MODES = ("none", "causal", "custom", "multi_item", "draft")
POS_ENCODINGS = ("none", "rope_llama", "alibi")
TILES = (8, 16, 64, 128)
DECODE_TILES = TILES[:2]  # whose warps share the keys
PACKED_TILE = 4  # of 4-bit values alone
PACKED_DECODE_TILES = (PACKED_TILE, *DECODE_TILES)
TILES_SECOND = (16, 64)
BACKENDS = ("fa2", "fa3")


@dataclass(frozen=True)
class AttentionConfig(ModuleConfig):
    """One kernel: element types, head sizes, tile, mask and the options that cost registers.

    Lengths, strides, page sizes, group sizes, scales, the width of the window and the value of
    the soft cap are run-time arguments.

    Attributes
    ----------
    tile_q : int
        Packed query rows (token and head of the group) of a tile: one of ``TILES``; for
        ``"fa3"`` what `hopper.hopper_tile_q` says.
    paged : bool
        Keys and values in pages; False for ragged tensors.
    mask_mode : str
        One of ``MASK_MODES``.
    pos_encoding : str
        One of ``POS_ENCODINGS``.
    sliding_window, logits_soft_cap, sinks, head_scales : bool
        Whether the option is compiled in.
    device_lengths : bool
        Whether the kernels divide the work themselves, by lengths in device memory, instead of
        reading a work list; for tiles of decode.
    profiled : bool
        Whether warps record what they do, and when.
    tile_q_second : int
        Tile of the work items of kind 1 in launches of two shapes, of ``TILES_SECOND``; 0 without.
    mask_mode_second, pos_encoding_second : str
        Mask and positional encoding of these.
    sliding_window_second, logits_soft_cap_second : bool
        Whether these have the option; sinks and scales of heads both kinds have, or neither.
    custom_variant : bool
        Whether rendered headers replace the built-in variant.
    backend : str
        ``"fa2"``: csrc/attention.cu, for every architecture; ``"fa3"``: csrc/attention_hopper.cu,
        for SM90a alone.
    """

    module: ClassVar[str] = "attention"
    # cp.async and mma of bfloat16 came with Ampere.
    supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)

    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype
    head_dim_qk: int
    head_dim_vo: int
    tile_q: int
    paged: bool = True
    mask_mode: str = "none"
    pos_encoding: str = "none"
    sliding_window: bool = False
    logits_soft_cap: bool = False
    sinks: bool = False
    tile_q_second: int = 0
    mask_mode_second: str = "none"
    pos_encoding_second: str = "none"
    sliding_window_second: bool = False
    logits_soft_cap_second: bool = False
    custom_variant: bool = False
    backend: str = "fa2"
    head_scales: bool = False
    device_lengths: bool = False
    profiled: bool = False

    def __post_init__(self) -> None:
        check_dtype("q_data_type", self.dtype_q, QUERIES)
        check_dtype("kv_data_type", self.dtype_kv, kv_dtypes(self.dtype_q))
        check_dtype("o_data_type", self.dtype_o, (*FLOAT16, CODES))
        check_head_dims(self.head_dim_qk, self.head_dim_vo)
        if self.dtype_o == CODES:
            check_codes(self.head_dim_vo, self.tile_q, self.tile_q_second > 0)
        if self.dtype_kv == PACKED_FLOAT4:
            _check_packed_head_dims(self.head_dim_qk, self.head_dim_vo)
        _check("tile_q_second", self.tile_q_second, (0, *TILES_SECOND))
        _check("mask_mode", self.mask_mode, MASK_MODES)
        _check("pos_encoding_mode", self.pos_encoding, POS_ENCODINGS)
        self._check_second()
        encodings = (self.pos_encoding, self.pos_encoding_second)
        if "rope_llama" in encodings and self.dtype_kv == PACKED_FLOAT4:
            raise ValueError(
                "`pos_encoding_mode` must not be ROPE_LLAMA with `kv_data_type` "
                f"{torch_name(self.dtype_kv)} (4 bits): rotate keys before they are appended to "
                "the cache"
            )
        if self.custom_variant and self.dtype_kv == PACKED_FLOAT4:
            raise ValueError(
                "`jit_args` must be left out with `kv_data_type` uint8: hooks would see sums of "
                "4-bit values in units of their own"
            )
        _check("backend", self.backend, BACKENDS)
        if self.backend == "fa3":
            check_hopper(missing_on_hopper(self, self.tile_q_second > 0))
            head_dims = (self.head_dim_qk, self.head_dim_vo)
            _check("tile_q", self.tile_q, (hopper_tile_q(*head_dims, self.dtype_q),))
        else:
            tiles = (PACKED_TILE, *TILES) if self.dtype_kv == PACKED_FLOAT4 else TILES
            _check("tile_q", self.tile_q, tiles)
        if self.device_lengths and (self.tile_q not in PACKED_DECODE_TILES or self.tile_q_second):
            raise ValueError(
                f"`device_lengths` must be False with `tile_q` {self.tile_q} and `tile_q_second` "
                f"{self.tile_q_second}: it is for one tile of {DECODE_TILES} rows"
            )
        if self.profiled and (self.custom_variant or self.device_lengths):
            raise ValueError(
                "`use_profiler` must be False with `jit_args` and with lengths on the device"
            )

    def _check_second(self) -> None:
        """Refuse options of a second shape that are unknown, or that there is no shape for."""
        has_second = self.tile_q_second > 0
        modes, encodings = (
            (MASK_MODES[:-1], POS_ENCODINGS) if has_second else (("none",), ("none",))
        )
        _check("mask_mode_second", self.mask_mode_second, modes)
        _check("pos_encoding_second", self.pos_encoding_second, encodings)
        flags = (False, True) if has_second else (False,)
        _check("sliding_window_second", self.sliding_window_second, flags)
        _check("logits_soft_cap_second", self.logits_soft_cap_second, flags)

    @property
    def majors(self) -> tuple[int, ...]:
        """Major compute capabilities that the kernel is written for."""
        return (9,) if self.backend == "fa3" else self.supported_major_versions

    @property
    def uri(self) -> str:
        """Name of the module: every field, those with their defaults left out."""
        types = (self.dtype_q, self.dtype_kv, self.dtype_o)
        parts = [self.module, *map(short_name, types)]
        parts += [f"qk{self.head_dim_qk}", f"vo{self.head_dim_vo}", f"tile{self.tile_q}"]
        parts.append("paged" if self.paged else "ragged")
        parts += [part for part in (self.mask_mode, self.pos_encoding) if part != "none"]
        options = (
            "sliding_window",
            "logits_soft_cap",
            "sinks",
            "head_scales",
            "custom_variant",
            "device_lengths",
            "profiled",
        )
        parts += [option for option in options if getattr(self, option)]
        if self.tile_q_second:
            parts.append(f"second{self.tile_q_second}_{self.mask_mode_second}")
            if self.pos_encoding_second != "none":
                parts.append(self.pos_encoding_second)
            flags = ("sliding_window_second", "logits_soft_cap_second")
            parts += [flag for flag in flags if getattr(self, flag)]
        if self.backend != "fa2":
            parts.append(self.backend)
        return "_".join(parts)


def check_head_dims(head_dim_qk: int, head_dim_vo: int) -> None:
    """Refuse head sizes that there is no kernel for.

    Raises
    ------
    ValueError
        Unless both are multiples of 16 from 16 to 512, and that of values beyond 256 one of 32:
        two CTAs share its columns.
    """
    for name, size in (("head_dim_qk", head_dim_qk), ("head_dim_vo", head_dim_vo)):
        if size % 16 or not 16 <= size <= 512:
            raise ValueError(f"`{name}` must be a multiple of 16 from 16 to 512, got {size}")
    if head_dim_vo > 256 and head_dim_vo % 32:
        raise ValueError(f"`head_dim_vo` must be a multiple of 32 beyond 256, got {head_dim_vo}")


def check_codes(head_dim_vo: int, rows: int, two_shapes: bool = False) -> None:
    """Refuse outputs of 8 bits where no warp has a row of a head whole.

    Parameters
    ----------
    head_dim_vo : int
        Columns of values, which share a scale.
    rows : int
        Packed query rows of a request, or of a tile.
    two_shapes : bool
        Whether the launch has tiles of a second shape.

    Raises
    ------
    ValueError
        Unless heads have 128 columns, and rows are few.
    """
    most = DECODE_TILES[-1]
    if head_dim_vo != CODE_BLOCK or rows > most or two_shapes:
        raise ValueError(
            f"`o_data_type` must not be float8_e4m3fn unless `head_dim` is {CODE_BLOCK} and a KV "
            f"head has at most {most} query rows in a request, got {head_dim_vo} and {rows}"
        )


def check_output_scale(o_dtype: torch.dtype, out_scale: object) -> None:
    """Refuse a run that gives no place for the scales of 8-bit outputs, or gives one for others.

    Raises
    ------
    ValueError
        If `out_scale` is None with `CODES`, or is not with another type.
    """
    if (o_dtype == CODES) == (out_scale is None):
        wanted = "given" if out_scale is None else "left out"
        raise ValueError(f"`out_scale` must be {wanted} with `o_data_type` {torch_name(o_dtype)}")


def kv_dtypes(dtype_q: torch.dtype) -> tuple[torch.dtype, ...]:
    """The types of keys and values that queries of a type may have."""
    packed = (PACKED_FLOAT4,) if dtype_q in FLOAT16 else ()
    return (dtype_q, *FLOAT8, *packed)


def _check_packed_head_dims(head_dim_qk: int, head_dim_vo: int) -> None:
    """Refuse head sizes that the kernel has no loads of 4-bit rows for."""
    for name, size in (("head_dim_qk", head_dim_qk), ("head_dim_vo", head_dim_vo)):
        step = 128 if name == "head_dim_vo" and size > 256 else 64
        if size % step:
            raise ValueError(
                f"`{name}` must be a multiple of {step} with `kv_data_type` "
                f"{torch_name(PACKED_FLOAT4)} (4 bits), got {size}"
            )


def tile_head_dim(head_dim_qk: int, head_dim_vo: int) -> int:
    """The head size that limits the tile: registers hold values, shared memory queries."""
    return max(head_dim_qk, head_dim_vo) if head_dim_qk > 256 else head_dim_vo


class TileRule(NamedTuple):
    """A tile, and the batches that it is for."""

    tile_q: int
    most_rows: float = math.inf  # of any request: for batches within this ...
    mean_rows: float = math.inf  # ... or with a mean within this


@functools.cache
def tile_rules(head_dim: int, fixed_split_size: bool = False) -> tuple[TileRule, ...]:
    """Tiles of the portable kernel, and which batches take them: the first that is for a batch.

    Parameters
    ----------
    head_dim : int
        `tile_head_dim` of the heads: large ones leave memory for small tiles only.
    fixed_split_size : bool
        Whether results must not depend on the batch: then the tile must not either, unless all
        tiles are of one row count anyway.

    Notes
    -----
    8 and 16 rows split the keys over the warps, which decode needs, and 8 take the fewest products
    per key; from 65 rows on 128 of them halve the reads of keys, worth it where most tiles are
    full.
    """
    if fixed_split_size:
        return (TileRule(16 if head_dim > 256 else 64),)
    small = TileRule(8, 8.0, -1.0), TileRule(16, 16.0, -1.0)
    if head_dim > 256:
        return small[0], TileRule(16)
    if head_dim > 128:
        return *small, TileRule(64)
    return *small, TileRule(64, 64.0, 64.0), TileRule(128)


@functools.lru_cache(maxsize=256)
def choose_tile_q(
    max_rows: float, mean_rows: float, head_dim: int, fixed_split_size: bool = False
) -> int:
    """Packed query rows of a tile, by `tile_rules`.

    Parameters
    ----------
    max_rows : float
        Largest product of query length and group size in the batch.
    mean_rows : float
        Its mean over the requests.
    head_dim, fixed_split_size
        As for `tile_rules`.
    """
    return next(
        rule.tile_q
        for rule in tile_rules(head_dim, fixed_split_size)
        if max_rows <= rule.most_rows or mean_rows <= rule.mean_rows
    )


@functools.cache
def decode_tile_q(rows: int, head_dim: int, dtype_kv: torch.dtype) -> int:
    """Packed query rows of a tile for requests of equal lengths.

    Parameters
    ----------
    rows : int
        Product of query length and group size.
    head_dim : int
        As for `tile_rules`.
    dtype_kv : torch.dtype
        Of 4-bit values the scales multiply the weights, if these are of at most four rows.
    """
    if rows <= PACKED_TILE and dtype_kv == PACKED_FLOAT4:
        return PACKED_TILE
    return choose_tile_q(rows, rows, head_dim)


def _check(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}")
