"""Kernels of attention as a parameter."""

from __future__ import annotations

import pytest
import torch

from tests.attention.batches import need_backend


@pytest.fixture(params=["fa2", "fa3"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Each kernel for prefill that the device has."""
    need_backend(request.param, device)
    return request.param
