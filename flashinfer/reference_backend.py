"""Run every decorated function by its reference: plain PyTorch, on CPU or GPU tensors.

    FLASHINFER_BACKEND=reference python serve.py     # the whole process
    with flashinfer.reference_backend(): ...         # this thread (or task), until the block ends

The same serving code then runs on a laptop or in CI without a GPU: slowly, and with the results
that the references state. Off by default.

How calls come here, and cost nothing when it is off: `flashinfer._instrument.routes`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from . import env
from ._attention.plan.no_kernel import compute_from_plans_when
from ._common.numbers import plain_arguments
from ._instrument import routes
from .trace.arguments import check_one_device
from .trace.template import TraceTemplate, resolve_template

_logger = logging.getLogger("flashinfer.reference_backend")

_process_wide = False
_in_this_context: ContextVar[bool] = ContextVar("flashinfer_reference_backend", default=False)
_announced = False


@contextlib.contextmanager
def reference_backend() -> Iterator[None]:
    """Use the reference of every decorated function inside the block.

    Holds for the current thread and, in asynchronous code, the current task; other threads keep
    using the GPU kernels. Blocks may be nested. Set ``FLASHINFER_BACKEND=reference`` before the
    import to switch a whole process.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w = torch.randn(4, 64), torch.ones(64)
    >>> with flashinfer.reference_backend():
    ...     y = flashinfer.rmsnorm(x, w)
    """
    routes.add_user(_references)
    token = _in_this_context.set(True)
    try:
        yield
    finally:
        _in_this_context.reset(token)
        routes.remove_user(_references)


def is_active() -> bool:
    """Whether a decorated function called here and now runs its reference."""
    return _process_wide or _in_this_context.get()


class _References:
    """Takes the calls of threads and tasks in which the backend is on."""

    def wants(self, trace: Any) -> bool:
        return trace is not None

    def is_awake(self) -> bool:
        return is_active()

    def take(self, route: routes.Route, arguments: dict[str, Any]) -> Any:
        return _run_reference(route, arguments)


_references = _References()


def _run_reference(route: routes.Route, arguments: dict[str, Any]) -> Any:
    """The public function's result, computed by the reference of its template."""
    _announce()
    name = route.function.__qualname__
    arguments = plain_arguments(arguments)
    template = resolve_template(route.trace, arguments)
    if template is None or template.reference is None:
        raise NotImplementedError(f"{name} has no reference for these arguments")
    gathered = template.gathered(arguments)
    template.validate(gathered)
    check_one_device(gathered)
    with torch.no_grad():
        results = _computed(template, gathered)
        return routes.deliver(route.function, template, gathered, results)


def _computed(template: TraceTemplate, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Results of the reference; of tensors without values, results without values.

    Raises
    ------
    ValueError
        If the shape of a result follows from values that a meta tensor does not have.
    """
    without_values = [
        name
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if not without_values:
        return template.compute(arguments)
    try:
        return template.compute(arguments)
    except (RuntimeError, NotImplementedError):  # it looks at values
        return template.without_values(arguments, without_values[0])


def _announce() -> None:
    global _announced
    if not _announced:
        _announced = True
        remedy = (
            "unset FLASHINFER_BACKEND"
            if _process_wide
            else "leave the block of flashinfer.reference_backend()"
        )
        _logger.warning(
            "FlashInfer's reference backend is on: operations run as plain PyTorch, without "
            "GPU kernels. To run the kernels, %s.",
            remedy,
        )


compute_from_plans_when(is_active)  # references read what a wrapper has planned
if env.FLASHINFER_BACKEND.get() == "reference":
    _process_wide = True
    routes.add_user(_references)
