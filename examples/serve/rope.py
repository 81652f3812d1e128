"""Scaling of RoPE that a checkpoint asks for, as cosines and sines of every position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Rope = dict[str, Any]


def read_rope(values: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """RoPE as a ``config.json`` has it, checked and completed.

    Parameters
    ----------
    values : mapping
        Its content, with ``rope_parameters``, or as older ones have it: ``rope_scaling`` and
        ``rope_theta``.
    head_dim, max_positions : int
        Head size and longest context of the model.

    Returns
    -------
    dict
        ``rope_type``, ``rope_theta`` and the numbers that this type has.

    Raises
    ------
    ValueError
        If it asks for something not implemented, or lacks a number; names the key.
    """
    key = next((k for k in ("rope_parameters", "rope_scaling") if values.get(k)), "")
    given = values[key] if key else {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ValueError(f"`{key}` must be the parameters of all layers, got {given!r}")
    rope = {name: value for name, value in given.items() if value is not None}
    rope.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if kind not in _NUMBERS:
        raise ValueError(f"`rope_type` must be one of {', '.join(_NUMBERS)}, got {kind!r}")
    partial = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"`partial_rotary_factor` must be 1, got {partial}")
    if kind in ("llama3", "yarn", "longrope"):
        trained = values.get("original_max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", max_positions)
        if trained is not None:
            rope["original_max_position_embeddings"] = trained
        if kind != "llama3" and _is_number(rope["original_max_position_embeddings"]):
            rope.setdefault("factor", max_positions / rope["original_max_position_embeddings"])
    _check(rope, head_dim)
    return rope


def _check(rope: Rope, head_dim: int) -> None:
    kind = rope["rope_type"]
    for name in ("rope_theta", *_NUMBERS[kind], *(_OPTIONAL & rope.keys())):
        low = 1 if name in ("rope_theta", "original_max_position_embeddings") else 0
        if not (_is_number(rope.get(name)) and rope[name] > low):
            raise ValueError(
                f"`{name}` of `rope_type` {kind!r} must be a number above {low}, "
                f"got {rope.get(name)!r}"
            )
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(
            f"`low_freq_factor` must be less than `high_freq_factor` {rope['high_freq_factor']}, "
            f"got {rope['low_freq_factor']}"
        )
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors, count = rope.get(name), head_dim // 2
        if not (
            isinstance(factors, list) and len(factors) == count and all(map(_is_number, factors))
        ):
            raise ValueError(f"`{name}` must be a list of {count} numbers above 0, got {factors!r}")


def rope_cache(rope: Rope, head_dim: int, max_positions: int) -> torch.Tensor:
    """Cosines and sines for `flashinfer.apply_rope_with_cos_sin_cache`.

    Parameters
    ----------
    rope : dict
        Result of `read_rope`.
    head_dim, max_positions : int
        Head size and longest context of the model.

    Returns
    -------
    torch.Tensor
        ``[max_positions, head_dim]`` float32. If `switch_length` is not None, as many rows for
        longer texts follow.
    """
    base = float(rope["rope_theta"]) ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    variants = [_FREQUENCIES[rope["rope_type"]](rope, base)]
    if switch_length(rope, max_positions) is not None:
        variants.append(_longrope(rope, base, "long_factor"))
    positions = torch.arange(max_positions).double()
    angle = torch.cat([positions[:, None] * frequency for frequency in variants])
    return (torch.cat([angle.cos(), angle.sin()], -1) * _attention_factor(rope)).float()


def switch_length(rope: Rope, max_positions: int) -> int | None:
    """Length of a text beyond which it has other frequencies, at every position, or None."""
    if rope["rope_type"] != "longrope":
        return None
    length = rope["original_max_position_embeddings"]
    return length if length < max_positions else None


def _is_number(value: object) -> bool:
    # NaN is not above 0; booleans are ints.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _attention_factor(rope: Rope) -> float:
    """Factor of queries and keys, hence squared of their products."""
    kind, given = rope["rope_type"], rope.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return float(given)
    factor = rope["factor"]
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rope["original_max_position_embeddings"]))

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1

    if "mscale" in rope and "mscale_all_dim" in rope:
        return temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
    return temperature(1.0)


def _unscaled(rope: Rope, base: torch.Tensor) -> torch.Tensor:
    """`dynamic` changes frequencies only of texts longer than `max_position_embeddings`."""
    return base


def _linear(rope: Rope, base: torch.Tensor) -> torch.Tensor:
    return base / rope["factor"]


def _llama3(rope: Rope, base: torch.Tensor) -> torch.Tensor:
    """Divided by `factor` where the original context has few periods, kept where it has many.

    Source: "The Llama 3 Herd of Models", 2024.
    """
    periods = rope["original_max_position_embeddings"] * base / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((periods - low) / (high - low)).clamp(0, 1)
    return base * (keep + (1 - keep) / rope["factor"])


def _yarn(rope: Rope, base: torch.Tensor) -> torch.Tensor:
    """Kept for pairs of more than `beta_fast` turns in the original context, divided by `factor`
    below `beta_slow` turns; linear in the number of the pair between.

    Source: B. Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models",
    2023.
    """
    pairs = len(base)

    def pair_of(turns: float) -> float:
        periods = rope["original_max_position_embeddings"] / (2 * math.pi * turns)
        return pairs * math.log(periods) / math.log(rope["rope_theta"])

    first, last = pair_of(rope.get("beta_fast", 32)), pair_of(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = (last - first) or 1e-3  # a step, where there is nothing between
    divided = ((torch.arange(pairs).double() - first) / width).clamp(0, 1)
    return base * (1 - divided + divided / rope["factor"])


def _longrope(rope: Rope, base: torch.Tensor, factors: str = "short_factor") -> torch.Tensor:
    """A divisor for each pair, found by search.

    Source: Y. Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024.
    """
    return base / torch.tensor(rope[factors]).double()


_FREQUENCIES: dict[str, Callable[[Rope, torch.Tensor], torch.Tensor]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _unscaled,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
_ORIGINAL = ("factor", "original_max_position_embeddings")
_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (*_ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": _ORIGINAL,
    "longrope": _ORIGINAL,
}
_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
