"""Plans for devices that have no kernel: refused, unless something else computes from the plan.

The reference backend does. It says so here, so that nothing of the product asks for it. What
describes a call that plans and runs at once looks at a plan, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from ...jit.errors import MissingJITCacheError, ToolchainError

NO_MODULE = (ToolchainError, MissingJITCacheError)
"""What a planner, which is compiled for the host, raises where it can be neither found nor built.

A reference needs its checks alone, and can go without them."""


def _nothing_computes() -> bool:
    return False


_in_this_context: ContextVar[bool] = ContextVar("flashinfer_no_kernel", default=False)
_computes: Callable[[], bool] = _nothing_computes


def compute_from_plans_when(is_active: Callable[[], bool]) -> None:
    """Let plans be made on any device, and without a compiler, while `is_active` says so."""
    global _computes
    _computes = is_active


def is_computed_from_plans() -> bool:
    """Whether a plan is of use here and now without a kernel."""
    return _in_this_context.get() or _computes()


@contextlib.contextmanager
def plans_without_kernels() -> Iterator[None]:
    """Inside the block plans are made to be looked at: nothing is compiled for them."""
    token = _in_this_context.set(True)
    try:
        yield
    finally:
        _in_this_context.reset(token)
