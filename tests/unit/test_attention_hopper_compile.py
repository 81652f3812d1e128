"""The attention kernel for Hopper compiles, multiplies by warpgroups and does not spill there."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from strict_build import build_and_measure
from strict_build import strict_build as strict_build

from flashinfer._attention.plan.tiles import hopper_tiles
from flashinfer.jit import JitSpec
from flashinfer.jit.attention import AttentionConfig, gen_attention_module, hopper, make_variant
from flashinfer.jit.binary import read_kernels, read_opcodes

pytestmark = pytest.mark.compiler

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HMMA, LDL, STL, UTMALDG, LDGSTS = 0x23C, 0x983, 0x387, 0x5B4, 0xFAE
HGMMA = (0x9F0, 0xDF0)  # the second waits for what came before
QGMMA = (0x9F3, 0xDF3)  # of 8 bits
WARPGROUP = 0x9C5  # begins and awaits products
KERNEL = "hopper_attention_kernel"


def config(dims: tuple[int, int] = (128, 128), **fields) -> AttentionConfig:
    dtype = fields.pop("dtype", BF16)
    types = (dtype, fields.pop("kv_dtype", dtype), BF16 if dtype == E4M3 else dtype)
    tile_q = hopper.hopper_tile_q(*dims, dtype)
    return AttentionConfig(*types, *dims, tile_q, backend="fa3", **fields)


# Configurations that engines use all the time.
COMMON = [
    config(mask_mode="causal", paged=False),
    config(mask_mode="causal"),
    config((64, 64), mask_mode="causal", dtype=FP16),
    config((192, 128), mask_mode="causal", paged=False),
    config((256, 256), mask_mode="causal"),
]
OTHERS = [
    config((96, 96), mask_mode="custom", sliding_window=True, logits_soft_cap=True, sinks=True),
    config(mask_mode="multi_item", pos_encoding="alibi", dtype=FP16),
    config(paged=False),
    config(mask_mode="causal", logits_soft_cap=True, paged=False),
    config(mask_mode="causal", dtype=E4M3, paged=False),
    config((64, 64), mask_mode="causal", dtype=E4M3),
    config((96, 96), mask_mode="causal", dtype=E4M3),
    config((192, 128), mask_mode="causal", dtype=E4M3, paged=False),
    config((256, 256), sliding_window=True, dtype=E4M3),
    config(mask_mode="causal", kv_dtype=E4M3),
    config((64, 64), kv_dtype=E4M3, paged=False),
    config((96, 96), mask_mode="custom", sinks=True, dtype=FP16, kv_dtype=E5M2),
    config((192, 128), mask_mode="causal", kv_dtype=E4M3),
    config((256, 256), sliding_window=True, kv_dtype=E4M3),
    config(mask_mode="causal", dtype=E4M3, head_scales=True),
    config(mask_mode="causal", logits_soft_cap=True, sliding_window=True),
    config(mask_mode="causal", pos_encoding="alibi", paged=False),
    config((64, 64), mask_mode="causal", sliding_window=True),
    config((64, 64), mask_mode="causal", logits_soft_cap=True, paged=False),
    config((96, 96), mask_mode="causal", sinks=True),
    config(mask_mode="custom", sinks=True),
    config(mask_mode="causal", logits_soft_cap=True, dtype=E4M3, head_scales=True),
]
# Here ptxas keeps numbers of an item in memory.
SPILLING = [OTHERS[1], *(v for v in OTHERS[-4:] if not v.sliding_window)]


def ids(value: AttentionConfig) -> str:
    return value.uri.removeprefix("attention_")


def build(spec: JitSpec) -> float:
    """CPU seconds of the compilers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    spec.build()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def code_of(spec: JitSpec) -> list[int]:
    (found,) = (
        (arch, code)
        for (name, arch), code in read_opcodes(spec.get_library_path()).items()
        if KERNEL in name
    )
    assert found[0] == "sm_90a"
    return found[1]


def matrix_products(value: AttentionConfig) -> int:
    """Instructions of 64 rows, 32 bytes of terms, for a KV tile: both products."""
    terms = 32 // value.dtype_q.itemsize
    head_dims = value.head_dim_qk, value.head_dim_vo
    tile_kv = hopper_tiles(value.dtype_q, value.dtype_kv, *head_dims).tile_kv
    return value.head_dim_qk // terms + tile_kv // terms


def loop(code: list[int]) -> list[int]:
    """The instructions from the first to the last product."""
    places = [i for i, opcode in enumerate(code) if opcode in HGMMA + QGMMA]
    return code[places[0] : places[-1] + 1]


# Two of three others run under --full only.
THIRD = [pytest.param(v, marks=pytest.mark.full if i % 3 else ()) for i, v in enumerate(OTHERS)]


@pytest.mark.parametrize("value", [*COMMON, *THIRD], ids=ids)
def test_it_multiplies_by_warpgroups_without_spills(
    value: AttentionConfig, strict_build: pytest.MonkeyPatch
):
    """Also where the list of targets has no `sm_90a`: wgmma is in no other."""
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0")
    spec = gen_attention_module(value)
    assert build_and_measure(spec) < 1.5 * 2**30, "bytes of one compiler"
    kernels = {kernel.short_name: kernel for kernel in read_kernels(spec.get_library_path())}
    assert set(kernels) == {KERNEL, "merge_kernel"}
    code = code_of(spec)
    products = sum(map(code.count, QGMMA if value.dtype_q == E4M3 else HGMMA))
    assert products >= matrix_products(value)
    assert HMMA not in code
    waits = code.count(WARPGROUP)
    assert waits < products, "each product waits for the one before (C7511)"
    assert UTMALDG in code, "queries and whole pages come through TMA"
    assert (LDGSTS in code) or not value.paged, "rows of small pages are gathered by threads"
    if value not in SPILLING:
        assert not {LDL, STL} & set(loop(code)), "spills where it multiplies"


@pytest.mark.full
def test_it_compiles_about_as_fast_as_the_portable_kernel(
    strict_build: pytest.MonkeyPatch, tmp_path: Path
):
    strict_build.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))  # nothing is built already
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    fields = {"mask_mode": "causal", "paged": False}
    portable = AttentionConfig(BF16, BF16, BF16, 128, 128, 128, **fields)
    allowed = 3 * build(gen_attention_module(portable))
    assert build(gen_attention_module(config(**fields))) < allowed


VARIANT = """
struct Shifted : AttentionVariantBase {
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ Shifted(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits + params.bias[qo_head_idx];
  })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return kv_idx % 3 != 0;
  })
};
"""


def shifted(**fields) -> JitSpec:
    """The module of a user's variant."""
    members = (["bias"], ["float"], ["scale"], ["double"])
    variant = make_variant("shifted", *members, "Shifted", VARIANT)
    return gen_attention_module(config(custom_variant=True, **fields), variant)


# With these the built-in forms of a tile would leave ptxas without registers.
OF_USERS = [
    {"mask_mode": "causal"},
    {"mask_mode": "causal", "dims": (64, 64), "paged": False},
    {"mask_mode": "causal", "dtype": E4M3, "paged": False},
]


@pytest.mark.parametrize("fields", OF_USERS, ids=["128", "64", "e4m3"])
def test_it_takes_a_users_variant(fields, strict_build: pytest.MonkeyPatch):
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    spec = shifted(**fields)
    spec.build()
    code = code_of(spec)
    products = sum(map(code.count, QGMMA if "dtype" in fields else HGMMA))
    assert products > 0 and code.count(WARPGROUP) < products, "products wait (C7511)"
