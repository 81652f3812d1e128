"""Latent attention: what it multiplies with, no spills, and how much there is to compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from strict_build import spills
from strict_build import strict_build as strict_build

from flashinfer.jit.attention.mla import FEW_ROWS, HEAD_DIMS, MlaConfig, gen_mla_module_of
from flashinfer.jit.binary import read_kernels, read_opcodes

pytestmark = pytest.mark.compiler

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HGMMA = (0x9F0, 0xDF0)  # the second waits for what came before
QGMMA = (0x9F3, 0xDF3)  # of 8 bits
HMMA, WARPGROUP, LDGSTS = 0x23C, 0x9C5, 0xFAE
UTMALDG = (0x5B4, 0x3B4)  # the second into several CTAs
LDL, STL = 0x983, 0x387
# nvcc takes 5 seconds of a core for two kernels of 11300.
MOST_INSTRUCTIONS = 11_400


def build(config: MlaConfig) -> Path:
    """The library."""
    spec = gen_mla_module_of(config)
    spec.build()
    assert not spills(spec)
    return spec.get_library_path()


def products(dim_ckv: int, dim_kpe: int) -> int:
    """Logits of a block of 64 tokens: the first warpgroup's first and later ones, the second's.

    Values of a block: both warpgroups' of two, and the second's of an item's odd one.
    """
    return 3 * (dim_ckv + dim_kpe) // 16 + 5 * 64 // 16


# The others run under --full only.
KINDS = [(dims, BF16) for dims in HEAD_DIMS] + [(HEAD_DIMS[0], FP16)]
PARAMETERS = [
    pytest.param(*kind, marks=pytest.mark.full if i else ()) for i, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("dims", "dtype"), PARAMETERS)
def test_it_multiplies_by_warpgroups_without_spills(
    dims: tuple[int, int], dtype: torch.dtype, strict_build: pytest.MonkeyPatch, tmp_path: Path
):
    strict_build.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))  # nothing is built already
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0")
    library = build(MlaConfig("fa3", dtype, dtype, dtype, *dims, dtype))
    assert {kernel.short_name for kernel in read_kernels(library)} == {"mla_sm90_kernel"}
    kernels = read_opcodes(library).values()
    assert len(kernels) == 2, "for CTAs alone and in pairs"
    for code in kernels:
        assert len(code) <= MOST_INSTRUCTIONS
        found = sum(map(code.count, HGMMA))
        assert found == products(*dims)
        assert HMMA not in code
        assert not {LDL, STL} & set(code), "spills"
        assert code.count(WARPGROUP) < found, "each product waits for the one before"
        assert set(UTMALDG) & set(code), "pages come through the copy engine"
        assert LDGSTS in code, "queries and small pages are copied by threads"


@pytest.mark.parametrize(
    ("arch", "dims"),
    [
        ("9.0", (512, 64)),
        pytest.param("8.0", (512, 64), marks=pytest.mark.full),
        pytest.param("8.6", (512, 0), marks=pytest.mark.full),
        pytest.param("9.0", (256, 64), marks=pytest.mark.full),
    ],
)
def test_the_portable_kernel_multiplies_by_warps_without_spills(
    arch: str, dims: tuple[int, int], strict_build: pytest.MonkeyPatch, tmp_path: Path
):
    strict_build.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", arch)
    library = build(MlaConfig("fa2", BF16, BF16, BF16, *dims, BF16))
    ((_, code),) = (
        (name, code) for name, code in read_opcodes(library).items() if "portable" in name[0]
    )
    assert len(code) <= MOST_INSTRUCTIONS
    assert HMMA in code and LDGSTS in code
    assert not any(code.count(opcode) for opcode in HGMMA)


@pytest.mark.parametrize("dims", [(512, 64), pytest.param((512, 0), marks=pytest.mark.full)])
def test_few_rows_multiply_by_warps(
    dims: tuple[int, int], strict_build: pytest.MonkeyPatch, tmp_path: Path
):
    strict_build.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0")
    library = build(MlaConfig("fa3", BF16, BF16, BF16, *dims, BF16, tile_rows=FEW_ROWS))
    kernels = [code for name, code in read_opcodes(library).items() if "mla_ring_kernel" in name[0]]
    assert len(kernels) == 2, "for CTAs alone and in pairs"
    for code in kernels:
        assert len(code) <= MOST_INSTRUCTIONS
        # A block of 32 tokens: logits, and values.
        assert code.count(HMMA) == 4 * sum(dims) // 64 + 2 * dims[0] // 32
        assert set(UTMALDG) & set(code), "pages come through the copy engine"
        assert LDGSTS in code, "small pages are copied by threads"


@pytest.mark.parametrize(
    ("dims", "dtype", "kpe"),
    [
        ((512, 64), BF16, E4M3),
        pytest.param((512, 64), FP16, BF16, marks=pytest.mark.full),
        pytest.param((512, 0), E4M3, E4M3, marks=pytest.mark.full),
    ],
)
def test_few_rows_multiply_keys_of_8_bits_as_they_are(
    dims: tuple[int, int],
    dtype: torch.dtype,
    kpe: torch.dtype,
    strict_build: pytest.MonkeyPatch,
    tmp_path: Path,
):
    strict_build.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0")
    library = build(MlaConfig("fa3", dtype, E4M3, BF16, *dims, kpe, tile_rows=FEW_ROWS))
    kernels = [code for name, code in read_opcodes(library).items() if "mla_ring_kernel" in name[0]]
    assert len(kernels) == (1 if dtype == FP16 else 2), "for CTAs alone and in pairs"
    rope = dims[1] * kpe.itemsize // 32  # products of 32 bytes
    for code in kernels:
        assert len(code) <= MOST_INSTRUCTIONS
        assert sum(map(code.count, QGMMA)) == dims[0] // 32 + (rope if kpe == E4M3 else 0)
        assert sum(map(code.count, HGMMA)) == (0 if kpe == E4M3 else rope)
        assert code.count(HMMA) == 4 * dims[0] // 32, "values of a block of 64 tokens"
        assert set(UTMALDG) & set(code), "pages come through the copy engine"
        assert LDGSTS in code, "small pages are copied by threads"
