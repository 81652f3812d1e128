"""Orders of rows that Blackwell's products of 4-bit weights read: they refuse every call.

Engines import these names on every GPU.
"""

from __future__ import annotations

import torch

from ..compat.backends import only_elsewhere

_BLACKWELL = (100, 103)


@only_elsewhere(_BLACKWELL)
def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """Rows of a weight in the order of an epilogue's tiles."""
    raise NotImplementedError


@only_elsewhere(_BLACKWELL)
def shuffle_matrix_sf_a(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """Rows of a weight's block scales in that order."""
    raise NotImplementedError
