"""The device helpers of this package under one name, as FlashInfer has them.

It needs the compiler. Two names are not here, since their signatures do not say what they do:
`cvt_w4a16_packed_e4m3_scale_to_f32` and `mx_scale_from_amax32`.
"""

from __future__ import annotations

import torch

from .._common.arch import get_compute_capability
from .blocks import *  # noqa: F403
from .conversions import *  # noqa: F403
from .float4 import *  # noqa: F403
from .memory import *  # noqa: F403
from .reduce import *  # noqa: F403


def get_sm_version(device: int | torch.device | str | None = None) -> int:
    """Compute capability of a GPU as one number, such as 90; of the current one by default."""
    if device is None:
        device = torch.cuda.current_device()
    major, minor = get_compute_capability(torch.device(device))
    return 10 * major + minor
