"""4-bit caches (NVFP4): appends, by table and by slot, and what is read back."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_matches_reference
from flashinfer.trace.templates.page import example_table

DTYPES = [torch.float16, torch.bfloat16]
HEADS, PAGES, PAGE_SIZE = 3, 7, 4


def _values(*shape: int, dtype, device, seed: int = 0) -> torch.Tensor:
    """Normal numbers; some blocks are zero, or large enough to saturate their scale."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values[0, ..., :16] = 0.0
    values[1, ..., 16:32] *= 3000.0
    return values.to(device, dtype)


def _cache(head_dim: int, kv_layout: str, form: str, device) -> tuple:
    """Codes and scales, of bytes that an append must leave alone where it does not write."""
    inner = (PAGE_SIZE, HEADS) if kv_layout == "NHD" else (HEADS, PAGE_SIZE)
    both = []
    for divisor in (2, 16):
        rows = torch.full((PAGES, 2, *inner, head_dim // divisor), 0x5A, dtype=torch.uint8)
        rows = rows.to(device)
        both.append(rows if form == "fused" else tuple(part.clone() for part in rows.unbind(1)))
    return both[0], both[1]


def _parts(cache) -> list[torch.Tensor]:
    return list(cache.unbind(1) if isinstance(cache, torch.Tensor) else cache)


def _by_slot(cache, kv_layout: str) -> list[torch.Tensor]:
    parts = _parts(cache)
    return parts if kv_layout == "NHD" else [part.transpose(1, 2) for part in parts]


def _quantized(rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales that the quantiser of rows makes."""
    flat = rows.reshape(-1, rows.shape[-1])
    codes, scales = flashinfer.nvfp4_kv_quantize(flat, torch.full((1,), scale).to(rows.device))
    return (x.reshape(*rows.shape[:-1], -1) for x in (codes, scales))


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (37, 128), (5, 80)])
def test_quantize_and_back(rows, columns, dtype, device):
    x = _values(max(rows, 2), max(columns, 32), dtype=dtype, device=device)[:rows, :columns]
    scale = torch.full((1,), 0.125, device=device)
    x = x.contiguous()
    assert_matches_reference(flashinfer.nvfp4_kv_quantize, input=x, global_scale=scale)
    codes, scales = flashinfer.nvfp4_kv_quantize(x, scale)
    for form in (scales, scales.view(torch.float8_e4m3fn)):
        back = {"fp4_data": codes, "block_scales": form, "global_scale": scale}
        assert_matches_reference(flashinfer.nvfp4_kv_dequantize, **back, output_dtype=dtype)
    restored = flashinfer.nvfp4_kv_dequantize(codes, scales, scale, dtype).float()
    blocks = x.float().unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True)
    fits = largest <= 6 * 448 * 0.125
    # Half of the widest step of e2m1, 2 of 6, and what rounding the scale adds.
    bound = largest * (1 / 6 + 0.08) + 2.0**-9 * 6 * 0.125
    error = (restored.unflatten(-1, (-1, 16)) - blocks).abs()
    assert ((error <= bound) | ~fits).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("form", ["tuple", "fused"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_appends(head_dim, kv_layout, form, dtype, device):
    """Both appends write what the quantiser of rows makes to the tokens' slots, nothing else."""
    both = _values(14, HEADS, head_dim, dtype=dtype, device=device).unflatten(0, (7, 2))
    key, value = both.unbind(1)  # as slices of a fused projection
    scales = {"k_scale": 0.25, "v_scale": torch.full((1,), 0.5, device=device)}
    table = example_table(torch.device(device))
    # Token i of request b at position p: page indices[indptr[b] + p // 4], slot p % 4.
    pages = [2, 2, 0, 6, 6, 1]
    slots = [0, 1, 0, 2, 3, 0]
    cache, sf = _cache(head_dim, kv_layout, form, device)
    flashinfer.nvfp4_quantize_append_paged_kv_cache(
        key,
        value,
        table["batch_indices"],
        table["positions"],
        cache,
        sf,
        table["kv_indices"],
        table["kv_indptr"],
        table["kv_last_page_len"],
        **scales,
        kv_layout=kv_layout,
    )
    expected, expected_sf = _cache(head_dim, kv_layout, "tuple", device)
    page, slot = (torch.tensor(x, device=device) for x in (pages, slots))
    for i, (rows, scale) in enumerate(((key, 0.25), (value, 0.5))):
        codes, block_scales = _quantized(rows[:6], scale)
        _by_slot(expected, kv_layout)[i][page, slot] = codes
        _by_slot(expected_sf, kv_layout)[i][page, slot] = block_scales
    for got, wanted in ((cache, expected), (sf, expected_sf)):
        for a, b in zip(_parts(got), wanted, strict=True):
            assert torch.equal(a, b)

    for index in (torch.int32, torch.int64):
        again, again_sf = _cache(head_dim, kv_layout, form, device)
        mapping = torch.tensor([*(PAGE_SIZE * p + s for p, s in zip(pages, slots, strict=True))])
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            key, value, mapping.to(device, index), again, again_sf, **scales, kv_layout=kv_layout
        )
        for got, wanted in ((again, expected), (again_sf, expected_sf)):
            for a, b in zip(_parts(got), wanted, strict=True):
                assert torch.equal(a, b)


def test_slots_that_are_not_written(device):
    """Negative ones and those beyond the cache; further rows are padding."""
    cache, sf = _cache(64, "NHD", "tuple", device)
    key, value = _values(14, HEADS, 64, dtype=torch.bfloat16, device=device).chunk(2)
    slots = torch.tensor([-1, PAGES * PAGE_SIZE, -(2**40), 2**40], device=device)
    flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        key, value, slots, cache, sf, 1.0, 1.0
    )
    assert all((part == 0x5A).all() for part in (*cache, *sf))


def _stored(kv_layout: str, head_dims: tuple[int, int], form: str, device) -> tuple:
    """Random codes and scales of heads of keys and of values."""
    generator = torch.Generator().manual_seed(3)
    inner = (PAGE_SIZE, HEADS) if kv_layout == "NHD" else (HEADS, PAGE_SIZE)
    both = []
    for high, divisor in ((256, 2), (120, 16)):
        parts = [
            torch.randint(0, high, (PAGES, *inner, dim // divisor), generator=generator)
            for dim in head_dims
        ]
        parts = [part.to(device, torch.uint8) for part in parts]
        both.append(tuple(parts) if form == "tuple" else torch.stack(parts, 1))
    return both[0], both[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize(
    ("form", "head_dims"),
    [("tuple", (64, 64)), ("fused", (64, 64)), ("tuple", (64, 128)), ("tuple", (256, 16))],
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dequantize_paged(index, kv_layout, form, head_dims, dtype, device):
    cache, sf = _stored(kv_layout, head_dims, form, device)
    scales = [torch.full((1,), x, device=device) for x in (0.25, 0.5)]
    tables = torch.tensor([[5, 2, 9], [0, 6, 1]], dtype=index, device=device)
    lengths = torch.tensor([10, 6], dtype=index, device=device)
    outputs = [
        torch.full((2, 11, HEADS, dim), 7.0, dtype=dtype, device=device) for dim in head_dims
    ]
    flashinfer.nvfp4_kv_dequantize_paged(
        cache, sf, tables, lengths, *scales, *outputs, kv_layout=kv_layout
    )
    for i, out in enumerate(outputs):
        codes, factors = _by_slot(cache, kv_layout)[i], _by_slot(sf, kv_layout)[i]
        wanted = torch.full_like(out, 7.0)
        for b, t in [(0, t) for t in range(8)] + [(1, t) for t in range(6)]:  # page 9 is none
            page, slot = int(tables[b, t // PAGE_SIZE]), t % PAGE_SIZE
            rows = codes[page, slot].contiguous(), factors[page, slot].contiguous()
            wanted[b, t] = flashinfer.nvfp4_kv_dequantize(*rows, scales[i], dtype)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("form", "changes", "named"),
    [
        ("tuple", {"output_v": (2, 11, HEADS, 64)}, r"paged_kv_cache\[1\]"),
        ("tuple", {"output_k": (2, 11, HEADS, 128)}, r"paged_kv_cache\[0\]"),
        ("tuple", {"output_v": (2, 10, HEADS, 128)}, "output_v"),
        ("tuple", {"output_v": (2, 11, HEADS, 120)}, "output_v"),
        ("fused", {"output_v": (2, 11, HEADS, 128)}, "output_v|paged_kv_cache"),
    ],
)
def test_dequantize_paged_refuses(form, changes, named, device):
    """What is wrong of values is said of values, not of keys."""
    head_dims = (64, 128) if form == "tuple" else (64, 64)
    cache, sf = _stored("NHD", head_dims, form, device)
    outputs = {
        name: torch.full((2, 11, HEADS, dim), 7.0, dtype=torch.float16, device=device)
        for name, dim in zip(("output_k", "output_v"), head_dims, strict=True)
    }
    for name, shape in changes.items():
        outputs[name] = torch.full(shape, 7.0, dtype=torch.float16, device=device)
    one = torch.ones(1, device=device)
    tables = torch.zeros(2, 3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"`({named})"):
        flashinfer.nvfp4_kv_dequantize_paged(cache, sf, tables, tables[:, 0], one, one, **outputs)
    assert all((out == 7.0).all() for out in outputs.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("append_key", torch.zeros(7, HEADS, 64)),
        ("append_value", torch.zeros(7, HEADS, 80, dtype=torch.bfloat16)),
        ("slot_mapping", torch.zeros(8, dtype=torch.int64)),
        ("slot_mapping", torch.zeros(7)),
        ("paged_kv_cache", torch.zeros(PAGES, 2, PAGE_SIZE, HEADS, 64, dtype=torch.uint8)),
        ("kv_cache_sf", torch.zeros(PAGES, 2, PAGE_SIZE, HEADS, 8, dtype=torch.uint8)),
        ("kv_cache_sf", torch.zeros(PAGES, 2, PAGE_SIZE, HEADS, 4)),
        ("k_scale", "1"),
        ("k_scale", -1.0),
        ("v_scale", True),
        ("v_scale", float("nan")),
        ("kv_layout", "DNH"),
    ],
)
def test_refuses(name, value, device):
    cache, sf = _cache(64, "NHD", "fused", device)
    rows = torch.zeros(7, HEADS, 64, dtype=torch.bfloat16, device=device)
    arguments = {
        "append_key": rows,
        "append_value": rows,
        "slot_mapping": torch.arange(7, device=device),
        "paged_kv_cache": cache,
        "kv_cache_sf": sf,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "kv_layout": "NHD",
    }
    wrong = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises((TypeError, ValueError), match=name.replace("append_value", "append_")):
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            **(arguments | {name: wrong})
        )
    assert (cache == 0x5A).all() and (sf == 0x5A).all()
