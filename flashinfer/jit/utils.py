"""Names of dtypes in the names of modules."""

from __future__ import annotations

import torch

from .._common.dtypes import SHORT_NAMES

filename_safe_dtype_map: dict[torch.dtype, str] = dict(SHORT_NAMES)
"""Each dtype that kernels are compiled for, as names of modules and files write it."""
