"""The reference backend: same calls, writes and refusals, and nothing left when it is off."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer.api_logging import flashinfer_api
from flashinfer.backends import backend_requirement
from flashinfer.reference_backend import is_active, reference_backend
from flashinfer.trace import Scalar, Tensor, TraceTemplate, Var
from tests.trace.calls import operations

REPOSITORY = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    is_active(), reason="switches the reference backend, which FLASHINFER_BACKEND keeps on"
)
each_operation = pytest.mark.parametrize("operation", operations(), ids=lambda o: o.label)


def _rms(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt()


# ---- off ---------------------------------------------------------------------------------------


@each_operation
def test_off_a_cpu_tensor_is_refused_with_a_word_on_cuda(operation):
    with pytest.raises(ValueError, match="(?i)cuda"):
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
        result = operation.api(**arguments)
        assert (result is None) == returns_nothing
        if result is not None and "out" in inspect.signature(operation.function).parameters:
            out = torch.full_like(result, float("nan"))
            assert operation.api(**arguments, out=out) is out
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


# ---- scope -------------------------------------------------------------------------------------


def test_blocks_nest_and_end_with_an_exception():
    x, weight = torch.randn(4, 64), torch.ones(64)
    with pytest.raises(KeyError):
        with reference_backend():
            with reference_backend():
                flashinfer.rmsnorm(x, weight)
            flashinfer.rmsnorm(x, weight)
            raise KeyError
    assert not is_active()
    with pytest.raises(ValueError, match="CUDA"):
        flashinfer.rmsnorm(x, weight)


def test_other_threads_keep_the_kernels():
    x, weight = torch.randn(4, 64), torch.ones(64)
    seen = []

    def elsewhere():
        assert not is_active()
        try:
            flashinfer.rmsnorm(x, weight)
        except ValueError as error:
            seen.append(str(error))

    with reference_backend():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        flashinfer.rmsnorm(x, weight)
    assert len(seen) == 1 and "CUDA" in seen[0]


def test_threads_enter_and_leave_at_will():
    """Sixteen threads switch on and off; each always gets what its own block asks for."""
    code = flashinfer.rmsnorm.__code__
    x, weight = torch.randn(2, 8), torch.ones(8)
    failures = []

    def work():
        for _ in range(50):
            try:
                with reference_backend():
                    flashinfer.rmsnorm(x, weight)
            except Exception as error:
                failures.append(error)
            try:
                flashinfer.rmsnorm(x, weight)
                failures.append("a kernel ran on a CPU tensor")
            except ValueError:
                pass

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert flashinfer.rmsnorm.__code__ is code


def test_tasks_are_separate():
    x, weight = torch.randn(2, 8), torch.ones(8)

    async def inside():
        with reference_backend():
            await asyncio.sleep(0)
            flashinfer.rmsnorm(x, weight)
            await asyncio.sleep(0)

    async def outside():
        for _ in range(3):
            assert not is_active()
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(inside(), outside())

    asyncio.run(both())


# ---- what is routed ----------------------------------------------------------------------------


def _double_reference(input, out=None, *, times=2):
    return input.double() * times


double_trace = TraceTemplate(
    "double",
    {"n": Var()},
    {"input": Tensor(["n"]), "times": Scalar("int32")},
    {"output": Tensor(["n"], param="out", dtype_from="input")},
    reference=_double_reference,
)


def test_function_taken_before_and_function_decorated_inside():
    before = flashinfer.rmsnorm
    with reference_backend():
        before(torch.randn(4, 64), torch.ones(64))

        @flashinfer_api(trace=double_trace)
        def late(input, out=None, *, times=2):
            raise ValueError("needs CUDA")

        assert late(torch.ones(3), times=5).tolist() == [5.0] * 3
    with pytest.raises(ValueError, match="CUDA"):
        late(torch.ones(3))


def test_function_with_free_variables_and_decorators():
    """A wrapper of another decorator is routed as well; what it adds to the call is dropped."""
    secret = object()

    @flashinfer_api(trace=double_trace)
    @backend_requirement({}, common_check=lambda input: bool(secret))
    def outer(input, out=None, *, times=2):
        raise ValueError(f"needs CUDA, {secret}")

    @backend_requirement({}, common_check=lambda input: True)
    @flashinfer_api(trace=double_trace)
    def inner(input, out=None, *, times=2):
        raise ValueError(f"needs CUDA, {secret}")

    for function in (outer, inner):
        signature = inspect.signature(function)
        with reference_backend():
            assert inspect.signature(function) == signature
            assert function(torch.ones(2), skip_check=True).tolist() == [2.0, 2.0]
            out = torch.zeros(2)
            assert function(torch.ones(2), out, times=3) is out and out.tolist() == [3.0, 3.0]
        with pytest.raises(ValueError, match="CUDA"):
            function(torch.ones(2))


def _plan_reference(self, offsets):
    self.offsets = offsets.tolist()
    return ()


def _run_reference(self, input, out=None):
    ends = zip(self.offsets, self.offsets[1:], strict=False)
    return torch.stack([input[begin:end].double().sum() for begin, end in ends])


class _SegmentSum:
    """A wrapper as the attention ones are: plan with lengths, run with tensors."""

    @flashinfer_api(
        trace=TraceTemplate(
            "segment_sum_plan",
            {"m": Var()},
            {"offsets": Tensor(["m"])},
            {},
            reference=_plan_reference,
        )
    )
    def plan(self, offsets):
        raise ValueError("needs CUDA")

    @flashinfer_api(
        trace=TraceTemplate(
            "segment_sum",
            {"n": Var(), "segments": Var()},
            {"input": Tensor(["n"])},
            {"output": Tensor(["segments"], param="out", dtype_from="input")},
            reference=_run_reference,
        )
    )
    def run(self, input, out=None):
        raise ValueError("needs CUDA")


def test_plan_and_run_of_a_wrapper():
    wrapper = _SegmentSum()
    with reference_backend():
        assert wrapper.plan(torch.tensor([0, 2, 5])) is None
        assert wrapper.run(torch.ones(5)).tolist() == [2.0, 3.0]
        out = torch.zeros(2)
        assert wrapper.run(torch.ones(5), out=out) is out and out.tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="CUDA"):
        wrapper.run(torch.ones(5))


def test_operation_without_reference_says_so():
    @flashinfer_api(trace=TraceTemplate("bare", {"n": Var()}, {"x": Tensor(["n"])}, {}))
    def bare(x): ...

    with reference_backend(), pytest.raises(NotImplementedError, match="bare"):
        bare(torch.ones(2))


# ---- the switch of the process -----------------------------------------------------------------


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_variable_switches_the_process_with_all_its_threads():
    code = """
import threading, torch, flashinfer
x = torch.ones(2, 8)
call = lambda: print(flashinfer.rmsnorm(x, x[0]).shape)
call()
thread = threading.Thread(target=call); thread.start(); thread.join()
with flashinfer.reference_backend(): call()
call()
"""
    done = _python(code, FLASHINFER_BACKEND="reference")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([2, 8])") == 4
    assert done.stderr.count("reference backend is on") == 1, "it announces itself once"


def test_variable_with_another_word_is_refused():
    done = _python("import flashinfer", FLASHINFER_BACKEND="refrence")
    assert done.returncode != 0
    assert "FLASHINFER_BACKEND" in done.stderr and "refrence" in done.stderr


@pytest.mark.parametrize(
    "variables", [{"FLASHINFER_LOGLEVEL": "3"}, {"FLASHINFER_TRACE_DUMP": "1"}]
)
def test_logged_and_dumped_calls_are_routed_too(variables, tmp_path):
    code = (
        "import torch, flashinfer; x = torch.ones(2, 8); r = x.clone()\n"
        "flashinfer.fused_add_rmsnorm(x, r, x[0].clone(), eps=0.0)\n"
        "assert r[0, 0] == 2 and x[1, 1] == 1"
    )
    variables = {**variables, "FLASHINFER_TRACE_DUMP_DIR": str(tmp_path)}
    done = _python(code, FLASHINFER_BACKEND="reference", **variables)
    assert done.returncode == 0, done.stderr


def test_announcement_is_a_warning_of_the_logger(monkeypatch, caplog):
    module = sys.modules["flashinfer.reference_backend"]
    monkeypatch.setattr(module, "_announced", False)
    with caplog.at_level(logging.WARNING, logger="flashinfer.reference_backend"):
        with reference_backend():
            flashinfer.rmsnorm(torch.ones(2, 8), torch.ones(8))
            flashinfer.rmsnorm(torch.ones(2, 8), torch.ones(8))
    assert len([r for r in caplog.records if "reference backend is on" in r.message]) == 1
