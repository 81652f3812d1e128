"""Bad calls of rope, page, cascade, concat and the video norm meet the real bindings on the CPU.

As `test_refusals.py`: a call with a fault must get its own error, and the same call without must
get as far as the complaint that the tensor is not on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer import _kernels, cascade, concat_ops, norm, page, rope
from tests.cascade import test_cascade_fuzz as cascade_fuzz
from tests.cascade import test_concat_fuzz as concat_fuzz
from tests.fuzzing import Fault, assert_refused
from tests.norm import test_qk_norm_rope_fuzz as video_fuzz
from tests.page import test_page_fuzz as page_fuzz
from tests.rope import test_rope_fuzz as rope_fuzz
from tests.rope import test_rope_quantize_fuzz as quantize_fuzz

pytestmark = pytest.mark.compiler
CPU = torch.device("cpu")


CONCAT_FAULTS = concat_fuzz.FAULTS | concat_fuzz.KERNEL_FAULTS
FAMILIES: list[tuple[Any, tuple[str, ...], Callable[..., dict[str, Any]], dict[str, Fault]]] = [
    (rope, rope_fuzz.FUNCTIONS, rope_fuzz.usual, rope_fuzz.FAULTS),
    (rope, quantize_fuzz.FUNCTIONS, quantize_fuzz.usual, quantize_fuzz.FAULTS),
    (page, page_fuzz.FUNCTIONS, page_fuzz.usual, page_fuzz.FAULTS),
    (cascade, cascade_fuzz.FUNCTIONS, cascade_fuzz.usual, cascade_fuzz.FAULTS),
    (norm, ("fused_qk_rmsnorm_rope",), video_fuzz.usual, video_fuzz.FAULTS),
    (concat_ops, ("concat_mla_k",), concat_fuzz.usual, CONCAT_FAULTS),
]
IN_PLACE = {**rope_fuzz.IN_PLACE_FAULTS, **cascade_fuzz.IN_PLACE_FAULTS}
CALLS = {
    function: (getattr(module, function), usual)
    for module, functions, usual, _ in FAMILIES
    for function in functions
}
BAD_CALLS = [
    pytest.param(function, change, fault, id=f"{function}-{fault}")
    for _, functions, usual, known in FAMILIES
    for function in functions
    for fault, change in (known | (IN_PLACE if "in" in function.split("_")[-1:] else {})).items()
    if change(usual(function, CPU)) is not None
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
    assert len(BAD_CALLS) >= 300


@pytest.mark.parametrize("function", CALLS)
def test_good_call_gets_as_far_as_the_device(function):
    api, usual = CALLS[function]
    with pytest.raises(ValueError, match="CUDA tensor"):
        api(**usual(function, CPU))


@pytest.mark.parametrize(("function", "change", "fault"), BAD_CALLS)
def test_bad_call_is_refused_by_name(function, change, fault):
    api, usual = CALLS[function]
    error = assert_refused(api, change(usual(function, CPU)), fault.split()[0])
    assert "CUDA tensor" not in error, "the fault itself was not seen"


def test_tokens_that_int32_does_not_count():
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    for nnz in (2**31, 2**70):
        with pytest.raises(ValueError, match=rf"`nnz` must be between 0 and 2\^31 - 1, got {nnz}"):
            page.get_batch_indices_positions(indptr, indptr[1:], nnz)
