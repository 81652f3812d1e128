"""Random arguments of a call that a template describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._common.dtypes import torch_name
from .specs import Const, Scalar, Tensor
from .standalone import required_parameters


def example_arguments(
    template: Any,
    sizes: Mapping[str, int],
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments of one call, outputs that the caller must provide included.

    Parameters
    ----------
    template : TraceTemplate
        This function is its method.
    sizes : mapping
        Size of each axis.
    dtype : torch.dtype
        Dtype of the tensors that are free to have any accepted one.
    device : str or torch.device
        Where the tensors are.
    seed : int
        Seed of the random numbers.

    Returns
    -------
    dict
        Arguments by name: those of `inputs` that are not optional, and what else the
        reference requires. A scalar without default is 0.5; an output's dtype is the first
        that is accepted.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    arguments: dict[str, Any] = {}
    fallback = torch_name(dtype)
    for key, spec in template.inputs.items():
        if isinstance(spec, Scalar) or spec.optional:
            continue
        name = spec.dtype or fallback
        shape = [sizes[axis] for axis in spec.dim_names]
        values = torch.randn(shape, generator=generator, dtype=torch.float32)
        arguments[spec.param or key] = values.to(device, getattr(torch, name))
    for param in required_parameters(template.reference) - set(arguments):
        arguments[param] = _example_of(template, param, sizes, fallback, device)
    return template.complete(arguments) if template.complete is not None else arguments


def is_completion(init: Callable[..., Any]) -> bool:
    """Whether a template's `init` takes arguments that are drawn already, by position."""
    parameters = inspect.signature(init).parameters.values()
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def draw_arguments(
    template: Any,
    *,
    device: str | torch.device = "cuda",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **sizes: int,
) -> dict[str, Any]:
    """Random arguments of a call with the given sizes of axes: `TraceTemplate.init`.

    Parameters
    ----------
    template : TraceTemplate
        The operation; `TraceTemplate.init` has it bound.
    device : str or torch.device
        Where the tensors are.
    seed : int
        Seed of the random numbers.
    dtype : torch.dtype
        Dtype of the tensors that are free to have any accepted one.
    **sizes : int
        Sizes of axes; those that are left out follow from the others, or are
        64 where they are constant and 4 where not.

    Raises
    ------
    ValueError
        If an axis is unknown, or the arguments of this operation depend on each other such that
        they are drawn with sizes of their own: then the axis is named.
    NotImplementedError
        For a method of an object that plans: what it plans is not drawn.
    """
    unknown = [axis for axis in sizes if axis not in template.axes]
    if unknown:
        raise ValueError(f"{template!r} has axes {list(template.axes)}, got {unknown[0]!r}")
    if template.predict is not None and template.gather is not None and template.complete is None:
        raise NotImplementedError(
            f"{template!r} is of a planned object: plan one and trace its run"
        )
    everywhere = {axis: 4 for axis in template.axes}
    for axis, kind in template.axes.items():
        if isinstance(kind, Const):
            everywhere[axis] = 64 if kind.value is None else kind.value
    everywhere |= sizes
    for axis, kind in template.axes.items():
        derive = getattr(kind, "derive", None)
        if axis not in sizes and derive is not None:
            everywhere[axis] = derive(everywhere)
    arguments = example_arguments(template, everywhere, dtype, device, seed)
    drawn = template.axis_values(arguments)
    for axis, size in sizes.items():
        if drawn.get(axis, size) != size:
            raise ValueError(
                f"{template!r} draws arguments of one size, {axis} = {drawn[axis]}, got {size}"
            )
    return arguments


def _example_of(
    template: Any,
    param: str,
    sizes: Mapping[str, int],
    fallback: str,
    device: str | torch.device,
) -> Any:
    for key, spec in template.outputs.items():
        if isinstance(spec, Tensor) and (spec.param or key) == param:
            name = spec.dtype or (spec.dtypes[0] if spec.dtypes else fallback)
            shape = [sizes[axis] for axis in spec.dim_names]
            return torch.empty(shape, dtype=getattr(torch, name), device=device)
    return 0.5
