"""`flashinfer new-op` writes an operation that builds, passes its tests and lint as written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "weigh_rows"
COPIED = ("benchmarks", "csrc", "examples", "flashinfer", "include", "tests")
FILES = ("pyproject.toml", "README.md", "version.txt", ".clang-format")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(params=["norm", "activation", "gadgets"], ids=["package", "module", "new"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the tree with a new operation in a family of each kind."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "family").write_text(request.param)
    done = run(tmp_path, "flashinfer", "new-op", NAME, "--family", request.param)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path


def test_it_passes_lint_and_is_registered(checkout: Path):
    for tool in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        done = run(checkout, *tool)
        assert done.returncode == 0, done.stdout
    family = (checkout / "family").read_text()
    code = f"import flashinfer; assert flashinfer.{NAME} is flashinfer.{family}.{NAME}"
    assert subprocess.run([sys.executable, "-c", code], cwd=checkout).returncode == 0
    assert f"`{NAME}`" in (checkout / "README.md").read_text()
    assert (checkout / "tests" / "trace" / "fi_trace_out" / f"{NAME}_h4096.json").is_file()
    assert f"    {NAME}_h4096.json\n" in (checkout / "tests" / "trace" / "example.py").read_text()
    again = run(checkout, "flashinfer", "new-op", NAME, "--family", family)
    assert again.returncode == 1 and "exists already" in again.stderr


@pytest.mark.compiler
@pytest.mark.parametrize("checkout", ["gadgets"], indirect=True, ids=["new"])
def test_it_builds_and_passes_its_tests(checkout: Path):
    """Its tests and fuzzer on the reference backend, its faults on the real binding, its trace."""
    tests = ["tests/gadgets", "tests/unit/test_refusals.py", "tests/unit/test_layering.py"]
    tests += [f"tests/trace/test_{n}.py" for n in ("definitions", "fi_trace_template_consistency")]
    done = run(checkout, "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", NAME)
    assert done.returncode == 0, done.stdout[-4000:]
    benchmark = ["benchmarks/flashinfer_benchmark.py", "--list_routines"]
    listed = subprocess.run(
        [sys.executable, *benchmark], cwd=checkout, capture_output=True, text=True
    )
    assert NAME in listed.stdout, listed.stderr


@pytest.mark.parametrize("name", ["Weigh", "2x", "a-b", "_x", "w" * 41])
def test_a_name_that_is_none_is_refused(name: str):
    done = run(ROOT, "flashinfer", "new-op", name, "--family", "norm")
    assert done.returncode == 2 and "NAME must" in done.stderr
