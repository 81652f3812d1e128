"""How closely latent attention must agree with its reference.

As for other attention (attention.py): a kernel rounds each weight p_j to the type it multiplies
with, so that an output is off by about u sqrt(sum p_j^2 c_j^2). Results of parts of a request are
rounded once more before they are merged. With few heads on Hopper, tensor cores sum the logits of
8-bit caches."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from .._common.dtypes import FLOAT8
from ..trace.template import TraceTemplate
from .attention import SpreadBound, loss_of_products
from .numerics import ErrorBound, unit_roundoff
from .reference import CheckOptions

__all__ = ["mla_check_options"]


@dataclasses.dataclass(frozen=True)
class _Bounds(CheckOptions):
    """The result of `mla_check_options`."""

    spread: torch.Tensor | None = None
    logit_error: float = 0.0

    def bound_for(self, output: torch.Tensor, arguments: Any) -> ErrorBound:
        if output.dtype == torch.float32:
            return ErrorBound(0.0, 2.0**-20, 1e-3 + self.logit_error)
        unit = unit_roundoff(output.dtype)
        return SpreadBound(1.01 * unit, 2.0**-16, 2.0**-20, spread=self.spread)


def mla_check_options(template: TraceTemplate, arguments: Mapping[str, Any]) -> CheckOptions:
    """Bounds of the output and of the LSE of one ``run``.

    Parameters
    ----------
    template : TraceTemplate
        Template of the ``run`` of a wrapper.
    arguments : Mapping[str, Any]
        Arguments of the call, by name.
    """
    gathered = dict(template.gathered(arguments))
    o_scale = abs(gathered.get("o_scale", 1.0))
    gathered |= {"lse_base": "log2", "o_scale": 1.0}
    _, lse = _results(template, gathered)
    squares, lse_of_squares = _results(template, _squared(gathered))
    shift = (lse_of_squares - 2 * lse).nan_to_num(0.0).clamp(max=0.0)
    factor = torch.exp2(shift).view(squares.shape[:-1])[..., None]
    deviation = (squares.clamp(min=0) * factor).sqrt()
    unit = unit_roundoff(gathered["o_dtype"])
    error = _summing_error(gathered)
    return _Bounds(spread=(8 * unit + 2 * error) * o_scale * deviation, logit_error=error)


def _summing_error(gathered: Mapping[str, Any]) -> float:
    """The error of a logit, base 2, whose keys of 8 bits are multiplied as they are.

    The losses of products are independent of each other.
    """
    error, rope = 0.0, abs(gathered.get("rope_factor", 1.0))
    for query, keys, factor in (("q_nope", "ckv_cache", 1.0), ("q_pe", "kpe_cache", rope)):
        q, k = gathered.get(query), gathered.get(keys)
        if q is not None and k is not None and k.dtype in FLOAT8:
            error += factor * q.shape[-1] ** 0.5 * loss_of_products(q, k)
    return error * abs(gathered["sm_scale"]) * math.log2(math.e)


def _results(template: TraceTemplate, gathered: Mapping[str, Any]) -> Any:
    assert template.reference is not None
    taken = inspect.signature(template.reference).parameters
    return template.reference(**{k: v for k, v in gathered.items() if k in taken})


def _squared(gathered: Mapping[str, Any]) -> dict[str, Any]:
    """Doubled logits over squared values: all of a key stands in the place of its rotary part."""
    rows, q = gathered["ckv_cache"].double(), gathered["q_nope"].double()
    rows = rows.nan_to_num(0.0)
    key, query = [rows], [q]
    if gathered.get("q_pe") is not None:
        key.append(gathered["kpe_cache"].double())
        query.append(gathered["q_pe"].double() * gathered.get("rope_factor", 1.0))
    sinks = gathered.get("sinks")
    return {
        **gathered,
        "q_nope": torch.zeros_like(q),
        "q_pe": torch.cat(query, -1),
        "ckv_cache": rows.square(),
        "kpe_cache": torch.cat(key, -1),
        "sm_scale": 2 * gathered["sm_scale"],
        "rope_factor": 1.0,
        "sinks": None if sinks is None else 2 * sinks,
    }
