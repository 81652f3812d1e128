"""A fixture that tests of products share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def hopper(device: torch.device) -> None:
    """Skips on a GPU that the kernels are not built for; without one the reference runs."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernels are built for it")
