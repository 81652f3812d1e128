"""Names that engines import on every GPU: they exist, and what has no kernels refuses its calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import flashinfer
from flashinfer.compat.backends import BackendSupportedError
from tests.unit.engine_table import find, state

REFUSING = [
    "flashinfer.shuffle_matrix_a",
    "flashinfer.shuffle_matrix_sf_a",
    "flashinfer.fused_moe.trtllm_mxint4_block_scale_moe",
    "flashinfer.fused_moe.trtllm_fp4_block_scale_moe",
    "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe",
    "flashinfer.fused_moe.core._maybe_get_cached_w3_w1_permute_indices",
    "flashinfer.fused_moe.core.get_w2_permute_indices_with_cache",
]
WORKING = [
    "flashinfer.bmm_fp8",
    "flashinfer.chunk_gated_delta_rule",
    "flashinfer.gemm.fp8_blockscale_gemm_sm90",
    "flashinfer.fp4_quantization.block_scale_interleave",
    "flashinfer.fp4_quantization.nvfp4_block_scale_interleave",
    "flashinfer.quantization.fp4_quantization.block_scale_interleave",
    "flashinfer.fp8_quantization.mxfp8_quantize",
    "flashinfer.nvfp4_kv_dequantize",
    "flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "flashinfer.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "flashinfer.comm.mnnvl.CommBackend",
    "flashinfer.comm.allreduce_fusion",
    "flashinfer.comm.create_allreduce_fusion_workspace",
    "flashinfer.comm.mnnvl.TorchDistBackend",
    "flashinfer.fused_moe.convert_to_block_layout",
    "flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes",
]
# Engines take another path as soon as these exist: they must not come before their kernels.
PROBED = [
    "flashinfer.fused_moe.cutlass_fused_moe",
    "flashinfer.fused_moe.trtllm_bf16_moe",
    "flashinfer.fused_moe.fused_topk_deepseek",
    "flashinfer.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm",
    "flashinfer.comm.PcieIpcAllReduceWorkspace",
    "flashinfer.comm.MoeAlltoAll",
    "flashinfer.comm.dcp_alltoall",
    "flashinfer.comm.trtllm_alltoall",
    "flashinfer.mm_bf16",
    "flashinfer.mm_fp4",
    "flashinfer.gemm.tinygemm_bf16",
    "flashinfer.autotune_v2",
    "flashinfer.moe_ep",
    "flashinfer.mamba",
    "flashinfer.gdn_prefill",
    "flashinfer.gdn_decode",
]


@pytest.mark.parametrize("path", REFUSING)
def test_what_has_no_kernels_refuses(path: str) -> None:
    function = find(path)
    arguments = [None] * len(inspect.signature(function).parameters)
    name = path.rpartition(".")[2]
    for given in ([], arguments):
        with pytest.raises(BackendSupportedError, match=rf"{name} has no kernels.*SM\d+.*GPU"):
            function(*given)
    assert not function.is_compute_capability_supported(90)
    assert not function.is_backend_supported("cutlass", 90)


@pytest.mark.parametrize("path", WORKING)
def test_what_works_is_where_it_is_looked_for(path: str) -> None:
    assert callable(find(path))


@pytest.mark.parametrize("path", PROBED)
def test_a_name_that_is_probed_is_no_stub(path: str) -> None:
    assert state(path) in ("absent", "works")


def test_the_mark_of_old_versions_is_absent() -> None:
    """SGLang takes a package that has it for version 0.1."""
    assert state("flashinfer.decode._grouped_size_compiled_for_decode_kernels") == "absent"


def test_architectures_as_engines_print_them() -> None:
    normalize = flashinfer.compilation_context.CompilationContext._normalize_cuda_arch
    assert [normalize(8, 9), normalize(9, 0)] == [(8, "9"), (9, "0a")]


def test_communicators_of_engines() -> None:
    from flashinfer.comm.mnnvl import CommBackend

    class OfAnEngine(CommBackend):
        def __init__(self, group: Any) -> None:
            self._group = group

        def Get_rank(self) -> int:
            return 1

    assert OfAnEngine("group").Get_rank() == 1
    names = {"Get_rank", "Get_size", "allgather", "bcast", "barrier", "Split"}
    assert names <= {name for name in dir(CommBackend) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("arguments", "expected"), [((1, 8, 132), 544), ((16, 32, 132), 2048), ((3, 45, 132), 544)]
)
def test_bytes_of_counters(arguments: tuple[int, int, int], expected: int) -> None:
    assert flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(*arguments) == expected


def test_the_version_passes_the_engines_gates() -> None:
    from packaging.version import Version

    assert Version(flashinfer.__version__) >= Version("0.7.2")
