"""The device helpers of this package under one name, as FlashInfer has them.

It needs the compiler. Conversions to and from FP4 are instructions of compute capability 10.0 and
later, for which no kernel of this package is written: they are not here.
"""

from __future__ import annotations

import torch

from .._common.arch import get_compute_capability
from .conversions import *  # noqa: F403
from .memory import *  # noqa: F403
from .reduce import *  # noqa: F403


def get_sm_version(device: int | torch.device | str | None = None) -> int:
    """Compute capability of a GPU as one number, such as 90; of the current one by default."""
    if device is None:
        device = torch.cuda.current_device()
    major, minor = get_compute_capability(torch.device(device))
    return 10 * major + minor
