"""Operators of ``torch.library``, one overload for each pattern of arguments that is compiled.

The schema of an overload follows from the call's pattern and the operation's trace template: the
template names the results and the arguments that are written. An overload is registered when
Dynamo first traces a call of its pattern; its name depends on the pattern alone, so that graphs
which another process has compiled and stored find it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .._common.numbers import plain_arguments
from ..trace.specs import is_returned
from ..trace.template import TraceTemplate, resolve_template
from .effects import Effects, as_returns, fixed_positions
from .handles import object_of, references
from .outputs import Destination, destinations_of, fake_results, tensors_in
from .shortcut import Invocation, skip_dispatch

NAMESPACE = "flashinfer"
Pattern = tuple[Any, ...]


class _Api(NamedTuple):
    """A public function that ``torch.compile`` may meet."""

    api: Callable[..., Any]
    function: Callable[..., Any]
    trace: Any


class Operator(NamedTuple):
    """One registered overload.

    Attributes
    ----------
    name : str
        Operator and overload in ``torch.ops.flashinfer``, with a dot between. A
        graph calls it with the leaves of the arguments.
    arrangement : int, tuple, list or None
        What the public function returns: number ``i`` is result ``i`` of the operator, and
        ``-1 - i`` is leaf ``i``, which the function has written.
    """

    name: str
    arrangement: Any


_apis: list[_Api] = []
_operators: dict[tuple[Any, ...], Operator] = {}


@functools.cache
def _library() -> torch.library.Library:
    """The library of all operators, which stay registered until the process is gone.

    PyTorch takes operators back when the interpreter exits. Compiled graphs that die later would
    use them then, which ends the process with an error.
    """
    known = set(weakref.finalize._registry)  # type: ignore[attr-defined]
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for finalizer in set(weakref.finalize._registry) - known:  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Nobody gives this reference back: else the interpreter's last steps delete the operators.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(library.m))
    return library


def declare(api: Callable[..., Any], function: Callable[..., Any], trace: Any) -> int:
    """Note a public function; returns its number."""
    _apis.append(_Api(api, function, trace))
    return len(_apis) - 1


def operator_for(
    number: int, pattern: Pattern, names: tuple[str, ...], handles: tuple[int, ...]
) -> tuple[str, str, Any]:
    """Names of the operator and of its overload for a call, registered if it is new.

    The third value is what the public function returns, see `Operator.arrangement`.

    Parameters
    ----------
    number : int
        The function, by the number of `declare`.
    pattern : tuple
        The pattern of each argument, in order.
    names : tuple of str
        Names of the arguments that are passed by keyword; they come last in `pattern`.
    handles : tuple of int
        Objects among the arguments, see `handles`.
    """
    operator = _operator(number, pattern, names, handles)
    name, _, overload = operator.name.partition(".")
    return name, overload, operator.arrangement


def fixed_for(number: int) -> tuple[int | str, ...]:
    """Positions and names of a function's arguments whose numbers belong to the pattern."""
    target = _apis[number]
    fixed = target.trace.fixed if isinstance(target.trace, Effects) else ()
    return fixed_positions(target.function, fixed)


def destinations_for(
    number: int, pattern: Pattern, names: tuple[str, ...], handles: tuple[int, ...]
) -> tuple[Destination, ...]:
    """Results that a call leaves to the function to allocate, and that a graph can allocate.

    Inductor then plans their memory, and neither side checks what the other has allocated. The
    parameters are those of `operator_for`.
    """
    call, leaves, arguments, template = _resolved(number, pattern, names, handles)
    if isinstance(template, Effects):
        return ()
    positional = len(pattern) - len(names)
    absent = {
        name
        for i, (name, parameter) in enumerate(call.signature.parameters.items())
        if (i >= positional or parameter.kind is parameter.KEYWORD_ONLY)
        and parameter.default is None
        and arguments[name] is None
    }
    found = tuple(destinations_of(template, arguments, leaves, absent))
    made = {
        to.name: torch.empty((1,) * len(to.sizes), dtype=to.dtype, device="meta") for to in found
    }
    given = resolve_template(call.target.trace, arguments | made) or template
    read = {spec.param or key for key, spec in given.inputs.items()}  # counters are added to
    return tuple(to for to in found if to.name not in read)


# Dynamo calls the functions while it traces, and their results are constants of the graph.
operator_for._dynamo_marked_constant = True  # type: ignore[attr-defined]
destinations_for._dynamo_marked_constant = True  # type: ignore[attr-defined]
fixed_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _resolved(
    number: int, pattern: Pattern, names: tuple[str, ...], handles: tuple[int, ...]
) -> tuple[_Call, list[Any], dict[str, Any], TraceTemplate | Effects]:
    """A call, leaves like its own, its arguments with these, and its template."""
    call = _Call(_apis[number], pattern, names)
    leaves = list(_example_leaves(pattern, iter(handles)))
    arguments = call.arguments(leaves)
    if isinstance(call.target.trace, Effects):
        return call, leaves, arguments, call.target.trace
    template = resolve_template(call.target.trace, arguments)
    if template is None:
        raise NotImplementedError(f"{call.name} has no trace template for these arguments")
    return call, leaves, arguments, template


def _operator(
    number: int, pattern: Pattern, names: tuple[str, ...], handles: tuple[int, ...]
) -> Operator:
    call, leaves, arguments, template = _resolved(number, pattern, names, handles)
    in_graph = _can_be_captured(call, arguments, template)
    # Objects with one pattern may have several templates, by what they have planned.
    key = (number, pattern, names, template.name_prefix, in_graph)
    if key not in _operators:
        _operators[key] = _register(call, template, leaves, in_graph)
    return _operators[key]


class _Call:
    """The form of a call: a function and the pattern of its arguments."""

    def __init__(self, target: _Api, pattern: Pattern, names: tuple[str, ...]) -> None:
        self.target, self.pattern, self.names = target, pattern, names
        self.name = target.function.__qualname__.replace(".", "_")
        self.signature = inspect.signature(target.function)

    def parts(self, leaves: Any) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of the call with these leaves."""
        stream = iter(leaves)
        values = [_join(part, stream) for part in self.pattern]
        count = len(values) - len(self.names)
        return values[:count], dict(zip(self.names, values[count:], strict=True))

    def arguments(self, leaves: Any) -> dict[str, Any]:
        """Arguments by name, defaults included."""
        args, kwargs = self.parts(leaves)
        known = {name: value for name, value in kwargs.items() if name != "skip_check"}
        bound = self.signature.bind(*args, **known)
        bound.apply_defaults()
        return plain_arguments(bound.arguments)


def _leaf_patterns(pattern: Any) -> Iterator[Any]:
    for part in pattern:
        if part[0] in ("tuple", "dict"):
            yield from _leaf_patterns(part[1])
        elif part[0] != "constant":
            yield part


def _example_leaves(pattern: Pattern, handles: Iterator[int]) -> Iterator[Any]:
    """Leaves that have the right types, and tensors of the right dtypes and ranks."""
    for kind, *properties in _leaf_patterns(pattern):
        if kind == "tensor":
            dtype, rank = properties
            yield torch.empty((1,) * rank, dtype=dtype, device="meta")
        else:
            yield {"int": 1, "float": 1.0}.get(kind) or next(handles)


def _join(part: Any, leaves: Iterator[Any]) -> Any:
    if part[0] == "constant":
        return part[1]
    if part[0] == "tuple":
        return tuple(_join(item, leaves) for item in part[1])
    if part[0] == "dict":
        return dict(zip(part[2], [_join(item, leaves) for item in part[1]], strict=True))
    leaf = next(leaves)
    return object_of(int(leaf)) if part[0] == "object" else leaf


def _can_be_captured(
    call: _Call, arguments: Mapping[str, Any], template: TraceTemplate | Effects
) -> bool:
    """Whether a CUDA graph may replay the call.

    A plan that is not made for graphs, and a random number that the host draws, would be frozen in
    it; the functions for one request keep plans, which a graph's memory pool must not hold, and
    what plans and runs in one call, with scratch memory, may read lengths on the host.
    """
    if isinstance(template, Effects):
        return template.in_graphs
    owner = arguments.get("self")
    if owner is not None:
        in_place = getattr(owner, "_use_cuda_graph", False)  # plans change in place
        return bool(getattr(owner, "_runs_in_graphs", in_place))
    if "generator" in arguments:
        return isinstance(arguments.get("seed"), torch.Tensor)
    return not (template.scratch or call.name.startswith("single_"))


def _written(template: TraceTemplate, arguments: Mapping[str, Any]) -> dict[str, list[int]]:
    """Ids of tensors that receive each output, for the outputs that have a destination."""
    found: dict[str, list[int]] = {}
    for key, spec in template.outputs.items():
        destination = arguments.get(spec.param or key)
        index = getattr(spec, "tuple_idx", None)
        if isinstance(destination, tuple) and index is not None:
            destination = destination[index]
        tensors = destination if isinstance(destination, tuple) else (destination,)
        ids = [id(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
        if ids:
            found[key] = ids
    return found


class _Described(NamedTuple):
    """A call as its operator is registered.

    Attributes
    ----------
    written : set of int
        Ids of the leaves that are written.
    num_results : int
        How many tensors the operator returns.
    finish, fake : callable
        ``finish(returned, *leaves)`` picks them from what the public function returned, None where
        there are none; ``fake(*leaves)`` makes tensors like them.
    arrangement : int, tuple or None
        As that of `Operator`.
    """

    written: set[int]
    num_results: int
    finish: Callable[..., Any] | None
    fake: Callable[..., Any]
    arrangement: Any


def _described(call: _Call, template: TraceTemplate | Effects, leaves: list[Any]) -> _Described:
    arguments = call.arguments(leaves)
    if isinstance(template, Effects):
        effects, outcome = template, template.outcome(arguments, leaves)

        def fake_of_effects(*leaves: Any) -> Any:
            return as_returns(effects.outcome(call.arguments(leaves), leaves).fresh)

        written_ids, num_results = effects.written_ids(arguments), len(outcome.fresh)
        finish, arrangement = outcome.finish(), outcome.arrangement
        return _Described(written_ids, num_results, finish, fake_of_effects, arrangement)
    written = _written(template, arguments)
    scratch = tensors_in(arguments.get(name) for name in template.scratch)
    ids = {tensor for tensors in written.values() for tensor in tensors} | {*map(id, scratch)}
    fresh = [key for key in template.outputs if key not in written]

    def fake(*leaves: Any) -> Any:
        return as_returns(fake_results(template, call.arguments(leaves), fresh))

    arrangement = _arrangement(call, template, leaves, written, fresh)
    return _Described(ids, len(fresh), _finish(template, len(fresh)), fake, arrangement)


def _register(
    call: _Call, template: TraceTemplate | Effects, leaves: list[Any], in_graph: bool
) -> Operator:
    described = _described(call, template, leaves)
    overload = _overload_name(call, template, in_graph)
    schema = _schema(call, leaves, described.written, described.num_results)
    library, name = _library(), f"{call.name}.{overload}"
    tags = [torch.Tag.pt2_compliant_tag]
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    if not in_graph and unsafe is not None:
        tags.append(unsafe)
    if "generator" in call.signature.parameters:
        tags.append(torch.Tag.nondeterministic_seeded)
    library.define(f"{name}{schema}", tags=tuple(tags))
    invocation, finish = _invocation(call, leaves), described.finish
    invoke = invocation.function()

    def implementation(*leaves: Any) -> Any:
        returned = invoke(*leaves)
        return None if finish is None else finish(returned, *leaves)

    library.impl(name, implementation, "CompositeExplicitAutograd")

    # No operation has a derivative. Without these, PyTorch's own kernels for that cost 4 us a call.
    for key in ("Autograd", "ADInplaceOrView"):
        library.impl(name, torch.library.fallthrough_kernel, key)

    operator = getattr(getattr(torch.ops.flashinfer, call.name), overload)
    skip_dispatch(operator, invocation, finish)
    torch.library.register_fake(f"{NAMESPACE}::{name}", described.fake, lib=library)
    return Operator(name, described.arrangement)


def _overload_name(call: _Call, template: TraceTemplate | Effects, in_graph: bool) -> str:
    """A name that only this pattern has, in every process."""
    text = repr((call.pattern, call.names, template.name_prefix, in_graph))
    return f"{template.name_prefix}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _schema(call: _Call, leaves: list[Any], written: set[int], num_results: int) -> str:
    types = {"tensor": "Tensor", "int": "SymInt", "float": "float", "object": "int"}
    declared = []
    names = iter(_leaf_names(call))
    for i, (part, leaf) in enumerate(zip(_leaf_patterns(call.pattern), leaves, strict=True)):
        mutated = f"(a{i}!)" if id(leaf) in written else ""
        declared.append(f"{types[part[0]]}{mutated} {next(names)}")
    returns = ", ".join(["Tensor"] * num_results)
    return f"({', '.join(declared)}) -> {returns if num_results == 1 else f'({returns})'}"


def _leaf_names(call: _Call) -> Iterator[str]:
    """Names for the schema: the parameters', numbered where one has several leaves."""
    parameters = list(call.signature.parameters)
    kinds = [parameter.kind for parameter in call.signature.parameters.values()]
    several = inspect.Parameter.VAR_POSITIONAL
    last = kinds.index(several) if several in kinds else len(parameters) - 1
    count = len(call.pattern) - len(call.names)
    positional = [parameters[min(i, last)] for i in range(count)]
    seen: dict[str, int] = {}
    for name, part in zip([*positional, *call.names], call.pattern, strict=True):
        for _ in _leaf_patterns((part,)):
            seen[name] = seen.get(name, -1) + 1
            shown = f"{name}_{seen[name]}" if seen[name] or part[0] == "tuple" else name
            yield {"self": "wrapper", "out": "out_"}.get(shown, shown)


def _finish(template: TraceTemplate, num_results: int) -> Callable[..., Any] | None:
    """What follows the eager call: ``finish(returned, leaves)`` keeps what the call did not write.

    Results are contiguous, as a compiled graph expects: a function that allocates its result like
    a permuted input gives it other strides. None where all results are written arguments.
    """
    keep = template.has_own_strides
    if num_results == 0:
        return None

    def finish(returned: Any, *leaves: Any) -> Any:
        if num_results == 1 and isinstance(returned, torch.Tensor):
            return returned if keep else returned.contiguous()
        given = {id(leaf) for leaf in leaves}
        results = [tensor for tensor in tensors_in((returned,)) if id(tensor) not in given]
        results = results[:num_results]
        return as_returns(results if keep else [tensor.contiguous() for tensor in results])

    return finish


def _invocation(call: _Call, leaves: list[Any]) -> Invocation:
    """The call of the public function, with names for the leaves."""
    constants: list[Any] = []
    names = list(_leaf_names(call))
    unused = iter(names)

    def written(part: Any) -> str:
        if part[0] == "tuple":
            return f"({''.join(written(item) + ', ' for item in part[1])})"
        if part[0] == "dict":
            items = zip(part[2], part[1], strict=True)
            return f"{{{', '.join(f'{key!r}: {written(item)}' for key, item in items)}}}"
        if part[0] == "constant":
            constants.append(part[1])
            return f"_constants[{len(constants) - 1}]"
        return f"_references[{next(unused)}]()" if part[0] == "object" else next(unused)

    values = [written(part) for part in call.pattern]
    count = len(values) - len(call.names)
    values[count:] = [f"{n}={v}" for n, v in zip(call.names, values[count:], strict=True)]
    known = {"_api": call.target.api, "_constants": constants, "_references": references}
    are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    return Invocation(
        f"_api({', '.join(values)})", known, dict(zip(names, are_tensors, strict=True))
    )


def _arrangement(
    call: _Call,
    template: TraceTemplate,
    leaves: list[Any],
    written: Mapping[str, list[int]],
    fresh: list[str],
) -> Any:
    """The arrangement by the rule of public functions: a required destination is not returned."""
    index_of = {id(leaf): -1 - i for i, leaf in enumerate(leaves)}
    parts: list[Any] = []
    for key, spec in template.outputs.items():
        if key in fresh:
            parts.append(fresh.index(key))
            continue
        parameter = call.signature.parameters[spec.param or key]
        optional = parameter.default is not inspect.Parameter.empty
        if is_returned(spec, optional):
            parts.append(index_of[written[key][0]])
    if template.nest is not None:
        return template.nest(tuple(parts))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else tuple(parts)
