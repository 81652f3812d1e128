"""One call of a decorated function, as the log and the dump see it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

_PACKAGE = __name__.partition(".")[0]
_numbers = itertools.count(1)
_paused = False


class ApiCall:
    """A call and its arguments.

    Attributes
    ----------
    number : int
        Position in the order of calls of this process, from 1.
    name : str
        ``rmsnorm``, or ``Class.run`` with the class of the object.
    owner : object or None
        The object whose method it is.
    arguments : dict
        The arguments that were passed, by parameter name, without a method's object.
    defaults : dict
        The parameters that were not passed.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        parameters: Mapping[str, inspect.Parameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.number = next(_numbers)
        self.func, self.args, self.kwargs = func, args, kwargs
        self.owner = args[0] if args and next(iter(parameters), None) == "self" else None
        if self.owner is None:
            self.name = func.__qualname__.rpartition("<locals>.")[2]
        else:
            self.name = f"{type(self.owner).__name__}.{func.__name__}"
        names = [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL]
        names += [f"args[{i}]" for i in range(len(args) - len(names))]
        self.arguments = dict(zip(names, args, strict=False)) | kwargs
        self.defaults = {
            name: p.default
            for name, p in parameters.items()
            if name not in self.arguments and p.default is not p.empty
        }
        if self.owner is not None:
            del self.arguments["self"]


def matches(call: ApiCall, patterns: str) -> bool:
    """Whether a comma-separated list of names and ``*`` patterns covers a call.

    A pattern is compared with the name as logged (``Class.run``), the bare function name and the
    full path (``flashinfer.norm.rmsnorm``).
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if not wanted:
        return False
    names = (call.name, call.func.__name__, public_path(call.func))
    return any(fnmatchcase(name, pattern) for pattern in wanted for name in names)


def public_path(func: Callable[..., Any]) -> str:
    """Where users find a function or method, such as ``flashinfer.sampling.softmax``.

    Its own module and name, unless a module next to the root of the package offers it.
    """
    name, _, rest = func.__qualname__.partition(".")
    return f"{_public_module(func.__module__, name)}.{name}{'.' if rest else ''}{rest}"


@functools.cache
def _public_module(module: str, name: str) -> str:
    package, _, inner = module.partition(".")
    if package != _PACKAGE or ("." not in inner and not inner.startswith("_")):
        return module
    wanted = getattr(sys.modules[module], name, None)
    # The package that has it comes before an older path to it.
    for public in sorted(list(sys.modules), key=lambda at: (not module.startswith(f"{at}."), at)):
        _, _, inner = public.removeprefix(package).partition(".")
        if not public.startswith(f"{package}.") or "." in inner or inner.startswith("_"):
            continue
        loaded = sys.modules[public]
        offered = getattr(loaded, "__all__", vars(loaded))
        if wanted is not None and name in offered and getattr(loaded, name, None) is wanted:
            return public
    return module


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph, where nothing may synchronise."""
    # The first test keeps this from creating a CUDA context.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No logging and no dumps in this process: a replay must not record itself."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def is_paused() -> bool:
    """Whether the process is inside :func:`paused`."""
    return _paused
