"""`flashinfer new-op` writes an operation that builds, passes its tests and lint as written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer.cli.new_op import new_op

ROOT = Path(__file__).resolve().parents[2]
NAME = "weigh_rows"
COPIED = ("benchmarks", "csrc", "examples", "flashinfer", "include", "tests")
# An editable install has links in `data` to the sources of its own checkout.
IGNORED = shutil.ignore_patterns("__pycache__", "data")
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


@pytest.fixture
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the tree with a new operation in the family that the test names."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=IGNORED)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    done = run(tmp_path, "flashinfer", "new-op", NAME, "--family", request.param)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path


def assert_lint_passes(folder: Path) -> None:
    for tool in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        done = run(folder, *tool)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("checkout", ["activation", "gadgets"], indirect=True)
def test_a_family_of_one_module_and_a_new_one(checkout: Path):
    assert_lint_passes(checkout)
    assert f"`{NAME}`" in (checkout / "README.md").read_text(), "the operation is public"
    assert (checkout / "tests" / "trace" / "fi_trace_out" / f"{NAME}_h4096.json").is_file()
    assert f"    {NAME}_h4096.json\n" in (checkout / "tests" / "trace" / "example.py").read_text()


@pytest.mark.compiler
@pytest.mark.parametrize("checkout", ["norm"], indirect=True)
def test_it_builds_and_passes_its_tests(checkout: Path):
    """Its tests and fuzzer on the reference backend, its faults on the real binding, its trace."""
    assert_lint_passes(checkout)
    tests = [f"tests/norm/test_{NAME}.py", f"tests/norm/test_{NAME}_fuzz.py"]
    tests += ["tests/unit/test_refusals.py", "tests/unit/test_layering.py"]
    tests += [f"tests/trace/test_{n}.py" for n in ("definitions", "fi_trace_template_consistency")]
    done = run(checkout, "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", NAME)
    assert done.returncode == 0, done.stdout[-4000:]
    again = run(checkout, "flashinfer", "new-op", NAME, "--family", "norm")
    assert again.returncode == 1 and "exists already" in again.stderr


@pytest.mark.parametrize("name", ["Weigh", "2x", "a-b", "_x", "w" * 41])
def test_a_name_that_is_none_is_refused(name: str):
    done = CliRunner().invoke(new_op, [name, "--family", "norm"])
    assert done.exit_code == 2 and "NAME must" in done.output
