"""When the reference backend is on: threads, tasks, late functions, wrappers, processes."""

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
from flashinfer.compat.backends import backend_requirement
from flashinfer.reference_backend import is_active, reference_backend
from flashinfer.trace import Scalar, Tensor, TraceTemplate, Var

REPOSITORY = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    is_active(), reason="switches the reference backend, which FLASHINFER_BACKEND keeps on"
)

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


def test_function_without_a_name():
    function = flashinfer_api(lambda input, out=None, *, times=2: 1 / 0, trace=double_trace)
    with reference_backend():
        assert function.__code__.co_name == "<lambda>"
        assert function(torch.ones(2)).tolist() == [2.0, 2.0]


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
