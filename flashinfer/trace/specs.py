"""The words a template is written in: axes, tensors and scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch

from .._common.dtypes import torch_name

FLOATING = ("bfloat16", "float16", "float32")
"""The dtypes of activations that kernels read."""


@dataclass(frozen=True)
class Var:
    """An axis whose size changes from call to call; it is named, but has no value in the JSON.

    Parameters
    ----------
    description : str
        The things that the axis counts.
    from_values : bool
        On an axis of outputs only: its size follows from the inputs' values or sizes by a rule that
        the reference has and the template does not state.
    """

    description: str = ""
    from_values: bool = False


@dataclass(frozen=True)
class Const:
    """An axis whose size belongs to the definition and is written into its name.

    Parameters
    ----------
    description : str
        The things that the axis counts.
    abbrev : str, optional
        Letters before the value in the definition's name: ``"h"`` gives ``_h4096``. ``""`` leaves
        the axis out of the name, None uses the axis' own name.
    value : int, optional
        The size, where it is always the same.
    derive : callable, optional
        Computes the size from the sizes of the other axes, for an axis that no input shows (such
        as half of an input's width).
    """

    description: str = ""
    abbrev: str | None = None
    value: int | None = None
    _: KW_ONLY
    derive: Callable[[Mapping[str, int]], int] | None = None


@dataclass(frozen=True)
class Tensor:
    """A tensor argument or result.

    Parameters
    ----------
    dim_names : list of str
        One axis name per dimension.
    param : str, optional
        The public function's argument, where it is not named as the JSON key. On an output: the
        argument that receives the result (``out``, or an input that is updated in place).
    tuple_idx : int, optional
        The argument is a tuple; this is its element.
    dtype : str, optional
        The only dtype this tensor can have, by its torch name (``"float32"``).
    dtype_from : str, optional
        JSON key (or argument name) of the tensor whose dtype this one has.
    dtype_from_scalar : str, optional
        Name of an argument that holds the dtype (as ``out_dtype`` does). Where that is None: the
        dtype of an output under the same name that the call gives, or else `dtype_default`.
    optional : bool
        The argument may be None; it is then left out of the definition.
    description : str
        Meaning, layout and unit.
    dtype_default : str, optional
        See `dtype_from_scalar`.
    dtypes : sequence of str, optional
        The dtypes that are accepted; any when None. With another source of the dtype that is the
        default, for an output that the caller may give another dtype.
    ranks : sequence of int, optional
        The numbers of dimensions that are accepted, where others than ``len(dim_names)`` are: the
        leading dimensions count as the first axis, multiplied together.
    layout : {"rows", "matrix", "contiguous"}, optional
        Accepted strides: ``"rows"`` has a contiguous last dimension, ``"matrix"`` moreover leading
        dimensions that fold into one. Any when None.
    in_place_of : str, optional
        For an output, the argument that its destination may be the same view of (``out=input``).
        Any other sharing of memory with another argument is refused.
    returned : bool, optional
        For an output with a destination, whether the public function returns that as well; by
        default where the destination is an optional argument.
    keeps_strides : bool
        An output has the strides of the reference's result.
    converts : bool
        An input of another dtype than `dtype` is converted if its numbers are of the same kind.
    """

    dim_names: Sequence[str]
    _: KW_ONLY
    param: str | None = None
    tuple_idx: int | None = None
    dtype: str | None = None
    dtype_from: str | None = None
    dtype_from_scalar: str | None = None
    optional: bool = False
    description: str = ""
    dtype_default: str | None = None
    dtypes: Sequence[str] | None = None
    ranks: Sequence[int] | None = None
    layout: Literal["rows", "matrix", "contiguous"] | None = None
    in_place_of: str | None = None
    returned: bool | None = None
    keeps_strides: bool = False
    converts: bool = False


def is_returned(spec: object, is_optional: bool) -> bool:
    """Whether a public function returns the destination of an output, an argument of the call."""
    returned: bool | None = getattr(spec, "returned", None)
    return is_optional if returned is None else returned


@dataclass(frozen=True)
class Scalar:
    """A number argument; always finite.

    Parameters
    ----------
    dtype : str
        Torch name of the dtype that the JSON declares.
    param : str, optional
        The public function's argument, where it is not named as the JSON key.
    optional : bool
        The argument may be None; it is then left out of the definition.
    description : str
        Meaning and unit.
    tensor : bool
        A one-element tensor of `dtype`, or of another one of its kind, is accepted in place of the
        number; its value is not looked at.
    minimum : float, optional
        Least value.
    above, below : float, optional
        Every value is greater, or less, than this.
    """

    dtype: str = "float32"
    _: KW_ONLY
    param: str | None = None
    optional: bool = False
    description: str = ""
    tensor: bool = False
    minimum: float | None = None
    above: float | None = None
    below: float | None = None


Axis = Var | Const
Value = Tensor | Scalar


def argument_of(key: str, spec: Value, arguments: Mapping[str, Any]) -> Any:
    """What a call passes for an entry of a template; None where it passes nothing.

    Raises
    ------
    ValueError
        If a list of tensors is shorter than the template says.
    """
    value = arguments.get(spec.param or key)
    if isinstance(spec, Tensor) and spec.tuple_idx is not None and value is not None:
        if len(value) <= spec.tuple_idx:
            raise ValueError(
                f"`{spec.param or key}` must have at least {spec.tuple_idx + 1} tensors, "
                f"got {len(value)}"
            )
        return value[spec.tuple_idx]
    return value


def axis_without_tensor(
    axis: str, kind: Axis, arguments: Mapping[str, Any], values: Mapping[str, int]
) -> int | None:
    """The size of an axis that no tensor of the call has; None if it may be left open."""
    given = arguments.get(axis)
    if type(given) is int:
        return given
    if given is not None and not isinstance(given, torch.Tensor):
        raise TypeError(f"`{axis}` must be an int, got {type(given).__name__}")
    if isinstance(kind, Const):
        if kind.value is not None:
            return kind.value
        if kind.derive is not None:
            return kind.derive(values)
        if axis in arguments:
            raise TypeError(f"`{axis}` must be an int, got {type(given).__name__}")
        raise ValueError(f"axis {axis} has no value in this call: no tensor and no argument has it")
    return None


def declared_dtype(
    spec: Tensor,
    names: Mapping[str, str],
    arguments: Mapping[str, Any],
    outputs: Mapping[str, Value],
) -> str | None:
    """The dtype that a tensor's entry states, by the dtypes found so far and a call's arguments."""
    if spec.dtype is not None:
        return spec.dtype
    if spec.dtype_from is not None:
        if spec.dtype_from in names:
            return names[spec.dtype_from]
        source = arguments.get(spec.dtype_from)
        return torch_name(source.dtype) if isinstance(source, torch.Tensor) else spec.dtype_default
    if spec.dtype_from_scalar is None:
        return None
    chosen = arguments.get(spec.dtype_from_scalar)
    if chosen is not None:
        return torch_name(chosen)
    for key, other in outputs.items():
        if getattr(other, "dtype_from_scalar", None) == spec.dtype_from_scalar:
            given = argument_of(key, other, arguments)
            if isinstance(given, torch.Tensor):
                return torch_name(given.dtype)
    return spec.dtype_default


def axis_json(axis: str, kind: Axis, values: Mapping[str, int]) -> dict[str, Any]:
    """An entry of `axes` of a definition."""
    entry: dict[str, Any] = {"type": "var"}
    if isinstance(kind, Const):
        entry = {"type": "const", "value": values[axis]}
    if kind.description:
        entry["description"] = kind.description
    return entry


def value_json(spec: Value, dtype: str) -> dict[str, Any]:
    """An entry of `inputs` or `outputs` of a definition."""
    shape = list(spec.dim_names) if isinstance(spec, Tensor) else None
    # The format has no unsigned bytes; the reference of a definition takes and gives their bits.
    is_bytes = dtype == "uint8"
    entry: dict[str, Any] = {"shape": shape, "dtype": "int8" if is_bytes else dtype}
    description = f"{spec.description} Unsigned.".lstrip() if is_bytes else spec.description
    if description:
        entry["description"] = description
    return entry
