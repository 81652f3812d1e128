"""Calls of decorated functions that go elsewhere: to a reference, or to a solution.

How it costs nothing when off: a decorated function is the undecorated function itself, so there is
no place for a test of the mode. Switching on exchanges the function's code object for one with the
same parameters that comes here; switching off puts the old one back. References to the function
that were taken before stay valid, and `inspect.signature` sees no difference.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch

from ..trace.arguments import check_aliasing, check_destination
from ..trace.specs import Value, argument_of, is_returned
from ..trace.template import TraceTemplate
from .decorator import on_registration, traced_functions

NOT_TAKEN = object()
"""What a user gives for a call that it leaves to others."""

lock = threading.RLock()
_routes: list[Route] = []  # index = the number in the trampoline's code; never shrinks
_users: list[User] = []


class User(Protocol):
    """Who takes calls; several may be there, and the first that takes a call has it."""

    def wants(self, trace: Any) -> bool:
        """Whether calls of a function with this trace may be taken."""
        ...

    def take(self, route: Route, arguments: dict[str, Any]) -> Any:
        """The call's result, or `NOT_TAKEN`; `arguments` with defaults, by name."""
        ...

    def is_awake(self) -> bool:
        """Whether any call of this thread and task is taken: asked before arguments are bound."""
        ...


@dataclass
class Route:
    """A registered function with both of its bodies."""

    function: FunctionType
    trace: Any
    kernel_code: CodeType
    routed_code: CodeType
    kernel: FunctionType  # the function as it is when nobody takes calls


def add_user(user: User, first: bool = False) -> None:
    """Let `user` take calls; as often as it is added, it must be removed."""
    with lock:
        _users.insert(0 if first else len(_users), user)
        route_registered()


def remove_user(user: User) -> None:
    """Take back one `add_user`."""
    with lock:
        _users.remove(user)
        _exchange()


def route_registered() -> None:
    """Route functions that were decorated after a user came; idempotent."""
    if not _users:
        return
    with lock:
        known = {id(route.function) for route in _routes}
        for function, trace in list(traced_functions):
            if trace is not None and id(function) not in known:
                known.add(id(function))
                _routes.append(_new_route(function, trace, len(_routes)))
        _exchange()


def _exchange() -> None:
    for route in _routes:
        wanted = any(user.wants(route.trace) for user in _users)
        route.function.__code__ = route.routed_code if wanted else route.kernel_code


def _new_route(function: Any, trace: Any, index: int) -> Route:
    kernel = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    kernel.__kwdefaults__ = function.__kwdefaults__
    return Route(function, trace, function.__code__, _trampoline(function, index), kernel)


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
    """Body of every trampoline: the call's arguments go to the user that takes them."""
    route = _routes[index]
    args, kwargs = _call_arguments(route.kernel_code, local_values)
    awake = [user for user in _users if user.is_awake() and user.wants(route.trace)]
    if awake:
        arguments = _bound(route, args, dict(kwargs))
        for user in awake:
            result = user.take(route, arguments)
            if result is not NOT_TAKEN:
                return result
    return route.kernel(*args, **kwargs)


def _bound(route: Route, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(route.function)
    for added in _added_by_decorators(route.kernel_code, signature):
        kwargs.pop(added)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


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


def deliver(
    function: Callable[..., Any],
    template: TraceTemplate,
    arguments: Mapping[str, Any],
    results: tuple[Any, ...],
    copies: bool = True,
) -> Any:
    """Round results to their dtypes, write them where the call wants them, return the others.

    Nothing is written before everything is computed and checked: an output may be an input. A
    result whose destination the function requires (in place, or a mandatory ``out``) is not
    returned, unless its specification says so; this is the convention of all public functions.
    Without `copies`, results that share no memory with an argument are returned themselves.
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
            is_own = not copies and not _shares_memory(result, arguments)
            dtype = getattr(torch, dtypes[key])
            returned.append(result if is_own else rounded(result, dtype, spec))
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


def _shares_memory(result: torch.Tensor, arguments: Mapping[str, Any]) -> bool:
    """Whether a result is, or is part of, an argument."""
    return any(
        isinstance(value, torch.Tensor)
        and value.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        for value in arguments.values()
    )


def rounded(result: torch.Tensor, dtype: torch.dtype, spec: Value) -> torch.Tensor:
    """A new tensor of a result."""
    if not getattr(spec, "keeps_strides", False):
        return result.to(dtype, copy=True)
    strides = result.stride()
    return torch.empty_strided(result.shape, strides, dtype=dtype, device=result.device).copy_(
        result
    )


on_registration.append(route_registered)
