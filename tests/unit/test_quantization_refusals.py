"""Bad calls of quantisation and of top-k are refused by name, on a machine without GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.quantization import nvfp4_quantization_utils as scales
from flashinfer.quantization.fp8 import mxfp8_dequantize_host

BYTES = torch.zeros(2, 32, dtype=torch.uint8)
ELSEWHERE = torch.zeros(2, 2, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 1e39])
def test_a_known_factor_is_positive(value: float):
    with pytest.raises(ValueError, match="`global_scale`"):
        scales.make_nvfp4_global_scale(torch.ones(3, 16), False, value)


def test_factors_of_numbers_as_they_are():
    bad = torch.tensor([[1.0, math.nan], [2.0, 3.0], [0.0, 0.0]])
    assert scales.make_nvfp4_global_scale(bad, False).isnan().all()
    assert scales.make_nvfp4_global_scale(bad, True).tolist()[1:] == [896.0, 1.0]
    assert scales.make_nvfp4_global_scale(bad, True)[0].isnan()
    for empty in (torch.zeros(0, 16), torch.zeros(3, 0)):
        assert scales.make_nvfp4_global_scale(empty, False).tolist() == [1.0]
        assert scales.make_nvfp4_global_scale(empty, True).tolist() == [1.0] * len(empty)
    for wrong in (torch.ones(3, 16).int(), [1.0], torch.tensor(1.0)):
        with pytest.raises((TypeError, ValueError), match="`input_tensor`"):
            scales.make_nvfp4_global_scale(wrong, False)
    with pytest.raises(TypeError, match="`per_token_activation`"):
        scales.make_nvfp4_global_scale(bad, 1)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["k_global_sf", "v_global_sf"])
def test_factors_of_a_cache_are_positive(name: str, value: float):
    cache = torch.ones(1, 2, 4, 32).bfloat16()
    with flashinfer.reference_backend(), pytest.raises(ValueError, match=f"`{name}` must be pos"):
        flashinfer.nvfp4_quantize_paged_kv_cache(cache, cache, **{name: torch.tensor([value])})


def test_factors_of_a_cache_are_said_by_their_names():
    cache = torch.ones(1, 2, 4, 32).bfloat16()
    with flashinfer.reference_backend(), pytest.raises(ValueError, match="`v_global_sf`"):
        flashinfer.nvfp4_quantize_paged_kv_cache(cache, cache, v_global_sf=torch.tensor([1]))


def _dequantize_e2m1(**changes: Any) -> None:
    call = {"e2m1_tensor": BYTES, "ufp8_scale_tensor": torch.zeros(512, dtype=torch.uint8)}
    flashinfer.e2m1_and_ufp8sf_scale_to_float(**{**call, **changes})


def test_scales_are_on_the_device_of_the_numbers():
    _dequantize_e2m1()
    with pytest.raises(ValueError, match="`ufp8_scale_tensor` must be on cpu"):
        _dequantize_e2m1(ufp8_scale_tensor=torch.zeros(512, dtype=torch.uint8, device="meta"))
    with pytest.raises(ValueError, match="`global_scale_tensor` must be on cpu"):
        _dequantize_e2m1(global_scale_tensor=torch.ones(1, device="meta"))
    with pytest.raises(TypeError, match="`global_scale_tensor` must be a torch.Tensor, got float"):
        _dequantize_e2m1(global_scale_tensor=3.0)
    with pytest.raises(ValueError, match="`scale` must be on cpu"):
        flashinfer.mxfp4_dequantize_host(BYTES, ELSEWHERE)
    with pytest.raises(ValueError, match="`scale_tensor` must be on cpu"):
        mxfp8_dequantize_host(BYTES, ELSEWHERE, False)


def test_no_scales_are_interleaved_to_none():
    for shape in ((0, 4), (0, 128, 4), (2, 0, 4), (128, 0)):
        empty = torch.zeros(shape, dtype=torch.uint8)
        assert flashinfer.block_scale_interleave(empty).shape == (0,)


def test_a_switch_for_blocks_scaled_to_4_is_refused(
    bindings_on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
):
    x, scale = torch.ones(4, 64).bfloat16(), torch.ones(1)
    calls: dict[str, Any] = {
        "fp4_quantize": (x, scale),
        "nvfp4_quantize": (x, scale),
        "nvfp4_batched_quantize": (x[None], scale),
        "silu_and_mul_nvfp4_quantize": (x, scale),
    }
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    for name, arguments in calls.items():
        with pytest.raises(ValueError, match="FLASHINFER_NVFP4_4OVER6"):
            getattr(flashinfer, name)(*arguments)


@pytest.mark.compiler
@pytest.mark.parametrize("k", [0, 2**30, 2**40, 2**62, 2**80])
def test_columns_beyond_any_memory_are_refused_first(bindings_on_the_cpu: None, k: int):
    x, rows = torch.zeros(3, 64), torch.zeros(3, dtype=torch.int32)
    for call in (
        lambda: flashinfer.top_k_ragged_transform(x, rows, rows, k),
        lambda: flashinfer.top_k_page_table_transform(x, rows[:, None], rows, k),
        lambda: flashinfer.top_k(x, k),
    ):
        with pytest.raises(ValueError, match="`k` must be"):
            call()


@pytest.mark.compiler
def test_flags_of_rows_of_different_lengths(bindings_on_the_cpu: None):
    x, lengths = torch.zeros(3, 64), torch.ones(3, dtype=torch.int32)
    with pytest.raises(TypeError, match="`return_values` must be a bool"):
        flashinfer.topk_varlen.top_k_varlen(x, lengths, 4, return_values=1)
    with pytest.raises(ValueError, match="`top_k` must be from 1"):
        flashinfer.topk_varlen.top_k_varlen(x, lengths, 2**40)
