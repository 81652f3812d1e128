"""Decode with results of 8 bits: what is refused, and what module it takes."""

from __future__ import annotations

import re

import pytest
import torch

import flashinfer
from flashinfer.jit.attention.config import AttentionConfig, check_output_scale

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def _plan(o_data_type=E4M3, heads=32, head_dim=128, **options):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8), backend=options.pop("backend", "auto")
    )
    indptr = torch.tensor([0, 2, 3], dtype=torch.int32)
    pages, last = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([3, 16])
    wrapper.plan(
        *(indptr, pages, last.int(), heads, 2, head_dim, 16),
        **{"q_data_type": BF16, "o_data_type": o_data_type, **options},
    )
    return wrapper


def _run(wrapper, **options):
    q = torch.randn(2, 32, 128).to(BF16)
    return wrapper.run(q, torch.randn(3, 2, 16, 2, 128).to(BF16), **options)


@pytest.fixture(autouse=True)
def _reference():
    with flashinfer.reference_backend():
        yield


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 64}, "`o_data_type` must not be float8_e4m3fn unless `head_dim` is 128"),
        ({"heads": 34}, "at most 16 query rows in a request, got 128 and 17"),
        ({"q_len_per_req": 2}, "got 128 and 32"),
        ({"o_data_type": E5M2}, "`o_data_type` must be one of"),
        ({"o_data_type": torch.float32}, "`o_data_type`"),
        ({"o_data_type": None, "q_data_type": E4M3}, "`o_data_type` must be one of"),
    ],
)
def test_plans_that_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _plan(**options)


def test_other_wrappers_have_no_codes():
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8)
    )
    one = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="`o_data_type` must be one of float16, bfloat16"):
        wrapper.plan(
            *(one, one, one[:1], one[1:], 8, 2, 128, 16), q_data_type=BF16, o_data_type=E4M3
        )


@pytest.mark.parametrize(
    ("out_scale", "message"),
    [
        (None, "`out_scale` must be given"),
        (torch.ones(2, 32, dtype=torch.float64), "`out_scale` must have dtype float32"),
        (torch.ones(2, 31), "`out_scale`"),
        (torch.ones(32, 2), "`out_scale`"),
    ],
)
def test_scales_that_are_refused(out_scale, message):
    with pytest.raises(ValueError, match=message):
        _run(_plan(), out_scale=out_scale)


def test_scales_are_asked_for_before_a_launch():
    scale = torch.ones(2, 32)
    check_output_scale(E4M3, scale)
    check_output_scale(BF16, None)
    for dtype, given in ((E4M3, None), (BF16, scale), (torch.float16, scale)):
        with pytest.raises(ValueError, match="`out_scale` must be (given|left out)"):
            check_output_scale(dtype, given)


def test_scales_of_16_bits_are_refused():
    with pytest.raises(ValueError, match="`out_scale` must be left out"):
        _run(_plan(BF16), out_scale=torch.ones(2, 32))


@pytest.mark.parametrize("changes", [{"tile_q": 64}, {"head_dim_vo": 64}, {"tile_q_second": 16}])
def test_modules_whose_warps_have_no_whole_row(changes):
    fields = {"head_dim_qk": 128, "head_dim_vo": 128, "tile_q": 8} | changes
    with pytest.raises(ValueError, match="`o_data_type` must not be float8_e4m3fn"):
        AttentionConfig(BF16, BF16, E4M3, **fields)


def test_modules_of_hopper_are_refused():
    with pytest.raises(ValueError, match="which lacks `o_data_type` float8_e4m3fn"):
        AttentionConfig(BF16, BF16, E4M3, 128, 128, 8, backend="fa3")
