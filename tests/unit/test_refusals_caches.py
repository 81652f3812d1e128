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
from tests.fuzzing import Fault, assert_refused
from tests.norm import test_qk_norm_rope_fuzz as video_fuzz
from tests.page import test_page_fuzz as page_fuzz
from tests.rope import test_rope_fuzz as rope_fuzz
from tests.rope import test_rope_quantize_fuzz as quantize_fuzz

pytestmark = pytest.mark.compiler
CPU = torch.device("cpu")


def _concat(function: str, device: torch.device) -> dict[str, Any]:
    k, nope, rope_part = (torch.randn(5, n, d) for n, d in ((4, 24), (4, 16), (1, 8)))
    return {"k": k, "k_nope": nope, "k_rope": rope_part}


def _with(name: str, value: Any) -> Fault:
    return lambda arguments: {**arguments, name: value}


CONCAT_FAULTS: dict[str, Fault] = {
    "k double": lambda a: {**a, "k": a["k"].double()},
    "k longer": lambda a: {**a, "k": torch.zeros(5, 4, 25)},
    "k strided": lambda a: {**a, "k": torch.zeros(5, 4, 48)[..., ::2]},
    "k expanded": lambda a: {**a, "k": torch.zeros(1, 4, 24).expand(5, 4, 24)},
    "k missing": _with("k", None),
    "k_nope of another dtype": lambda a: {**a, "k_nope": a["k_nope"].half()},
    "k_nope two-dimensional": lambda a: {**a, "k_nope": a["k_nope"][:, 0]},
    "k_nope of other tokens": lambda a: {**a, "k_nope": a["k_nope"][:4]},
    "k_nope in k": lambda a: {**a, "k_nope": a["k"][..., :16]},
    "k_nope missing": _with("k_nope", None),
    "k_rope of two heads": lambda a: {**a, "k_rope": torch.zeros(5, 2, 8)},
    "k_rope strided": lambda a: {**a, "k_rope": torch.zeros(5, 1, 16)[..., ::2]},
    "k_rope missing": _with("k_rope", None),
    "backend unknown": _with("backend", "cake"),
}

FAMILIES: list[tuple[Any, tuple[str, ...], Callable[..., dict[str, Any]], dict[str, Fault]]] = [
    (rope, rope_fuzz.FUNCTIONS, rope_fuzz.usual, rope_fuzz.FAULTS),
    (rope, quantize_fuzz.FUNCTIONS, quantize_fuzz.usual, quantize_fuzz.FAULTS),
    (page, page_fuzz.FUNCTIONS, page_fuzz.usual, page_fuzz.FAULTS),
    (cascade, cascade_fuzz.FUNCTIONS, cascade_fuzz.usual, cascade_fuzz.FAULTS),
    (norm, ("fused_qk_rmsnorm_rope",), video_fuzz.usual, video_fuzz.FAULTS),
    (concat_ops, ("concat_mla_k",), _concat, CONCAT_FAULTS),
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
