"""Fixtures of several unit tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer._common import arch, checks
from tests.unit.bindings_alone import leave_out_kernels


@pytest.fixture
def bindings_on_the_cpu(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """CPU tensors reach the bindings: build without a GPU, leave out the early look at the device.

    The bindings check everything else before the device, so a machine without a GPU sees their
    answers: a call with a fault gets its own error, and a good call gets as far as the complaint
    that the tensor is not on a GPU. Nothing else is built, except under ``--full``. Kernels are
    chosen as for an H200.
    """
    if not torch.cuda.is_available():
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        if not full:
            leave_out_kernels(monkeypatch)

    def check_types_only(**tensors: Any) -> None:
        for name, tensor in tensors.items():
            checks.tensor(name, tensor)

    monkeypatch.setattr(checks, "cuda_tensors", check_types_only)
    facts = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setitem(arch._CAPABILITIES, torch.device("cpu"), (9, 0))
    get_properties = arch.get_device_properties
    monkeypatch.setattr(
        arch,
        "get_device_properties",
        lambda device: facts if device == torch.device("cpu") else get_properties(device),
    )
