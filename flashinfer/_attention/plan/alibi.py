"""Slopes of ALiBi (O. Press et al., "Train Short, Test Long", 2022)."""

from __future__ import annotations

import torch


def get_alibi_slopes(n_heads: int, device: torch.device | None = None) -> torch.Tensor:
    """Slope of each head's linear bias.

    Parameters
    ----------
    n_heads : int
        Number of query heads.
    device : torch.device, optional
        Device of the result.

    Returns
    -------
    torch.Tensor
        ``[n_heads]`` float32. For a power of two the powers ``2^(-8 i / n)``, i from 1; otherwise
        those of the power below, then every other one of the power above, as in the paper.
    """
    below = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (n_heads - below) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
