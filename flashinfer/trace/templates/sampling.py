"""Templates and references of softmax, sampling and the filters top-k, top-p and min-p.

The references work row by row: they sort, sum weights as integers (the fixed point of the kernels),
and draw with the same counter-based generator, so their tokens are those of the kernels but for the
last bits of an exponential.

A parameter may be one number or one per row, and outputs may be drawn from chosen rows. Templates
are made for what a call passes; those with a tensor for every parameter are the ones that are
listed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..specs import FLOATING, Axis, Const, Scalar, Tensor, Value, Var, dtype_name
from ..template import TraceTemplate


def _philox_bits(seed: int, offset: int, stream: int, draw: int) -> int:
    """64 bits of Philox4x32-10: key `seed`, counter (`offset`, `stream`, `draw`)."""
    mask = 2**32 - 1
    c0, c1, c2, c3 = offset & mask, offset >> 32 & mask, stream, draw
    k0, k1 = seed & mask, seed >> 32 & mask
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return c1 << 32 | c0


def _row_value(value: Any, row: int) -> Any:
    """The number of a row, of a parameter that is one number or one per row."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.reshape(-1)[row if value.numel() > 1 else 0].item()


def _row_key(seed: Any, offset: Any, row: int, num_rows: int) -> tuple[int, int, int]:
    """Seed, offset and stream of an output; rows that share a seed have a stream each."""
    if seed is None:
        if offset is not None:
            raise ValueError("`offset` needs a `seed`, got None")
        seed = int(torch.randint(2**62, ()))
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, torch.Tensor) and value.numel() not in (1, num_rows):
            raise ValueError(f"`{name}` must have shape [{num_rows}], got {list(value.shape)}")
    shared = not isinstance(seed, torch.Tensor) or (seed.numel() == 1 and num_rows != 1)
    number = _row_value(0 if offset is None else offset, row)
    return int(_row_value(seed, row)), int(number), row if shared else 0


def _row_weights(row: torch.Tensor, logits: bool, temperature: float = 1.0) -> torch.Tensor | None:
    """Weights of a row as integers of at most 2^44; None if it has no distribution."""
    if row.isnan().any() or not temperature >= 0:
        return None
    largest = row.max()
    if logits:
        if largest == -math.inf:
            return None
        if largest == math.inf or temperature == 0:
            return (row == largest).long() << 43
        return torch.round(torch.exp((row - largest) / temperature) * 2.0**43).long()
    if not 0 < largest < math.inf:
        return None
    exponent = max(math.frexp(float(largest))[1] - 1, -126)
    return torch.round(row.clamp(min=0) * 2.0 ** (43 - exponent)).long()


def _single(value: float) -> float:
    """Rounded to float32, as parameters are."""
    return float(torch.tensor(value, dtype=torch.float32))


def _row_threshold(
    row: torch.Tensor,
    weights: torch.Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    joint: bool = False,
) -> float:
    """The least value that top-k, then top-p (on the whole row if `joint`), and min-p keep."""
    values, order = row.sort(descending=True)
    threshold = -math.inf
    if 1 <= top_k < row.numel():
        threshold = float(values[int(top_k) - 1])
    if top_p < 1:
        seen = weights[order] if joint else weights[order] * (values >= threshold)
        total = int(seen.sum())
        target = min(max(math.ceil(max(_single(top_p), 0.0) * float(total)), 1), total)
        reached = int((seen.cumsum(0) < target).sum())
        threshold = max(threshold, float(values[reached]))
    if min_p > 0:
        threshold = max(threshold, _single(_single(min(min_p, 1.0)) * float(values[0])))
    return threshold


def _inverse(weights: torch.Tensor, key: tuple[int, int, int], draw: int) -> int:
    """The index where the running sum of integer weights passes a random part of the total."""
    target = _philox_bits(*key, draw) * int(weights.sum()) >> 64
    return int((weights.cumsum(0) <= target).sum())


def _nucleus_token(
    row: torch.Tensor, weights: torch.Tensor, top_p: float, key: tuple[int, int, int]
) -> int:
    """A draw that is repeated among the larger elements while it is not in the nucleus.

    It is in if the larger elements weigh less than `top_p` of the row. After five draws the nucleus
    is searched for.
    """
    total = int(weights.sum())
    wanted = min(max(math.ceil(max(_single(top_p), 0.0) * float(total)), 1), total)
    left = weights
    for draw in range(5):
        token = _inverse(left, key, draw)
        left = weights * (row > row[token])
        if top_p >= 1 or int(left.sum()) < wanted:
            return token
    return _inverse(weights * (row >= _row_threshold(row, weights, top_p=top_p)), key, 6)


def _draw(
    rows: torch.Tensor,
    logits: bool,
    indices: torch.Tensor | None,
    check_nan: bool,
    seed: Any,
    offset: Any,
    filters: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per output and whether it comes from a distribution; 0 where it does not."""
    if check_nan and rows.isnan().any():
        raise ValueError(f"`{'logits' if logits else 'probs'}` must not contain NaN")
    chosen = list(range(rows.shape[0])) if indices is None else indices.tolist()
    tokens, valid = [0] * len(chosen), [False] * len(chosen)
    for output, index in enumerate(chosen):
        key = _row_key(seed, offset, output, len(chosen))
        if not 0 <= index < rows.shape[0]:
            continue
        row = rows[index].double()
        own = {name: _row_value(value, index) for name, value in filters.items()}
        weights = _row_weights(row, logits)
        if weights is None or any(value != value for value in own.values()):
            continue
        valid[output] = True
        # A top-k for all rows that keeps everything leaves a draw by top-p alone.
        top_k = filters.get("top_k", 0)
        if "top_p" in own and isinstance(top_k, int) and not 1 <= top_k < row.numel():
            tokens[output] = _nucleus_token(row, weights, own["top_p"], key)
        else:
            kept = weights * (row >= _row_threshold(row, weights, **own))
            tokens[output] = _inverse(kept, key, 0)
    samples = torch.tensor(tokens, dtype=torch.int64, device=rows.device)
    return samples, torch.tensor(valid, dtype=torch.bool, device=rows.device)


def _filtered_row(
    row: torch.Tensor, weights: torch.Tensor, filters: dict[str, Any]
) -> torch.Tensor:
    """The kept weights of a row divided by their sum."""
    kept = weights * (row >= _row_threshold(row, weights, **filters))
    return kept.double() / float(kept.sum())


def _softmax_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor | float | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """p = exp(x / t) / sum(exp(x / t)) of each row.

    Source: the definition; the limits t -> 0 and max(x) -> inf share 1 among the maxima.
    """
    out = torch.full(logits.shape, math.nan, dtype=torch.float64, device=logits.device)
    for i, row in enumerate(logits.double()):
        own = 1.0 if temperature is None else float(_row_value(temperature, i))
        if row.isnan().any() or not own >= 0 or row.max() == -math.inf:
            continue
        limit = own == 0 or row.max() == math.inf
        weights = (row == row.max()).double() if limit else torch.exp((row - row.max()) / own)
        out[i] = weights / weights.sum()
    return out


def _sampling_from_probs_reference(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """P(token = i) = p_i / sum(p), by the inverse of the distribution function.

    Source: L. Devroye, "Non-Uniform Random Variate Generation", 1986, chapter III.2.
    """
    drawn = _draw(probs, False, indices, check_nan, seed, offset, {})
    return drawn if return_valid else drawn[0]


def _sampling_from_logits_reference(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """P(token = i) = exp(x_i) / sum(exp(x)).

    Source: as sampling_from_probs.
    """
    return _draw(logits, True, indices, check_nan, seed, offset, {})[0]


def _top_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """kept = {i : p_i >= t}, t the largest with sum(p_i >= t) >= top_p * sum(p); drawn from it.

    Source: A. Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019.
    """
    drawn = _draw(probs, False, indices, check_nan, seed, offset, {"top_p": top_p})
    return drawn if return_valid else drawn[0]


def _top_k_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """kept = {i : p_i >= the top_k-th largest}; drawn from it.

    Source: A. Fan et al., "Hierarchical Neural Story Generation", 2018.
    """
    drawn = _draw(probs, False, indices, check_nan, seed, offset, {"top_k": top_k})
    return drawn if return_valid else drawn[0]


def _min_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """kept = {i : p_i >= min_p * max(p)}; drawn from it.

    Source: M. Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.
    """
    drawn = _draw(probs, False, indices, check_nan, seed, offset, {"min_p": min_p})
    return drawn if return_valid else drawn[0]


def _top_k_top_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """As top_k_sampling_from_probs, then as top_p_sampling_from_probs on what is left (or both).

    Source: as those.
    """
    filters = {"top_k": top_k, "top_p": top_p, "joint": filter_apply_order == "joint"}
    drawn = _draw(probs, False, indices, check_nan, seed, offset, filters)
    return drawn if return_valid else drawn[0]


def _top_k_top_p_sampling_from_logits_reference(
    logits: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """As top_k_top_p_sampling_from_probs of p = exp(x) / sum(exp(x)).

    Source: as that.
    """
    filters = {"top_k": top_k, "top_p": top_p, "joint": filter_apply_order == "joint"}
    return _draw(logits, True, indices, check_nan, seed, offset, filters)[0]


def _renormalise(probs: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    """Each row's kept part divided by its sum; zero without weight, NaN with a NaN."""
    out = torch.zeros(probs.shape, dtype=torch.float64, device=probs.device)
    for i, row in enumerate(probs.double()):
        own = _row_value(value, i)
        weights = _row_weights(row, False)
        if row.isnan().any() or own != own:
            out[i] = math.nan
        elif weights is not None:
            kept = row * (row >= _row_threshold(row, weights, **{name: own}))
            out[i] = kept.clamp(min=0) / kept.clamp(min=0).sum()
    return out


def _top_k_renorm_probs_reference(
    probs: torch.Tensor, top_k: torch.Tensor | int, is_deterministic: bool = False
) -> torch.Tensor:
    """q_i = p_i / sum(kept p) where p_i is at least the top_k-th largest, else 0.

    Source: as top_k_sampling_from_probs.
    """
    return _renormalise(probs, "top_k", top_k)


def _top_p_renorm_probs_reference(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    """q_i = p_i / sum(kept p) in the nucleus, else 0.

    Source: as top_p_sampling_from_probs.
    """
    return _renormalise(probs, "top_p", top_p)


def _top_k_mask_logits_reference(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """y_i = x_i where x_i is at least the top_k-th largest, else -inf.

    Source: as top_k_sampling_from_probs.
    """
    out = torch.full(logits.shape, math.nan, dtype=torch.float64, device=logits.device)
    for i, row in enumerate(logits.double()):
        if not row.isnan().any():
            threshold = _row_threshold(row, row, top_k=_row_value(top_k, i))
            out[i] = row.masked_fill(row < threshold, -math.inf)
    return out


def _chain_speculative_sampling_reference(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept x_i while u_i * q_i(x_i) < p_i(x_i), then draw from max(p - q, 0) or the last p.

    Source: C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
    2023.
    """
    batch, num_drafts, vocab_size = draft_probs.shape
    token_ids = torch.full((batch, num_drafts + 1), -1, device=draft_probs.device)
    counts = torch.zeros(2, batch, dtype=torch.int64, device=draft_probs.device)
    for b in range(batch):
        key = _row_key(seed, offset, b, batch)
        accepted = []
        for i, token in enumerate(draft_token_ids[b].tolist()):
            uniform = (_philox_bits(*key, i + 1) >> 40) * 2.0**-24
            known = 0 <= token < vocab_size
            accepted.append(
                known
                and _single(uniform * float(draft_probs[b, i, token]))
                < float(target_probs[b, i, token])
            )
        emitted = [*accepted, False].index(False)
        counts[0, b], counts[1, b] = sum(accepted), emitted
        token_ids[b, :emitted] = draft_token_ids[b, :emitted]
        row = target_probs[b, emitted]
        if emitted < num_drafts:
            difference = row - draft_probs[b, emitted]
            difference = difference.where(~(difference <= 0), 0)
            row = difference if difference.isnan().any() or difference.max() > 0 else row
        weights = _row_weights(row.double(), False)
        token_ids[b, emitted] = 0
        if weights is not None:
            token_ids[b, emitted] = _inverse(weights, key, 0)
    for count, before in enumerate(
        (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    ):
        if before is not None:
            counts[count] += before
    return token_ids, counts[0], counts[1]


_DESCRIPTIONS = {
    "temperature": "Divides the logits.",
    "top_k": "Elements to keep; less than 1: all.",
    "top_p": "Weight to keep, as a share of the row's.",
    "min_p": "Least share of the largest probability.",
    "seed": "Key of the random numbers.",
    "offset": "Counter of the random numbers.",
}
_DTYPES = {"top_k": "int32", "seed": "int64", "offset": "int64"}
_EXAMPLES: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1}


# What is passed for a parameter: its name, dtype, and whether it is one number for all rows.
_Passed = tuple[str, str, bool]


def _passed_tensors(names: tuple[str, ...], arguments: Mapping[str, Any]) -> frozenset[_Passed]:
    """The parameters of a call that are tensors."""
    tensors = {n: v for n, v in arguments.items() if n in names and isinstance(v, torch.Tensor)}
    return frozenset(
        (name, dtype_name(value.dtype), name in ("seed", "offset") and value.numel() == 1)
        for name, value in tensors.items()
    )


def _listed(names: tuple[str, ...]) -> frozenset[_Passed]:
    """A tensor of the usual dtype with a number per row, for every parameter."""
    return frozenset((name, _DTYPES.get(name, "float32"), False) for name in names)


def _parameter(name: str, passed: frozenset[_Passed], axis: str) -> Value:
    """One per row where the call passes a tensor, else a number."""
    usual, description = _DTYPES.get(name, "float32"), _DESCRIPTIONS[name]
    for key, dtype, single in passed:
        if key == name:
            is_integer = "int" in dtype
            declared = dtype if is_integer == ("int" in usual) else usual
            return Tensor(["one" if single else axis], dtype=declared, description=description)
    return Scalar(usual, description=description)


def _complete(
    kind: str, parameters: tuple[str, ...], valid: bool = False
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`init` of a template: distributions and sensible parameters in place of normal numbers."""

    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        result = dict(arguments)
        if kind == "probs":
            result["probs"] = torch.softmax(arguments["probs"].float(), -1).to(
                arguments["probs"].dtype
            )
        for name in parameters:
            if name in ("seed", "offset"):
                number = torch.arange(len(result[name]), device=result[name].device)
                result[name] = number * 3 + 11
            else:
                result[name] = torch.full_like(result[name], _EXAMPLES[name]).to(
                    getattr(torch, _DTYPES.get(name, "float32"))
                )
        return {**result, "return_valid": True} if valid else result

    return init


def _draw_trace(
    name: str, reference: Callable[..., Any], filters: tuple[str, ...], description: str
) -> Callable[..., TraceTemplate]:
    """Dispatch function of a draw: chooses by what is passed per row."""
    kind = "logits" if name.endswith("logits") else "probs"
    names = (*filters, "seed", "offset")
    ordered = len(filters) == 2

    @functools.cache
    def make(
        passed: frozenset[_Passed], absent: frozenset[str], indices: str | None, valid: bool
    ) -> TraceTemplate:
        row_axis = "batch_size" if indices is None else "num_rows"
        axes: dict[str, Axis] = {"batch_size": Var("Draws.")}
        if indices is not None:
            axes["num_rows"] = Var("Distributions.")
        axes["vocab_size"] = Const("Elements of a distribution.", abbrev="v")
        if any(single for _, _, single in passed):
            axes["one"] = Const("One for all rows.", abbrev="", value=1)
        inputs: dict[str, Value] = {kind: Tensor([row_axis, "vocab_size"], dtypes=FLOATING,
                                                 layout="rows")}  # fmt: skip
        for n in filters:
            inputs[n] = _parameter(n, passed, row_axis)
        if indices is not None:
            inputs["indices"] = Tensor(
                ["batch_size"], dtype=indices, description="Row of each draw."
            )
        for n in ("seed", "offset"):
            if n not in absent:
                inputs[n] = _parameter(n, passed, "batch_size")
        outputs: dict[str, Value] = {
            "samples": Tensor(["batch_size"], dtype=indices or "int32", description="Tokens.")
        }
        if valid:
            outputs["valid"] = Tensor(
                ["batch_size"], dtype="bool", description="Whether there was a distribution."
            )
        options: dict[str, tuple[Any, ...]] = {"generator": (None,), "check_nan": (False, True)}
        if kind == "probs":
            options["return_valid"] = (valid,)
        if ordered:
            options["filter_apply_order"] = ("top_k_first", "joint")
        if indices is None:
            options["indices"] = (None,)
        options |= {n: (None,) for n in sorted(absent)}
        return TraceTemplate(
            op_type="sampling",
            name_prefix=name + ("_valid" if valid else ""),
            description=description,
            axes=axes,
            inputs=inputs,
            outputs=outputs,
            options=options,
            hints=["deterministic"],
            tags=["status:verified"],
            reference=reference,
            init=_complete(kind, names, valid),
        )

    def dispatch(**arguments: Any) -> TraceTemplate:
        absent = frozenset(n for n in ("seed", "offset") if arguments.get(n) is None)
        indices = arguments.get("indices")
        dtype = dtype_name(indices.dtype) if isinstance(indices, torch.Tensor) else None
        valid = bool(arguments.get("return_valid", False))
        return make(_passed_tensors(names, arguments), absent, dtype, valid)

    dispatch.templates = [  # type: ignore[attr-defined]
        make(_listed(names), frozenset(), None, valid)
        for valid in ((False, True) if kind == "probs" else (False,))
    ]
    return dispatch


def _row_trace(
    name: str,
    reference: Callable[..., Any],
    parameter: str,
    description: str,
    hints: list[str],
    out_dtype: str | None = None,
) -> Callable[..., TraceTemplate]:
    """Dispatch function of an operation that changes rows by one parameter."""
    kind = "probs" if name.endswith("probs") else "logits"

    @functools.cache
    def make(passed: frozenset[_Passed] | None) -> TraceTemplate:
        inputs: dict[str, Value] = {
            kind: Tensor(["batch_size", "vocab_size"], dtypes=FLOATING, layout="rows")
        }
        options: dict[str, tuple[Any, ...]] = {}
        if passed is None:
            options[parameter] = (None,)
        else:
            inputs[parameter] = _parameter(parameter, passed, "batch_size")
        return TraceTemplate(
            op_type="sampling",
            name_prefix=name,
            description=description,
            axes={
                "batch_size": Var("Rows."),
                "vocab_size": Const("Elements of a row.", abbrev="v"),
            },
            inputs=inputs,
            outputs={
                "output": Tensor(
                    ["batch_size", "vocab_size"],
                    dtype=out_dtype,
                    dtype_from=None if out_dtype else kind,
                    layout="rows",
                )
            },
            options=options,
            hints=hints,
            tags=["status:verified"],
            reference=reference,
            init=_complete(kind, (parameter,)),
        )

    def dispatch(**arguments: Any) -> TraceTemplate:
        given = arguments.get(parameter) is not None
        return make(_passed_tensors((parameter,), arguments) if given else None)

    dispatch.templates = [make(_listed((parameter,)))]  # type: ignore[attr-defined]
    return dispatch


softmax_trace = _row_trace(
    "softmax", _softmax_reference, "temperature", "Softmax of each row of logits.",
    ["enable_pdl"], "float32",
)  # fmt: skip
top_k_renorm_probs_trace = _row_trace(
    "top_k_renorm_probs", _top_k_renorm_probs_reference, "top_k",
    "The largest elements of each row divided by their sum.", ["is_deterministic"],
)  # fmt: skip
top_p_renorm_probs_trace = _row_trace(
    "top_p_renorm_probs", _top_p_renorm_probs_reference, "top_p",
    "The nucleus of each row divided by its sum.", ["is_deterministic"],
)  # fmt: skip
top_k_mask_logits_trace = _row_trace(
    "top_k_mask_logits", _top_k_mask_logits_reference, "top_k",
    "The largest elements of each row, and -inf for the others.", [],
)  # fmt: skip
sampling_from_probs_trace = _draw_trace(
    "sampling_from_probs", _sampling_from_probs_reference, (), "One token per distribution."
)
sampling_from_logits_trace = _draw_trace(
    "sampling_from_logits", _sampling_from_logits_reference, (), "One token per row of logits."
)
top_p_sampling_from_probs_trace = _draw_trace(
    "top_p_sampling_from_probs", _top_p_sampling_from_probs_reference, ("top_p",),
    "One token per distribution, from its nucleus.",
)  # fmt: skip
top_k_sampling_from_probs_trace = _draw_trace(
    "top_k_sampling_from_probs", _top_k_sampling_from_probs_reference, ("top_k",),
    "One token per distribution, from its largest elements.",
)  # fmt: skip
min_p_sampling_from_probs_trace = _draw_trace(
    "min_p_sampling_from_probs", _min_p_sampling_from_probs_reference, ("min_p",),
    "One token per distribution, from elements near the largest.",
)  # fmt: skip
top_k_top_p_sampling_from_probs_trace = _draw_trace(
    "top_k_top_p_sampling_from_probs", _top_k_top_p_sampling_from_probs_reference,
    ("top_k", "top_p"), "One token per distribution, after top-k and top-p.",
)  # fmt: skip
top_k_top_p_sampling_from_logits_trace = _draw_trace(
    "top_k_top_p_sampling_from_logits", _top_k_top_p_sampling_from_logits_reference,
    ("top_k", "top_p"), "One token per row of logits, after top-k and top-p.",
)  # fmt: skip


def _complete_drafts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Distributions and tokens; the target has one position more than the drafts."""
    result = dict(arguments)
    drafts, target = arguments["draft_probs"], arguments["target_probs"]
    positions = drafts.shape[1] + 1
    target = target[:, :1].expand(-1, positions, -1) + 0.1 * torch.arange(
        positions, device=target.device
    ).view(1, -1, 1)
    result["draft_probs"] = torch.softmax(drafts, -1)
    result["target_probs"] = torch.softmax(target * 2, -1).contiguous()
    result["draft_token_ids"] = result["draft_probs"].argmax(-1).int()
    for name in ("seed", "offset"):
        result[name] = torch.arange(drafts.shape[0], device=drafts.device) + 5
    return result


def _chain_trace() -> Callable[..., TraceTemplate]:
    @functools.cache
    def make(
        passed: frozenset[_Passed], absent: frozenset[str], added: frozenset[str]
    ) -> TraceTemplate:
        shape = ["batch_size", "num_drafts", "vocab_size"]
        inputs: dict[str, Value] = {
            "draft_probs": Tensor(shape, dtype="float32", layout="matrix"),
            "draft_token_ids": Tensor(shape[:2], dtype="int32", layout="matrix"),
            "target_probs": Tensor(
                ["batch_size", "num_positions", "vocab_size"], dtype="float32", layout="matrix"
            ),
        }
        axes: dict[str, Axis] = {
            "batch_size": Var("Requests."),
            "num_drafts": Const("Draft tokens of a request.", abbrev="n"),
            "num_positions": Const(
                "num_drafts + 1.", abbrev="", derive=lambda v: v["num_drafts"] + 1
            ),
            "vocab_size": Const("Elements of a distribution.", abbrev="v"),
        }
        if any(single for _, _, single in passed):
            axes["one"] = Const("One for all rows.", abbrev="", value=1)
        for n in ("seed", "offset"):
            if n not in absent:
                inputs[n] = _parameter(n, passed, "batch_size")
        counts = {
            "accepted": "maybe_output_accepted_token_num",
            "emitted": "maybe_output_emitted_draft_token_num",
        }
        outputs: dict[str, Value] = {
            "output_token_ids": Tensor(["batch_size", "num_positions"], dtype="int32")
        }
        for key, param in counts.items():
            if param in added:
                inputs[param] = Tensor(["batch_size"], dtype="int32")
            outputs[key] = Tensor(["batch_size"], dtype="int32", param=param)
        options: dict[str, tuple[Any, ...]] = {"generator": (None,)}
        options |= {n: (None,) for n in sorted(absent)}
        return TraceTemplate(
            op_type="sampling",
            name_prefix="chain_speculative_sampling",
            description="Draft tokens that the target model accepts, and one of its own.",
            axes=axes,
            inputs=inputs,
            outputs=outputs,
            constraints=["num_positions == num_drafts + 1"],
            options=options,
            hints=["deterministic"],
            tags=["status:verified"],
            reference=_chain_speculative_sampling_reference,
            init=_complete_drafts,
        )

    def dispatch(**arguments: Any) -> TraceTemplate:
        absent = frozenset(n for n in ("seed", "offset") if arguments.get(n) is None)
        added = {n for n, v in arguments.items() if n.startswith("maybe_") and v is not None}
        return make(_passed_tensors(("seed", "offset"), arguments), absent, frozenset(added))

    dispatch.templates = [  # type: ignore[attr-defined]
        make(_listed(("seed", "offset")), frozenset(), frozenset())
    ]
    return dispatch


chain_speculative_sampling_trace = _chain_trace()
