"""Results of a token that do not depend on what else a step computes, bit for bit.

Matrix products, and norms of wide rows, may add in another order for another number of rows, so
they get tiles of one shape. Attention has tiles of one size and cuts no request; requests that
decode take the kernel of prompts, too, since the one for decoding adds in another order. Each draw
is a batch of its own. A token then gets the same result in a prompt, while decoding, alone and in
any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .sampling import SamplingParams, sample

# Arguments of `plan`: the size selects the tile of query rows, and nothing is cut.
ATTENTION = {"fixed_split_size": 4096, "disable_split_kv": True}
# Rows of a tile. A GPU reads the weights once for each tile, a CPU computes its padding. Neither
# number has been measured.
_TILE_ROWS = {"cuda": 64, "cpu": 8}


def tile_rows(device: torch.device) -> int:
    """Rows of the tiles on a device."""
    return _TILE_ROWS[device.type]


def round_up(rows: int, tile: int | None) -> int:
    """The number of rows with padding to whole tiles; `tile` None: without."""
    return rows if tile is None else -(-rows // tile) * tile


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` with zeros after its rows."""
    if len(x) == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def in_tiles(tile: int | None, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Result of `function` for the rows of tensors, `tile` rows at a time.

    Parameters
    ----------
    tile : int or None
        Rows of a tile, of which the tensors have whole ones. None: all rows at once.
    function : callable
        Gets the same rows of each tensor, and returns a tensor or several with as many rows. What
        it writes in place is written.
    tensors : torch.Tensor
        Inputs.
    """
    if tile is None:
        return function(*tensors)
    parts = [function(*rows) for rows in zip(*(t.split(tile) for t in tensors), strict=True)]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
    return torch.cat(parts)


def sample_alone(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    drawn: Sequence[int],
) -> torch.Tensor:
    """As `sample`, each row in a batch of its own.

    A copy of the row begins where every tensor begins: kernels that read 16 bytes at once add in
    an order that follows from the address.
    """
    return torch.cat(
        [
            sample(
                logits[row : row + 1].clone(), params[row : row + 1], seeds[row : row + 1], [count]
            )
            for row, count in enumerate(drawn)
        ]
    )
