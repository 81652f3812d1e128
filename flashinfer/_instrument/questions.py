"""Where an operation runs, without checks in front of its calls.

``@backend_requirement`` answers callers' questions and checks each call, which takes a microsecond
or two. An operation that checks its arguments elsewhere, as all bindings do, needs only the
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from .._common.arch import Capability, as_number
from .typed import CheckedFunction, Parameters, Returned

Runs = Callable[[int], bool]
"""Whether kernels run on a compute capability, such as 90."""


def since(least: int) -> Runs:
    """Kernels run from a compute capability on."""
    return lambda cc: cc >= least


def says_where_it_runs(
    runs: Runs, backends: Mapping[str, Runs] | None = None
) -> Callable[[Callable[Parameters, Returned]], CheckedFunction[Parameters, Returned]]:
    """Give an operation the methods that ``@backend_requirement`` gives to others.

    Parameters
    ----------
    runs : callable
        Where any of its kernels runs.
    backends : mapping of str to callable, optional
        Where each backend runs, for an operation with a parameter ``backend``.

    Returns
    -------
    callable
        A decorator, to stand outermost: it returns the function itself, with
        ``is_backend_supported(backend, cc=None)``, ``is_compute_capability_supported(cc)``,
        ``has_backend(backend)`` and ``has_backend_choices()``.
    """
    named = backends or {}

    def decorate(
        function: Callable[Parameters, Returned],
    ) -> CheckedFunction[Parameters, Returned]:
        def is_backend_supported(backend: str, cc: Capability | None = None) -> bool:
            if not named:
                name = getattr(function, "__name__", str(function))
                raise ValueError(
                    f"Invalid is_backend_supported call: no backend choices for {name}"
                )
            return backend in named and (cc is None or named[backend](as_number(cc)))

        answers = cast(Any, function)
        answers.is_backend_supported = is_backend_supported
        answers.is_compute_capability_supported = lambda cc: runs(as_number(cc))
        answers.has_backend = named.__contains__
        answers.has_backend_choices = lambda: bool(named)
        return cast(CheckedFunction[Parameters, Returned], function)

    return decorate
