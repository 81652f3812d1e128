"""The reference backend: same calls, writes and refusals, and nothing left when it is off."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashinfer
from flashinfer.api_logging import flashinfer_api
from flashinfer.reference_backend import is_active, reference_backend
from flashinfer.testing.tensors import clone_arguments
from tests.trace.attention_cases import planned_call
from tests.trace.calls import operations

pytestmark = pytest.mark.skipif(
    is_active(), reason="switches the reference backend, which FLASHINFER_BACKEND keeps on"
)
each_operation = pytest.mark.parametrize("operation", operations(), ids=lambda o: o.label)


def _rms(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt()


# ---- off ---------------------------------------------------------------------------------------


@each_operation
def test_off_a_cpu_tensor_is_refused_with_a_word_on_cuda(operation, monkeypatch):
    """And before any kernel is compiled for it; wrappers may compile a planner for the host."""
    if "host" in operation.template.tags:
        return  # plain PyTorch, on any device
    if "self" not in inspect.signature(operation.function).parameters:
        monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(ValueError, match="(?i)cuda"):
        if "self" in inspect.signature(operation.function).parameters:
            planned_call(operation.template, torch.bfloat16, torch.device("cpu"), 0, backend=False)
        operation.api(**operation.arguments())


@each_operation
def test_off_nothing_is_left_of_it(operation):
    """The function runs the very code that it was defined with: its cost cannot have changed."""
    function = operation.function
    code, defaults, signature = (
        function.__code__,
        function.__defaults__,
        inspect.signature(function),
    )
    with reference_backend():
        assert function.__code__ is not code
        assert inspect.signature(function) == signature
    assert function.__code__ is code
    assert function.__defaults__ is defaults


def test_without_logging_the_decorator_returns_the_function():
    def plain(input): ...

    assert flashinfer_api(plain) is plain


# ---- results and writes ------------------------------------------------------------------------


@each_operation
def test_in_place_and_returned_as_the_signature_says(operation):
    """`-> None` returns None and writes; otherwise the result is returned, in `out` if given."""
    arguments = operation.arguments()
    returns_nothing = str(inspect.signature(operation.function).return_annotation) == "None"
    with reference_backend():
        result = operation.api(**clone_arguments(arguments))
        assert (result is None) == returns_nothing
        if result is not None and "out" in inspect.signature(operation.function).parameters:
            result = result[0] if isinstance(result, tuple) else result
            out = torch.full_like(result, float("nan") if result.is_floating_point() else -7)
            again = operation.api(**{**clone_arguments(arguments), "out": out})
            assert (again[0] if isinstance(again, tuple) else again) is out
            assert torch.equal(out, result)


def test_fused_add_writes_both_tensors():
    x, residual = torch.randn(2, 5, 64, dtype=torch.bfloat16).unbind()
    total = x.double() + residual.double()
    pointers = x.data_ptr(), residual.data_ptr()
    with reference_backend():
        nothing = flashinfer.fused_add_rmsnorm(x, residual, torch.full((64,), 2.0).bfloat16())
    assert nothing is None
    assert (x.data_ptr(), residual.data_ptr()) == pointers
    assert torch.equal(residual, total.to(torch.bfloat16))
    assert torch.equal(x, (2 * _rms(total)).to(torch.bfloat16))


def test_out_may_be_the_input():
    x, weight = torch.randn(5, 64), torch.randn(64)
    expected = (_rms(x) * weight.double()).float()
    with reference_backend():
        assert flashinfer.rmsnorm(x, weight, out=x) is x
    assert torch.equal(x, expected)


def test_results_are_rounded_once_to_the_dtype_of_the_output():
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    out = torch.empty(4, 64, dtype=torch.float8_e5m2)
    with reference_backend():
        assert flashinfer.silu_and_mul(x).dtype == torch.bfloat16
        flashinfer.rmsnorm_quant(out, x, torch.full((64,), 1e6).bfloat16(), 1.0)
    assert out.float().abs().max() == torch.finfo(torch.float8_e5m2).max, "saturates"


def test_parameters_that_require_grad_are_taken():
    weight = torch.nn.Parameter(torch.ones(64))
    x = torch.randn(4, 64, requires_grad=True)
    with reference_backend():
        assert not flashinfer.rmsnorm(x, weight).requires_grad


# ---- refusals ----------------------------------------------------------------------------------


def test_memory_shared_with_another_argument_is_refused():
    buffer, weight = torch.randn(9, 64), torch.ones(64)
    with reference_backend():
        with pytest.raises(ValueError, match="`out` .*`input`"):
            flashinfer.rmsnorm(buffer[:8], weight, out=buffer[1:])
        with pytest.raises(ValueError, match="`out` .*`weight`"):
            flashinfer.rmsnorm(torch.randn(8, 64), buffer[8], out=buffer[1:])
        with pytest.raises(ValueError, match="`(input|residual)`"):
            flashinfer.fused_add_rmsnorm(buffer, buffer, weight)
        with pytest.raises(ValueError, match="`out` .*`input`"):
            flashinfer.silu_and_mul(buffer, out=buffer[:, :32])


def test_columns_of_one_matrix_are_not_shared_memory():
    """Their address ranges interleave, but no element is common."""
    matrix = torch.randn(8, 128)
    left, right = matrix[:, :64], matrix[:, 64:]
    expected = _rms(left).float()
    with reference_backend():
        flashinfer.rmsnorm(left, torch.ones(64), out=right)
    assert torch.equal(right, expected)


def test_tensor_with_two_indices_for_one_element_is_not_written():
    x, weight = torch.randn(4, 64), torch.ones(64)
    sliding = torch.zeros(128).as_strided((4, 64), (16, 1))
    with reference_backend():
        for out in (torch.zeros(64).expand(4, 64), sliding):
            with pytest.raises(ValueError, match="`out`.*two indices"):
                flashinfer.rmsnorm(x, weight, out=out)


def test_refused_call_writes_nothing():
    x, residual = torch.randn(4, 64), torch.randn(4, 64)
    before = x.clone(), residual.clone()
    with reference_backend(), pytest.raises(ValueError, match="`eps`"):
        flashinfer.fused_add_rmsnorm(x, residual, torch.ones(64), eps=-1.0)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_tensors_on_two_devices_are_refused():
    with reference_backend(), pytest.raises(ValueError, match="`weight` is on meta"):
        flashinfer.rmsnorm(torch.randn(4, 64), torch.ones(64, device="meta"))


def test_wrong_call_is_a_type_error():
    with reference_backend():
        with pytest.raises(TypeError, match="weight"):
            flashinfer.rmsnorm(torch.randn(4, 64))
        with pytest.raises(TypeError, match="epsilon"):
            flashinfer.rmsnorm(torch.randn(4, 64), torch.ones(64), epsilon=1.0)
