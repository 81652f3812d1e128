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
from tests.fuzzing import (
    Fault,
    assert_refused,
    expanded,
    longer,
    one_row_more,
    put,
    replace,
    strided,
    with_dtype,
)
from tests.quantization import test_quantization_fuzz as fuzz

pytestmark = pytest.mark.compiler
CPU = torch.device("cpu")
NORMS = ("fused_add_rmsnorm_fp8_block_quant", "rmsnorm_fp8_block_quant", "fused_rmsnorm_silu")


def _norm(function: str) -> dict[str, Any]:
    x = torch.randn(6, 256, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"input": x, "weight": x[0].clone(), "eps": 1e-6}
    if function == "fused_rmsnorm_silu":
        return arguments | {"out": torch.empty_like(x)}
    arguments["out"] = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    arguments |= {"block_scale": torch.empty(2, 8), "enable_pdl": None}
    if "fused_add" in function:
        arguments |= {"residual": x.clone(), "normed_out": torch.empty_like(x)}
    return arguments


def _quantization(function: str) -> dict[str, Any]:
    return fuzz.build(fuzz.Case(function, torch.bfloat16, *fuzz.USUAL), CPU)


def _off_sixteen_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    return storage[1 : 1 + tensor.numel()].view(tensor.shape)


NORM_FAULTS: dict[str, Fault] = {
    "input missing": put("input", None),
    "input strided": replace("input", strided),
    "input of doubles": replace("input", with_dtype(torch.float64)),
    "input one-dimensional": replace("input", lambda t: t[0]),
    "input three-dimensional": replace("input", lambda t: t[None]),
    "weight missing": put("weight", None),
    "weight longer": replace("weight", longer),
    "weight strided": replace("weight", strided),
    "weight of floats": replace("weight", with_dtype(torch.float32)),
    "residual missing": put("residual", None),
    "residual longer": replace("residual", longer),
    "residual with one row more": replace("residual", one_row_more),
    "residual of floats": replace("residual", with_dtype(torch.float32)),
    "residual expanded": replace("residual", expanded),
    "residual is the input": replace("residual", lambda t: t, "input"),
    "residual off its vectors": lambda a: (
        replace("residual", _off_sixteen_bytes)(a) if "residual" in a else None
    ),
    "normed_out missing": put("normed_out", None),
    "normed_out longer": replace("normed_out", longer),
    "normed_out of floats": replace("normed_out", with_dtype(torch.float32)),
    "normed_out is the residual": replace("normed_out", lambda t: t, "residual"),
    "out longer": replace("out", longer),
    "out with one row more": replace("out", one_row_more),
    "out of halves": replace("out", with_dtype(torch.float16)),
    "out a list": put("out", [1]),
    "block_scale of halves": replace("block_scale", with_dtype(torch.float16)),
    "block_scale without padding": replace("block_scale", lambda t: t[:, :6].contiguous()),
    "block_scale in rows": replace("block_scale", lambda t: t.t().contiguous()),
    "block_scale strided": replace("block_scale", strided),
    "eps negative": put("eps", -1.0),
    "eps not a number": put("eps", float("nan")),
    "eps beyond float32": put("eps", 1e39),
    "eps text": put("eps", "1e-6"),
    "enable_pdl text": put("enable_pdl", "yes"),
}


def _norm_applies(fault: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    name = fault.split()[0]
    return NORM_FAULTS[fault](arguments) if name in arguments else None


BAD_CALLS = [
    (function, fault)
    for function in fuzz.FUNCTIONS
    for fault in fuzz.FAULTS
    if fuzz.FAULTS[fault](_quantization(function)) is not None
]
BAD_NORMS = [
    (function, fault)
    for function in NORMS
    for fault in NORM_FAULTS
    if _norm_applies(fault, _norm(function)) is not None
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
    assert {fault for _, fault in BAD_NORMS} == set(NORM_FAULTS)


@pytest.mark.parametrize("function", fuzz.FUNCTIONS)
def test_good_call_gets_as_far_as_the_device(function):
    with pytest.raises(ValueError, match="CUDA tensor"):
        getattr(quantization, function)(**_quantization(function))


@pytest.mark.parametrize("function", NORMS)
def test_good_norm_gets_as_far_as_the_device(function):
    with pytest.raises(ValueError, match="CUDA tensor"):
        getattr(norm, function)(**_norm(function))


@pytest.mark.parametrize(("function", "fault"), BAD_CALLS)
def test_bad_call_is_refused_by_name(function, fault):
    arguments = fuzz.FAULTS[fault](_quantization(function))
    error = assert_refused(getattr(quantization, function), arguments, fault.split()[0])
    assert "CUDA tensor" not in error, "the fault itself was not seen"


@pytest.mark.parametrize(("function", "fault"), BAD_NORMS)
def test_bad_norm_is_refused_by_name(function, fault):
    arguments = _norm_applies(fault, _norm(function))
    error = assert_refused(getattr(norm, function), arguments, fault.split()[0])
    assert "CUDA tensor" not in error, "the fault itself was not seen"


def test_segments_whose_differences_int32_does_not_hold():
    indptr = torch.tensor([0, 2**31 - 1, -2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="`indptr` must rise .* falls in between"):
        quantization.segment_packbits(torch.zeros(5, dtype=torch.bool), indptr)
    module = importlib.import_module("flashinfer.quantization.packbits")  # its function hides it
    _, packed = module._segment_offsets(indptr[:2], 2**31 - 1)
    assert packed.tolist() == [0, 2**28] and packed.dtype == torch.int32
