"""Hyper-connections, on the GPU; refusals and sizes under the reference backend as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing import CheckOptions, assert_matches_reference, error_bound, make_tensor
from flashinfer.testing.reference import template_of

# One token, more than a GPU has multiprocessors, rows of one vector, of the models, and of more
# than a CTA holds at once.
SHAPES = [(1, 4096), (7, 8), (300, 7168), (1000, 4096), (3, 264), (2, 16384)]
DTYPES = [torch.bfloat16, torch.float16]


def _weights(
    tokens: int, splits: int, hidden: int, device: torch.device
) -> dict[str, torch.Tensor]:
    return {
        "dot_mix": torch.randn(splits, tokens, 24, device=device),
        "sqrsum": (torch.rand(splits, tokens, device=device) + 0.5) * 4 * hidden,
        "mhc_scale": torch.rand(3, device=device),
        "mhc_base": torch.randn(24, device=device),
    }


def _streams(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return make_tensor(tokens, 4, hidden, dtype=dtype, device=device)


def _check(api: Any, **arguments: Any) -> None:
    """All results within rounding; weights, which are of float32, closer than the rows."""
    # Four or five terms of at most 4.5 may cancel. Gates are exponentials of sums of up to 40.
    bound = error_bound(arguments["residual"].dtype, operations=512, magnitude=24.0)
    found = assert_matches_reference(api, CheckOptions(bound=bound), **arguments)
    expected = template_of(api, arguments).compute(arguments)
    for result, exact in zip(found.values(), expected, strict=True):
        if result.dtype == torch.float32:
            torch.testing.assert_close(result.double(), exact, rtol=2e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_post(shape, dtype, device):
    tokens, hidden = shape
    residual = _streams(tokens, hidden, dtype, device)
    x = make_tensor(tokens, hidden, dtype=dtype, device=device)
    post, comb = torch.rand(tokens, 4, device=device), torch.rand(tokens, 4, 4, device=device)
    _check(flashinfer.mhc_post, x=x, residual=residual, post_layer_mix=post, comb_res_mix=comb)
    column = flashinfer.mhc_post(x, residual, post[..., None], comb)
    assert torch.equal(column, flashinfer.mhc_post(x, residual, post, comb))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 16, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pre(shape, splits, dtype, device):
    tokens, hidden = shape
    arguments = _weights(tokens, splits, hidden, device)
    arguments |= {"residual": _streams(tokens, hidden, dtype, device), "k": 4 * hidden}
    arguments["num_splits"] = splits
    for changed in ({}, {"mhc_post_mult_value": 2.0, "sinkhorn_repeat": 1, "rms_eps": 0.1}):
        _check(flashinfer.mhc_pre_big_fuse, **arguments | changed)
    for block_size in (64, 256, 1024):
        _check(flashinfer.mhc_pre_big_fuse, **arguments, block_size=block_size, mhc_pre_eps=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pre_with_prenorm(shape, dtype, device):
    tokens, hidden = shape
    arguments = _weights(tokens, 1, hidden, device)
    del arguments["sqrsum"]
    arguments["residual"] = _streams(tokens, hidden, dtype, device)
    for block_size in (0, 64, 416, 1024):
        _check(flashinfer.mhc_pre_big_fuse_with_prenorm, **arguments, block_size=block_size)


@pytest.mark.gpu
def test_leading_dimensions(device):
    residual = _streams(6, 64, torch.bfloat16, device)
    weights = _weights(6, 2, 64, device)
    rest = weights.pop("mhc_scale"), weights.pop("mhc_base"), 256
    flat = flashinfer.mhc_pre_big_fuse(*weights.values(), residual, *rest, num_splits=2)
    dots, squares = weights["dot_mix"].view(2, 2, 3, 24), weights["sqrsum"].view(2, 2, 3)
    folded = residual.view(2, 3, 4, 64)
    deep = flashinfer.mhc_pre_big_fuse(dots, squares, folded, *rest, num_splits=2)
    for one, other in zip(flat, deep, strict=True):
        assert other.shape == (2, 3, *one.shape[1:]) and torch.equal(one, other.flatten(0, 1))
    x = make_tensor(2, 3, 64, dtype=torch.bfloat16, device=device)
    mixed = flashinfer.mhc_post(x, folded, *deep[:2])
    assert torch.equal(
        mixed.flatten(0, 1), flashinfer.mhc_post(x.flatten(0, 1), residual, *flat[:2])
    )


def test_a_matrix_has_rows_and_columns_that_add_up_to_1(device):
    """Sinkhorn's iterations end there from any weights."""
    arguments = _weights(500, 1, 64, device)
    arguments |= {"residual": _streams(500, 64, torch.bfloat16, device), "k": 256}
    _, comb, _ = flashinfer.mhc_pre_big_fuse(**arguments, sinkhorn_repeat=100)
    for across in (-1, -2):
        assert (comb.sum(across) - 1).abs().max() < 1e-2


def test_no_tokens(device):
    empty = torch.empty(0, 4, 64, dtype=torch.bfloat16, device=device)
    weights = _weights(0, 1, 64, device)
    rest = weights["mhc_scale"], weights["mhc_base"]
    post, comb, row = flashinfer.mhc_pre_big_fuse_with_prenorm(weights["dot_mix"], empty, *rest)
    assert post.shape == (0, 4, 1) and comb.shape == (0, 4, 4) and row.shape == (0, 64)
    assert flashinfer.mhc_post(row, empty, post, comb).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("name", "changed", "error"),
    [
        ("residual", None, TypeError),
        ("residual", torch.zeros(2, 3, 64, dtype=torch.bfloat16), ValueError),
        ("residual", torch.zeros(2, 4, 60, dtype=torch.bfloat16), ValueError),
        ("residual", torch.zeros(2, 4, 64), ValueError),
        ("dot_mix", torch.zeros(2, 23), ValueError),
        ("dot_mix", torch.zeros(2, 24, dtype=torch.float64), ValueError),
        ("sqrsum", torch.zeros(3), ValueError),
        ("mhc_scale", torch.zeros(4), ValueError),
        ("mhc_base", torch.zeros(1, 24), ValueError),
        ("k", 0, ValueError),
        ("sinkhorn_repeat", 0, ValueError),
        ("block_size", 100, ValueError),
        ("rms_eps", -1.0, ValueError),
    ],
)
def test_refusals(device, name, changed, error):
    arguments = _weights(2, 1, 64, device)
    arguments |= {"dot_mix": arguments["dot_mix"][0], "sqrsum": arguments["sqrsum"][0]}
    arguments |= {"residual": _streams(2, 64, torch.bfloat16, device), "k": 256}
    if isinstance(changed, torch.Tensor):
        changed = changed.to(device)
    with pytest.raises(error, match=f"`?{name}`?|hidden_size|streams|parts"):
        flashinfer.mhc_pre_big_fuse(**{**arguments, name: changed})
