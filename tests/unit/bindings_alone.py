"""Modules of their bindings alone, for tests of what bindings refuse; for import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flashinfer.jit.spec import ModuleSpec


def leave_out_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on leave kernels and launchers out of modules, which get names of their own.

    nvcc takes three quarters of the time of a build, and says nothing about what a binding checks.
    Launchers are undefined symbols, which nobody calls: every call ends before its launch. One that
    gets as far, because a check is missing, ends the process with "symbol lookup error".
    """
    init = ModuleSpec.__init__

    def bindings_alone(
        self: ModuleSpec, name: str, sources: Sequence[str | Path], *args: Any, **options: Any
    ) -> None:
        init(self, name, sources, *args, **options)
        of_host = [source for source in self.sources if source.suffix != ".cu"]
        if of_host and len(of_host) < len(self.sources):
            self.name, self.sources = f"binding_{name[-190:]}", of_host
            self.extra_ldflags += ["-Wl,-z,undefs", "-Wl,-z,lazy"]

    monkeypatch.setattr(ModuleSpec, "__init__", bindings_alone)
