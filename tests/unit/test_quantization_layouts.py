"""Layouts of block scales, and what runs without a GPU because it is plain PyTorch."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import SfLayout, reference_backend
from flashinfer.quantization import (
    block_scale_interleave,
    e2m1_and_ufp8sf_scale_to_float,
    fp4_quantize,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    mxfp4_quantize,
    mxfp8_dequantize_host,
    mxfp8_quantize,
)
from flashinfer.quantization.layout import padded_shape, to_linear


def _offset(row: int, block: int, blocks: int) -> int:
    """Position of a scale in tiles of 128 x 4, spelled out."""
    tile = row // 128 * (blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 16)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_interleave(shape, dtype):
    scales = torch.randint(1, 100, shape).to(dtype)
    tiles = block_scale_interleave(scales)
    rows, blocks = padded_shape(SfLayout.layout_128x4, *shape)
    assert tiles.shape == (rows * blocks,) and tiles.dtype == dtype
    for row in range(0, shape[0], 7):
        for block in range(shape[1]):
            assert tiles[_offset(row, block, blocks)].float() == scales[row, block].float()
    assert tiles.float().sum() == scales.float().sum(), "padding is zero"
    back = to_linear("tiles", tiles, SfLayout.layout_128x4, *shape)
    assert torch.equal(back.float(), scales.float())


def test_experts_are_interleaved_one_by_one():
    scales = torch.randint(0, 255, (3, 130, 6), dtype=torch.uint8)
    apart = torch.cat([block_scale_interleave(expert) for expert in scales])
    assert torch.equal(block_scale_interleave(scales), apart)
    out = torch.empty_like(apart)
    assert flashinfer.nvfp4_block_scale_interleave(scales, out=out) is out
    assert torch.equal(out, apart)


@pytest.mark.parametrize("bad", ["dtype", "rank", "list", "out shape", "out dtype", "out list"])
def test_interleave_refuses(bad):
    scales = torch.zeros(128, 4, dtype=torch.uint8)
    arguments = {
        "dtype": (scales.int(), None),
        "rank": (scales[0], None),
        "list": ([1], None),
        "out shape": (scales, torch.zeros(511, dtype=torch.uint8)),
        "out dtype": (scales, torch.zeros(512, dtype=torch.int8)),
        "out list": (scales, [1]),
    }[bad]
    name = "`out`" if bad.startswith("out") else "`unswizzled_sf`"
    with pytest.raises((TypeError, ValueError), match=name):
        block_scale_interleave(arguments[0], out=arguments[1])


@pytest.mark.parametrize("layout", SfLayout)
@pytest.mark.parametrize("rows", [1, 128, 131])
def test_what_is_quantised_comes_back(rows, layout):
    x = torch.randn(rows, 160)
    with reference_backend():
        x_q, sf = mxfp8_quantize(x, sf_swizzle_layout=layout)
        codes, scales = mxfp4_quantize(x, sfLayout=layout)
    fp8 = mxfp8_dequantize_host(x_q, sf, sf_swizzle_layout=layout)
    assert ((fp8 - x).abs() <= x.abs() / 16 + 2**-6).all()
    fp4 = mxfp4_dequantize(codes, scales, layout)
    amax = x.reshape(rows, 5, 32).abs().amax(-1, keepdim=True)
    assert ((fp4 - x).reshape(rows, 5, 32).abs() <= 2.01 * amax / 6).all()
    if layout is SfLayout.layout_linear:
        assert torch.equal(fp4, mxfp4_dequantize_host(codes, scales))


def test_every_code_has_its_value():
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    one = torch.full((1, 32), 0x38, dtype=torch.uint8)  # 1.0 in E4M3
    values = e2m1_and_ufp8sf_scale_to_float(codes, one, is_sf_swizzled_layout=False)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = [table[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert values[0].tolist() == expected
    doubled = e2m1_and_ufp8sf_scale_to_float(
        codes, one, torch.full((1,), 2.0), is_sf_swizzled_layout=False
    )
    assert torch.equal(doubled, 2 * values)


def test_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    with reference_backend():
        codes, scales = fp4_quantize(ties.reshape(1, 16), is_sf_swizzled_layout=False)
    assert scales.item() == 0x38
    nibbles = [n for byte in codes[0].tolist() for n in (byte & 15, byte >> 4)]
    assert nibbles == [0, 2, 2, 4, 4, 6, 6, 7] * 2


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (mxfp8_dequantize_host, ([1], torch.zeros(512)), "input"),
        (mxfp8_dequantize_host, (torch.zeros(1, 32), torch.zeros(512)), "input"),
        (mxfp8_dequantize_host, (torch.zeros(1, 31).byte(), torch.zeros(512).byte()), "input"),
        (mxfp8_dequantize_host, (torch.zeros(1, 32).byte(), torch.zeros(512)), "scale_tensor"),
        (mxfp8_dequantize_host, (torch.zeros(1, 32).byte(), torch.zeros(9).byte()), "scale_tensor"),
        (mxfp4_dequantize, (torch.zeros(1, 16), torch.zeros(512).byte()), "a_fp4"),
        (mxfp4_dequantize, (torch.zeros(1, 15).byte(), torch.zeros(512).byte()), "a_fp4"),
        (mxfp4_dequantize, (torch.zeros(1, 16).byte(), torch.zeros(1).byte()), "a_sf"),
        (mxfp4_dequantize, (torch.zeros(1, 16).byte(), torch.zeros(512).byte(), 7), "sfLayout"),
        (mxfp4_dequantize_host, (torch.zeros(1, 16).byte(), None), "scale"),
        (
            mxfp4_dequantize_host,
            (torch.zeros(1, 16).byte(), torch.zeros(1).byte(), 3),
            "group_size",
        ),
        (
            e2m1_and_ufp8sf_scale_to_float,
            (torch.zeros(1, 8).byte(), torch.zeros(512).byte(), torch.ones(2)),
            "global_scale_tensor",
        ),
        (
            e2m1_and_ufp8sf_scale_to_float,
            (torch.zeros(1, 8).byte(), torch.zeros(512).byte(), None, 8),
            "sf_vec_size",
        ),
        (
            e2m1_and_ufp8sf_scale_to_float,
            (torch.zeros(1, 8).byte(), torch.zeros(512).byte(), None, 16, 2),
            "ufp8_type",
        ),
    ],
)
def test_dequantisers_refuse_by_name(function, arguments, name):
    with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
        function(*arguments)
