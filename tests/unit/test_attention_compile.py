"""Attention modules compile for every target, hold what was asked for, and use the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from strict_build import build_and_measure
from strict_build import strict_build as strict_build

from flashinfer.jit import JitSpec, build_jit_specs
from flashinfer.jit.attention import AttentionConfig, gen_attention_module, make_variant
from flashinfer.jit.attention.config import PACKED_FLOAT4
from flashinfer.jit.binary import read_kernels, read_opcodes

pytestmark = pytest.mark.compiler

TARGETS = ("8.0", "8.9", "9.0a", "10.0a", "12.0a")
# The data centre's: for SM120 ptxas spills a few bytes of 128 rows in the loop as well.
WITHOUT_SPILLS = ("sm_80", "sm_90a", "sm_100a")
HMMA, LDSM, LDGSTS, MUFU, LDL, STL = 0x23C, 0x83B, 0xFAE, 0x308, 0x983, 0x387
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2


def config(tile_q: int, dims: tuple[int, int] = (128, 128), **fields) -> AttentionConfig:
    q = fields.pop("dtype_q", BF16)
    kv = fields.pop("dtype_kv", q)
    return AttentionConfig(q, kv, q, *dims, tile_q, **fields)


# The kernels that engines call all the time, whose loop must not spill.
COMMON = [
    config(8),
    config(64, mask_mode="causal"),
    config(128, mask_mode="causal", paged=False),
    config(128, mask_mode="causal"),
    config(16, dtype_q=FP16),
    config(128, mask_mode="causal", dtype_q=FP16),
]
# Every option, dtype and extreme of the head sizes in some configuration.
OTHERS = [
    config(16, dtype_kv=E4M3),
    config(8, dtype_kv=E4M3),
    config(64, dtype_q=FP16, dtype_kv=E5M2, mask_mode="causal"),
    config(64, (64, 64), mask_mode="custom", logits_soft_cap=True, pos_encoding="rope_llama"),
    config(16, dtype_q=FP16, dtype_kv=E4M3, pos_encoding="rope_llama"),
    config(64, (256, 256), dtype_kv=E5M2, mask_mode="causal", pos_encoding="rope_llama"),
    config(64, (256, 256), mask_mode="multi_item", sliding_window=True, pos_encoding="alibi"),
    config(128, (192, 128), mask_mode="causal", paged=False),
    config(16, (512, 512), sinks=True),
    config(16, (16, 48), sliding_window=True),
    config(
        128,
        mask_mode="causal",
        logits_soft_cap=True,
        tile_q_second=16,
        pos_encoding_second="rope_llama",
        sliding_window_second=True,
    ),
]


def ids(value: AttentionConfig) -> str:
    return value.uri.removeprefix("attention_")


def matrix_products(value: AttentionConfig) -> int:
    """Instructions m16n8k16 that a warp needs for a KV tile of 64 tokens, both products."""
    rows = 2 if value.tile_q == 128 else 1  # blocks of 16 query rows per warp
    tokens = 16 if value.tile_q <= 16 else 64
    outputs = value.head_dim_vo if value.head_dim_vo <= 256 else value.head_dim_vo // 2
    block = 16 if value.tile_q == 8 else 8  # of tokens or of the output's columns, of one product
    return rows * (tokens // block * (value.head_dim_qk // 16) + tokens // 16 * (outputs // block))


def opcodes(spec: JitSpec, kernel: str = "attention_kernel") -> Iterator[tuple[str, list[int]]]:
    """Architecture and instructions of a kernel."""
    for (name, arch), found in read_opcodes(spec.get_library_path()).items():
        if kernel in name:
            yield arch, found


def loop(code: list[int]) -> list[int]:
    """From the first to the last product: the loop over keys, without what precedes and follows."""
    return code[code.index(HMMA) : len(code) - code[::-1].index(HMMA)]


def targets_of(value: AttentionConfig, full: bool) -> list[str]:
    """sm_90a and another target, dealt in turn; for an option sm_90a or the oldest, in turn."""
    if full:
        return list(TARGETS)
    if value in OTHERS:
        return [("9.0a", "8.0")[OTHERS.index(value) % 2]]
    chosen = {"9.0a", ("8.0", "8.9", "10.0a", "12.0a")[COMMON.index(value) % 4]}
    return [target for target in TARGETS if target in chosen]


@pytest.mark.slow
@pytest.mark.parametrize("value", [*COMMON, *OTHERS], ids=ids)
def test_compiles_for_every_target(
    value: AttentionConfig, full: bool, strict_build: pytest.MonkeyPatch
):
    """Without warnings, into one attention and one merge kernel for each target."""
    chosen = targets_of(value, full)
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", " ".join(chosen))
    spec = gen_attention_module(value)
    assert build_and_measure(spec) < 1.5 * 2**30, "bytes of one compiler"
    found = sorted((k.arch, k.short_name) for k in read_kernels(spec.get_library_path()))
    targets = [f"sm_{target.replace('.', '')}" for target in chosen]
    assert found == sorted(
        (target, name) for target in targets for name in ("attention_kernel", "merge_kernel")
    )
    if value in COMMON:
        code_of = dict(opcodes(spec))
        for arch in set(targets) & set(WITHOUT_SPILLS):
            code = code_of[arch]
            assert not {LDL, STL} & set(loop(code)), f"spills in the loop for {arch}"


@pytest.mark.parametrize("value", [COMMON[0], COMMON[2], COMMON[4], *OTHERS[:4:2]], ids=ids)
def test_multiplies_on_the_tensor_cores(
    value: AttentionConfig, full: bool, strict_build: pytest.MonkeyPatch
):
    """Each product is compiled once, from memory that was copied asynchronously."""
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", " ".join(targets_of(value, full)))
    spec = gen_attention_module(value)
    spec.build()
    code = dict(opcodes(spec))["sm_90a"]
    # Once, and with tiles of 64 rows and more the logits of half a KV tile again: of the last tile
    # of a causal mask, the second half is often hidden.
    expected = matrix_products(value)
    if value.tile_q > 16:
        expected += value.tile_q // 64 * (32 // 8) * (value.head_dim_qk // 16)
    assert code.count(HMMA) == expected
    assert LDGSTS in code and LDSM in code
    assert all(HMMA not in merge for _, merge in opcodes(spec, "merge_kernel"))


def test_an_option_that_is_off_costs_no_instruction(full: bool, strict_build: pytest.MonkeyPatch):
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    options = [
        {},
        {"mask_mode": "causal"},
        {"logits_soft_cap": True},
        {"sliding_window": True},
        {"sinks": True},
        {"pos_encoding": "rope_llama"},
    ]
    options = options if full else options[:3]
    # Not a tile of decode, whose kernel merges: how that is laid out counts for more than a mask.
    specs = [gen_attention_module(config(64, (64, 64), **option)) for option in options]
    build_jit_specs(specs)
    sizes = [len(code) for spec in specs for _, code in opcodes(spec)]
    assert len(sizes) == len(options)
    assert all(size > sizes[0] for size in sizes[1:])


def test_a_variant_without_hooks_is_the_plain_kernel(strict_build: pytest.MonkeyPatch):
    """What a user writes costs what it computes: hooks that are not there leave no trace."""
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    variant = make_variant("bare", [], [], [], [], "Bare", BARE)
    plain = gen_attention_module(config(16, (64, 64)))
    bare = gen_attention_module(config(16, (64, 64), custom_variant=True), variant)
    build_jit_specs([plain, bare])
    ((_, expected),), ((_, code),) = opcodes(plain), opcodes(bare)
    for opcode in (HMMA, LDSM, LDGSTS, MUFU):
        assert code.count(opcode) == expected.count(opcode)
    # Registers are dealt differently, and the plain kernel also takes a negative sm_scale.
    assert len(code) <= 1.1 * len(expected)


BARE = """
struct Bare : AttentionVariantBase {
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ Bare(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
};
"""


def test_rotation_of_4_bit_keys_is_refused_before_it_is_compiled():
    with pytest.raises(ValueError, match="`pos_encoding_mode` must not be ROPE_LLAMA"):
        config(16, dtype_kv=PACKED_FLOAT4, pos_encoding="rope_llama")
    assert config(16, dtype_kv=PACKED_FLOAT4, pos_encoding="alibi").pos_encoding == "alibi"
