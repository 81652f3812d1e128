"""Orders of weights of mixtures, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer import reference_backend
from flashinfer.fused_moe import (
    convert_to_block_layout,
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    reorder_rows_for_gated_act_gemm,
)
from flashinfer.trace.templates.moe_four_bit import four_bit_example


def test_blocks_of_columns() -> None:
    x = torch.arange(5 * 12).view(5, 12)
    blocks = convert_to_block_layout(x, 4)
    assert blocks.shape == (3, 5, 4) and blocks.is_contiguous()
    for b in range(3):
        assert torch.equal(blocks[b], x[:, 4 * b : 4 * b + 4])


def test_rows_take_turns() -> None:
    x = torch.randn(6, 3)
    assert torch.equal(reorder_rows_for_gated_act_gemm(x), x[[0, 3, 1, 4, 2, 5]])
    codes = torch.randint(0, 255, (4, 3), dtype=torch.uint8)
    assert torch.equal(reorder_rows_for_gated_act_gemm(codes), codes[[0, 2, 1, 3]])


@pytest.mark.parametrize("block", [5, 0, -4, 4.0])
def test_blocks_that_do_not_divide_are_refused(block: float) -> None:
    with pytest.raises((TypeError, ValueError), match="blockK"):
        convert_to_block_layout(torch.zeros(2, 12), block)  # type: ignore[arg-type]


def test_odd_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="`x` must have an even number of rows"):
        reorder_rows_for_gated_act_gemm(torch.zeros(3, 4))


def test_checkpoints_of_four_bits_are_read_as_they_are() -> None:
    codes = torch.randint(0, 256, (2, 8, 64), dtype=torch.uint8)
    assert interleave_moe_weights_for_sm90_mixed_gemm(codes) is codes
    turned = codes.transpose(1, 2)
    prepared = interleave_moe_weights_for_sm90_mixed_gemm(turned, "int4")
    assert torch.equal(prepared, turned) and prepared.is_contiguous()
    scales = torch.randint(0, 256, (2, 8, 4), dtype=torch.uint8)
    assert interleave_moe_scales_for_sm90_mixed_gemm(scales) is scales
    factors = torch.rand(2, 8, 1).bfloat16()
    assert interleave_moe_scales_for_sm90_mixed_gemm(factors, 128) is factors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interleave_moe_weights_for_sm90_mixed_gemm(torch.zeros(2, 8, 4)), "`weight`"),
        (
            lambda: interleave_moe_weights_for_sm90_mixed_gemm(
                torch.zeros(2, 8, 4, dtype=torch.uint8), "fp6"
            ),
            "`quant_type` must be 'fp4' or 'int4', got 'fp6'",
        ),
        (
            lambda: interleave_moe_scales_for_sm90_mixed_gemm(
                torch.zeros(2, 8, 4, dtype=torch.uint8), 16
            ),
            "`group_size` must be 32, got 16",
        ),
        (
            lambda: interleave_moe_scales_for_sm90_mixed_gemm(torch.zeros(8, 4)),
            "`scales` must have 3 dimensions",
        ),
    ],
)
def test_what_is_no_four_bit_weight_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


FOUR_BIT_CALL = {
    "input": torch.zeros(2, 256, dtype=torch.bfloat16),
    "token_selected_experts": torch.zeros(2, 1, dtype=torch.int32),
    "token_final_scales": torch.zeros(2, 1),
    "fc1_expert_weights": torch.zeros(2, 128, 128, dtype=torch.uint8),
    "fc2_expert_weights": torch.zeros(2, 256, 32, dtype=torch.uint8),
    "output_dtype": torch.bfloat16,
    "quant_scales": [
        torch.zeros(2, 128, 8, dtype=torch.uint8),
        torch.zeros(2, 256, 2, dtype=torch.uint8),
    ],
    "use_w4_group_scaling": True,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # A layout for other kernels: groups of four rows side by side.
        (
            {"quant_scales": [torch.zeros(2, 2, 512, dtype=torch.uint8)] * 2},
            r"`quant_scales\[0\]` must have shape \[2, 128, 8\] for mxfp4 weights",
        ),
        ({"quant_scales": []}, "`quant_scales` must have 2 tensors"),
        (
            {"quant_scales": [torch.zeros(2, 128, 16).to(torch.float8_e4m3fn)] * 2},
            r"`quant_scales\[1\]` must have shape \[2, 256, 4\] for nvfp4 weights",
        ),
        (
            {"quant_scales": [torch.zeros(2, 128, 8), torch.zeros(2, 256, 2).bfloat16()]},
            r"`quant_scales\[1\]` must have dtype float32",
        ),
        ({"quant_scales": [torch.zeros(2, 128, 8).half()] * 2}, r"`quant_scales\[0\]` must have d"),
        (
            {"fc1_expert_weights": torch.zeros(2, 128, 256, dtype=torch.bfloat16)},
            "`use_w4_group_scaling` needs `fc1_expert_weights` of torch.uint8",
        ),
        ({"use_deepseek_fp8_block_scale": True}, "`use_w4_group_scaling` and"),
        (
            {"quant_scales": [torch.zeros(2, 128, 8, dtype=torch.int32)] * 2},
            r"`quant_scales\[0\]` must have shape \[2, 128, 8\] for mxfp4 .*got \[2, 128, 32\]",
        ),
        (
            {"quant_scales": [torch.zeros(2, 2, 128, dtype=torch.int32).mT] * 2},
            r"`quant_scales\[0\]` must be contiguous",
        ),
        ({"quant_scales": torch.ones(4)}, "`quant_scales` must be a list .*got Tensor"),
        ({"quant_scales": 3}, "`quant_scales` must be a list of tensors or None, got int"),
        ({"output_dtype": torch.float16}, "`output_dtype` must have dtype bfloat16"),
        ({"fc2_expert_weights": torch.zeros(2, 256, 24, dtype=torch.uint8)}, "`fc1_expert_weig"),
        ({}, "`input` must be a CUDA tensor"),
    ],
)
def test_what_four_bit_mixtures_refuse(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cutlass_fused_moe(**{**FOUR_BIT_CALL, **change})


def test_four_scales_of_mxfp4_may_stand_in_an_int32() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 256, 256), (2, 256, 128)
    codes, scales = four_bit_example("mxfp4", shapes, torch.bfloat16, generator)
    call = {
        **FOUR_BIT_CALL,
        "input": torch.randn(2, 256, generator=generator).bfloat16(),
        "token_final_scales": torch.ones(2, 1),
        "fc1_expert_weights": codes[0],
        "fc2_expert_weights": codes[1],
        "quant_scales": scales,
    }
    words = {**call, "quant_scales": [scale.view(torch.int32) for scale in scales]}
    for given in (call, words):  # the scales are right: only the device is not
        with pytest.raises(ValueError, match="`input` must be a CUDA tensor"):
            cutlass_fused_moe(**given)
    with reference_backend():
        assert torch.equal(cutlass_fused_moe(**words)[0], cutlass_fused_moe(**call)[0])


def test_a_mixture_returns_a_list_of_one_tensor() -> None:
    call = {**FOUR_BIT_CALL, "output": torch.ones(2, 256, dtype=torch.bfloat16)}
    with reference_backend():
        (result,) = cutlass_fused_moe(**call)
        assert result is call["output"] and not result.any()
    rows = ("input", "token_selected_experts", "token_final_scales", "output")
    nothing = {**call, **{name: call[name][:0] for name in rows}}
    returned = cutlass_fused_moe(**nothing)
    assert type(returned) is list and len(returned) == 1 and returned[0] is nothing["output"]


def test_the_workspace_of_four_bits_is_that_of_sixteen() -> None:
    sizes = (64, 256, 128, 8, 2)
    usual = cutlass_fused_moe_workspace_size(
        *sizes, x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16
    )
    packed = cutlass_fused_moe_workspace_size(
        *sizes, x_dtype=torch.bfloat16, weight_dtype=torch.uint8, use_w4_group_scaling=True
    )
    assert packed == usual
    with pytest.raises(ValueError, match="`weight_dtype` must have dtype uint8"):
        cutlass_fused_moe_workspace_size(
            *sizes, x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16, use_w4_group_scaling=True
        )
