"""What the child process of the rank tests runs; pickled by name, which no conftest has alone."""

from __future__ import annotations

import importlib
import os
from typing import Any

from flashinfer.jit import build_jit_specs

_built: set[str] = set()


def prepare() -> None:
    """Set what is read when the child first uses CUDA.

    The streams of all ranks get hardware queues of their own.
    """
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="32", FLASHINFER_COMM_TIMEOUT="10")


def call_test(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call a test function of a module that the parent collected.

    Kernels of all its tests, `modules` of the module, are compiled together before the first one.
    """
    tests = importlib.import_module(module)
    if module not in _built:
        build_jit_specs(tests.modules())
        _built.add(module)
    getattr(tests, name)(**arguments)
