"""The fuzzers' bad calls meet the real bindings on the CPU: refused by name, before any GPU work.

A call with a fault must get its own error, and the same call without the fault must get as far as
the complaint that the tensor is not on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from flashinfer import page, quantization
from flashinfer._common import packbits
from flashinfer._common.checks import cuda_tensors
from tests.fuzzing import assert_refused, families

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("bindings_on_the_cpu")]
CPU = torch.device("cpu")

FAMILIES = {family.name: family for family in families()}


@cache
def usual(name: str, function: str) -> dict[str, Any]:
    """The call that all faults of a function begin with: a refused call writes nothing."""
    return FAMILIES[name].usual(function, CPU)


GOOD_CALLS = [(name, function) for name in FAMILIES for function in FAMILIES[name].functions]
BAD_CALLS = [
    (name, function, fault)
    for name, function in GOOD_CALLS
    for fault, change in FAMILIES[name].faults_of(function, kernels=True).items()
    if change(usual(name, function)) is not None
]


def test_every_fault_is_in_some_bad_call():
    assert len(BAD_CALLS) >= 700
    seen = {(name, fault) for name, _, fault in BAD_CALLS}
    assert seen == {(name, f) for name, family in FAMILIES.items() for f in family.all_faults()}


@pytest.mark.parametrize(("family", "function"), GOOD_CALLS)
def test_good_call_gets_as_far_as_the_device(family, function):
    with pytest.raises(ValueError, match="CUDA tensor"):
        FAMILIES[family].api(function)(**usual(family, function))


@pytest.mark.parametrize(("family", "function", "fault"), BAD_CALLS)
def test_bad_call_is_refused_by_name(family, function, fault):
    known = FAMILIES[family].faults_of(function, kernels=True)
    arguments = known[fault](usual(family, function))
    error = assert_refused(FAMILIES[family].api(function), arguments, fault.split()[0])
    assert "CUDA tensor" not in error, "the fault itself was not seen"


def test_a_sparse_tensor_is_refused_by_name():
    with pytest.raises(ValueError, match="`input` must be a dense tensor, got torch.sparse_coo"):
        cuda_tensors(input=torch.ones(1).to_sparse())


@pytest.mark.parametrize("gpu", [True, False])
def test_without_a_gpu_the_reference_backend_is_named(monkeypatch: pytest.MonkeyPatch, gpu: bool):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(ValueError, match="`input` must be a CUDA tensor, got one on cpu") as error:
        cuda_tensors(input=torch.ones(1))
    assert ("FLASHINFER_BACKEND=reference" in str(error.value)) == (not gpu)


def test_tokens_that_int32_does_not_count():
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    for nnz in (2**31, 2**70):
        with pytest.raises(ValueError, match=rf"`nnz` must be from 0 to {2**31 - 1}, got {nnz}"):
            page.get_batch_indices_positions(indptr, indptr[1:], nnz)


def test_segments_whose_differences_int32_does_not_hold():
    indptr = torch.tensor([0, 2**31 - 1, -2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="`indptr` must rise .* falls in between"):
        quantization.segment_packbits(torch.zeros(5, dtype=torch.bool), indptr)
    _, packed = packbits._segment_offsets(indptr[:2], 2**31 - 1)
    assert packed.tolist() == [0, 2**28] and packed.dtype == torch.int32
