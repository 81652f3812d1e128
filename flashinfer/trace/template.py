"""Declarative description of one operation: axes, inputs, outputs and a reference.

A `TraceTemplate` is written once per public function and used three ways: it turns a call into a
FlashInfer-Bench definition (`flashinfer.fi_trace`), its reference is the oracle of the tests, and
the reference backend runs the same reference in place of the kernel. The checks on shapes and
dtypes that those uses share live here too, so that an argument is refused in one wording.

Nothing of ours is imported but siblings: a template must load on a machine without GPU, driver or
compiler.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .._common.checks import choice
from .._common.conversions import as_dtype, is_convertible
from .._common.dtypes import SHORT_FLOATS, torch_name
from .arguments import (
    check_beside_inputs,
    check_chosen_dtype,
    check_constraints,
    check_layout,
    check_scalar,
    folded_shape,
    names_in,
)
from .check import default_check
from .examples import draw_arguments, example_arguments, is_completion
from .specs import (
    Axis,
    Const,
    Scalar,
    Tensor,
    Value,
    argument_of,
    axis_json,
    axis_without_tensor,
    declared_dtype,
    value_json,
)
from .specs import Var as Var
from .standalone import required_parameters, standalone_reference


class Gathered(dict[str, Any]):
    """Arguments that `TraceTemplate.gathered` has put together; `given` has those it converted."""

    given: Mapping[str, Any] = {}


class TraceTemplate:
    """Describes what one operation computes, and on which tensors.

    Parameters
    ----------
    op_type : str
        Category of the operation; variants of one operation share it.
    axes : dict of str to Var or Const
        Every axis that a tensor names.
    inputs, outputs : dict of str to Tensor or Scalar
        The tensors by JSON key, in order. An output with the name of an input is that input
        updated in place; the format has no such thing, so its JSON key gains ``_out``.
    name_prefix : str, optional
        First part of the definition's name; unique. Defaults to `op_type`.
    reference : callable, optional
        Plain PyTorch function of the public function's arguments. It changes none of them and
        returns its results in the order of `outputs` (a tensor, or a tuple of them, which may be
        more) in higher precision, not yet rounded to the output's dtype.
    check : callable, optional
        ``check(reference_outputs, actual_outputs) -> bool``: whether a result is acceptable; by
        default closeness by dtype (`flashinfer.trace.default_check`).
    init : callable, optional
        ``init(*, <axes>, device, seed) -> arguments`` draws the arguments of one call; the
        attribute of this name is such a function for every template, see `draw_arguments`. A
        function of one positional parameter completes what `example_arguments` draws instead, for
        an operation whose inputs are not free (offsets, page tables).
    constraints : list of str, optional
        Python expressions over axes and integer inputs that hold for every valid call. The
        definition has those of axes alone.
    tags : list of str, optional
        Labels, copied into the definition.
    description : str
        One or two sentences: what is computed.
    hints : sequence of str
        Arguments (None, True or False) that may change how a kernel is launched, never a result;
        they are not part of the definition.
    unsupported : sequence of str
        Arguments of the kernels alone: None where the reference is to compute.
    options : dict of str to tuple
        Arguments that choose what is computed, and the values they may have, the default first:
        flags, names, dtypes. The definition is that of the call's values, and says so in its name
        where they are not the defaults.
    nest : callable, optional
        ``nest(results) -> results`` where the public function returns tuples within a tuple,
        or a list.
    gather : callable, optional
        ``gather(arguments) -> arguments`` where inputs and reference are not the arguments of the
        call: a method's, part of which its object keeps, or one that takes the same tensors in
        several layouts. The reference is then a function of what is gathered.
    predict : callable, optional
        ``predict(arguments) -> arguments``: sizes of axes and dtypes of results that no tensor of a
        call shows, without a look at any value, where `gather` needs values.
    has_own_strides : bool
        Whether callers rely on the strides of the reference's results.
    scratch : sequence of str
        Arguments whose memory a call uses, and which mean nothing before and after it: those of a
        function that plans and runs at once.
    """

    def __init__(
        self,
        op_type: str,
        axes: dict[str, Axis],
        inputs: dict[str, Value],
        outputs: dict[str, Value],
        *,
        name_prefix: str | None = None,
        reference: Callable[..., Any] | None = None,
        check: Callable[..., bool] | None = None,
        init: Callable[..., dict[str, Any]] | None = None,
        constraints: list[str] | None = None,
        tags: list[str] | None = None,
        description: str = "",
        hints: Sequence[str] = (),
        unsupported: Sequence[str] = (),
        options: dict[str, tuple[Any, ...]] | None = None,
        gather: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
        nest: Callable[[tuple[Any, ...]], Any] | None = None,
        predict: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
        has_own_strides: bool = False,
        scratch: Sequence[str] = (),
    ) -> None:
        self.op_type = op_type
        self.axes = axes
        self.inputs = inputs
        self.outputs = outputs
        self.name_prefix = name_prefix or op_type
        self.reference = reference
        self.check = default_check if check is None else check
        self.complete = init if init is not None and is_completion(init) else None
        self.init = init if self.complete is not init else partial(draw_arguments, self)
        self.constraints = list(constraints or [])
        self.tags = list(tags or [])
        self.description = description
        self.hints, self.unsupported = tuple(hints), tuple(unsupported)
        self.options = dict(options or {})
        self.gather = gather
        self.nest = nest
        self.predict = predict
        self.has_own_strides = has_own_strides
        self.scratch = tuple(scratch)
        self._refuse_unknown_axes()

    def __repr__(self) -> str:
        return f"TraceTemplate({self.name_prefix!r}, op_type={self.op_type!r})"

    def _refuse_unknown_axes(self) -> None:
        for key, spec in {**self.inputs, **self.outputs}.items():
            for axis in getattr(spec, "dim_names", ()):
                if axis not in self.axes:
                    raise ValueError(
                        f"{self!r}: tensor {key!r} names axis {axis!r}, which is not in axes "
                        f"{list(self.axes)}"
                    )

    # ---- arguments of a call -------------------------------------------------------------------

    def gathered(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """What inputs, outputs, options and the reference are named by, from a call's arguments.

        The arguments themselves unless the template has `gather`, or a tensor has to be converted;
        what was gathered before is returned as it is. The other methods gather, too.
        """
        if isinstance(arguments, Gathered):
            return arguments
        if self.gather is not None:
            arguments = Gathered(self.gather(arguments))
        changed = {
            name: as_dtype(tensor, dtype)
            for name, tensor, dtype in self._converting(arguments)
            if is_convertible(tensor, dtype)
        }
        if not changed:
            return arguments
        result = Gathered({**arguments, **changed})
        result.given = {name: arguments[name] for name in changed}
        return result

    def _converting(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, torch.dtype]]:
        for key, spec in self.inputs.items():
            if isinstance(spec, Tensor) and spec.converts and spec.dtype is not None:
                yield (
                    spec.param or key,
                    arguments.get(spec.param or key),
                    getattr(torch, spec.dtype),
                )

    def compute(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Results of the reference for a call, in the order of `outputs`.

        Results that the template does not list are left out.

        Raises
        ------
        NotImplementedError
            If the template has no reference.
        """
        if self.reference is None:
            raise NotImplementedError(f"{self!r} has no reference")
        gathered = self.gathered(arguments)
        taken = inspect.signature(self.reference).parameters
        results = self.reference(**{k: v for k, v in gathered.items() if k in taken})
        results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        return results[: len(self.outputs)]

    def without_values(self, arguments: Mapping[str, Any], name: str) -> tuple[torch.Tensor, ...]:
        """Meta tensors in place of the results of a call whose argument `name` is one.

        Raises
        ------
        ValueError
            If a result's shape is not known from the shapes of the arguments.
        """
        sizes, dtypes = self.axis_values(arguments), self.dtypes(arguments)
        results = []
        for key, spec in self.outputs.items():
            axes = getattr(spec, "dim_names", ())
            if any(axis not in sizes for axis in axes):
                raise ValueError(f"`{name}` must have values, which decide the shape of the result")
            shape, dtype = [sizes[axis] for axis in axes], getattr(torch, dtypes[key])
            results.append(torch.empty(shape, dtype=dtype, device="meta"))
        return tuple(results)

    def axis_values(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Sizes of all axes of a call.

        Parameters
        ----------
        arguments : mapping
            The call's arguments by name, defaults included.

        Returns
        -------
        dict of str to int

        Raises
        ------
        TypeError
            If an argument is not a tensor where one is declared.
        ValueError
            If a tensor has the wrong rank, two arguments disagree about an axis, or a constraint
            does not hold. The argument is named.
        """
        arguments = self.gathered(arguments)
        values: dict[str, int] = {}
        seen_in: dict[str, str] = {}
        shapes: dict[tuple[str, ...], tuple[str, torch.Size]] = {}
        for param, spec, tensor in self._input_tensors(arguments):
            dims = tuple(spec.dim_names)
            for axis, size in zip(dims, folded_shape(param, spec, tensor), strict=True):
                if values.setdefault(axis, size) != size:
                    raise ValueError(
                        f"`{param}` must have {axis} {values[axis]} as `{seen_in[axis]}` has, "
                        f"got shape {list(tensor.shape)}"
                    )
                seen_in.setdefault(axis, param)
            first, shape = shapes.setdefault(dims, (param, tensor.shape))
            if shape != tensor.shape:
                raise ValueError(
                    f"`{param}` must have the shape of `{first}`, {list(shape)}, "
                    f"got {list(tensor.shape)}"
                )
        for axis, kind in self.axes.items():
            given = arguments.get(axis)
            if axis in seen_in and type(given) is int and given != values[axis]:
                raise ValueError(
                    f"`{axis}` must be {values[axis]} as in `{seen_in[axis]}`, got {given}"
                )
            if axis not in values:
                derived = axis_without_tensor(axis, kind, arguments, values)
                if derived is not None:
                    values[axis] = derived
        # A size that no tensor has is an argument of its own.
        named = {axis: axis for axis in values if axis in arguments} | seen_in
        scalars = {key: spec for key, spec in self.inputs.items() if isinstance(spec, Scalar)}
        check_constraints(self.constraints, values, named, scalars, arguments)
        return values

    def dtypes(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Torch dtype name of each input and output of a call, by JSON key.

        Raises
        ------
        ValueError
            If an argument's dtype is not one that the template accepts.
        """
        arguments = self.gathered(arguments)
        names: dict[str, str] = {}
        for key, spec in self.outputs.items():
            if isinstance(spec, Tensor):
                check_chosen_dtype(key, spec, arguments, argument_of(key, spec, arguments))
        for key, spec in [*self.inputs.items(), *self.outputs.items()]:
            if isinstance(spec, Scalar):
                names[key] = spec.dtype
                continue
            tensor = argument_of(key, spec, arguments)
            declared = declared_dtype(spec, names, arguments, self.outputs)
            observed = torch_name(tensor.dtype) if isinstance(tensor, torch.Tensor) else declared
            if observed is None:
                if key in self.outputs:
                    raise ValueError(f"{self!r}: output {key!r} has no dtype in this call")
                continue
            allowed = spec.dtypes if spec.dtypes or not declared else [declared]
            if allowed is not None and observed not in allowed:
                raise ValueError(
                    f"`{spec.param or key}` must have dtype {' or '.join(allowed)}, got {observed}"
                )
            # An input that is also an output keeps the input's entry under another JSON key.
            names[key] = observed
        return names

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Refuse arguments that do not fit the template; the sizes of the axes if they do.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what it is and what is allowed.
        """
        arguments = self.gathered(arguments)
        # A dispatch function that knows no template for an option falls back to another's shapes.
        for name, allowed in self.options.items():
            choice(name, arguments.get(name, allowed[0]), allowed)
        values = self.axis_values(arguments)
        self._check_destination_types(arguments)
        self.dtypes(arguments)
        for param, tensor_spec, tensor in self._input_tensors(arguments):
            check_layout(param, tensor_spec.layout, tensor)
        for key, spec in self.inputs.items():
            if isinstance(spec, Scalar):
                check_scalar(spec.param or key, spec, argument_of(key, spec, arguments))
        check_beside_inputs(self.hints, self.unsupported, arguments)
        return values

    def _input_tensors(
        self, arguments: Mapping[str, Any]
    ) -> Iterator[tuple[str, Tensor, torch.Tensor]]:
        for key, spec in self.inputs.items():
            if isinstance(spec, Scalar):
                continue
            tensor = argument_of(key, spec, arguments)
            param = spec.param or key
            if tensor is None and spec.optional:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"`{param}` must be a torch.Tensor, got {type(tensor).__name__}")
            yield param, spec, tensor

    def _check_destination_types(self, arguments: Mapping[str, Any]) -> None:
        required = required_parameters(self.reference)
        for key, spec in self.outputs.items():
            destination, param = argument_of(key, spec, arguments), spec.param or key
            if isinstance(destination, torch.Tensor) or (
                destination is None and param not in required
            ):
                continue
            raise TypeError(f"`{param}` must be a torch.Tensor, got {type(destination).__name__}")

    # ---- definition ----------------------------------------------------------------------------

    def definition_name(self, axis_values: Mapping[str, int]) -> str:
        """Prefix and constant axes, such as ``rmsnorm_h4096``."""
        parts = [self.name_prefix]
        for axis, kind in self.axes.items():
            if isinstance(kind, Const) and kind.abbrev != "":
                parts.append(f"{axis if kind.abbrev is None else kind.abbrev}{axis_values[axis]}")
        return "_".join(parts)

    def call_name(self, arguments: Mapping[str, Any]) -> str:
        """Name of the definition of one call: distinct for distinct definitions.

        The name of `definition_name`, then what departs from the usual bfloat16 call: the dtype of
        the first tensor, and each tensor of another dtype than that one.
        """
        arguments = self.gathered(arguments)
        parts = [self.definition_name(self.axis_values(arguments))]
        usual = "bfloat16"
        dtypes = self.dtypes(arguments)
        for key, spec in [*self.inputs.items(), *self.outputs.items()]:
            if spec.optional and argument_of(key, spec, arguments) is None:
                continue
            if spec.optional and key in self.inputs:
                parts.append(key)
            if isinstance(spec, Scalar) or key not in dtypes:
                continue
            if spec.dtype is None and dtypes[key] != usual:
                short = SHORT_FLOATS.get(dtypes[key], dtypes[key])
                parts.append(short if key == next(iter(self.inputs)) else f"{key}_{short}")
            if key == next(iter(self.inputs)):
                usual = dtypes[key]
        for name, allowed in self.options.items():
            value = arguments.get(name, allowed[0])
            if value != allowed[0]:
                flag = {True: name, False: f"no_{name}"}
                text = value.name if isinstance(value, enum.Enum) else torch_name(value).lower()
                parts.append(flag[value] if isinstance(value, bool) else text)
        return "_".join(parts)

    def definition(self, arguments: Mapping[str, Any], fi_api: str) -> dict[str, Any]:
        """FlashInfer-Bench definition of one call.

        Parameters
        ----------
        arguments : mapping
            The call's arguments by name, defaults included.
        fi_api : str
            Module and qualified name of the public function, for the ``fi_api:`` tag.

        Returns
        -------
        dict
            Ready for ``json.dump``; ``reference`` holds a source that runs by itself.

        Raises
        ------
        TypeError, ValueError
            As `validate`; and ValueError if the template has no reference.
        """
        if self.reference is None:
            raise ValueError(f"{self!r} has no reference, so {fi_api} has no definition")
        arguments = self.gathered(arguments)
        values = self.validate(arguments)
        dtypes = self.dtypes(arguments)
        inputs = {
            key: spec
            for key, spec in self.inputs.items()
            if argument_of(key, spec, arguments) is not None
        }
        outputs = {
            f"{key}_out" if key in self.inputs else key: (spec, dtypes[key])
            for key, spec in self.outputs.items()
        }
        result: dict[str, Any] = {
            "name": self.call_name(arguments),
            "description": self.description,
            "op_type": self.op_type,
            "tags": [f"fi_api:{fi_api}", *self.tags],
            "axes": {axis: axis_json(axis, kind, values) for axis, kind in self.axes.items()},
            "constraints": [each for each in self.constraints if names_in(each) <= values.keys()],
            "inputs": {key: value_json(spec, dtypes[key]) for key, spec in inputs.items()},
            "outputs": {key: value_json(spec, dtype) for key, (spec, dtype) in outputs.items()},
        }
        constants = {axis: values[axis] for axis, k in self.axes.items() if isinstance(k, Const)}
        constants |= {name: arguments.get(name, v[0]) for name, v in self.options.items()}
        result["reference"] = standalone_reference(self.reference, inputs, outputs, constants)
        return result

    def build_fi_trace_fn(self, fi_api: str) -> Callable[..., dict[str, Any]]:
        """Function of the public function's keyword arguments that returns the definition."""

        def trace_call(**kwargs: Any) -> dict[str, Any]:
            return self.definition(kwargs, fi_api)

        return trace_call

    example_arguments = example_arguments


def resolve_template(trace: Any, arguments: Mapping[str, Any]) -> TraceTemplate | None:
    """The template of one call: `trace` itself, or what the dispatch function `trace` chooses."""
    if trace is None or isinstance(trace, TraceTemplate):
        return trace
    return trace(**arguments)


def templates_of(trace: Any) -> list[TraceTemplate]:
    """All templates that `trace` can stand for.

    Raises
    ------
    ValueError
        If `trace` is a dispatch function without the ``templates`` attribute.
    """
    if trace is None:
        return []
    if isinstance(trace, TraceTemplate):
        return [trace]
    if not hasattr(trace, "templates"):
        raise ValueError(f"dispatch function {trace!r} must list its choices in .templates")
    return list(trace.templates)
