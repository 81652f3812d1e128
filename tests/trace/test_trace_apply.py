"""Solutions in place of operations: by definition, with checks, and back again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer import trace_apply
from flashinfer.trace import (
    BuildSpec,
    Solution,
    SourceFile,
    SupportedBindings,
    SupportedLanguages,
)

NAME = "rmsnorm_h64"
SOURCE = """
import helper

def run(hidden_states, weight, eps=1e-6):
    return helper.norm(hidden_states, weight, eps)

def write(hidden_states, weight, eps, output):
    output.copy_(helper.norm(hidden_states, weight, eps))
"""
HELPER = """
def norm(x, w, eps):
    y = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (y * w.float()).to(x.dtype)
"""


@pytest.fixture(autouse=True)
def operations() -> Iterator[None]:
    """What no solution takes runs as a reference; nothing is left over."""
    with flashinfer.reference_backend():
        yield
    trace_apply.disable_apply()


def make_solution(symbol: str = "run", **spec: object) -> Solution:
    build = BuildSpec(SupportedLanguages.PYTHON, ("any",), f"main.py::{symbol}", **spec)  # type: ignore[arg-type]
    sources = (SourceFile("main.py", SOURCE), SourceFile("helper.py", HELPER))
    return Solution("mine", NAME, "me", build, sources)


def call(hidden: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, hidden, dtype=torch.bfloat16), torch.rand(hidden).bfloat16()


def test_a_callable_takes_calls_of_its_definition() -> None:
    code = flashinfer.rmsnorm.__code__
    seen = []

    def mine(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        seen.append(eps)
        return hidden_states * 2

    x, weight = call()
    usual = flashinfer.rmsnorm(x, weight)
    assert trace_apply.enable_apply({NAME: mine}) >= 1 and trace_apply.is_enabled()
    assert torch.equal(flashinfer.rmsnorm(x, weight, eps=1e-5), x * 2) and seen == [1e-5]
    out = torch.empty_like(x)
    assert flashinfer.rmsnorm(x, weight, out=out) is out and torch.equal(out, x * 2)
    flashinfer.rmsnorm(*call(128))
    assert trace_apply.stats() == {"rmsnorm": {"hit": 2, "fallback": 1, "error": 0}}
    trace_apply.disable_apply()
    assert not trace_apply.is_enabled() and torch.equal(flashinfer.rmsnorm(x, weight), usual)
    assert flashinfer.rmsnorm.__code__ is code


def test_only_functions_that_may_match_are_routed() -> None:
    with_references = flashinfer.silu_and_mul.__code__
    trace_apply.enable_apply({NAME: lambda **inputs: None})
    assert flashinfer.silu_and_mul.__code__ is with_references


def test_a_solution_may_call_the_operation() -> None:
    trace_apply.enable_apply(
        {NAME: lambda hidden_states, weight, eps: flashinfer.rmsnorm(hidden_states, weight, eps)}
    )
    x, weight = call()
    flashinfer.rmsnorm(x, weight)
    assert trace_apply.stats()["rmsnorm"] == {"hit": 1, "fallback": 0, "error": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda **inputs: None,
        lambda **inputs: inputs["hidden_states"].float(),
        lambda **inputs: inputs["hidden_states"][:-1],
        lambda **inputs: (inputs["hidden_states"],) * 2,
        lambda **inputs: 1 / 0,
    ],
)
def test_a_solution_that_fails_gives_the_call_back(wrong) -> None:
    x, weight = call()
    usual = flashinfer.rmsnorm(x, weight)
    trace_apply.enable_apply({NAME: wrong})
    for _ in range(2):
        assert torch.equal(flashinfer.rmsnorm(x, weight), usual)
    assert trace_apply.stats()["rmsnorm"] == {"hit": 0, "fallback": 1, "error": 1}


def test_results_in_place_are_written_after_the_checks() -> None:
    x, weight = call()
    residual = torch.randn(3, 64).bfloat16()
    name = flashinfer.fi_trace(
        flashinfer.fused_add_rmsnorm, input=x, residual=residual, weight=weight
    )["name"]
    trace_apply.enable_apply(
        {name: lambda hidden_states, residual, weight, eps: (residual + 1, hidden_states + 1)}
    )
    expected = residual + 1, x + 1
    flashinfer.fused_add_rmsnorm(x, residual, weight)
    assert torch.equal(x, expected[0]) and torch.equal(residual, expected[1])


def test_wrong_values_are_found_if_asked_for() -> None:
    x, weight = call()
    usual = flashinfer.rmsnorm(x, weight)
    trace_apply.enable_apply({NAME: lambda hidden_states, **rest: hidden_states * 2}, verify=True)
    assert torch.equal(flashinfer.rmsnorm(x, weight), usual)
    assert trace_apply.stats()["rmsnorm"]["error"] == 1
    trace_apply.enable_apply({NAME: make_solution()}, verify=True)
    flashinfer.rmsnorm(x, weight)
    assert trace_apply.stats()["rmsnorm"] == {"hit": 1, "fallback": 0, "error": 0}


@pytest.mark.parametrize(
    "solution",
    [make_solution(), make_solution("write", destination_passing_style=True)],
    ids=["returns", "writes"],
)
def test_a_solution_is_built_from_its_sources(solution: Solution) -> None:
    x, weight = call()
    usual = flashinfer.rmsnorm(x, weight)
    trace_apply.enable_apply({NAME: solution})
    assert (flashinfer.rmsnorm(x, weight) - usual).abs().max() <= 2**-6
    assert trace_apply.stats()["rmsnorm"]["hit"] == 1


def test_solutions_of_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert trace_apply.enable_apply() == 0 and not trace_apply.is_enabled()
    monkeypatch.setenv("FLASHINFER_TRACE_APPLY", str(tmp_path))
    folder = tmp_path / "me" / "rmsnorm"
    folder.mkdir(parents=True)
    (folder / "mine.json").write_text(json.dumps(make_solution().to_dict()))
    (folder / "definition.json").write_text(json.dumps({"name": NAME}))
    assert trace_apply.enable_apply() >= 1
    flashinfer.rmsnorm(*call())
    assert trace_apply.stats_snapshot()["rmsnorm"]["hit"] == 1
    (folder / "other.json").write_text(json.dumps({**make_solution().to_dict(), "name": "b"}))
    with pytest.raises(ValueError, match="one solution of 'rmsnorm_h64'"):
        trace_apply.enable_apply()


def test_what_is_no_solution_is_refused() -> None:
    with pytest.raises(TypeError, match="callable or a Solution, got int"):
        trace_apply.enable_apply({NAME: 3})
    with pytest.raises(ValueError, match="under that name"):
        trace_apply.enable_apply({"rmsnorm_h128": make_solution()})
    with pytest.raises(TypeError, match="verify"):
        trace_apply.enable_apply({}, verify="yes")  # type: ignore[arg-type]


def test_a_solution_survives_json() -> None:
    solution = make_solution(dependencies=("torch",), binding=SupportedBindings.TVM_FFI)
    again = Solution.from_dict(json.loads(json.dumps(solution.to_dict())))
    assert again == solution and again.hash() == solution.hash()
    assert again.entry_file() == "main.py" and again.entry_symbol() == "run"
    assert again.entry_source() == SourceFile("main.py", SOURCE)
    assert make_solution("write").hash() != solution.hash()


@pytest.mark.parametrize("path", ["/etc/passwd", "../main.py", "a/../../b.py", ""])
def test_sources_stay_in_their_folder(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        SourceFile(path, "")


def test_entry_points_are_files_and_functions() -> None:
    for entry in ("main.py", "main.py::", "::run", "main.py::a b"):
        with pytest.raises(ValueError, match="entry_point"):
            BuildSpec(SupportedLanguages.PYTHON, (), entry)
    build = BuildSpec(SupportedLanguages.CUDA, (), "other.cu::run")
    with pytest.raises(ValueError, match="sources"):
        Solution("a", NAME, "me", build, (SourceFile("main.cu", ""),))
    assert not build.is_python_family()
