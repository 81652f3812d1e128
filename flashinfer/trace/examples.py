"""Random arguments of a call that a template describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._common.dtypes import torch_name
from .specs import Scalar, Tensor
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
    return template.init(arguments) if template.init is not None else arguments


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
