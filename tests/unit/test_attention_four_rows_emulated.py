"""Decode over caches of 4 bits by tiles of four rows, each of which stands twice, on the CPU."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import (
    BF16,
    F16,
    PACKED_FLOAT4,
    Emulator,
    emulator,
    make_config,
    one_by_default,
)

__all__ = ["emulator"]  # a fixture

BF16_Q = {"dtype_q": BF16, "dtype_kv": PACKED_FLOAT4}
F16_Q = {"dtype_q": F16, "dtype_kv": PACKED_FLOAT4, "dtype_o": F16}
OPTIONS = {"sliding_window": True, "logits_soft_cap": True, "sinks": True}


@pytest.mark.parametrize(
    "head_dim_qk, head_dim_vo, fields",
    [
        pytest.param(128, 128, BF16_Q, id="128"),
        pytest.param(64, 64, {**F16_Q, **OPTIONS, "mask_mode": "causal"}, id="options"),
        pytest.param(192, 256, {**F16_Q, "paged": False}, id="ragged", marks=pytest.mark.full),
        pytest.param(512, 512, BF16_Q, id="pairs of warps", marks=pytest.mark.full),
        pytest.param(128, 128, {**BF16_Q, "device_lengths": True}, id="lengths"),
    ],
)
def test_configuration(
    emulator: Emulator, head_dim_qk: int, head_dim_vo: int, fields: dict[str, object]
):
    emulator.run(make_config(head_dim_qk, head_dim_vo, 4, fields))


def test_huge_strides(emulator: Emulator):
    emulator.run(make_config(128, 128, 4, BF16_Q), cases=6, huge_strides=True)


# (name, header, statement, what stands there instead)
FAULTS = [
    (
        "sums_of_the_other_half",
        "portable/output.cuh",
        "lane_idx % 4 / 2 != lane_idx / 16",
        "lane_idx % 4 / 2 == lane_idx / 16",
    ),
    (
        "sums_of_other_columns",
        "portable/output.cuh",
        "lane_idx % 4 / 2 != lane_idx / 16",
        "lane_idx % 4 / 2 != lane_idx / 8 % 2",
    ),
    (
        "scales_of_other_tokens",
        "portable/products.cuh",
        "ptx::multiply_pair(p[0][1], factors[1][s])",
        "ptx::multiply_pair(p[0][1], factors[0][s])",
    ),
    (
        "queries_once",
        "portable/products.cuh",
        "lane_idx % Tile::kTileQ * Tile::kPitchQ",
        "lane_idx % 8 * Tile::kPitchQ",
    ),
    ("weights_beyond_float16", "state.cuh", "kDoublesRows ? 3.f", "kDoublesRows ? 17.f"),
    (
        "scale_of_zero",
        "rows.cuh",
        "fmaxf(fabsf(scale) * factor, 1e-30f)",
        "fmaxf(fabsf(scale), 1e-30f) * factor",
    ),
    (
        "dense_rows_of_the_first_slot",
        "portable/loader.cuh",
        "tensors_.k_stride_page + slot_ * kRowBytesK",
        "tensors_.k_stride_page",
    ),
    (
        "dense_pages_in_32_bits",
        "portable/loader.cuh",
        "int64_t{page_} * tensors_.k_stride_page",
        "int(page_ * tensors_.k_stride_page)",
    ),
    ("dense_scales_of_k_for_v", "portable/block_scales.cuh", "source + (v_ - k_)", "source"),
]


@pytest.mark.parametrize(
    "header, statement, other",
    one_by_default([f[1:] for f in FAULTS]),
    ids=[f[0] for f in FAULTS],
)
def test_faults_are_found(emulator: Emulator, header: str, statement: str, other: str):
    emulator.substitute(f"flashinfer/attention/{header}", statement, other)
    assert emulator.find_fault(
        make_config(128, 128, 4, BF16_Q), cases=40, huge_strides=other.startswith("int(")
    )
