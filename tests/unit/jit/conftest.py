"""An empty cache for each test, and a project to compile in it."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jit_helpers import Project, make_project

from flashinfer import jit

_SYSTEM = ("MAX_JOBS", "CUDA_HOME", "CUDA_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "project")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, sm_90a as target, and from the environment only where NVRTC is."""
    for variable in list(os.environ):
        is_ours = variable.startswith("FLASHINFER_") and variable != "FLASHINFER_NVRTC"
        if is_ours or variable in _SYSTEM:
            monkeypatch.delenv(variable)
    base = tmp_path / "cache"
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(base))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    return base


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Messages that the JIT logs."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep()
    jit.logger.addHandler(handler)
    yield found
    jit.logger.removeHandler(handler)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Makes a shell script that can stand before a compiler."""

    def make(text: str) -> str:
        path = tmp_path / f"script{len(list(tmp_path.glob('script*')))}.sh"
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        return str(path)

    return make


@pytest.fixture
def compile_count(tmp_path: Path, script, monkeypatch) -> Callable[[], int]:
    """Counts compiler processes of both kinds (links are not counted)."""
    record = tmp_path / "compilers"
    record.touch()
    launcher = script(f'case " $* " in *" -c "*) echo x >> {record};; esac\nexec "$@"\n')
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", launcher)
    monkeypatch.setenv("FLASHINFER_NVCC_LAUNCHER", launcher)
    return lambda: len(record.read_text().split())
