"""What operations answer that have no checks in front: where they run, by which backends."""

from __future__ import annotations

from typing import Any

import pytest

import flashinfer
from flashinfer import comm, fused_moe, gemm
from flashinfer._instrument.questions import says_where_it_runs, since

EVERYWHERE = [
    flashinfer.merge_state,
    flashinfer.merge_state_in_place,
    flashinfer.merge_states,
    flashinfer.fused_qk_rmsnorm_rope,
    fused_moe.hash_topk,
]


@pytest.mark.parametrize("function", EVERYWHERE, ids=lambda function: function.__name__)
def test_operations_of_every_gpu(function: Any) -> None:
    for cc in (75, 86, (9, 0), 107, 121):
        assert function.is_compute_capability_supported(cc)
    assert not function.is_compute_capability_supported(70)
    assert not function.has_backend_choices() and not function.has_backend("cuda")
    with pytest.raises(ValueError, match=f"no backend choices for {function.__name__}"):
        function.is_backend_supported("cuda")


@pytest.mark.parametrize(
    ("function", "backend", "least"),
    [
        (fused_moe.fused_topk_deepseek, "default", 75),
        (comm.create_allreduce_fusion_workspace, "trtllm", 80),
        (flashinfer.mm_bf16, "cublaslt", 80),
        (flashinfer.bmm_bf16, "cudnn", 80),
        (flashinfer.bmm_fp8, "cudnn", 90),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_operations_with_backends(function: Any, backend: str, least: int) -> None:
    assert function.has_backend_choices() and function.has_backend(backend)
    assert function.is_backend_supported(backend) and function.is_backend_supported(backend, 90)
    assert not function.is_backend_supported(backend, least - 1 if least % 10 else least - 9)
    assert not function.has_backend("none") and not function.is_backend_supported("none", 90)
    assert function.is_compute_capability_supported(90)


def test_kernels_of_hopper_alone() -> None:
    assert flashinfer.mm_bf16.is_backend_supported("tinygemm", (9, 0))
    assert not flashinfer.mm_bf16.is_backend_supported("tinygemm", 100)
    assert gemm.tinygemm_bf16.is_compute_capability_supported(90)
    assert not gemm.tinygemm_bf16.is_compute_capability_supported(100)


def test_the_function_is_the_same() -> None:
    """No call pays for the answers."""

    def double(x: int) -> int:
        return 2 * x

    assert says_where_it_runs(since(80))(double) is double
    with pytest.raises(TypeError, match="compute capability"):
        double.is_compute_capability_supported("90")  # type: ignore[attr-defined]
