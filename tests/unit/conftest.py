"""Fixtures of several unit tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer._common import checks
from tests.unit.bindings_alone import leave_out_kernels


@pytest.fixture
def bindings_on_the_cpu(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """CPU tensors reach the bindings: build without a GPU, leave out the early look at the device.

    The bindings check everything else before the device, so a machine without a GPU sees their
    answers: a call with a fault gets its own error, and a good call gets as far as the complaint
    that the tensor is not on a GPU. Nothing else is built, except under ``--full``.
    """
    if not torch.cuda.is_available():
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        if not full:
            leave_out_kernels(monkeypatch)

    def check_types_only(**tensors: Any) -> None:
        for name, tensor in tensors.items():
            checks.tensor(name, tensor)

    monkeypatch.setattr(checks, "cuda_tensors", check_types_only)
