"""Shapes and dtypes of an operation's results without its kernel, from its trace template."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._common.dtypes import torch_name
from ..trace.arguments import folded_shape
from ..trace.specs import Const, Scalar, Tensor, argument_of, axis_without_tensor, declared_dtype
from ..trace.template import TraceTemplate

Shape = Sequence[int]
Size = int | tuple[int, int]


class Destination(NamedTuple):
    """An argument that receives a result, as a graph can make it.

    Attributes
    ----------
    name : str
        The parameter.
    sizes : tuple
        For each dimension its size, or a leaf of the call and that one's dimension of this size.
    dtype : torch.dtype
        The dtype of the result.
    """

    name: str
    sizes: tuple[Size, ...]
    dtype: torch.dtype


def destinations_of(
    template: TraceTemplate,
    arguments: Mapping[str, Any],
    leaves: Sequence[Any],
    absent: Container[str],
) -> Iterator[Destination]:
    """The results that have a parameter, and sizes and strides that the call's tensors show.

    Parameters
    ----------
    template : TraceTemplate
        Describes the operation.
    arguments : mapping
        The call's arguments by name, defaults included.
    leaves : sequence
        The call's tensors and numbers, in order; tensors among `arguments` are these very objects.
    absent : container of str
        Parameters that the call leaves out.
    """
    candidates = {
        key: spec
        for key, spec in template.outputs.items()
        if isinstance(spec, Tensor) and (spec.param or key) in absent
    }
    if template.has_own_strides or not candidates:
        return
    axes, shapes = _leaf_axes(template, arguments, leaves)
    predicted = template.predict(arguments) if template.predict else {}
    if "self" in arguments:  # what a wrapper has planned is the same in each run of the graph
        axes |= {axis: size for axis, size in predicted.items() if type(size) is int}
    dtypes = _dtypes(template, dict(arguments) | predicted)
    for key, spec in candidates.items():
        dims = tuple(spec.dim_names)
        sizes = shapes.get(dims) or tuple(axes[dim] for dim in dims if dim in axes)
        if key in dtypes and sizes and len(sizes) >= len(dims):
            yield Destination(spec.param or key, sizes, dtypes[key])


def _leaf_axes(
    template: TraceTemplate, arguments: Mapping[str, Any], leaves: Sequence[Any]
) -> tuple[dict[str, Size], dict[tuple[str, ...], tuple[Size, ...]]]:
    """Leaf and dimension that have an axis' size, and those of whole shapes by names of axes."""
    index_of = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    axes: dict[str, Size] = {}
    shapes: dict[tuple[str, ...], tuple[Size, ...]] = {}
    for key, spec in template.inputs.items():
        tensor = None if isinstance(spec, Scalar) else argument_of(key, spec, arguments)
        if not isinstance(spec, Tensor) or tensor is None or id(tensor) not in index_of:
            continue
        shape: tuple[Size, ...] = tuple((index_of[id(tensor)], i) for i in range(tensor.ndim))
        shapes.setdefault(tuple(spec.dim_names), shape)
        if len(shape) == len(spec.dim_names):
            axes = dict(zip(spec.dim_names, shape, strict=True)) | axes
    return axes, shapes


def fake_results(
    template: TraceTemplate, arguments: Mapping[str, Any], fresh: Sequence[str]
) -> list[torch.Tensor]:
    """New tensors like the results of a call, without values.

    Parameters
    ----------
    template : TraceTemplate
        Describes the operation.
    arguments : mapping
        The call's arguments by name, defaults included; tensors may be fake.
    fresh : sequence of str
        The outputs that the call has no destination for.
    """
    if not fresh:
        return []
    device = next(tensors_in(arguments.values())).device
    known = dict(arguments) | (template.predict(arguments) if template.predict else {})
    axes, shapes = _axes(template, known)
    dtypes = _dtypes(template, known)
    results = []
    for key in fresh:
        spec = template.outputs[key]
        assert isinstance(spec, Tensor)
        dims = tuple(spec.dim_names)
        shape: Any = shapes.get(dims) or [axes.get(axis) for axis in dims]
        if None in shape or template.has_own_strides:
            return _like_reference(template, arguments, fresh)
        results.append(torch.empty(shape, dtype=dtypes[key], device=device))
    return results


def _axes(
    template: TraceTemplate, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[tuple[str, ...], Shape]]:
    """Sizes of axes, and shapes by the names of their axes, as far as the arguments show them."""
    axes: dict[str, Any] = {}
    shapes: dict[tuple[str, ...], Shape] = {}
    for key, spec in template.inputs.items():
        tensor = None if isinstance(spec, Scalar) else argument_of(key, spec, arguments)
        if not isinstance(spec, Tensor) or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.ndim in (spec.ranks or (len(spec.dim_names),)):
            sizes = folded_shape(key, spec, tensor)
            for axis, size in zip(spec.dim_names, sizes, strict=True):
                axes.setdefault(axis, size)
            shapes.setdefault(tuple(spec.dim_names), tensor.shape)
    for axis, kind in template.axes.items():
        given = arguments.get(axis)
        if isinstance(given, (int, torch.SymInt)):
            axes[axis] = given
        elif axis not in axes and isinstance(kind, Const) and (kind.value or kind.derive):
            axes[axis] = axis_without_tensor(axis, kind, {}, axes)
    return axes, shapes


def _dtypes(template: TraceTemplate, arguments: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """As `TraceTemplate.dtypes`, of a call that is not checked and that may have to be gathered."""
    names: dict[str, str] = {}
    for key, spec in [*template.inputs.items(), *template.outputs.items()]:
        if isinstance(spec, Scalar):
            continue
        tensor = argument_of(key, spec, arguments)
        name = declared_dtype(spec, names, arguments, template.outputs)
        if isinstance(tensor, torch.Tensor):
            name = torch_name(tensor.dtype)
        if name is not None:
            names[key] = name
    return {key: getattr(torch, names[key]) for key in template.outputs if key in names}


def _like_reference(
    template: TraceTemplate, arguments: Mapping[str, Any], fresh: Sequence[str]
) -> list[torch.Tensor]:
    """Results of the reference on tensors without values, where it alone knows a size."""
    results = dict(zip(template.outputs, template.compute(arguments), strict=False))
    dtypes = _dtypes(template, arguments)
    return [results[key].to(dtypes[key], copy=True) for key in fresh]


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, those within tuples included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
