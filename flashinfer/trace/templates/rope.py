"""Templates and references of the rotary position embeddings.

The references compute in float64 and return unrounded results. A position outside the cos-sin
cache gives NaN. A token that belongs to no request keeps its values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..specs import FLOATING, Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool
) -> torch.Tensor:
    """Rotate the first columns of ``x[tokens, heads, dim]``; ``cos[tokens, rotary_dim / 2]``.

    Pairs are (j, j + rotary_dim / 2), or (2 j, 2 j + 1) when interleaved.
    """
    half = cos.shape[-1]
    x = x.double()
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    if interleave:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
    else:
        a, b = rotary[..., :half], rotary[..., half:]
    pair = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1)
    return torch.cat([rotated, rest], -1)


def _cached_angles(cache: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of each token; NaN where the cache has no such row."""
    positions = positions.long()
    valid = (positions >= 0) & (positions < cache.shape[0])
    # The rows first, as a cache of a long context has far more than are needed.
    rows = (cache if len(cache) else cache.new_zeros(1, cache.shape[1]))[positions.where(valid, 0)]
    rows = rows.double().where(valid[:, None], float("nan"))
    half = cache.shape[1] // 2
    return rows[:, :half], rows[:, half:]


def _request_positions(
    indptr: torch.Tensor, offsets: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """offsets[b] + i - indptr[b] for token i of request b; 0 for a token of no request."""
    tokens = torch.arange(num_tokens, device=indptr.device)
    bound = torch.searchsorted(indptr.long(), tokens, right=True)
    valid = (bound > 0) & (bound <= offsets.shape[0])
    if not valid.any():
        return torch.zeros_like(tokens)
    request = (bound - 1).clamp(0, offsets.shape[0] - 1)
    return (offsets.long()[request] + tokens - indptr.long()[request]).where(valid, 0)


def _computed_angles(
    positions: torch.Tensor, rotary_dim: int, rope_scale: float, rope_theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * theta^(-2 j / rotary_dim) / scale."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
    frequency = rope_theta ** (-exponent / rotary_dim) / rope_scale
    angle = positions.double()[:, None] * frequency
    return angle.cos(), angle.sin()


def _llama31_angles(
    positions: torch.Tensor,
    rotary_dim: int,
    rope_scale: float,
    rope_theta: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies of few periods in the old context are divided by the scale, of many kept."""
    if low_freq_factor >= high_freq_factor:
        raise ValueError(
            f"`low_freq_factor` must be less than `high_freq_factor` {high_freq_factor}, "
            f"got {low_freq_factor}"
        )
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
    base = rope_theta ** (-exponent / rotary_dim)
    periods = old_context_len * base / (2 * math.pi)
    keep = ((periods - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    angle = positions.double()[:, None] * ((1 - keep) * base / rope_scale + keep * base)
    return angle.cos(), angle.sin()


def _apply_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, b) = (a cos - b sin, b cos + a sin), angle = position theta^(-2 j / d) / scale.

    Source: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    positions = _request_positions(indptr, offsets, q.shape[0])
    cos, sin = _computed_angles(positions, rotary_dim or q.shape[-1], rope_scale, rope_theta)
    return _rotate(q, cos, sin, interleave), _rotate(k, cos, sin, interleave)


def _apply_rope_pos_ids_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As apply_rope, with a position for each token.

    Source: as apply_rope.
    """
    cos, sin = _computed_angles(pos_ids, rotary_dim or q.shape[-1], rope_scale, rope_theta)
    return _rotate(q, cos, sin, interleave), _rotate(k, cos, sin, interleave)


def _apply_llama31_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As apply_rope, with frequencies (1 - s) f / scale + s f, s = clamp((L f / 2 pi - low) /
    (high - low), 0, 1), L = old_context_len.

    Source: A. Grattafiori et al., "The Llama 3 Herd of Models", 2024, and its released code.
    """
    positions = _request_positions(indptr, offsets, q.shape[0])
    factors = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    cos, sin = _llama31_angles(positions, rotary_dim or q.shape[-1], *factors)
    return _rotate(q, cos, sin, interleave), _rotate(k, cos, sin, interleave)


def _apply_llama31_rope_pos_ids_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As apply_llama31_rope, with a position for each token.

    Source: as apply_llama31_rope.
    """
    factors = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    cos, sin = _llama31_angles(pos_ids, rotary_dim or q.shape[-1], *factors)
    return _rotate(q, cos, sin, interleave), _rotate(k, cos, sin, interleave)


def _apply_rope_with_cos_sin_cache_reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, b) = (a cos - b sin, b cos + a sin), cos and sin looked up by position.

    Source: as apply_rope.
    """
    cos, sin = _cached_angles(cos_sin_cache, positions)
    results = []
    for x in (query, key):
        heads = x.reshape(x.shape[0], x[0].numel() // head_size if len(x) else 0, head_size)
        results.append(_rotate(heads, cos, sin, not is_neox).reshape(x.shape))
    return results[0], results[1]


def _axes(*, requests: bool) -> dict[str, Axis]:
    axes: dict[str, Axis] = {
        "num_tokens": Var("Tokens of all requests."),
        "num_qo_heads": Const("Heads of q.", abbrev="q"),
        "num_kv_heads": Const("Heads of k.", abbrev="kv"),
        "head_dim": Const("Elements of a head.", abbrev="d"),
        "rotary_dim": Const(
            "Leading elements that are rotated.", abbrev="r", derive=lambda v: v["head_dim"]
        ),
    }
    if requests:
        axes["batch_size"] = Var("Requests.")
        axes["len_indptr"] = Var("batch_size + 1.")
    return axes


_Q = Tensor(["num_tokens", "num_qo_heads", "head_dim"], param="q", dtypes=FLOATING, layout="rows")
_K = Tensor(["num_tokens", "num_kv_heads", "head_dim"], param="k", dtype_from="q", layout="rows")
_INDPTR = Tensor(
    ["len_indptr"],
    dtype="int32",
    layout="rows",
    description="First token of each request.",
    converts=True,
)
_OFFSETS = Tensor(
    ["batch_size"],
    dtype="int32",
    layout="rows",
    description="Position of each request's first token.",
    converts=True,
)
_POS_IDS = Tensor(
    ["num_tokens"],
    dtypes=("int32", "int64"),
    layout="rows",
    description="Position of each token in its sequence.",
)
_FACTORS: dict[str, Value] = {
    "rope_scale": Scalar(above=0, description="Positions are divided by it."),
    "rope_theta": Scalar(above=0, description="Base of the wavelengths."),
}
_LLAMA31_FACTORS: dict[str, Value] = _FACTORS | {
    "low_freq_factor": Scalar(above=0, description="Periods below which the scale holds fully."),
    "high_freq_factor": Scalar(above=0, description="Periods above which it does not hold."),
    "old_context_len": Scalar(above=0, description="Context that periods are counted in, tokens."),
}


def _example(like: torch.Tensor, /, **others: Any) -> dict[str, Any]:
    """Valid arguments in the dtype and on the device of `like`, seeded by its values.

    A tuple stands for random values of that shape, a list for the int32 tensor of its elements.
    """
    generator = torch.Generator().manual_seed(int(like.double().abs().sum().item() * 1e3))
    arguments: dict[str, Any] = {}
    for name, value in others.items():
        if isinstance(value, tuple):
            value = torch.randn(value, generator=generator).to(like.device, like.dtype)
        elif isinstance(value, list):
            value = torch.tensor(value, dtype=torch.int32, device=like.device)
        arguments[name] = value
    return arguments


_LLAMA31_VALUES = {
    "rope_scale": 8.0,
    "rope_theta": 1e4,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "old_context_len": 8192,
}


def _init(requests: bool, llama31: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {"q": (7, 4, 64), "k": (7, 2, 64)}
        if requests:
            values |= {"indptr": [0, 3, 3, 7], "offsets": [90, 11, 400]}
        else:
            values |= {"pos_ids": [0, 1, 77, 400, 31, 5000, 2]}
        values |= {"rope_scale": 1.0, "rope_theta": 1e4} | (_LLAMA31_VALUES if llama31 else {})
        return _example(arguments["q"], **values)

    return init


def _template(
    name: str, reference: Callable[..., Any], *, requests: bool, llama31: bool, inplace: bool
) -> TraceTemplate:
    where: dict[str, Value] = (
        {"indptr": _INDPTR, "offsets": _OFFSETS} if requests else {"pos_ids": _POS_IDS}
    )
    target = ("q", "k") if inplace else (None, None)
    constraints = ["rotary_dim >= 2", "rotary_dim % 2 == 0", "rotary_dim <= head_dim"]
    constraints += ["rotary_dim <= 512"]
    constraints += ["len_indptr == batch_size + 1"] if requests else []
    factors = _LLAMA31_FACTORS if llama31 else _FACTORS
    return TraceTemplate(
        op_type="rope",
        name_prefix=name,
        description="Rotary position embedding of q and k, angles from frequencies.",
        axes=_axes(requests=requests),
        inputs={"q": _Q, "k": _K, **where, **factors},
        outputs={
            "q_out": Tensor(
                ["num_tokens", "num_qo_heads", "head_dim"],
                param=target[0],
                dtype_from="q",
                layout="rows",
            ),
            "k_out": Tensor(
                ["num_tokens", "num_kv_heads", "head_dim"],
                param=target[1],
                dtype_from="k",
                layout="rows",
            ),
        },
        constraints=constraints,
        options={"interleave": (False, True)},
        tags=["status:verified"],
        reference=reference,
        init=_init(requests, llama31),
    )


apply_rope_trace = _template(
    "apply_rope", _apply_rope_reference, requests=True, llama31=False, inplace=False
)
apply_rope_inplace_trace = _template(
    "apply_rope_inplace", _apply_rope_reference, requests=True, llama31=False, inplace=True
)
apply_rope_pos_ids_trace = _template(
    "apply_rope_pos_ids",
    _apply_rope_pos_ids_reference,
    requests=False,
    llama31=False,
    inplace=False,
)
apply_rope_pos_ids_inplace_trace = _template(
    "apply_rope_pos_ids_inplace",
    _apply_rope_pos_ids_reference,
    requests=False,
    llama31=False,
    inplace=True,
)
apply_llama31_rope_trace = _template(
    "apply_llama31_rope",
    _apply_llama31_rope_reference,
    requests=True,
    llama31=True,
    inplace=False,
)
apply_llama31_rope_inplace_trace = _template(
    "apply_llama31_rope_inplace",
    _apply_llama31_rope_reference,
    requests=True,
    llama31=True,
    inplace=True,
)
apply_llama31_rope_pos_ids_trace = _template(
    "apply_llama31_rope_pos_ids",
    _apply_llama31_rope_pos_ids_reference,
    requests=False,
    llama31=True,
    inplace=False,
)
apply_llama31_rope_pos_ids_inplace_trace = _template(
    "apply_llama31_rope_pos_ids_inplace",
    _apply_llama31_rope_pos_ids_reference,
    requests=False,
    llama31=True,
    inplace=True,
)


def _cache_init(heads: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "positions": [3, 0, 17, 99, 4],
        "query": (5, 4, 32) if heads else (5, 128),
        "key": (5, 2, 32) if heads else (5, 64),
        "head_size": 32,
    }
    values = _example(arguments["query"], **values, cos_sin_cache=(100, 32))
    return {**values, "cos_sin_cache": values["cos_sin_cache"].float(), "is_neox": True}


def _cache_template(name: str, *, heads: bool, inplace: bool) -> TraceTemplate:
    """For query and key as [tokens, heads * head_size], or with a dimension of heads."""
    axes: dict[str, Axis] = {"num_tokens": Var("Tokens of all requests.")}
    if heads:
        q_dims = ["num_tokens", "num_qo_heads", "head_size"]
        k_dims = ["num_tokens", "num_kv_heads", "head_size"]
        axes["num_qo_heads"] = Const("Heads of the query.", abbrev="q")
        axes["num_kv_heads"] = Const("Heads of the key.", abbrev="kv")
        constraints = []
    else:
        q_dims, k_dims = ["num_tokens", "query_size"], ["num_tokens", "key_size"]
        axes["query_size"] = Const("Heads of the query times head_size.", abbrev="q")
        axes["key_size"] = Const("Heads of the key times head_size.", abbrev="kv")
        constraints = ["query_size % head_size == 0", "key_size % head_size == 0"]
    axes["head_size"] = Const("Elements of a head.", abbrev="d")
    axes["rotary_dim"] = Const("Leading elements of a head that are rotated.", abbrev="r")
    axes["max_position"] = Var("Rows of the cache.")
    return TraceTemplate(
        op_type="rope",
        name_prefix=name,
        description="Rotary position embedding of query and key, angles from a cache.",
        axes=axes,
        inputs={
            "query": Tensor(q_dims, dtypes=FLOATING, layout="rows"),
            "key": Tensor(k_dims, dtype_from="query", layout="rows"),
            "positions": _POS_IDS,
            "cos_sin_cache": Tensor(
                ["max_position", "rotary_dim"],
                dtypes=FLOATING,
                layout="rows",
                description="Row of each position: rotary_dim / 2 cosines, then as many sines.",
            ),
        },
        outputs={
            "query_out": Tensor(
                q_dims, param="query" if inplace else None, dtype_from="query", layout="rows"
            ),
            "key_out": Tensor(
                k_dims, param="key" if inplace else None, dtype_from="key", layout="rows"
            ),
        },
        constraints=[
            "rotary_dim >= 2",
            "rotary_dim % 2 == 0",
            "head_size >= rotary_dim",
            *constraints,
        ],
        options={"is_neox": (True, False)},
        tags=["status:verified"],
        reference=_apply_rope_with_cos_sin_cache_reference,
        init=functools.partial(_cache_init, heads),
    )


def _by_rank(flat: TraceTemplate, heads: TraceTemplate) -> Callable[..., TraceTemplate]:
    def choose(**arguments: Any) -> TraceTemplate:
        return heads if getattr(arguments.get("query"), "ndim", 2) == 3 else flat

    choose.templates = [flat, heads]  # type: ignore[attr-defined]
    return choose


apply_rope_with_cos_sin_cache_trace = _by_rank(
    _cache_template("apply_rope_with_cos_sin_cache", heads=False, inplace=False),
    _cache_template("apply_rope_with_cos_sin_cache_heads", heads=True, inplace=False),
)
apply_rope_with_cos_sin_cache_inplace_trace = _by_rank(
    _cache_template("apply_rope_with_cos_sin_cache_inplace", heads=False, inplace=True),
    _cache_template("apply_rope_with_cos_sin_cache_inplace_heads", heads=True, inplace=True),
)
