"""The promises of tests/conftest.py to every test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import random
import pytest
import torch

DRAWN = []

@pytest.mark.gpu
def test_needs_a_gpu():
    raise AssertionError("ran without a GPU")

def test_out_of_memory():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 EiB")

@pytest.mark.parametrize("again", range(2))
def test_seed(again):
    DRAWN.append((random.random(), torch.rand(()).item()))
    assert DRAWN[0] == DRAWN[-1]

def test_other_error():
    raise RuntimeError("a real failure")

def test_full(full, record_property):
    print("full is", full)
"""


@pytest.fixture
def report(tmp_path: Path):
    """Function that runs the tests above under our conftest and returns what pytest printed."""
    (tmp_path / "test_inner.py").write_text(TESTS)

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull]
        command += ["-rsf", "-s", "-p", "no:cacheprovider", "-W", "ignore", str(tmp_path), *options]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True
        ).stdout

    return run


def test_skips_name_the_reason(report):
    out = report()
    assert "1 failed, 3 passed, 2 skipped" in out
    assert "needs a GPU: torch" in out
    assert "out of GPU memory: CUDA out of memory" in out
    assert "RuntimeError: a real failure" in out
    assert "full is False" in out


def test_full_option(report):
    assert "full is True" in report("--full", "-k", "test_full")
