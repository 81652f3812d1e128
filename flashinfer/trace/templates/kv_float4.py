"""Templates and references of 4-bit caches (NVFP4): appending to them and reading them back.

A cache comes as a tuple or as one tensor, with heads before slots or after them. All are gathered
as views [pages, page_size, heads, row]. The references do the kernels' float32 operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._common.cache_layout import of_pages
from ..._common.checks import choice
from ..specs import Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate
from .block_scales import e2m1_codes, pack_pairs, same_bits, unpack_pairs
from .fp4 import _nvfp4_codes
from .page import _LENGTH, _TABLE, _TABLE_AXES, _slots, example_table

_FLOAT16 = ("bfloat16", "float16")
_OUTPUTS = ("output_k", "output_v")


def _by_slot(name: str, cache: Any, kv_layout: str) -> tuple[torch.Tensor, ...]:
    """Views [pages, page_size, heads, row] of keys and of values."""
    choice("kv_layout", kv_layout, ("NHD", "HND"))
    cache = of_pages(cache, kv_layout)
    if isinstance(cache, torch.Tensor):
        if cache.ndim != 5 or cache.shape[1] != 2:
            raise ValueError(f"`{name}` must have shape [pages, 2, ...], got {list(cache.shape)}")
        parts = tuple(cache.unbind(1))
    elif isinstance(cache, (tuple, list)) and len(cache) == 2:
        parts = tuple(cache)
    else:
        raise TypeError(
            f"`{name}` must be a torch.Tensor or a pair of them, got {type(cache).__name__}"
        )
    if not all(isinstance(part, torch.Tensor) and part.ndim == 4 for part in parts):
        raise ValueError(f"`{name}` must have 4 dimensions of keys and 4 of values, or 5")
    return parts if kv_layout == "NHD" else tuple(part.transpose(1, 2) for part in parts)


def _gather(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The caches as views, global scales as numbers or tensors of one."""
    layout = arguments.get("kv_layout", "NHD")
    scales = _by_slot("kv_cache_sf", arguments.get("kv_cache_sf"), layout)
    if any(part.dtype not in (torch.uint8, torch.float8_e4m3fn) for part in scales):
        raise ValueError(f"`kv_cache_sf` must be float8_e4m3fn or uint8, got {scales[0].dtype}")
    gathered = {name: arguments[name] for name in arguments if name != "kv_layout"}
    for name in ("k_scale", "v_scale"):
        scale = arguments.get(name)
        if isinstance(scale, torch.Tensor):
            if scale.numel() != 1 or not scale.is_floating_point():
                raise ValueError(f"`{name}` must be a number or one float32")
            gathered[name] = scale.float().reshape(1)
        elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"`{name}` must be a number or a torch.Tensor, got {scale!r}")
        elif not 0 < scale < float("inf"):
            raise ValueError(f"`{name}` must be positive and finite, got {scale}")
        else:
            like = scales[0]
            gathered[name] = torch.full((1,), float(scale), device=like.device)
    codes = _by_slot("paged_kv_cache", arguments.get("paged_kv_cache"), layout)
    names = ("append_key", "append_value") if "append_key" in arguments else _OUTPUTS
    for name, parts, size in (("paged_kv_cache", codes, 2), ("kv_cache_sf", scales, 16)):
        for i, part in enumerate(parts):
            rows = arguments.get(names[i])
            head_dim = rows.shape[-1] if isinstance(rows, torch.Tensor) and rows.ndim else 0
            if part.shape[-1] * size != head_dim:
                raise ValueError(
                    f"`{name}[{i}]` must have rows of {head_dim // size} for `{names[i]}`, got "
                    f"{list(part.shape)}"
                )
    sf = tuple(part.view(torch.uint8) for part in scales)
    return gathered | {"paged_kv_cache": codes, "kv_cache_sf": sf}


def _quantized(rows: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., row / 2] and scales [..., row / 16] of the last dimension."""
    inverse = torch.ones_like(scale) / scale
    quotients, scales = _nvfp4_codes(rows.float(), 16, inverse)
    codes = pack_pairs(e2m1_codes(quotients.reshape(rows.shape)))
    return codes, scales.reshape(*rows.shape[:-1], rows.shape[-1] // 16)


def _append_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """sf = amax / 6 / g of each 16 elements in E4M3; code = x / (sf g) in E2M1; both go to the slot
    of append_paged_kv_cache.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025; W. Kwon et al., "Efficient
    Memory Management for Large Language Model Serving with PagedAttention", 2023.
    """
    results = []
    rows = ((append_key, k_scale), (append_value, v_scale))
    for (values, scale), cache, sf in zip(rows, paged_kv_cache, kv_cache_sf, strict=True):
        cache, sf = cache.clone(), sf.clone()
        tokens, page, slot = _slots(
            batch_indices, positions, kv_indices, kv_indptr, *cache.shape[:2]
        )
        cache[page, slot], sf[page, slot] = _quantized(values[tokens], scale)
        results.append((cache, sf))
    return results[0][0], results[1][0], results[0][1], results[1][1]


def _append_slots_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor],
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As nvfp4_quantize_append_paged_kv_cache; slot = page * page_size + place in the page.

    Source: as nvfp4_quantize_append_paged_kv_cache.
    """
    results = []
    rows = ((append_key, k_scale), (append_value, v_scale))
    slots = slot_mapping.long()
    for (values, scale), cache, sf in zip(rows, paged_kv_cache, kv_cache_sf, strict=True):
        cache, sf = cache.clone(), sf.clone()
        page_size = cache.shape[1]
        exists = (slots >= 0) & (slots < cache.shape[0] * page_size)
        page, slot = slots[exists] // page_size, slots[exists] % page_size
        cache[page, slot], sf[page, slot] = _quantized(values[: len(slots)][exists], scale)
        results.append((cache, sf))
    return results[0][0], results[1][0], results[0][1], results[1][1]


def _dequantize_reference(
    fp4_data: torch.Tensor, block_scales: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """x = code * sf * g, of codes in E2M1 and sf of each 16 of them in E4M3.

    Source: as nvfp4_quantize_append_paged_kv_cache.
    """
    factors = block_scales.contiguous().view(torch.float8_e4m3fn).float()
    blocks = unpack_pairs(fp4_data.contiguous()).unflatten(-1, (-1, 16)) * factors[..., None]
    return blocks.flatten(-2) * global_scale.reshape(())


def _dequantize_paged_reference(
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x = code * sf * g of token t of request b in page block_tables[b, t // page_size], for t <
    seq_lens[b]; other rows of the outputs stay.

    Source: as nvfp4_quantize_append_paged_kv_cache.
    """
    results = []
    scales = (k_scale, v_scale)
    for cache, sf, scale, output in zip(
        paged_kv_cache, kv_cache_sf, scales, (output_k, output_v), strict=True
    ):
        result, page_size = output.float(), cache.shape[1]
        position = torch.arange(output.shape[1], device=output.device)
        for b, length in enumerate(seq_lens.tolist()):
            fits = min(length, output.shape[1], block_tables.shape[1] * page_size)
            tokens = position[: max(fits, 0)]
            page, slot = block_tables[b].long()[tokens // page_size], tokens % page_size
            exists = (page >= 0) & (page < len(cache))
            tokens, page, slot = tokens[exists], page[exists], slot[exists]
            factors = sf[page, slot].view(torch.float8_e4m3fn).float()
            blocks = unpack_pairs(cache[page, slot]).unflatten(-1, (-1, 16)) * factors[..., None]
            result[b, tokens] = blocks.flatten(-2) * scale.reshape(())
        results.append(result)
    return results[0], results[1]


# ---- templates ---------------------------------------------------------------------------------

_AXES: dict[str, Axis] = {
    "num_pages": Var("Pages of the cache."),
    "page_size": Const("Slots of a page.", abbrev="ps"),
    "num_kv_heads": Const("Heads of keys and values.", abbrev="kv"),
    "head_dim": Const("Elements of a head.", abbrev="d"),
    "num_bytes": Const("Bytes of a row of codes.", abbrev="", derive=lambda a: a["head_dim"] // 2),
    "num_scales": Const("Scales of a row.", abbrev="", derive=lambda a: a["head_dim"] // 16),
    "one": Const("", abbrev="", value=1),
}
_ROWS = ["num_tokens", "num_kv_heads", "head_dim"]
_APPENDED: dict[str, Value] = {
    "append_key": Tensor(_ROWS, dtypes=_FLOAT16, layout="rows"),
    "append_value": Tensor(_ROWS, dtype_from="append_key", layout="rows"),
}
_GLOBAL: dict[str, Value] = {
    name: Tensor(["one"], dtype="float32", description="g.") for name in ("k_scale", "v_scale")
}


def _cache(index: int, num_bytes: str = "num_bytes") -> Tensor:
    dims = ["num_pages", "page_size", "num_kv_heads", num_bytes]
    return Tensor(dims, param="paged_kv_cache", tuple_idx=index, dtype="uint8", layout="rows")


def _scales(index: int, num_scales: str = "num_scales") -> Tensor:
    dims = ["num_pages", "page_size", "num_kv_heads", num_scales]
    return Tensor(dims, param="kv_cache_sf", tuple_idx=index, dtype="uint8", layout="rows")


_CACHES: dict[str, Value] = {
    "k_cache": _cache(0),
    "v_cache": _cache(1),
    "k_sf": _scales(0),
    "v_sf": _scales(1),
}
_BLOCKS = "head_dim % 16 == 0"
_VALUE_AXES: dict[str, Axis] = {
    "head_dim_vo": Const("Elements of a head of values.", abbrev="dv"),
    "num_bytes_vo": Const("", abbrev="", derive=lambda a: a["head_dim_vo"] // 2),
    "num_scales_vo": Const("", abbrev="", derive=lambda a: a["head_dim_vo"] // 16),
}
_READ: dict[str, Value] = {
    "output_k": Tensor(["batch_size", "max_seq_len", "num_kv_heads", "head_dim"], dtypes=_FLOAT16),
    "output_v": Tensor(
        ["batch_size", "max_seq_len", "num_kv_heads", "head_dim_vo"], dtype_from="output_k"
    ),
}


def _example(arguments: dict[str, Any]) -> dict[str, Any]:
    """Two heads of 64 elements, 7 pages of 4 slots."""
    like = next(x for x in arguments.values() if isinstance(x, torch.Tensor))
    generator = torch.Generator().manual_seed(7)
    dtype = torch.bfloat16 if like.dtype not in (torch.float16, torch.bfloat16) else like.dtype

    def codes(*shape: int) -> torch.Tensor:
        values = torch.randint(0, 100, shape, generator=generator)
        return values.to(torch.uint8).to(like.device)

    key, value = torch.randn((2, 7, 2, 64), generator=generator).to(like.device, dtype)
    return {
        "append_key": key,
        "append_value": value,
        "paged_kv_cache": (codes(7, 4, 2, 32), codes(7, 4, 2, 32)),
        "kv_cache_sf": (codes(7, 4, 2, 4), codes(7, 4, 2, 4)),
        "k_scale": 0.25,
        "v_scale": 0.5,
    }


def _append_init(arguments: dict[str, Any]) -> dict[str, Any]:
    made = _example(arguments)
    return {**made, **example_table(made["append_key"].device)}


def _append_slots_init(arguments: dict[str, Any]) -> dict[str, Any]:
    made = _example(arguments)
    slots = torch.tensor([20, 3, -1, 7, 27, 0], dtype=torch.int64)
    return {**made, "slot_mapping": slots.to(made["append_key"].device)}


def _paged_init(arguments: dict[str, Any]) -> dict[str, Any]:
    made = _example(arguments)
    device, dtype = made["append_key"].device, made["append_key"].dtype
    tables = torch.tensor([[1, 4], [6, 0]], dtype=torch.int32, device=device)
    return {
        **{name: made[name] for name in ("paged_kv_cache", "kv_cache_sf")},
        "block_tables": tables,
        "seq_lens": torch.tensor([5, 8], dtype=torch.int32, device=device),
        "k_scale": torch.full((1,), 0.25, device=device),
        "v_scale": torch.full((1,), 0.5, device=device),
        "output_k": torch.zeros(2, 8, 2, 64, dtype=dtype, device=device),
        "output_v": torch.zeros(2, 8, 2, 64, dtype=dtype, device=device),
    }


nvfp4_quantize_append_paged_kv_cache_trace = TraceTemplate(
    op_type="append_paged_kv_cache",
    name_prefix="nvfp4_quantize_append_paged_kv_cache",
    description="Keys and values of new tokens, of 4 bits, written to their slots of a cache.",
    axes={"num_tokens": Var("Tokens that are appended."), **_AXES, **_TABLE_AXES},
    inputs={**_APPENDED, **_CACHES, **_TABLE, **_GLOBAL},
    outputs=_CACHES,
    constraints=[_LENGTH, _BLOCKS],
    tags=["status:verified", "quantize"],
    reference=_append_reference,
    check=same_bits,
    gather=_gather,
    init=_append_init,
)

nvfp4_quantize_append_slots_trace = TraceTemplate(
    op_type="append_paged_kv_cache",
    name_prefix="nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    description="Keys and values of new tokens, of 4 bits, written to slots of a cache.",
    axes={
        "num_tokens": Var("Rows of keys and values."),
        "num_slots": Var("Tokens that are appended."),
        **_AXES,
    },
    inputs={
        **_APPENDED,
        "slot_mapping": Tensor(
            ["num_slots"], dtypes=("int64", "int32"), description="Negative: not written."
        ),
        **_CACHES,
        **_GLOBAL,
    },
    outputs=_CACHES,
    constraints=["num_slots <= num_tokens", _BLOCKS],
    tags=["status:verified", "quantize"],
    reference=_append_slots_reference,
    check=same_bits,
    gather=_gather,
    init=_append_slots_init,
)

nvfp4_kv_dequantize_paged_trace = TraceTemplate(
    op_type="dequantize_paged_kv_cache",
    name_prefix="nvfp4_kv_dequantize_paged",
    description="Keys and values of 4 bits, read through block tables.",
    axes={
        "batch_size": Var("Requests."),
        "max_pages": Var("Entries of a block table."),
        "max_seq_len": Var("Rows of a request in the outputs."),
        **_AXES,
        **_VALUE_AXES,
    },
    inputs={
        **_CACHES,
        "v_cache": _cache(1, "num_bytes_vo"),
        "v_sf": _scales(1, "num_scales_vo"),
        "block_tables": Tensor(["batch_size", "max_pages"], dtype="int32", converts=True),
        "seq_lens": Tensor(["batch_size"], dtype="int32", converts=True),
        **_GLOBAL,
        **_READ,
    },
    outputs=_READ,
    constraints=[_BLOCKS, "head_dim_vo % 16 == 0"],
    tags=["status:verified"],
    reference=_dequantize_paged_reference,
    gather=_gather,
    init=_paged_init,
)


def _flat_init(arguments: dict[str, Any]) -> dict[str, Any]:
    made = _example(arguments)
    return {
        "fp4_data": made["paged_kv_cache"][0].reshape(-1, 32),
        "block_scales": made["kv_cache_sf"][0].reshape(-1, 4),
        "global_scale": torch.full((1,), 0.25, device=made["append_key"].device),
    }


nvfp4_kv_dequantize_trace = TraceTemplate(
    op_type="dequantize_kv_cache",
    name_prefix="nvfp4_kv_dequantize",
    description="Rows of 4 bits in 16.",
    axes={
        "num_rows": Var("Rows."),
        "num_bytes": Const("Bytes of a row of codes.", abbrev="b"),
        "num_scales": Const("", abbrev="", derive=lambda a: a["num_bytes"] // 8),
        "num_columns": Const("", abbrev="", derive=lambda a: a["num_bytes"] * 2),
        "one": Const("", abbrev="", value=1),
    },
    inputs={
        "fp4_data": Tensor(["num_rows", "num_bytes"], dtype="uint8", layout="rows"),
        "block_scales": Tensor(
            ["num_rows", "num_scales"], dtypes=("uint8", "float8_e4m3fn"), layout="rows"
        ),
        "global_scale": Tensor(["one"], dtype="float32", ranks=(0, 1), converts=True),
    },
    outputs={
        "output": Tensor(
            ["num_rows", "num_columns"], dtype_from_scalar="output_dtype", dtypes=_FLOAT16
        )
    },
    constraints=["num_bytes % 8 == 0"],
    options={"output_dtype": (torch.bfloat16, torch.float16)},
    tags=["status:verified"],
    reference=_dequantize_reference,
    init=_flat_init,
)


def _quantize_reference(
    input: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sf = amax / 6 / g of each 16 elements in E4M3; code = x / (sf g) in E2M1.

    Source: as nvfp4_quantize_append_paged_kv_cache.
    """
    return _quantized(input, global_scale.reshape(()))


def _quantize_init(arguments: dict[str, Any]) -> dict[str, Any]:
    made = _example(arguments)
    key = made["append_key"]
    return {"input": key.reshape(-1, 64), "global_scale": torch.full((1,), 0.25).to(key.device)}


nvfp4_kv_quantize_trace = TraceTemplate(
    op_type="quantize_kv_cache",
    name_prefix="nvfp4_kv_quantize",
    description="Rows of 16 bits in 4, with a scale for each 16 elements.",
    axes={
        "num_rows": Var("Rows."),
        "num_columns": Const("Elements of a row.", abbrev="h"),
        "num_bytes": Const("", abbrev="", derive=lambda a: a["num_columns"] // 2),
        "num_scales": Const("", abbrev="", derive=lambda a: a["num_columns"] // 16),
        "one": Const("", abbrev="", value=1),
    },
    inputs={
        "input": Tensor(["num_rows", "num_columns"], dtypes=_FLOAT16, layout="rows"),
        "global_scale": Tensor(["one"], dtype="float32", ranks=(0, 1), converts=True),
    },
    outputs={
        "fp4_output": Tensor(["num_rows", "num_bytes"], dtype="uint8"),
        "block_scales": Tensor(["num_rows", "num_scales"], dtype="uint8"),
    },
    constraints=["num_columns % 16 == 0"],
    tags=["status:verified", "quantize"],
    reference=_quantize_reference,
    check=same_bits,
    init=_quantize_init,
)
