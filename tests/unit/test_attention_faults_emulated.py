"""Faults that the emulation of attention finds: a kernel with one does not pass."""

from __future__ import annotations

from typing import Any

import pytest

from flashinfer.jit.attention.config import PACKED_FLOAT4
from tests.unit.test_attention_emulated import E4M3, Emulator, emulator, make_config, one_by_default

__all__ = ["emulator"]  # a fixture

# (name, header, statement, what stands there instead, tile_q, huge strides)
FAULTS = [
    (
        "copies_not_waited_for",
        "attention/portable/attention.cuh",
        "ptx::cp_async_wait<kAhead - 1>();\n      synchronize();",
        "synchronize();",
        16,
        False,
    ),
    (
        "tile_without_barrier",
        "attention/portable/attention.cuh",
        "ptx::cp_async_wait<kAhead - 1>();\n      synchronize();",
        "ptx::cp_async_wait<kAhead - 1>();",
        64,
        False,
    ),
    (
        "items_without_barrier",
        "attention/portable/attention.cuh",
        "item = params.items[item.next];\n    __syncthreads();",
        "item = params.items[item.next];",
        16,
        False,
    ),
    (
        "warps_merge_too_early",
        "attention/portable/output.cuh",
        "__syncthreads();  // every warp has finished reading K and V",
        "",
        16,
        False,
    ),
    (
        "parts_of_a_tile_weigh_the_same",
        "attention/finalize.cuh",
        ": math::ptx_exp2(parts[i].x - largest);",
        ": 1.f;",
        64,
        False,
    ),
    (
        "offsets_of_32_bits",
        "attention/portable/loader.cuh",
        "k_offset_ = (page_ * tensors_.k_stride_page + slot",
        "k_offset_ = (static_cast<int32_t>(page_ * tensors_.k_stride_page) + slot",
        16,
        True,
    ),
    (
        "cuts_depend_on_the_gpu",
        "scheduler/attention_plan.h",
        "const int64_t size = config_->fixed_split_size;",
        "const int64_t size = config_->fixed_split_size * (1 + config_->cta_slots % 2);",
        16,
        False,
    ),
    (
        "queries_depend_on_each_other",
        "attention/row_weights.cuh",
        "if (Weights::grow(previous, largest * scale[i][h])) {",
        "if (__any_sync(0xffffffffu, Weights::grow(previous, largest * scale[i][h]))) {",
        64,
        False,
    ),
]


# (name, header, statement, what stands there instead)
FAULTS_OF_4_BITS = [
    (
        "scales_of_another_token",
        "attention/portable/block_scales.cuh",
        "+ threadIdx.x % Tile::kWarpTokens;",
        "+ (threadIdx.x + 1) % Tile::kWarpTokens;",
    ),
    (
        "key_scales_of_the_other_half",
        "attention/portable/block_scales.cuh",
        "const bool is_second = threadIdx.x % 4 >= 2;",
        "const bool is_second = threadIdx.x % 4 % 2;",
    ),
    (
        "value_scales_of_the_other_half",
        "attention/portable/block_scales.cuh",
        "const bool is_second = threadIdx.x % 32 >= 16;",
        "const bool is_second = false;",
    ),
    (
        "codes_without_their_sign",
        "common/float4_pairs.cuh",
        "constexpr uint32_t kSigns = 0x80808080u",
        "constexpr uint32_t kSigns = 0x80008080u",
    ),
    (
        "queries_in_the_order_of_memory",
        "attention/portable/query.cuh",
        "return pair / 2 * 16 + i / 8 * 2 + i % 8 / 4 + pair % 2 * 8;",
        "return i / 16 * 16 + i % 8 / 2 * 2 + i / 8 % 2 * 8 + i % 2;",
    ),
    (
        "no_unit",
        "attention/portable/query.cuh",
        "*inverse = unit * (is_moved",
        "*inverse = 2.f * unit * (is_moved",
    ),
    (
        "scales_not_waited_for",
        "attention/portable/attention.cuh",
        "ptx::cp_async_wait<kAhead - 1>();\n      synchronize();",
        "synchronize();",
    ),
]


# (name, statement of attention/portable/attention.cuh, what stands there instead, head size,
# fields), each with tiles of 8 rows
FAULTS_OF_DECODE = [
    (
        "partner_not_waited_for",
        "ptx::named_barrier_sync(1 + threadIdx.x / 64, 64);",
        "",
        *(512, {}),
    ),
    ("one_buffer_of_logits", "turn_ ^= 1;", "", *(512, {})),
    (
        "item_not_waited_for",
        "while (true) {\n    __syncthreads();\n",
        "while (true) {\n",
        *(64, {"device_lengths": True}),
    ),
]


# (name, header, statement, what stands there instead), each with tiles of 16 rows
FAULTS_OF_DRAFTS = [
    (
        "a_key_too_late",
        "rows",
        "hidden |= last_token >= item_.kv_len - item_.qo_len;",
        "hidden |= last_token > item_.kv_len - item_.qo_len;",
    ),
    ("words_of_the_first_request", "mask", "[item.qo_begin + row.qo_idx]", "[row.qo_idx]"),
    ("a_bit_too_far", "rows", "words[w] |= bits << before;", "words[w] |= bits << (before & 30);"),
    (
        "no_bits_of_another_word",
        "rows",
        "if (before < 0 && before > -32) words[w] |= bits >> -before;",
        "",
    ),
]


@pytest.mark.parametrize(
    "header, statement, other",
    one_by_default([f[1:] for f in FAULTS_OF_DRAFTS]),
    ids=[f[0] for f in FAULTS_OF_DRAFTS],
)
def test_faults_of_drafts_are_found(emulator: Emulator, header: str, statement: str, other: str):
    emulator.substitute(f"flashinfer/attention/{header}.cuh", statement, other)
    fields = {"mask_mode": "draft", "device_lengths": True}
    assert emulator.find_fault(make_config(64, 64, 16, fields), cases=60)


@pytest.mark.parametrize(
    "statement, other, head_dim, fields",
    one_by_default([f[1:] for f in FAULTS_OF_DECODE]),
    ids=[f[0] for f in FAULTS_OF_DECODE],
)
def test_faults_of_decode_are_found(
    emulator: Emulator, statement: str, other: str, head_dim: int, fields: dict[str, Any]
):
    emulator.substitute("flashinfer/attention/portable/attention.cuh", statement, other)
    assert emulator.find_fault(make_config(head_dim, head_dim, 8, fields), cases=60)


@pytest.mark.parametrize(
    "header, statement, other",
    one_by_default([f[1:] for f in FAULTS_OF_4_BITS]),
    ids=[f[0] for f in FAULTS_OF_4_BITS],
)
def test_faults_of_4_bits_are_found(emulator: Emulator, header: str, statement: str, other: str):
    emulator.substitute(f"flashinfer/{header}", statement, other)
    assert emulator.find_fault(make_config(64, 64, 8, {"dtype_kv": PACKED_FLOAT4}), cases=10)


@pytest.mark.parametrize(
    "header, statement, other, tile_q, huge_strides",
    one_by_default([f[1:] for f in FAULTS]),
    ids=[f[0] for f in FAULTS],
)
def test_faults_are_found(
    emulator: Emulator, header: str, statement: str, other: str, tile_q: int, huge_strides: bool
):
    """The emulation itself: a kernel with a fault does not pass."""
    emulator.substitute(f"flashinfer/{header}", statement, other)
    config = make_config(64, 64, tile_q, {"mask_mode": "causal"})
    assert emulator.find_fault(config, cases=120, huge_strides=huge_strides)


@pytest.mark.parametrize(
    "statement, other",
    [
        ("magnitude.reduce<32>()", "magnitude.reduce<16>()"),
        ("*= found.reciprocal", "*= found.reciprocal * 0.5f"),
        ("token * scale.stride_token", "0"),
    ],
    ids=["half_of_a_row", "half_of_the_range", "one_token"],
)
def test_faults_of_codes_are_found(emulator: Emulator, statement: str, other: str):
    emulator.substitute("flashinfer/attention/finalize.cuh", statement, other)
    assert emulator.find_fault(make_config(128, 128, 8, {"dtype_o": E4M3}), cases=20)


@pytest.mark.parametrize(
    "statement, other",
    [
        ("if (is_last) *counter = 0;", ""),
        ("ptx::count_and_see(counter, 1) + 1;", "ptx::count_and_see(counter, 1) + 2;"),
        ("parts.add(params_, kv_head_, row, begin, 1, begin, end);",
         "parts.add(params_, kv_head_, row, begin, 1, begin, end - 1);"),
    ],
    ids=["counter_stays", "a_part_too_soon", "without_the_last_part"],
)  # fmt: skip
def test_faults_of_merging_are_found(emulator: Emulator, statement: str, other: str):
    emulator.substitute("flashinfer/attention/portable/output.cuh", statement, other)
    assert emulator.find_fault(make_config(64, 64, 8, {}), cases=60)
