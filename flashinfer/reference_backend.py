"""Run every decorated function by its reference: plain PyTorch, on CPU or GPU tensors.

    FLASHINFER_BACKEND=reference python serve.py     # the whole process
    with flashinfer.reference_backend(): ...         # this thread (or task), until the block ends

The same serving code then runs on a laptop or in CI without a GPU: slowly, and with the results
that the references state. Off by default.

How it costs nothing when off: a decorated function is the undecorated function itself, so there
is no place for a test of the mode. Switching on exchanges the function's code object for one with
the same parameters that comes here; switching off puts the old one back. References to the
function that were taken before stay valid, and `inspect.signature` sees no difference.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from . import env
from ._attention.plan.no_kernel import compute_from_plans_when
from ._common.numbers import plain_arguments
from ._instrument.decorator import on_registration, traced_functions
from .trace.arguments import check_aliasing, check_destination, check_one_device
from .trace.specs import Value, argument_of, is_returned
from .trace.template import TraceTemplate, resolve_template

_logger = logging.getLogger("flashinfer.reference_backend")

_lock = threading.RLock()
_routes: list[_Route] = []  # index = the number in the trampoline's code; never shrinks
_users = 0  # open contexts, plus one for FLASHINFER_BACKEND
_process_wide = False
_in_this_context: ContextVar[bool] = ContextVar("flashinfer_reference_backend", default=False)
_announced = False


@dataclass
class _Route:
    """A registered function with both of its bodies."""

    function: FunctionType
    trace: Any
    kernel_code: CodeType
    reference_code: CodeType
    kernel: FunctionType  # the function as it is when the backend is off


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
    _acquire()
    token = _in_this_context.set(True)
    try:
        yield
    finally:
        _in_this_context.reset(token)
        _release()


def is_active() -> bool:
    """Whether a decorated function called here and now runs its reference."""
    return _process_wide or _in_this_context.get()


def route_registered() -> None:
    """Route functions that were decorated after the backend was switched on; idempotent."""
    if not _users:
        return
    with _lock:
        known = {id(route.function) for route in _routes}
        for function, trace in list(traced_functions):
            if trace is not None and id(function) not in known:
                known.add(id(function))
                _routes.append(_new_route(function, trace, len(_routes)))
        for route in _routes:
            route.function.__code__ = route.reference_code


def _acquire() -> None:
    global _users
    with _lock:
        _users += 1
        route_registered()


def _release() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            for route in _routes:
                route.function.__code__ = route.kernel_code


def _new_route(function: Any, trace: Any, index: int) -> _Route:
    kernel = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    kernel.__kwdefaults__ = function.__kwdefaults__
    return _Route(function, trace, function.__code__, _trampoline(function, index), kernel)


def _trampoline(function: Any, index: int) -> CodeType:
    """Code with the parameters and free variables of `function` that calls `_dispatch`.

    Python accepts a code object in place of another if the number of free variables agrees, so
    the body names them after its return.
    """
    code = function.__code__
    names = list(code.co_varnames)
    positional, names = names[: code.co_argcount], names[code.co_argcount :]
    keyword_only, names = names[: code.co_kwonlyargcount], names[code.co_kwonlyargcount :]
    parameters = list(positional)
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        parameters.append("*" + names.pop(0))
    elif keyword_only:
        parameters.append("*")
    parameters += keyword_only
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parameters.append("**" + names.pop(0))
    source = (
        f"def outer({', '.join(code.co_freevars)}):\n"
        f"    def call({', '.join(parameters)}):\n"
        f"        from {__name__} import _dispatch\n"
        f"        return _dispatch({index}, locals())\n"
        f"        ({' '.join(name + ',' for name in code.co_freevars)})\n"
    )
    outer = next(c for c in compile(source, __file__, "exec").co_consts if isinstance(c, CodeType))
    inner = next(c for c in outer.co_consts if isinstance(c, CodeType))
    return inner.replace(co_name=code.co_name)


def _dispatch(index: int, local_values: Mapping[str, Any]) -> Any:
    """Body of every trampoline: the call's arguments go to the reference or to the kernel."""
    route = _routes[index]
    args, kwargs = _call_arguments(route.kernel_code, local_values)
    if not is_active():
        return route.kernel(*args, **kwargs)
    signature = inspect.signature(route.function)
    for added in _added_by_decorators(route.kernel_code, signature):
        kwargs.pop(added)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return _run_reference(route, bound.arguments)


def _added_by_decorators(code: CodeType, signature: inspect.Signature) -> list[str]:
    """Keywords of a wrapper that its public signature does not have, such as `skip_check`."""
    keyword_only = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    return [name for name in keyword_only if name not in signature.parameters]


def _call_arguments(code: CodeType, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    count = code.co_argcount
    total = count + code.co_kwonlyargcount
    args = [values[name] for name in code.co_varnames[:count]]
    kwargs = {name: values[name] for name in code.co_varnames[count:total]}
    if code.co_flags & inspect.CO_VARARGS:
        args += values[code.co_varnames[total]]
        total += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= values[code.co_varnames[total]]
    return args, kwargs


def _run_reference(route: _Route, arguments: dict[str, Any]) -> Any:
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
        return _deliver(route.function, template, gathered, results)


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


def _deliver(
    function: Callable[..., Any],
    template: TraceTemplate,
    arguments: Mapping[str, Any],
    results: tuple[Any, ...],
) -> Any:
    """Round results to their dtypes, write them where the call wants them, return the others.

    Nothing is written before everything is computed and checked: an output may be an input. A
    result whose destination the function requires (in place, or a mandatory ``out``) is not
    returned, unless its specification says so; this is the convention of all public functions.
    """
    parameters = inspect.signature(function).parameters
    dtypes = template.dtypes(arguments)
    returned: list[Any] = []
    written: dict[str, torch.Tensor] = {}
    writes: list[tuple[torch.Tensor, torch.Tensor]] = []
    in_place_of: dict[str, str | None] = {}
    given = getattr(arguments, "given", {})
    # A reference may return fewer results than the template lists: optional ones come last.
    for (key, spec), result in zip(template.outputs.items(), results, strict=False):
        param = spec.param or key
        destination = given.get(param, argument_of(key, spec, arguments))
        if destination is None:
            returned.append(_rounded(result, getattr(torch, dtypes[key]), spec))
            continue
        check_destination(param, getattr(spec, "layout", None), destination, result.shape)
        index = getattr(spec, "tuple_idx", None)
        name = param if index is None else f"{param}[{index}]"
        written[name], in_place_of[name] = destination, getattr(spec, "in_place_of", None)
        writes.append((destination, result))
        optional = parameters[param].default is not inspect.Parameter.empty
        if is_returned(spec, optional):
            returned.append(destination)
    check_aliasing(written, arguments, in_place_of)
    for destination, result in writes:
        destination.copy_(result)
    if template.nest is not None:
        return template.nest(tuple(returned))
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else tuple(returned)


def _rounded(result: torch.Tensor, dtype: torch.dtype, spec: Value) -> torch.Tensor:
    """A new tensor of a result."""
    if not getattr(spec, "keeps_strides", False):
        return result.to(dtype, copy=True)
    strides = result.stride()
    return torch.empty_strided(result.shape, strides, dtype=dtype, device=result.device).copy_(
        result
    )


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


on_registration.append(route_registered)
compute_from_plans_when(is_active)  # references read what a wrapper has planned
if env.FLASHINFER_BACKEND.get() == "reference":
    _process_wide = True
    _acquire()
