"""``@flashinfer_api``: what marks a public function, and what can watch its calls.

``FLASHINFER_LOGLEVEL`` is read when the decorator runs. At level 0 the decorator returns the
function it was given, so that logging costs nothing. Otherwise a wrapper writes to
``FLASHINFER_LOGDEST``:

====== ===============================================================================
level  written
====== ===============================================================================
1      the name of each API called
3      its inputs before the call and its outputs after it (shape, dtype, device, ...)
5      the same with statistics of each tensor (min, max, mean, NaN and Inf counts)
10     the same, and the tensors themselves are dumped (see ``dump.py`` here)
====== ===============================================================================

Inputs are on disk before the kernel starts, so that the last record of a crashed process is the
call that crashed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast, overload

import torch

from .. import env
from .._compile.traced import make_traceable
from .call import ApiCall, is_paused
from .definitions import dump_definition, fi_trace
from .dump import dump_inputs
from .names import register_operation
from .text import describe_inputs, describe_outputs, write_record
from .typed import ApiFunction, Parameters, Returned

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

#: Every ``(function, template, label)``, in decoration order: what trace tests enumerate. The label
#: is the function's name, with the template's where a dispatch function chooses among several.
_TRACE_REGISTRY: list[tuple[Callable[..., Any], Any, str]] = []

#: Every ``(function, trace)`` pair, in decoration order: what the reference backend routes. A trace
#: is a template, or a dispatch function.
traced_functions: list[tuple[Callable[..., Any], Any]] = []

#: Called after each addition to the registry: a function that is decorated while the reference
#: backend is on must not escape it.
on_registration: list[Callable[[], None]] = []


class _Decorator(Protocol):
    def __call__(
        self, func: Callable[Parameters, Returned], /
    ) -> ApiFunction[Parameters, Returned]: ...


@overload
def flashinfer_api(func: Callable[Parameters, Returned]) -> ApiFunction[Parameters, Returned]: ...
@overload
def flashinfer_api(func: None = None, *, trace: Any = None) -> _Decorator: ...
def flashinfer_api(func: Callable[..., Any] | None = None, *, trace: Any = None) -> Any:
    """Mark a public function or method.

    Parameters
    ----------
    func : callable, optional
        The function; absent when the decorator is written with arguments.
    trace : TraceTemplate or callable, optional
        Describes the operation to ``flashinfer.fi_trace``; or a dispatch function that picks a
        template from the keyword arguments and lists all of them in its attribute ``templates``.

    Returns
    -------
    callable
        ``func`` itself, unless logging (``FLASHINFER_LOGLEVEL``) or trace dumps
        (``FLASHINFER_TRACE_DUMP``) are on while the decorator runs. It carries
        ``__flashinfer_trace__`` and, with a trace, ``fi_trace(**kwargs)``.

    Raises
    ------
    TypeError
        If ``func`` is a class, a ``staticmethod`` or a ``classmethod``.
    """
    if func is None:
        return functools.partial(flashinfer_api, trace=trace)
    if isinstance(func, (type, staticmethod, classmethod)) or not callable(func):
        raise TypeError(
            "@flashinfer_api goes on a function, below any @staticmethod or @classmethod, "
            f"got {func!r}"
        )
    register_operation(func)
    if trace is not None:
        traced_functions.append((func, trace))
        _TRACE_REGISTRY.extend(_labelled(func, trace))
        for notify in on_registration:
            notify()
    level = env.FLASHINFER_LOGLEVEL.get()
    api = func
    if trace is not None and env.FLASHINFER_TRACE_DUMP.get():
        api = _with_trace_dump(api, func, trace)
    if level > 0:
        api = _with_logging(api, func, level)
    api.__flashinfer_trace__ = trace  # type: ignore[attr-defined]
    if trace is not None:
        api.fi_trace = functools.partial(fi_trace, api)  # type: ignore[attr-defined]
        make_traceable(api, func, trace)
    return api


def flashinfer_constructor(init: AnyFunction) -> AnyFunction:
    """`flashinfer_api` on ``__init__``, whose type has to stay that of a function."""
    return cast(AnyFunction, flashinfer_api(init))


def _labelled(func: Callable[..., Any], trace: Any) -> list[tuple[Callable[..., Any], Any, str]]:
    """The entries of the registry for a function."""
    if not callable(trace):
        return [(func, trace, func.__qualname__)]
    templates = getattr(trace, "templates", ())
    return [(func, t, f"{func.__qualname__}[{t.name_prefix}]") for t in templates]


def _with_trace_dump(api: AnyFunction, func: Callable[..., Any], trace: Any) -> AnyFunction:
    @functools.wraps(func)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            # skip_check is @backend_requirement's, not the operation's.
            arguments = {name: kwargs[name] for name in kwargs if name != "skip_check"}
            dump_definition(func, trace, args, arguments)
        return api(*args, **kwargs)

    return cast(AnyFunction, traced)


def _with_logging(api: AnyFunction, func: Callable[..., Any], level: int) -> AnyFunction:
    parameters = inspect.signature(func).parameters

    @functools.wraps(func)
    def logged(*args: Any, **kwargs: Any) -> Any:
        # A traced-by-Dynamo call has no data to look at, and a write would break its graph.
        if is_paused() or torch.compiler.is_compiling():
            return api(*args, **kwargs)
        call = ApiCall(func, parameters, args, kwargs)
        write_record(describe_inputs(call, level))
        dump = None
        if level >= 10:
            dump = dump_inputs(call)
        try:
            result = api(*args, **kwargs)
        except BaseException as error:
            write_record(f"#{call.number} {call.name} raised {type(error).__name__}: {error}")
            if dump is not None:
                dump.failed(error)
            raise
        if level >= 3:
            write_record(describe_outputs(call, result, level))
        if dump is not None:
            dump.outputs(result)
        return result

    return cast(AnyFunction, logged)
