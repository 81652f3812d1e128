"""The Makefile's recipes: what make hands to the shell can be read by it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("target", ["install", "demo", "test", "test-gpu", "docs", "lint"])
def test_recipes_are_whole_commands(target: str, tmp_path: Path):
    """A comma in an argument of `call` cuts a command in two."""
    make = ["make", "--dry-run", f"VENV={tmp_path}/environment", "PYTHON=python3", target]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install" in done.stdout
    read = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
