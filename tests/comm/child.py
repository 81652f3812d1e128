"""What the child process of the rank tests runs; pickled by name, which no conftest has alone."""

from __future__ import annotations

import importlib
from typing import Any


def call_test(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call a test function of a module that the parent collected."""
    getattr(importlib.import_module(module), name)(**arguments)
