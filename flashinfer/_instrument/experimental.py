"""``@flashinfer_experimental_api``: a public function whose meaning may still change."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from .decorator import flashinfer_api


class ExperimentalWarning(UserWarning):
    """A function that is called may change or go in any version."""


def flashinfer_experimental_api(
    func: Callable[..., Any] | None = None, *, trace: Any = None, feature: str | None = None
) -> Any:
    """`flashinfer_api` for a function that warns at its first call.

    Parameters
    ----------
    func : callable, optional
        The function; absent when the decorator is written with arguments.
    trace : TraceTemplate or callable, optional
        As for `flashinfer_api`.
    feature : str, optional
        The name in the warning, by default that of the function.

    Returns
    -------
    callable
        The function. Its first call in a process gives an `ExperimentalWarning`.
    """
    if func is None:
        return functools.partial(flashinfer_experimental_api, trace=trace, feature=feature)
    api = flashinfer_api(trace=trace)(func)
    name = feature or f"{func.__module__}.{func.__qualname__}"
    warned = False

    @functools.wraps(api)
    def experimental(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        if not warned:
            warned = True
            warnings.warn(
                f"{name} is experimental: it may change or go in any version",
                ExperimentalWarning,
                stacklevel=2,
            )
        return api(*args, **kwargs)

    experimental.__signature__ = inspect.signature(func)  # type: ignore[attr-defined]
    return experimental
