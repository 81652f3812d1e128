"""How closely attention must agree with its reference.

A kernel rounds each probability to the type it multiplies with, so an output is off by
sum_j p_j e_j v_j with independent errors |e_j| <= u. Its deviation is at most u sqrt(sum p_j^2
v_j^2), which the reference gives by a second call with doubled logits and squared values: a bound
tight enough to see one wrong key among a thousand. The LSE is accumulated in float32 from exact
products; its bound is a thousandth."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from .._common.dtypes import FLOAT8
from ..trace.template import TraceTemplate
from .numerics import ErrorBound, unit_roundoff
from .reference import CheckOptions

__all__ = ["attention_check_options"]

SOFT_CAP_ERROR = 1.2e-5  # of the cap, in each logit: include/flashinfer/attention/math.cuh


def attention_check_options(template: TraceTemplate, arguments: Mapping[str, Any]) -> CheckOptions:
    """Bounds of the output and of the LSE of one call.

    Parameters
    ----------
    template : TraceTemplate
        Template of an attention function or of the ``run`` of a wrapper.
    arguments : Mapping[str, Any]
        Arguments of the call, by name.
    """
    gathered = template.gathered(arguments)
    output, lse = _errors(template, gathered)
    return _AttentionBounds(output=output, lse=lse)


@dataclasses.dataclass(frozen=True)
class SpreadBound(ErrorBound):
    """An error bound with a part of its own for each element."""

    spread: torch.Tensor | None = None

    def systematic(self, expected: torch.Tensor) -> torch.Tensor:
        assert self.spread is not None
        return super().systematic(expected) + self.spread


@dataclasses.dataclass(frozen=True)
class _AttentionBounds(CheckOptions):
    """The result of `attention_check_options`."""

    output: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    def bound_for(self, output: torch.Tensor, arguments: Any) -> ErrorBound:
        if output.dtype == torch.float32:
            return SpreadBound(0.0, 2.0**-20, 1e-3, spread=self.lse)
        # The output's own rounding; sums in float32 of terms that cancel.
        unit = unit_roundoff(output.dtype)
        return SpreadBound(1.01 * unit, 2.0**-16, 2.0**-20, spread=self.output)


def _errors(template: TraceTemplate, gathered: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of what rounding of probabilities, and of rotated keys, does to output and LSE."""
    values = "v_cache" if "v_cache" in gathered else "v"
    keys = "k_cache" if "k_cache" in gathered else "k"
    finite = gathered[values].double().nan_to_num(0.0)
    soft_cap = gathered.get("logits_soft_cap")
    doubled = {
        **gathered,
        "sm_scale": 2 * gathered["sm_scale"],
        "logits_soft_cap": 2 * soft_cap if soft_cap else 0.0,
        values: finite.square(),
        "v_scale": 1.0,
    }
    if gathered.get("sinks") is not None:
        doubled["sinks"] = 2 * gathered["sinks"]
    _, lse = _both_results(template, gathered)
    squares, lse_of_squares = _both_results(template, doubled)
    # ALiBi's slopes cannot be doubled: then the largest probability stands for all of them.
    shift = (lse_of_squares - 2 * lse).nan_to_num(0.0).clamp(max=0.0)
    if gathered.get("pos_encoding_mode") == "ALIBI":
        largest = finite.abs().max() if finite.numel() else finite.sum()
        squares, shift = torch.full_like(squares, float(largest) ** 2), shift * 0
    deviation = (squares.clamp(min=0) * torch.exp2(shift)[..., None]).sqrt()

    unit = unit_roundoff(gathered["q"].dtype)
    if gathered[keys].dtype in FLOAT8:  # the weights' type, of Hopper's products if q has 8 bits
        is_8_bit = gathered["q"].dtype in FLOAT8
        unit = unit_roundoff(torch.float8_e4m3fn if is_8_bit else torch.float16)
    logit_error = _rotated_error(gathered, keys) + _summing_error(gathered, keys)
    # Rows with logits of one size share the error of the approximation; an LSE has the base 2.
    logit_error += SOFT_CAP_ERROR * (soft_cap or 0.0) * math.log2(math.e)
    factor = (8 * unit + 2 * logit_error) * abs(gathered.get("v_scale", 1.0))
    return factor * deviation, torch.full_like(lse, logit_error)


def _both_results(template: TraceTemplate, gathered: Any) -> Any:
    """Output and LSE, also where the call returns no LSE."""
    assert template.reference is not None
    taken = inspect.signature(template.reference).parameters
    return template.reference(**{k: v for k, v in gathered.items() if k in taken})


def _rotated_error(gathered: Any, keys: str) -> float:
    """What a logit is off by when q and k are rounded again after rotation.

    Errors of the products q_i k_i are independent, of a deviation below half of u |q_i k_i|. The
    root of the sum of their squares is at most the product of the vectors' 4-norms, here of the
    lengths of the pairs that are rotated; a row of large entries is off by several times the
    average. The largest of them bounds the deviation, and twice the deviation is returned.
    """
    if gathered.get("pos_encoding_mode") != "ROPE_LLAMA":
        return 0.0
    q, k = gathered["q"], gathered[keys]
    if not q.numel() or not k.numel():
        return 0.0
    types = [q.dtype, k.dtype]
    if k.dtype in FLOAT8:  # widened before they are rotated
        types = [torch.float16, torch.float16]
    units = [unit_roundoff(dtype) for dtype in types]
    unit = (units[0] ** 2 + units[1] ** 2) ** 0.5
    return abs(gathered["sm_scale"]) * unit * _largest_norm(q) * _largest_norm(k)


def _summing_error(gathered: Any, keys: str) -> float:
    """The error of a logit where 8-bit queries and keys are multiplied as they are."""
    q, k = gathered["q"], gathered[keys]
    if q.dtype not in FLOAT8:
        return 0.0
    return abs(gathered["sm_scale"]) * q.shape[-1] * loss_of_products(q, k)


def loss_of_products(q: torch.Tensor, k: torch.Tensor) -> float:
    """The most that the tensor cores lose of a product of 8 bits when they add it to others.

    Those of Hopper keep 13 bits below the largest of the products that they sum: DeepSeek-AI,
    "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    if not q.numel() or not k.numel():
        return 0.0
    largest = [float(x.double().nan_to_num(0.0).abs().max()) for x in (q, k)]
    return 2.0**-13 * largest[0] * largest[1]


def _largest_norm(x: torch.Tensor) -> float:
    """The largest (sum over i of |(x_i, x_{i + d/2})|^4)^(1/4) of all vectors."""
    low, high = x.double().nan_to_num(0.0).chunk(2, dim=-1)
    return float((low.square() + high.square()).square().sum(-1).max()) ** 0.25
