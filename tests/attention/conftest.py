"""Kernels of attention as a parameter."""

from __future__ import annotations

import pytest
import torch

from flashinfer._attention import backends
from tests.attention.batches import need_backend


@pytest.fixture(params=["fa2", "fa3"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Each kernel for prefill that the device has."""
    need_backend(request.param, device)
    return request.param


@pytest.fixture(params=["fa2", "fa3"])
def auto_backend(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Each kernel, as what ``auto`` takes for any batch."""
    need_backend(request.param, device)
    if request.param == "fa3":
        always = {head_dims: backends.Profit(0, 0) for head_dims in backends.PROFITS}
        monkeypatch.setattr(backends, "PROFITS", always)
    else:
        monkeypatch.setattr(backends, "is_hopper", lambda device: False)
    return request.param
