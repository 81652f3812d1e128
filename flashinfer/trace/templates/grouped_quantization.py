"""Templates and references of quantisation in groups of rows: NVFP4 and MXFP8 of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..specs import FLOATING, Axis, Const, Tensor, Var
from ..template import TraceTemplate
from .block_scales import mx_codes, neighbouring_fp4, same_bits, swizzle, to_8bit
from .fp4 import _fp4

Quantized = tuple[torch.Tensor, torch.Tensor]


def _counted(a: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`a` as float32 in whole tiles of 128 rows; zero from each matrix' row `mask` on."""
    if a.ndim != 3:
        raise ValueError(f"`a` must have 3 dimensions, got shape {list(a.shape)}")
    rows = a.float()
    if mask is not None:
        if mask.shape != a.shape[:1]:
            raise ValueError(f"`mask` must have shape {list(a.shape[:1])}, got {list(mask.shape)}")
        counts = torch.arange(a.shape[1], device=a.device) < mask[:, None]
        rows = torch.where(counts[..., None], rows, 0.0)
    return torch.nn.functional.pad(rows, (0, 0, 0, -a.shape[1] % 128))


def _nvfp4_by_group(a: torch.Tensor, mask: torch.Tensor | None, scale: torch.Tensor) -> Quantized:
    """Codes [B, M, K / 2], and the tiles of each matrix' scales, [B, bytes]."""
    if scale.numel() not in (1, len(a)):
        raise ValueError(f"`a_global_sf` must have 1 element, or {len(a)}, got {scale.numel()}")
    rows = _counted(a, mask)
    of_rows = scale.reshape(-1, 1).expand(rows.shape[:2]).reshape(-1, 1)
    codes, scales = _fp4(rows.flatten(0, 1), of_rows, 16, False, 0)
    bytes_each = rows.shape[1] * scales.shape[1]
    codes = codes.reshape(*rows.shape[:2], a.shape[-1] // 2)[:, : a.shape[1]]
    return codes.contiguous(), scales.reshape(len(a), bytes_each)


def _batch_last(codes: torch.Tensor, scales: torch.Tensor, blocks: int) -> Quantized:
    """Views [M, ..., B] of the codes, and [32, 4, row tiles, 4, column tiles, B] of the tiles."""
    shape = (len(codes), -(-codes.shape[1] // 128), -(-blocks // 4), 32, 4, 4)
    return codes.permute(1, 2, 0), scales.reshape(shape).permute(3, 4, 1, 5, 2, 0)


def _nvfp4_batched_quantize_reference(a: torch.Tensor, a_global_sf: torch.Tensor) -> Quantized:
    """sf = g * amax / 6 of each 16 elements in E4M3; x_q = a * g / sf in E2M1, matrix by matrix.

    Source: as fp4_quantize.
    """
    return _nvfp4_by_group(a, None, a_global_sf)


def _scaled_fp4_grouped_quantize_reference(
    a: torch.Tensor, mask: torch.Tensor, a_global_sf: torch.Tensor
) -> Quantized:
    """As nvfp4_batched_quantize of the first mask[i] rows of matrix i, the others being 0.

    Source: as fp4_quantize.
    """
    codes, scales = _nvfp4_by_group(a, mask, a_global_sf)
    codes, scales = _batch_last(codes, scales, a.shape[-1] // 16)
    return codes, scales.view(torch.float8_e4m3fn)


def _silu_and_mul_scaled_nvfp4_experts_quantize_reference(
    a: torch.Tensor, mask: torch.Tensor, a_global_sf: torch.Tensor
) -> Quantized:
    """y = silu(gate) * up, rounded to the dtype of a; then as scaled_fp4_grouped_quantize.

    Source: as fp4_quantize; N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    gate, up = a.double().chunk(2, dim=-1)
    y = (gate * torch.sigmoid(gate) * up).to(a.dtype)
    return _scaled_fp4_grouped_quantize_reference(y, mask, a_global_sf)


def _mxfp8_grouped_quantize_reference(a: torch.Tensor, mask: torch.Tensor) -> Quantized:
    """scale = 2^ceil(log2(amax / 448)) of each 32 elements; x_q = a / scale in E4M3, of the first
    mask[i] rows of matrix i, the others being 0.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification 1.0", 2023.
    """
    rows = torch.nn.functional.pad(_counted(a, mask), (0, -a.shape[-1] % 128))
    quotients, scales = mx_codes(rows.flatten(0, 1), 32, 448.0)
    codes = to_8bit(quotients, torch.float8_e4m3fn).reshape(rows.shape)[:, : a.shape[1]]
    return _batch_last(codes.contiguous(), swizzle(scales, 0), rows.shape[-1] // 32)


# ---- templates ---------------------------------------------------------------------------------


def _axes(width: int, size: Callable[[int], int]) -> dict[str, Axis]:
    """`width` input elements make one that is quantised; `size`: bytes of a row of so many."""

    def num_bytes(sizes: Mapping[str, int]) -> int:
        return size(sizes["hidden_size"] // width)

    return {
        "num_groups": Var("Matrices, such as experts."),
        "num_rows": Var("Rows of each."),
        "hidden_size": Const("Elements of an input row.", abbrev="h"),
        "num_bytes": Const("Bytes of an output row.", abbrev="", derive=num_bytes),
    }


_TILES: dict[str, Axis] = {
    "quarter_rows": Const("Rows of a quarter of a tile.", abbrev="", value=32),
    "quarters": Const("Quarters of the rows of a tile.", abbrev="", value=4),
    "row_tiles": Var("Tiles of 128 rows.", from_values=True),
    "tile_columns": Const("Scales of a row of a tile.", abbrev="", value=4),
    "column_tiles": Var("Tiles in a row of scales.", from_values=True),
}
_A = Tensor(["num_groups", "num_rows", "hidden_size"], dtypes=FLOATING, layout="rows")
_MASK = Tensor(["num_groups"], dtype="int32", description="Rows of each matrix that count.")
_SCALES: dict[str, Axis] = {"num_scales": Var("Global scales: 1, or one for each matrix.")}
_SCALE = Tensor(["num_scales"], dtype="float32", ranks=(0, 1), converts=True)


def _grouped_trace(name: str, description: str, **properties: Any) -> TraceTemplate:
    return TraceTemplate(
        op_type="grouped_quantize",
        name_prefix=name,
        description=description,
        tags=["status:verified", "quantize", "moe"],
        has_own_strides=True,
        init=_init,
        **properties,
    )


def _init(arguments: dict[str, Any]) -> dict[str, Any]:
    """Rows of whole blocks, counts of rows, and one positive global scale for each matrix."""
    a = torch.cat([arguments["a"]] * 64, dim=-1)
    made: dict[str, Any] = {"a": a}
    if "mask" in arguments:
        counts = torch.arange(len(a), device=a.device, dtype=torch.int32)
        made["mask"] = counts * a.shape[1] // max(len(a) - 1, 1)
    if "a_global_sf" in arguments:
        made["a_global_sf"] = torch.linspace(0.5, 3, len(a), device=a.device)
    return arguments | made


def _outputs(codes: str, scales: str) -> dict[str, Any]:
    return {
        "x_q": Tensor(
            ["num_rows", "num_bytes", "num_groups"],
            dtype=codes,
            keeps_strides=True,
            description="A view of contiguous matrices.",
        ),
        "sf": Tensor(
            [*_TILES, "num_groups"],
            dtype=scales,
            keeps_strides=True,
            description="A view of contiguous tiles of 128 rows by 4 scales.",
        ),
    }


nvfp4_batched_quantize_trace = _grouped_trace(
    "nvfp4_batched_quantize",
    "E2M1 codes with an E4M3 scale for each 16 neighbours in a row, matrix by matrix.",
    axes=_axes(1, lambda n: n // 2)
    | _SCALES
    | {"num_tile_bytes": Var("Scales of a matrix, padding included.", from_values=True)},
    inputs={"a": _A, "a_global_sf": _SCALE},
    outputs={
        "x_q": Tensor(["num_groups", "num_rows", "num_bytes"], dtype="uint8"),
        "sf": Tensor(["num_groups", "num_tile_bytes"], dtype="uint8"),
    },
    constraints=["hidden_size % 16 == 0"],
    reference=_nvfp4_batched_quantize_reference,
    check=same_bits,
    options={"sf_vec_size": (16,), "nvfp4_4over6": (None,)},
)

scaled_fp4_grouped_quantize_trace = _grouped_trace(
    "scaled_fp4_grouped_quantize",
    "nvfp4_batched_quantize of the rows that count, the matrices last.",
    axes=_axes(1, lambda n: n // 2) | _SCALES | _TILES,
    inputs={"a": _A, "mask": _MASK, "a_global_sf": _SCALE},
    outputs=_outputs("uint8", "float8_e4m3fn"),
    constraints=["hidden_size % 16 == 0"],
    reference=_scaled_fp4_grouped_quantize_reference,
    check=same_bits,
    options={"nvfp4_4over6": (None,)},
)


def _neighbours(expected: Any, actual: Any) -> bool:
    """`neighbouring_fp4` of the bytes of codes and scales."""
    pairs = ([x.view(torch.uint8) for x in both] for both in (expected, actual))
    return neighbouring_fp4(*pairs)


silu_and_mul_scaled_nvfp4_experts_quantize_trace = _grouped_trace(
    "silu_and_mul_scaled_nvfp4_experts_quantize",
    "scaled_fp4_grouped_quantize of a gated activation.",
    axes=_axes(2, lambda n: n // 2) | _SCALES | _TILES,
    inputs={"a": _A, "mask": _MASK, "a_global_sf": _SCALE},
    outputs=_outputs("uint8", "float8_e4m3fn"),
    constraints=["hidden_size % 32 == 0"],
    reference=_silu_and_mul_scaled_nvfp4_experts_quantize_reference,
    check=_neighbours,
    options={"nvfp4_4over6": (None,)},
)

mxfp8_grouped_quantize_trace = _grouped_trace(
    "mxfp8_grouped_quantize",
    "E4M3 codes with a power-of-two scale for each 32 neighbours in a row that counts.",
    axes=_axes(1, lambda n: -(-n // 128) * 128) | _TILES,
    inputs={"a": _A, "mask": _MASK},
    outputs=_outputs("float8_e4m3fn", "uint8"),
    constraints=["hidden_size % 32 == 0"],
    reference=_mxfp8_grouped_quantize_reference,
    check=same_bits,
    options={"backend": ("cutile", "cake")},
)
