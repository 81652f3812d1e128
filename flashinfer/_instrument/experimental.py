"""``@flashinfer_experimental_api``: a public function whose meaning may still change."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from .decorator import flashinfer_api

_Checker = TypeVar("_Checker", bound=Callable[..., Any])


class ExperimentalWarning(UserWarning):
    """A function that is called may change or go in any version."""


_warned: set[tuple[str, str]] = set()


def warn_experimental_backend_once(api_name: str, backend: str, *, automatic: bool = False) -> None:
    """Warn, once in a process, that a backend of a function may change or go.

    Parameters
    ----------
    api_name, backend : str
        The function and its backend.
    automatic : bool
        Whether the backend was chosen for the caller, and not named.
    """
    if (api_name, backend) in _warned:
        return
    _warned.add((api_name, backend))
    chosen = ", which was chosen for you," if automatic else ""
    warnings.warn(
        f"backend {backend!r} of {api_name}{chosen} is experimental: it may change or go in any "
        "version",
        ExperimentalWarning,
        stacklevel=3,
    )


def experimental_auto_backends_allowed() -> bool:
    """Whether ``backend="auto"`` may choose an experimental backend: here it never does."""
    return False


def require_experimental_auto_backends(feature: str) -> None:
    """Refuse a feature that only experimental backends have, unless ``auto`` may choose them.

    Raises
    ------
    RuntimeError
        Always, by `experimental_auto_backends_allowed`; it names `feature`.
    """
    if not experimental_auto_backends_allowed():
        raise RuntimeError(
            f"{feature} needs an experimental backend, which 'auto' never chooses: name the backend"
        )


def experimental_backend(checker: _Checker) -> _Checker:
    """Mark the check function of a backend that may change or go in any version.

    ``backend_requirement`` then leaves the backend out of ``backend="auto"``, and warns once in a
    process where a call names it.

    Parameters
    ----------
    checker : callable
        The function, with or without ``supported_compute_capability``.

    Returns
    -------
    callable
        `checker` itself.

    Raises
    ------
    TypeError
        If it cannot be called.
    """
    if not callable(checker):
        raise TypeError(f"`checker` must be a check function, got {checker!r}")
    checker.is_experimental_backend = True  # type: ignore[attr-defined]
    return checker


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
