"""Kernels of attention as a parameter."""

from __future__ import annotations

import pytest
import torch

from tests.attention.batches import need_backend


@pytest.fixture(params=["fa2", "fa3"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Each kernel for prefill that the device has; without a GPU the reference stands for both."""
    need_backend(request.param, device)
    if request.param == "fa3" and device.type != "cuda":
        pytest.skip("needs a GPU: without one, it is the same call as with fa2")
    return request.param
