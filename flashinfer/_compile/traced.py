"""The stand-in of a decorated function: what Dynamo traces in its place.

Dynamo reads the attribute ``_torchdynamo_inline`` of a function before it traces the function's
body. Eager calls never see the stand-in, so they cost what they cost without it.

The stand-in takes the arguments apart. Tensors, integers and floats become arguments of the
operator. Planned wrappers and generators become numbers (see `handles`). Everything else, and the
nesting of tuples, becomes the *pattern* of the call, which selects the overload.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .effects import Effects, Results
from .handles import Planned, handle_of
from .operators import declare, destinations_for, fixed_for, operator_for
from .outputs import Destination

# A PyTorch without torch.distributed has no groups.
ProcessGroup = getattr(torch.distributed, "ProcessGroup", Planned)

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def make_traceable(api: AnyFunction, function: Callable[..., Any], trace: Any) -> AnyFunction:
    """Let ``torch.compile`` see a public function as an operator.

    Parameters
    ----------
    api : callable
        The function as users call it, with all its decorators.
    function : callable
        The function that the decorators were put on.
    trace : TraceTemplate, dispatch function or Effects
        Describes the operation: its results and what it writes.
    """
    number = declare(api, function, trace)
    local: dict[str, Any] = {}
    # The number is a literal: for a method, Dynamo would look for a closure in `function`.
    exec(f"def traced(*args, **kwargs): return _call({number}, args, kwargs)", globals(), local)
    api._torchdynamo_inline = local["traced"]  # type: ignore[attr-defined]
    return api


def graph_operator(
    *written: str,
    results: Results = lambda arguments: None,
    fixed: tuple[str, ...] = (),
    in_graphs: bool = False,
) -> Callable[[AnyFunction], AnyFunction]:
    """Let ``torch.compile`` see a function without a trace template as an operator.

    It stands above ``@flashinfer_api``. The parameters are the attributes of `Effects`.
    """
    effects = Effects(frozenset(written), results, frozenset(fixed), in_graphs)

    def decorate(api: AnyFunction) -> AnyFunction:
        function = inspect.unwrap(api)
        unknown = (effects.written | effects.fixed) - set(inspect.signature(function).parameters)
        if unknown:
            raise TypeError(f"{function.__name__} has no parameters {sorted(unknown)}")
        return make_traceable(api, function, effects)

    return decorate


def _call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of function `number`, as Dynamo sees it."""
    leaves: list[Any] = []
    handles: list[int] = []
    fixed = fixed_for(number)
    pattern = []
    for key, value in [*enumerate(args), *kwargs.items()]:
        is_fixed = key in fixed and not isinstance(value, torch.Tensor)
        pattern.append(("constant", value) if is_fixed else _split(value, leaves, handles))
    call = (number, tuple(pattern), tuple(kwargs), tuple(handles))
    destinations = destinations_for(*call)
    if destinations:
        made = {to.name: _new_destination(to, leaves) for to in destinations}
        return _call(number, args, {**kwargs, **made})
    name, overload, arrangement = operator_for(*call)
    results = getattr(getattr(torch.ops.flashinfer, name), overload)(*leaves)
    if results is None:
        results = ()
    elif isinstance(results, torch.Tensor):
        results = (results,)
    return _arrange(arrangement, results, leaves)


def _new_destination(to: Destination, leaves: list[Any]) -> torch.Tensor:
    """The tensor that a graph allocates for a result."""
    sizes = [size if isinstance(size, int) else leaves[size[0]].shape[size[1]] for size in to.sizes]
    device = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)][0]
    return torch.empty(sizes, dtype=to.dtype, device=device)


def _split(value: Any, leaves: list[Any], handles: list[int]) -> Any:
    """The pattern of a value; its tensors and numbers are appended to `leaves`."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return ("tensor", value.dtype, value.ndim)
    if value is None or isinstance(value, (bool, str, torch.dtype, torch.device)):
        return ("constant", value)
    if isinstance(value, float):
        leaves.append(value)
        return ("float",)
    if type(value) is int or isinstance(value, torch.SymInt):
        leaves.append(value)
        return ("int",)
    if isinstance(value, (tuple, list)):
        return ("tuple", tuple([_split(item, leaves, handles) for item in value]))
    if isinstance(value, dict):
        values = tuple([_split(item, leaves, handles) for item in value.values()])
        return ("dict", values, tuple(value))
    if isinstance(value, (torch.Generator, ProcessGroup, Planned)):
        handle = int(value._handle) if isinstance(value, Planned) else handle_of(value)
        leaves.append(handle)
        handles.append(handle)
        # The results follow the plan: a plan of other results needs another graph.
        return ("object", getattr(value, "_planned_results", None))
    return ("constant", value)


def _arrange(arrangement: Any, results: tuple[Any, ...], leaves: list[Any]) -> Any:
    """The value that the public function returns, from results and written arguments."""
    if arrangement is None:
        return None
    if isinstance(arrangement, (tuple, list)):
        parts = [_arrange(part, results, leaves) for part in arrangement]
        return parts if isinstance(arrangement, list) else tuple(parts)
    return results[arrangement] if arrangement >= 0 else leaves[-1 - arrangement]
