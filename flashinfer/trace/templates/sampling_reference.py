"""References of softmax, sampling and the filters top-k, top-p and min-p.

They work row by row: they sort, sum weights as integers (the fixed point of the kernels), and draw
with the same counter-based generator, so their tokens are those of the kernels but for the last
bits of an exponential.
"""

from __future__ import annotations

import math
from typing import Any

import torch


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


def _drawn_key(seed: Any, offset: Any, generator: torch.Generator | None) -> tuple[Any, Any]:
    """Seed and offset of a call, from a generator if it says none."""
    if seed is not None:
        return seed, offset
    if offset is not None:
        raise ValueError("`offset` needs a `seed`, got None")
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device)), None


def _row_key(seed: Any, offset: Any, row: int, num_rows: int) -> tuple[int, int, int]:
    """Seed, offset and stream of an output: its number, or 0 for a column of seeds."""
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, torch.Tensor) and value.numel() not in (1, num_rows):
            raise ValueError(f"`{name}` must have shape [{num_rows}], got {list(value.shape)}")
    is_column = isinstance(seed, torch.Tensor) and seed.ndim == 2
    number = _row_value(0 if offset is None else offset, row)
    return int(_row_value(seed, row)), int(number), 0 if is_column else row


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


def _half_octave(value: float) -> tuple[int, float]:
    """Number and start of the half of an octave that a value is in: [2^n, 1.5 * 2^n) or the rest.

    Numbers count from 0 for the least one, which is of float32's least exponent and reaches to 0.
    """
    exponent = max(math.frexp(value)[1] - 1, -126)
    upper = value >= 1.5 * 2.0**exponent
    number = 2 * (exponent + 126) + upper
    return number, (1.5 if upper else 1.0) * 2.0**exponent if number else 0.0


def _nucleus_token(
    row: torch.Tensor, weights: torch.Tensor, top_p: float, key: tuple[int, int, int]
) -> int:
    """A draw from the nucleus and the rest of the half octave where it ends.

    If that is not in the nucleus, it is replaced by one from just the nucleus.
    """
    if top_p >= 1:
        return _inverse(weights, key, 0)
    threshold = _row_threshold(row, weights, top_p=top_p)
    last, start = _half_octave(threshold)
    if _half_octave(float(row.max()))[0] // 2 - last // 2 <= 30:
        token = _inverse(weights * (row >= start), key, 0)
        if row[token] >= threshold:
            return token
    return _inverse(weights * (row >= threshold), key, 1)


def _draw(
    rows: torch.Tensor,
    logits: bool,
    indices: torch.Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Any,
    offset: Any,
    filters: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per output and whether it comes from a distribution; 0 where it does not."""
    if check_nan and rows.isnan().any():
        raise ValueError(f"`{'logits' if logits else 'probs'}` must not contain NaN")
    seed, offset = _drawn_key(seed, offset, generator)
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
        # A top-k that keeps everything leaves a draw by top-p alone.
        is_nucleus = "top_p" in own and not 1 <= own.get("top_k", 0) < row.numel()
        if is_nucleus and not logits:
            tokens[output] = _nucleus_token(row, weights, own["top_p"], key)
        else:
            kept = weights * (row >= _row_threshold(row, weights, **own))
            tokens[output] = _inverse(kept, key, 0)
    samples = torch.tensor(tokens, dtype=torch.int64, device=rows.device)
    return samples, torch.tensor(valid, dtype=torch.bool, device=rows.device)


def _softmax_reference(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None
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
        weights = weights.nan_to_num()  # -inf at an infinite temperature
        out[i] = weights / weights.sum()
    return out


def _sampling_from_probs_reference(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """P(token = i) = p_i / sum(p), by the inverse of the distribution function.

    Source: L. Devroye, "Non-Uniform Random Variate Generation", 1986, chapter III.2.
    """
    drawn = _draw(probs, False, indices, generator, check_nan, seed, offset, {})
    return drawn if return_valid else drawn[0]


def _sampling_from_logits_reference(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """P(token = i) = exp(x_i) / sum(exp(x)).

    Source: as sampling_from_probs.
    """
    return _draw(logits, True, indices, generator, check_nan, seed, offset, {})[0]


def _top_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """kept = {i : p_i >= t}, t the largest with sum(p_i >= t) >= top_p * sum(p); drawn from it.

    Source: A. Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019.
    """
    drawn = _draw(probs, False, indices, generator, check_nan, seed, offset, {"top_p": top_p})
    return drawn if return_valid else drawn[0]


def _top_k_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """kept = {i : p_i >= the top_k-th largest}; drawn from it.

    Source: A. Fan et al., "Hierarchical Neural Story Generation", 2018.
    """
    drawn = _draw(probs, False, indices, generator, check_nan, seed, offset, {"top_k": top_k})
    return drawn if return_valid else drawn[0]


def _min_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """kept = {i : p_i >= min_p * max(p)}; drawn from it.

    Source: M. Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.
    """
    drawn = _draw(probs, False, indices, generator, check_nan, seed, offset, {"min_p": min_p})
    return drawn if return_valid else drawn[0]


def _top_k_top_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
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
    drawn = _draw(probs, False, indices, generator, check_nan, seed, offset, filters)
    return drawn if return_valid else drawn[0]


def _top_k_top_p_sampling_from_logits_reference(
    logits: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """As top_k_top_p_sampling_from_probs of p = exp(x) / sum(exp(x)).

    Source: as that.
    """
    filters = {"top_k": top_k, "top_p": top_p, "joint": filter_apply_order == "joint"}
    return _draw(logits, True, indices, generator, check_nan, seed, offset, filters)[0]


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


def _top_k_renorm_probs_reference(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """q_i = p_i / sum(kept p) where p_i is at least the top_k-th largest, else 0.

    Source: as top_k_sampling_from_probs.
    """
    return _renormalise(probs, "top_k", top_k)


def _top_p_renorm_probs_reference(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
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
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept x_i while u_i * q_i(x_i) < p_i(x_i), then draw from max(p - q, 0) or the last p.

    Source: C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
    2023.
    """
    batch, num_drafts, vocab_size = draft_probs.shape
    seed, offset = _drawn_key(seed, offset, generator)
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
