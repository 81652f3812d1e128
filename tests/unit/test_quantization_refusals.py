"""Bad calls of the quantisation and fused norm functions meet the real bindings on the CPU.

As in `test_refusals`: a call with a fault gets its own error, by name and before any GPU work; the
same call without gets as far as the complaint that the tensor is not on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from flashinfer import _kernels, norm, quantization
from tests.fuzzing import assert_refused
from tests.norm import test_fused_norm_fuzz as fused
from tests.quantization import test_quantization_fuzz as fuzz

pytestmark = pytest.mark.compiler
CPU = torch.device("cpu")


def _quantization(function: str) -> dict[str, Any]:
    return fuzz.build(fuzz.Case(function, torch.bfloat16, *fuzz.USUAL), CPU)


BAD_CALLS = [
    (function, fault)
    for function in fuzz.FUNCTIONS
    for fault in fuzz.FAULTS
    if fuzz.FAULTS[fault](_quantization(function)) is not None
]
BAD_NORMS = [
    (function, fault)
    for function in fused.FUNCTIONS
    for fault in fused.ALL_FAULTS
    if fused.ALL_FAULTS[fault](fused.usual(function, CPU)) is not None
]


@pytest.fixture(autouse=True)
def cpu_tensors_reach_the_binding(monkeypatch):
    """Build without a GPU, and leave out the early look at the device."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")

    def check_types_only(**tensors: Any) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")

    monkeypatch.setattr(_kernels, "check_cuda_tensors", check_types_only)


def test_there_are_many_bad_calls():
    assert len(BAD_CALLS) + len(BAD_NORMS) >= 200
    assert {function for function, _ in BAD_CALLS} == set(fuzz.FUNCTIONS)
    assert {fault for _, fault in BAD_NORMS} == set(fused.ALL_FAULTS)


@pytest.mark.parametrize("function", fuzz.FUNCTIONS)
def test_good_call_gets_as_far_as_the_device(function):
    with pytest.raises(ValueError, match="CUDA tensor"):
        getattr(quantization, function)(**_quantization(function))


@pytest.mark.parametrize("function", fused.FUNCTIONS)
def test_good_norm_gets_as_far_as_the_device(function):
    with pytest.raises(ValueError, match="CUDA tensor"):
        getattr(norm, function)(**fused.usual(function, CPU))


@pytest.mark.parametrize(("function", "fault"), BAD_CALLS)
def test_bad_call_is_refused_by_name(function, fault):
    arguments = fuzz.FAULTS[fault](_quantization(function))
    error = assert_refused(getattr(quantization, function), arguments, fault.split()[0])
    assert "CUDA tensor" not in error, "the fault itself was not seen"


@pytest.mark.parametrize(("function", "fault"), BAD_NORMS)
def test_bad_norm_is_refused_by_name(function, fault):
    arguments = fused.ALL_FAULTS[fault](fused.usual(function, CPU))
    error = assert_refused(getattr(norm, function), arguments, fault.split()[0])
    assert "CUDA tensor" not in error, "the fault itself was not seen"


def test_segments_whose_differences_int32_does_not_hold():
    indptr = torch.tensor([0, 2**31 - 1, -2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="`indptr` must rise .* falls in between"):
        quantization.segment_packbits(torch.zeros(5, dtype=torch.bool), indptr)
    module = importlib.import_module("flashinfer._common.packbits")
    _, packed = module._segment_offsets(indptr[:2], 2**31 - 1)
    assert packed.tolist() == [0, 2**28] and packed.dtype == torch.int32
