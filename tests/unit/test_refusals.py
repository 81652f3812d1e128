"""Bad calls meet the real bindings on the CPU: refused by name, before any GPU work.

The bindings check everything else before the device, so a machine without GPU sees their answers:
a call with a fault must get its own error, and the same call without must get as far as the
complaint that the tensor is not on a GPU. The faults are those of the fuzzers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import _kernels
from flashinfer._kernels import check_cuda_tensors
from tests.activation import test_activation_fuzz as activation
from tests.fuzzing import Layout, assert_refused
from tests.norm import test_norm_fuzz as norm

pytestmark = pytest.mark.compiler
CPU = torch.device("cpu")
USUAL = Layout(), Layout(), "new"


def _norm(function: str) -> dict[str, Any]:
    options = 1e-6, None, False, 1.0, "", 0
    case = norm.Case(function, torch.bfloat16, norm.FLOAT8[0], (4, 64), *USUAL, *options)
    return norm.build(case, CPU)


def _activation(function: str) -> dict[str, Any]:
    case = activation.Case(function, torch.bfloat16, (4, 3), 64, *USUAL, None, 1.0, "", 0)
    return activation.build(case, CPU)


CALLS = {function: _norm for function in norm.FUNCTIONS}
CALLS |= {function: _activation for function in activation.FUNCTIONS}
BAD_CALLS = [
    (function, fault)
    for function, make in CALLS.items()
    for fault, change in (norm.FAULTS if make is _norm else activation.FAULTS).items()
    if change(make(function)) is not None
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
    assert len(BAD_CALLS) >= 200
    assert {function for function, _ in BAD_CALLS} == set(CALLS)


@pytest.mark.parametrize("function", CALLS)
def test_good_call_gets_as_far_as_the_device(function):
    with pytest.raises(ValueError, match="CUDA tensor"):
        getattr(flashinfer, function)(**CALLS[function](function))


@pytest.mark.parametrize(("function", "fault"), BAD_CALLS)
def test_bad_call_is_refused_by_name(function, fault):
    all_faults = norm.FAULTS if CALLS[function] is _norm else activation.FAULTS
    arguments = all_faults[fault](CALLS[function](function))
    error = assert_refused(getattr(flashinfer, function), arguments, fault.split()[0])
    assert "CUDA tensor" not in error, "the fault itself was not seen"


def test_a_sparse_tensor_is_refused_by_name():
    with pytest.raises(ValueError, match="`input` must be a dense tensor, got torch.sparse_coo"):
        check_cuda_tensors(input=torch.ones(1).to_sparse())


@pytest.mark.parametrize("gpu", [True, False])
def test_without_a_gpu_the_reference_backend_is_named(monkeypatch: pytest.MonkeyPatch, gpu: bool):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(ValueError, match="`input` must be a CUDA tensor, got one on cpu") as error:
        check_cuda_tensors(input=torch.ones(1))
    assert ("FLASHINFER_BACKEND=reference" in str(error.value)) == (not gpu)
