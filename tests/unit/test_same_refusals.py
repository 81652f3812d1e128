"""The reference backend refuses what the bindings refuse, with the same kind of error.

The hostile calls are those that tests send to the bindings: the faults of every fuzzer, and those
of sampling and top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.reference_backend import is_active
from tests.fuzzing import families
from tests.gemm import test_grouped_fuzz, test_weight_only_fuzz
from tests.unit import test_sampling_refusals as sampling

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.usefixtures("bindings_on_the_cpu"),
    pytest.mark.skipif(is_active(), reason="compares the bindings with the reference backend"),
]
CPU = torch.device("cpu")

# Kernels read whole vectors, which a reference has none of; it takes strides that they do not, and
# the type of a result that is given.
OF_KERNELS_ALONE = {
    (function, f"{name} off its vectors")
    for function in ("fused_add_rmsnorm_fp8_block_quant", "rmsnorm_fp8_block_quant")
    for name in ("input", "weight", "residual", "normed_out", "out")
} | {
    ("mm_bf16", "b strided"),
    ("bmm_bf16", "B strided"),
    ("mm_bf16", "out_dtype missing"),
    ("bmm_bf16", "out_dtype missing"),
}
# A reference makes copies of the weights that indices choose.
OF_KERNELS_ALONE |= {("run", f"out over {name}") for name in ("weights", "weight_indices")}
OF_KERNELS_ALONE |= {
    ("weight_only_linear", "input off its vectors"),
    ("weight_only_linear", "weight off its vectors"),
    ("add_rmsnorm_mm_bf16", "input off its vectors"),
    *((name, "mat_a off its vectors") for name in test_weight_only_fuzz.ROUTERS),
    *(
        (function, f"{name} off its vectors")
        for function in test_grouped_fuzz.FUNCTIONS
        for name in "abx"
    ),
    *(
        (function, f"{name} off its vectors")
        for function in ("mm_silu_and_mul_bf16", "mm_add_rmsnorm_bf16", "add_rmsnorm_mm_bf16")
        for name in ("a", "b", "residual")
    ),
}


def _error(api: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    try:
        api(**arguments)
    except Exception as error:
        return error
    return None


def _compare(api: Callable[..., Any], bad: dict[str, Any], name: str) -> None:
    refused = _error(api, bad)
    assert isinstance(refused, (TypeError, ValueError)), "a hostile call is not one"
    with flashinfer.reference_backend():
        found = _error(api, bad)
    # An error of one's own kind, such as BackendSupportedError, is a ValueError of the reference's.
    kinds = (TypeError, ValueError)
    assert isinstance(found, kinds) and isinstance(refused, type(found)), (
        f"{name}: the reference backend says {found!r}, the binding {refused!r}"
    )


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_faults_of_the_fuzzers(family):
    compared = 0
    for function in family.functions:
        usual = family.usual(function, CPU)
        for fault, change in family.faults_of(function, kernels=True).items():
            if (function, fault) in OF_KERNELS_ALONE:
                continue
            if (call := change(usual)) is not None:
                _compare(family.api(function), call, f"{function}, {fault}")
                compared += 1
    assert compared >= 10


@pytest.mark.parametrize("function", sampling.CALLS)
def test_faults_of_sampling(function: str):
    for called, name, value in sampling.BAD_CALLS:
        if called == function:
            call = {**sampling.CALLS[function], name: value}
            _compare(getattr(flashinfer, function), call, f"{function}, {name}")
