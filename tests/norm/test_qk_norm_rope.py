"""Norm and rotation of video tokens, against expectations written here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_matches_reference, compare, error_bound, make_tensor

FLOATING = (torch.bfloat16, torch.float16, torch.float32)
# Whole vectors or not; rows of one warp, of several, of two units a thread, of a loop.
SIZES = [
    ((2, 3, 4), (8, 6, 2), (3, 2, 1)),
    ((1, 2, 3), (4, 4, 6), (2, 2, 2)),
    ((3, 5, 7), (44, 42, 42), (12, 12, 12)),
    ((2, 4, 4), (44, 42, 42), (40, 40, 40)),
    ((1, 2, 2), (32, 48, 48), (96, 8, 8)),
    ((2, 2, 2), (128, 64, 64), (80, 40, 40)),
]


def sizes_of(patches, channels, heads) -> dict[str, int]:
    names = [
        *("ppf", "pph", "ppw"),
        *("num_frame_channels", "num_height_channels", "num_width_channels"),
        *("num_heads_q", "num_heads_k", "num_heads_v"),
    ]
    return dict(zip(names, (*patches, *channels, *heads), strict=True)) | {
        "head_dim": sum(channels)
    }


def call(device, sizes, *, videos=2, dtype=torch.bfloat16, **options) -> dict[str, Any]:
    """Arguments of a call."""
    heads = [sizes[f"num_heads_{name}"] for name in "qkv"]
    tokens = videos * sizes["ppf"] * sizes["pph"] * sizes["ppw"]
    qkv = make_tensor(tokens, sum(heads) * sizes["head_dim"], dtype=dtype, device=device)
    weights = (
        make_tensor(count * sizes["head_dim"], dtype=dtype, device=device, mean=1.0, std=0.3)
        for count in heads[:2]
    )
    return dict(zip(("qkv", "q_weight", "k_weight"), (qkv, *weights), strict=True)) | {
        **sizes,
        **options,
    }


@pytest.mark.parametrize("interleave", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_agrees_with_the_reference(sizes, dtype, interleave, device):
    if sizes == SIZES[-1] and device.type != "cuda":
        pytest.skip("needs a GPU: the reference would be compared with itself, for long")
    arguments = call(device, sizes_of(*sizes), dtype=dtype, interleave=interleave)
    assert_matches_reference(flashinfer.fused_qk_rmsnorm_rope, **arguments)
    assert_matches_reference(flashinfer.fused_qk_rmsnorm_rope, **arguments, is_qk_norm=False)
    scales = {"output_fp8": True, "output_quant_scale": 100.0, "v_quant_scale": 0.5}
    assert_matches_reference(flashinfer.fused_qk_rmsnorm_rope, **arguments, **scales)


def test_each_axis_turns_its_own_channels(device):
    """Ones without norm: the cosines and sines themselves, written down token by token."""
    sizes = sizes_of((2, 3, 4), (6, 4, 6), (1, 1, 1))
    arguments = call(device, sizes, dtype=torch.float32, is_qk_norm=False)
    arguments["qkv"] = torch.ones_like(arguments["qkv"])
    q, k, v = flashinfer.fused_qk_rmsnorm_rope(**arguments, base=100.0)
    assert torch.equal(q, k) and torch.equal(v, torch.ones_like(v))
    for token in range(48):
        frame, row, column = token // 12 % 2, token // 4 % 3, token % 4
        axes = ((frame, 6), (row, 4), (column, 6))
        angles = [
            position * 100.0 ** (-2 * j / count)
            for position, count in axes
            for j in range(count // 2)
        ]
        angle = torch.tensor(angles, dtype=torch.float64, device=device)
        expected = torch.stack([angle.cos() - angle.sin(), angle.cos() + angle.sin()], -1)
        result = compare(q[token, 0], expected.flatten(), bound=error_bound(torch.float32, 2))
        assert result, f"token {token}: {result}"


def test_the_norm_goes_over_all_heads(device):
    """The first token of a video is not rotated: it is `rmsnorm` of the flat query."""
    arguments = call(device, sizes_of((3, 5, 7), (44, 42, 42), (12, 6, 6)), videos=3)
    q, k, v = flashinfer.fused_qk_rmsnorm_rope(**arguments, eps=1e-5)
    qkv = arguments["qkv"]
    first = slice(None, None, 3 * 5 * 7)
    for result, columns, weight in (
        (q, slice(0, 1536), "q_weight"),
        (k, slice(1536, 2304), "k_weight"),
    ):
        norm = flashinfer.rmsnorm(qkv[first, columns], arguments[weight], 1e-5)
        difference = (result[first].flatten(1).float() - norm.float()).abs().max()
        assert difference <= norm.float().abs().max() * 2**-7
    assert torch.equal(v.flatten(1), qkv[:, 2304:])


def test_batches_and_strides(device):
    """[batch, tokens, columns], and columns of a wider matrix, give the bits of the flat call."""
    arguments = call(device, sizes_of((2, 3, 4), (8, 12, 12), (2, 2, 2)), videos=6)
    flat = flashinfer.fused_qk_rmsnorm_rope(**arguments)
    for gap in (8, 1):  # aligned rows, and rows that are not
        wide = torch.zeros(144, 192 + gap, dtype=torch.bfloat16, device=device)
        wide[:, :192] = arguments["qkv"]
        batched = flashinfer.fused_qk_rmsnorm_rope(
            **{**arguments, "qkv": wide[:, :192].unflatten(0, (3, 48))}
        )
        for x, y in zip(flat, batched, strict=True):
            assert y.shape == (3, 48, 2, 32)
            assert (
                x.float() - y.flatten(0, 1).float()
            ).abs().max() <= 2**-6 * x.float().abs().max()
    rows = arguments["qkv"].unflatten(0, (3, 48))
    again = flashinfer.fused_qk_rmsnorm_rope(**{**arguments, "qkv": rows})
    assert all(torch.equal(x, y.flatten(0, 1)) for x, y in zip(flat, again, strict=True))


def test_yarn(device):
    sizes = sizes_of((2, 3, 4), (32, 48, 48), (2, 1, 1))
    numbers = {"factor": 4.0, "low": 3.0, "high": 9.0, "attention_factor": 1.3}
    arguments = call(device, sizes, dtype=torch.float32)
    assert_matches_reference(flashinfer.fused_qk_rmsnorm_rope, **arguments, **numbers)
    step = numbers | {"low": 5.0, "high": 5.0}
    assert_matches_reference(flashinfer.fused_qk_rmsnorm_rope, **arguments, **step)


def test_no_tokens(device):
    q, k, v = flashinfer.fused_qk_rmsnorm_rope(
        **call(device, sizes_of((2, 3, 4), (8, 6, 2), (3, 2, 1)), videos=0)
    )
    assert q.shape == (0, 3, 16) and k.shape == (0, 2, 16) and v.shape == (0, 1, 16)


def test_quantised_values_saturate_and_keep_nan(device):
    arguments = call(device, sizes_of((1, 1, 2), (8, 4, 4), (1, 1, 1)), videos=1)
    arguments["qkv"][0, -1], arguments["qkv"][1, -1] = float("nan"), 1000.0
    results = flashinfer.fused_qk_rmsnorm_rope(**arguments, output_fp8=True, v_quant_scale=2.0)
    assert results[2][0, 0, -1].isnan() and results[2][1, 0, -1] == 448


@pytest.mark.gpu
def test_captured_in_a_graph(device):
    arguments = call(device, sizes_of((3, 5, 7), (44, 42, 42), (12, 12, 12)))
    usual = flashinfer.fused_qk_rmsnorm_rope(**arguments)
    outs = {f"{name}_out": torch.zeros_like(x) for name, x in zip("qkv", usual, strict=True)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.fused_qk_rmsnorm_rope(**arguments, **outs)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(usual, outs.values(), strict=True))
