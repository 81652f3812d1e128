"""Numbers of tokens that engines tune mixtures and products for.

Powers of two up to 256, then steps of 256 up to 2048 and of 512 up to 4096, where a tile more or
less shows most, then powers of two again.
"""

from __future__ import annotations

from collections.abc import Callable

from .._common import checks
from ..utils import next_positive_power_of_2, round_up

_STEPS = ((256, 0), (2048, 256), (4096, 512))  # up to so many tokens: steps of so many, or doubling


def map_to_hybrid_bucket_uncapped(x: int) -> int:
    """The least of these numbers that is at least `x`."""
    x = max(checks.count("x", x), 1)
    step = next((step for most, step in _STEPS if x <= most), 0)
    return round_up(x, step) if step else next_positive_power_of_2(x)


def map_to_hybrid_bucket(x: int, max_num_tokens: int) -> int:
    """The same, `max_num_tokens` at most."""
    return min(map_to_hybrid_bucket_uncapped(x), checks.count("max_num_tokens", max_num_tokens))


def make_hybrid_bucket_mapper(max_num_tokens: int) -> Callable[[int], int]:
    """`map_to_hybrid_bucket` with this largest number."""
    most = checks.count("max_num_tokens", max_num_tokens)
    return lambda x: map_to_hybrid_bucket(x, most)


def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """These numbers from `min_num_tokens` on, and `max_num_tokens` as the last one.

    Raises
    ------
    TypeError, ValueError
        If an argument is not a positive integer, or the first is less than the second.
    """
    most = checks.count("max_num_tokens", max_num_tokens)
    least = checks.count("min_num_tokens", min_num_tokens)
    if not 1 <= least <= most:
        raise ValueError(
            f"`min_num_tokens` must be from 1 to `max_num_tokens` ({most}), got {least}"
        )
    buckets = []
    size = map_to_hybrid_bucket_uncapped(least)
    while size < most:
        buckets.append(size)
        size = map_to_hybrid_bucket_uncapped(size + 1)
    return (*buckets, most)
