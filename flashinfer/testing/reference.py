"""Check a public function against the reference of its trace template.

The reference is the one statement of what an operation computes: a pure function of the public
function's arguments, whose results come unrounded and in the order of the template's outputs.
Here the public function runs on copies of the arguments, into poisoned outputs, and everything it
can have done is compared: what it returned, what it wrote in place, and that it wrote nothing
else."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._common.dtypes import torch_name
from ..trace.check import default_check
from ..trace.specs import argument_of, is_returned
from ..trace.standalone import required_parameters
from ..trace.template import resolve_template
from .numerics import ErrorBound, compare, error_bound
from .tensors import (
    clone_arguments,
    iter_tensors,
    poisoned_allocations,
    poisoned_like,
    unviewed_bytes,
)

__all__ = ["CheckOptions", "assert_matches_reference", "check_against"]


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """How closely :func:`assert_matches_reference` looks.

    Attributes
    ----------
    bound : ErrorBound, optional
        For every floating output; by default derived from each output's dtype and
        ``accumulation_length``.
    accumulation_length : int, optional
        Terms added up for one element; by default the longest last dimension of the arguments.
    roundings : int
        Times a value is rounded to the output's dtype on its way.
    check_bias : bool
        See :func:`flashinfer.testing.compare`.
    compare_arguments : bool
        Whether arguments that are no outputs must be unchanged, bit for bit, and gaps between
        rows too.
    """

    bound: ErrorBound | None = None
    accumulation_length: int | None = None
    roundings: int = 1
    check_bias: bool = True
    compare_arguments: bool = True

    def bound_for(self, output: torch.Tensor, arguments: Mapping[str, Any]) -> ErrorBound:
        """The bound for one output of a call."""
        if self.bound is not None:
            return self.bound
        length = self.accumulation_length
        if length is None:
            length = max((t.shape[-1] for t in iter_tensors(dict(arguments)) if t.dim()), default=1)
        return error_bound(output.dtype, max(length, 1), roundings=self.roundings)


def template_of(api: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The trace template that describes a call of ``api``.

    Raises
    ------
    ValueError
        If ``api`` has no template for this call, or the template has no reference.
    """
    name = getattr(api, "__qualname__", repr(api))
    trace = getattr(api, "__flashinfer_trace__", None)
    template = None if trace is None else resolve_template(trace, arguments)
    if template is None:
        raise ValueError(f"api {name} has no trace template for this call")
    if template.reference is None:
        raise ValueError(f"api {name}: its template {template!r} has no reference")
    return template


_Destination = tuple[str, "int | None"]
"""An argument, and which element of it if it is a tuple."""


def _destinations(template: Any, arguments: Mapping[str, Any]) -> dict[str, _Destination]:
    """For each output that an argument receives in this call: the argument."""
    found = {}
    for key, spec in template.outputs.items():
        if isinstance(argument_of(key, spec, arguments), torch.Tensor):
            found[key] = (spec.param or key, getattr(spec, "tuple_idx", None))
    return found


def _tensor_at(arguments: Mapping[str, Any], destination: _Destination) -> torch.Tensor:
    param, index = destination
    tensor: torch.Tensor = arguments[param] if index is None else arguments[param][index]
    return tensor


def _poison(
    template: Any, arguments: dict[str, Any], destinations: Mapping[str, _Destination]
) -> None:
    """Poison the arguments that are only written; one that shares memory with an input stays."""
    read = {getattr(spec, "param", None) or key for key, spec in template.inputs.items()}
    for param, index in destinations.values():
        if index is not None:
            continue  # an element of a tuple: what this call does not write must stay
        shares = any(
            other.untyped_storage().data_ptr() == arguments[param].untyped_storage().data_ptr()
            for name, value in arguments.items()
            if name != param
            for other in iter_tensors(value)
        )
        if param not in read and not shares:
            arguments[param] = poisoned_like(arguments[param])


def _outputs(
    template: Any,
    returned: Any,
    arguments: Mapping[str, Any],
    destinations: Mapping[str, _Destination],
) -> dict[str, Any]:
    """Each output by JSON key, from the argument that received it or from the returned value."""
    values = list(iter_tensors(returned))
    if len(values) == len(template.outputs):
        by_key = dict(zip(template.outputs, values, strict=True))
    else:  # not returned is then what the function requires a destination for
        required = required_parameters(template.reference)
        without = [
            key
            for key, spec in template.outputs.items()
            if key not in destinations or is_returned(spec, destinations[key][0] not in required)
        ]
        if len(values) != len(without):
            wanted = ", ".join(without) or "none"
            raise AssertionError(
                f"{len(values)} values returned, expected {len(without)}: {wanted}"
            )
        by_key = dict(zip(without, values, strict=True))
    for key, destination in destinations.items():
        given = _tensor_at(arguments, destination)
        if key in by_key and by_key[key].data_ptr() != given.data_ptr():
            raise AssertionError(
                f"{destination[0]} was given, but what is returned is another tensor"
            )
        by_key[key] = given
    return {key: by_key[key] for key in template.outputs}


def _describe(arguments: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(text, value))})"
        if not isinstance(value, torch.Tensor):
            return repr(value)
        dtype = torch_name(value.dtype)
        contiguous = "" if value.is_contiguous() else f" stride {tuple(value.stride())}"
        offset = f" offset {value.storage_offset()}" if value.storage_offset() else ""
        return f"{dtype}{list(value.shape)}{contiguous}{offset} on {value.device}"

    return ", ".join(f"{name}={text(value)}" for name, value in arguments.items())


def _by_storage(arguments: Mapping[str, Any]) -> dict[int, list[torch.Tensor]]:
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in iter_tensors(dict(arguments)):
        if tensor.untyped_storage().nbytes():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return groups


def _scratch(template: Any, arguments: Mapping[str, Any]) -> list[_Destination]:
    """The arguments whose memory a call may use as it likes."""
    given = (name for name in template.scratch if isinstance(arguments.get(name), torch.Tensor))
    return [(name, None) for name in given]


def _side_effects(
    before: Mapping[str, Any], after: Mapping[str, Any], written: set[_Destination]
) -> list[str]:
    """Sentences about what changed although no output lives there."""
    failures = []
    outputs = {_tensor_at(after, where).untyped_storage().data_ptr() for where in written}
    for name, value in after.items():
        for old, new in zip(iter_tensors(before[name]), iter_tensors(value), strict=True):
            if new.untyped_storage().data_ptr() in outputs or not new.numel():
                continue
            # A copy has the strides of its shape, which a view as bytes asks for.
            copies = [
                t.reshape(-1).clone(memory_format=torch.contiguous_format) for t in (old, new)
            ]
            bits = [t.view(torch.uint8) for t in copies]
            if not torch.equal(*bits):
                failures.append(f"{name} is an input, and was changed")
    old_groups, new_groups = list(_by_storage(before).values()), list(_by_storage(after).values())
    for old_views, new_views in zip(old_groups, new_groups, strict=True):
        if not torch.equal(unviewed_bytes(old_views), unviewed_bytes(new_views)):
            shape = tuple(new_views[0].shape)
            failures.append(f"memory around a tensor of shape {shape} (gap or margin) was written")
    return failures


def check_against(
    function: Callable[..., Any],
    template: Any,
    arguments: Mapping[str, Any],
    options: CheckOptions | None = None,
) -> dict[str, torch.Tensor]:
    """Run ``function`` on copies of ``arguments`` and compare everything with the reference.

    Parameters
    ----------
    function : Callable
        The public function, or another implementation with the same arguments.
    template : TraceTemplate
        Gives the reference and which argument receives which output.
    arguments : Mapping[str, Any]
        Arguments by name; they are not modified.
    options : CheckOptions, optional
        Bounds and what to compare.

    Returns
    -------
    dict of str to torch.Tensor
        The results of ``function``, by the template's output names.

    Raises
    ------
    AssertionError
        With every failed demand, the worst element and a description of the arguments.
    """
    options = options or CheckOptions()
    expected = template.compute(clone_arguments(dict(arguments)))

    mine = clone_arguments(dict(arguments))
    destinations = _destinations(template, mine)
    _poison(template, mine, destinations)
    before = clone_arguments(mine)
    try:
        with poisoned_allocations():
            returned = function(**mine)
        outputs = _outputs(template, returned, mine, destinations)
        failures = (
            _side_effects(before, mine, {*destinations.values(), *_scratch(template, mine)})
            if options.compare_arguments
            else []
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n  called with {_describe(arguments)}") from error

    if template.check is not default_check:
        if not template.check(tuple(expected), tuple(outputs.values())):
            failures.append(f"{template.name_prefix}: the template's own check refuses the result")
    else:
        for (key, actual), wanted in zip(outputs.items(), expected, strict=True):
            bound = options.bound_for(actual, arguments)
            if not (found := compare(actual, wanted, bound=bound, check_bias=options.check_bias)):
                failures.append(f"output {key!r}: {found}")
    if failures:
        raise AssertionError("\n".join(failures) + f"\n  called with {_describe(arguments)}")
    return outputs


def assert_matches_reference(
    api: Callable[..., Any], options: CheckOptions | None = None, /, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Check one call of a public function against its reference.

    Tensors that only receive results are replaced by NaN-filled ones of the same layout, and
    memory that the function allocates is NaN-filled as well, so an element that is not written
    shows. The caller's tensors are not modified.

    Parameters
    ----------
    api : Callable
        A function decorated with ``@flashinfer_api(trace=...)``.
    options : CheckOptions, optional
        Bounds and what to compare; positional, so that ``api`` may have any argument names.
    **arguments : Any
        The arguments of ``api``, by name.

    Returns
    -------
    dict of str to torch.Tensor
        The results of ``api``, by the names of the template's outputs.

    Raises
    ------
    AssertionError
        If anything differs by more than rounding explains, or was written that is no output.
    TypeError
        If ``arguments`` do not fit the signature of ``api``.
    ValueError
        If ``api`` has no template with a reference.

    Examples
    --------
    >>> x = torch.randn(8, 4096, dtype=torch.bfloat16, device="cuda")
    >>> w = torch.randn(4096, dtype=torch.bfloat16, device="cuda")
    >>> outputs = assert_matches_reference(flashinfer.rmsnorm, input=x, weight=w, eps=1e-5)
    """
    bound = inspect.signature(api).bind(**arguments)
    return check_against(api, template_of(api, bound.arguments), bound.arguments, options)
