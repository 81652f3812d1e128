"""NVRTC keeps several products of the attention kernel for Hopper under way, as nvcc does."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_attention_hopper_compile import FP16, HGMMA, WARPGROUP, config, ids, shifted

from flashinfer.jit import JitSpec, nvrtc, nvrtc_compile
from flashinfer.jit.attention import AttentionConfig, gen_attention_module
from flashinfer.jit.binary import read_opcodes

pytestmark = pytest.mark.compiler

PARAMS = "flashinfer::AttentionParams<flashinfer::{params}>"
KERNEL = f"flashinfer::hopper_attention_kernel<flashinfer::Traits, {PARAMS} >"
MANGLED = (
    "_ZN10flashinfer23hopper_attention_kernelINS_6TraitsENS_15AttentionParamsINS_{params}E"
    "EEEEvNS_12HopperParamsIT0_EE"
)
MOST_OF_USERS = 6500
"""Instructions of a kernel with a user's hooks; NVRTC takes 0.13 ms of CPU time for each."""
FIRST = [
    config((64, 64), mask_mode="causal"),
    config((96, 96), mask_mode="causal"),
    config(mask_mode="causal"),
]
OTHERS = [
    config((64, 64), mask_mode="causal", dtype=FP16, paged=False),
    config((64, 64), paged=False),
    config((64, 64), mask_mode="causal", sliding_window=True, sinks=True),
    config((64, 64), mask_mode="custom"),
    config(mask_mode="causal", paged=False),
    config(mask_mode="causal", sliding_window=True),
    config(mask_mode="causal", pos_encoding="alibi"),
    config((192, 128), mask_mode="causal", paged=False),
    config((256, 256), mask_mode="causal"),
]


def compiled(spec: JitSpec, params: str, folder: Path) -> list[int]:
    """The instructions of a module's kernel as NVRTC makes them."""
    if nvrtc.library() is None:
        pytest.skip("needs libnvrtc: pip install nvidia-cuda-nvrtc")
    sources = [nvrtc.prelude(), *(path for path in spec.sources if path.suffix == ".cu")]
    text = "".join(f'#include "{path}"\n' for path in sources)
    names = {MANGLED.format(params=f"{len(params)}{params}"): KERNEL.format(params=params)}
    compiler = nvrtc_compile.Compiler(nvrtc.library())
    path = folder / "kernels"
    cubin = compiler.cubin(text, "90a", names, spec.nvrtc_options())
    path.write_bytes(nvrtc_compile.container({"90a": cubin}))
    (code,) = read_opcodes(path).values()
    products = sum(map(code.count, HGMMA))
    assert products > 0
    assert code.count(WARPGROUP) < products, "each product waits for the one before (C7511)"
    return code


@pytest.mark.parametrize(
    "value", [*FIRST, *(pytest.param(v, marks=pytest.mark.full) for v in OTHERS)], ids=ids
)
def test_products_do_not_wait_for_each_other(
    value: AttentionConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    compiled(gen_attention_module(value), "VariantParams", tmp_path)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_users_variant_is_short(head_dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    spec = shifted(dims=(head_dim, head_dim), mask_mode="causal", paged=head_dim > 64)
    assert len(compiled(spec, "UserVariantParams", tmp_path)) < MOST_OF_USERS
