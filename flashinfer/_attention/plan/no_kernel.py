"""Plans for devices that have no kernel: refused, unless something else computes from the plan.

The reference backend does. It says so here, so that nothing of the product asks for it.
"""

from __future__ import annotations

from collections.abc import Callable


def _nothing_computes() -> bool:
    return False


_computes: Callable[[], bool] = _nothing_computes


def compute_from_plans_when(is_active: Callable[[], bool]) -> None:
    """Let plans be made on any device, and without a compiler, while `is_active` says so."""
    global _computes
    _computes = is_active


def is_computed_from_plans() -> bool:
    """Whether a plan is of use here and now without a kernel."""
    return _computes()
