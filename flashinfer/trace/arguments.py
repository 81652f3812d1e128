"""Checks of a call's arguments against a template, in one wording for all its uses.

Each raises TypeError or ValueError with the argument's name, what it is and what is allowed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .._common.conversions import is_convertible
from .._common.dtypes import torch_name
from .specs import Scalar, Tensor


def with_defaults(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `function` by name; what the call leaves out has its default."""
    return {
        name: call[name] if p.default is p.empty else call.get(name, p.default)
        for name, p in inspect.signature(function).parameters.items()
    }


def folded_shape(param: str, spec: Tensor, tensor: torch.Tensor) -> list[int]:
    """Sizes of the named axes; leading dimensions beyond them are multiplied into the first."""
    ranks = spec.ranks if spec.ranks is not None else (len(spec.dim_names),)
    if tensor.ndim not in ranks:
        allowed = f"{min(ranks)}" if len(ranks) == 1 else f"{min(ranks)} to {max(ranks)}"
        raise ValueError(
            f"`{param}` must have {allowed} dimensions ([{', '.join(spec.dim_names)}]), "
            f"got shape {list(tensor.shape)}"
        )
    if tensor.ndim == len(spec.dim_names):
        return list(tensor.shape)
    leading = tensor.ndim - len(spec.dim_names) + 1
    return [math.prod(tensor.shape[:leading]), *tensor.shape[leading:]]


def check_layout(param: str, layout: str | None, tensor: torch.Tensor) -> None:
    """Refuse strides that `Tensor.layout` does not allow; of an empty tensor they mean nothing."""
    if layout is None or tensor.numel() == 0:
        return
    if layout == "contiguous" and not tensor.is_contiguous():
        raise ValueError(
            f"`{param}` must be contiguous, got strides {list(tensor.stride())} for shape "
            f"{list(tensor.shape)}"
        )
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"`{param}` must be contiguous in its last dimension, got strides {tensor.stride()}"
        )
    if layout == "matrix" and not _leading_dimensions_fold(tensor):
        raise ValueError(
            f"`{param}` must have leading dimensions that fold into one (a contiguous tensor, or a "
            f"column slice of one), got strides {tensor.stride()} for shape {list(tensor.shape)}"
        )


def _leading_dimensions_fold(tensor: torch.Tensor) -> bool:
    dims = [(n, s) for n, s in zip(tensor.shape[:-1], tensor.stride(), strict=False) if n > 1]
    return all(
        stride == inner_size * inner_stride
        for (_, stride), (inner_size, inner_stride) in zip(dims, dims[1:], strict=False)
    )


def check_chosen_dtype(key: str, spec: Tensor, arguments: Mapping[str, Any], tensor: Any) -> None:
    """Refuse the argument that names a result's dtype, where it is none that the result has, and a
    destination of another dtype than that."""
    name = spec.dtype_from_scalar
    chosen = arguments.get(name) if name is not None else None
    is_own = isinstance(tensor, torch.Tensor) and tensor.dtype == chosen
    if chosen is None or is_own:  # a destination's dtype is checked with it
        return
    if not isinstance(chosen, torch.dtype):
        raise TypeError(f"`{name}` must be a torch.dtype, got {type(chosen).__name__}")
    if spec.dtypes and torch_name(chosen) not in spec.dtypes:
        allowed = " or ".join(spec.dtypes)
        raise ValueError(f"`{name}` must have dtype {allowed}, got {torch_name(chosen)}")
    if isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"`{spec.param or key}` must have dtype {torch_name(chosen)}, got "
            f"{torch_name(tensor.dtype)}"
        )


_FLOAT32 = torch.finfo(torch.float32)


def check_scalar(param: str, spec: Scalar, value: Any) -> None:
    """Refuse what is not a number (or tensor of one) in the range of `spec`."""
    if value is None and spec.optional:
        return
    if isinstance(value, torch.Tensor) and spec.tensor:
        dtype = getattr(torch, spec.dtype)
        if value.numel() != 1 or not (value.dtype == dtype or is_convertible(value, dtype)):
            raise ValueError(
                f"`{param}` must be a number or a {spec.dtype} tensor of one element, got "
                f"{torch_name(value.dtype)} of shape {list(value.shape)}"
            )
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{param}` must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"`{param}` must be finite, got {value}")
    if "int" in spec.dtype and not isinstance(value, int):
        raise TypeError(f"`{param}` must be an int, got {type(value).__name__}")
    if spec.dtype == "float32" and abs(value) > _FLOAT32.max:
        raise ValueError(f"`{param}` must be finite in float32, got {value}")
    if spec.minimum is not None and value < spec.minimum:
        raise ValueError(f"`{param}` must be at least {spec.minimum}, got {value}")
    if spec.below is not None and value >= spec.below:
        raise ValueError(f"`{param}` must be less than {spec.below}, got {value}")
    if spec.above is not None and value <= spec.above:
        raise ValueError(f"`{param}` must be greater than {spec.above}, got {value}")
    if spec.dtype == "float32" and spec.above == 0 and value < _FLOAT32.tiny:
        raise ValueError(f"`{param}` must be positive in float32, got {value}")


def check_beside_inputs(
    hints: Iterable[str], unsupported: Iterable[str], arguments: Mapping[str, Any]
) -> None:
    """Refuse hints that are no flags, and whatever the reference does not know."""
    for hint in hints:
        if not isinstance(arguments.get(hint), (bool, type(None))):
            raise TypeError(
                f"`{hint}` must be True, False or None, got {type(arguments[hint]).__name__}"
            )
    for name in unsupported:
        if arguments.get(name) is not None:
            raise ValueError(
                f"`{name}` must be None with the reference backend, got "
                f"{type(arguments[name]).__name__}"
            )


@functools.cache
def names_in(constraint: str) -> frozenset[str]:
    """The names of axes and inputs in a constraint, which every call of an operation asks for."""
    tree = ast.walk(ast.parse(constraint))
    return frozenset(node.id for node in tree if isinstance(node, ast.Name))


def check_constraints(
    constraints: Iterable[str],
    sizes: Mapping[str, int],
    seen_in: Mapping[str, str],
    scalars: Mapping[str, Scalar],
    arguments: Mapping[str, Any],
) -> None:
    """Refuse a call for which a constraint does not hold; `seen_in` has the argument of an axis."""
    values, params = dict(sizes), dict(seen_in)
    for key, spec in scalars.items():
        param = spec.param or key
        if type(arguments.get(param)) is int:
            values[key], params[key] = arguments[param], param
    for constraint in constraints:
        names = names_in(constraint)
        if any(name in scalars and name not in values for name in names):
            continue  # what is no integer is refused as such
        if eval(constraint, {"__builtins__": {}}, values):
            continue
        found = [name for name in values if name in names]
        arguments_named = " and ".join(
            dict.fromkeys(f"`{params[name]}`" for name in found if name in params)
        )
        text = ", ".join(f"{name} = {values[name]}" for name in found)
        raise ValueError(f"{arguments_named}: {constraint} must hold, got {text}")


def check_one_device(arguments: Mapping[str, Any]) -> None:
    """Refuse tensors on several devices."""
    first: tuple[str, torch.device] | None = None
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            first = first or (name, value.device)
            if value.device != first[1]:
                raise ValueError(
                    f"`{name}` is on {value.device} and `{first[0]}` on {first[1]}: "
                    "they must be on one device"
                )


def check_destination(param: str, layout: str | None, tensor: Any, shape: Iterable[int]) -> None:
    """Refuse a tensor that cannot receive a result of `shape`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{param}` must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.shape != tuple(shape):
        raise ValueError(f"`{param}` must have shape {list(shape)}, got {list(tensor.shape)}")
    check_layout(param, layout, tensor)
    if not tensor.is_contiguous() and int(_touched(tensor, tensor).sum()) != tensor.numel():
        raise ValueError(
            f"`{param}` is written and must not have two indices for one element, got strides "
            f"{tensor.stride()} for shape {list(tensor.shape)}"
        )


def check_aliasing(
    written: Mapping[str, torch.Tensor],
    arguments: Mapping[str, Any],
    in_place_of: Mapping[str, str | None],
) -> None:
    """Refuse a written tensor that shares elements with another argument.

    The same view as the argument that `in_place_of` names for it is fine.
    """
    for name, tensor in written.items():
        for other_name, other in {**arguments, **written}.items():
            if other_name == name or not isinstance(other, torch.Tensor):
                continue
            in_place = in_place_of.get(name) == other_name and _same_view(tensor, other)
            if not in_place and _share_elements(tensor, other):
                raise ValueError(f"`{name}` must not share memory with `{other_name}`")


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    def view(t: torch.Tensor) -> tuple[Any, ...]:
        strides = [s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1]
        return t.data_ptr(), t.dtype, t.shape, strides

    return view(a) == view(b)


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device or a.device.type == "meta" or not a.numel() or not b.numel():
        return False
    (a_begin, a_end), (b_begin, b_end) = _byte_range(a), _byte_range(b)
    if a_end <= b_begin or b_end <= a_begin:
        return False
    return bool((_touched(a, a, b) & _touched(b, a, b)).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _touched(tensor: torch.Tensor, *span: torch.Tensor) -> torch.Tensor:
    """Which addresses of those that the tensors of `span` cover are elements of `tensor`.

    In units of the smallest element size among them, marked at the beginning of each element and
    over its length; exact, where a comparison of address ranges would refuse two columns of one
    matrix.
    """
    if not tensor.numel():
        return torch.zeros(0, dtype=torch.bool)
    unit = min(t.element_size() for t in span)
    begin = min(_byte_range(t)[0] for t in span)
    end = max(_byte_range(t)[1] for t in span)
    marks = torch.zeros((end - begin) // unit, dtype=torch.bool)
    length = tensor.element_size() // unit
    marks.as_strided(
        (*tensor.shape, length),
        (*(stride * length for stride in tensor.stride()), 1),
        (tensor.data_ptr() - begin) // unit,
    ).fill_(True)
    return marks
