"""Whether an implementation's outputs are close enough to the reference's: a yes-or-no question.

This is the check that goes with a definition to other tools. The project's own tests ask for more
(`flashinfer.testing.assert_matches_reference`: bounds from accumulation length, bias, a report).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._common.dtypes import torch_name


def default_tolerances(dtype: torch.dtype | str) -> tuple[float, float]:
    """Relative and absolute tolerance for outputs of a dtype.

    Two roundings to the dtype, from results that differ in their last bits, may land one unit
    apart; the relative tolerance is two such units, the absolute one an eighth of that, for sums
    that cancel to a value well below the terms' size of about one.

    Returns
    -------
    tuple of float
        ``(rtol, atol)``; zeros for integers and bool, which must agree exactly.
    """
    kind: torch.dtype = getattr(torch, torch_name(dtype))
    if not kind.is_floating_point:
        return 0.0, 0.0
    # float32 kernels sum in float32 in another order: allow for a few hundred roundings.
    unit = torch.finfo(kind).eps if kind != torch.float32 else 2.0**-17
    return 2 * unit, unit / 4


def default_check(
    reference_outputs: Any,
    actual_outputs: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    max_mismatch_pct: float = 0.0,
    min_cos_sim: float | None = 0.999,
) -> bool:
    """Whether each output is close to its reference.

    Parameters
    ----------
    reference_outputs, actual_outputs : Tensor, tuple of Tensor or dict of str to Tensor
        In the same order; dictionaries by name.
    rtol, atol : float, optional
        Tolerances; by default those of the actual output's dtype.
    max_mismatch_pct : float
        Percentage of elements that may be out of tolerance.
    min_cos_sim : float, optional
        Least cosine similarity over the finite elements of a floating dtype, whose elements are
        coordinates; None leaves it out.

    Returns
    -------
    bool
        False also for another number of outputs, other names, another shape, or NaN and
        infinities in other places.
    """
    if isinstance(reference_outputs, Mapping) and isinstance(actual_outputs, Mapping):
        if reference_outputs.keys() != actual_outputs.keys():
            return False
        actual_outputs = {name: actual_outputs[name] for name in reference_outputs}
    expected, actual = _as_tuple(reference_outputs), _as_tuple(actual_outputs)
    if len(expected) != len(actual):
        return False
    limits = (rtol, atol, max_mismatch_pct, min_cos_sim)
    return all(_is_close(e, a, *limits) for e, a in zip(expected, actual, strict=True))


standard_check = default_check
"""The name under which some definitions ask for it."""


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    if isinstance(outputs, Mapping):
        return tuple(outputs.values())
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _is_close(
    expected: torch.Tensor,
    actual: torch.Tensor,
    rtol: float | None,
    atol: float | None,
    max_mismatch_pct: float,
    min_cos_sim: float | None,
) -> bool:
    if expected.shape != actual.shape:
        return False
    default_rtol, default_atol = default_tolerances(actual.dtype)
    rtol = default_rtol if rtol is None else rtol
    atol = default_atol if atol is None else atol
    wanted, got = expected.to(actual.device).double().flatten(), actual.double().flatten()
    close = torch.isclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
    allowed = max_mismatch_pct / 100 * close.numel()
    if int((~close).sum()) > allowed:
        return False
    if min_cos_sim is None or not actual.is_floating_point():
        return True
    finite = wanted.isfinite() & got.isfinite()
    wanted, got = wanted[finite], got[finite]
    scale = wanted.norm() * got.norm()
    return not scale or bool(wanted @ got / scale >= min_cos_sim)
