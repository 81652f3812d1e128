"""Print a reference as a Python source that needs nothing but torch.

The `reference` field of a definition is executed by tools that do not have this package. The
source is put together from the reference itself, the helpers and constants it uses, and a `run`
function that takes the definition's inputs in order and rounds each result to its dtype.
"""

from __future__ import annotations

import dis
import enum
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any


def standalone_reference(
    reference: Callable[..., Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[Any, str]],
    constants: Mapping[str, Any],
) -> str:
    """Source with a top-level ``run(*inputs)`` that returns the outputs.

    Parameters
    ----------
    reference : callable
        Module-level function of the public function's arguments.
    inputs : mapping
        JSON key to `Tensor` or `Scalar`: the parameters of ``run``.
    outputs : mapping
        JSON key to (spec, torch dtype name).
    constants : mapping
        Sizes of the constant axes, and values of other arguments that belong to the definition.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If the reference uses a global that cannot be printed.
    """
    imports, definitions = _closure(reference)
    header = ["from __future__ import annotations", "", *sorted(imports | {"import torch"})]
    run = _run_function(reference, inputs, outputs, constants)
    return "\n".join(header) + "\n\n\n" + "\n\n\n".join([*definitions, run]) + "\n"


def _closure(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """Import lines and definitions that `function` needs, itself included, callees first."""
    imports: set[str] = set()
    definitions: dict[str, str] = {}

    def visit(name: str, value: Any) -> None:
        if name in definitions:
            return
        if isinstance(value, ModuleType):
            alias = "" if value.__name__ == name else f" as {name}"
            imports.add(f"import {value.__name__}{alias}")
        elif isinstance(value, FunctionType):
            for callee in _globals_read(value.__code__):
                target = value.__globals__.get(callee, value)  # absent: a builtin
                if target is not value:
                    visit(callee, target)
            definitions[name] = textwrap.dedent(inspect.getsource(value)).rstrip()
        elif isinstance(value, (bool, int, float, str, tuple)):
            definitions[name] = f"{name} = {value!r}"
        else:
            raise ValueError(
                f"reference {function.__qualname__} uses {name}, a {type(value).__name__}, which "
                "cannot be written into a definition; use functions, modules and plain constants"
            )

    visit(function.__name__, function)
    return imports, list(definitions.values())


def _globals_read(code: CodeType) -> list[str]:
    """Names of the globals that `code` and the functions nested in it read, in order.

    `inspect.getclosurevars` counts attribute names too: `torch.Tensor` would pull in `Tensor`.
    """
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for nested in code.co_consts:
        if isinstance(nested, CodeType):
            names.update(dict.fromkeys(_globals_read(nested)))
    return list(names)


def _run_function(
    reference: Callable[..., Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[Any, str]],
    constants: Mapping[str, Any],
) -> str:
    required = required_parameters(reference)
    taken = inspect.signature(reference).parameters
    passed = {name: key for name, key in _passed_inputs(inputs).items() if name in taken}
    passed |= {name: _literal(value) for name, value in constants.items() if name in taken}
    lines = []
    for key, (spec, dtype) in outputs.items():
        # A destination that the public function requires: the reference reads its dtype only.
        destination = spec.param or key
        if getattr(spec, "dtype_from_scalar", None) in taken:
            passed[spec.dtype_from_scalar] = f"torch.{dtype}"
        if destination in required and destination not in passed:
            shape = ", ".join(_size(axis, inputs, constants) for axis in spec.dim_names)
            lines.append(f"{key} = torch.empty([{shape}], dtype=torch.{dtype}, device='meta')")
            passed[destination] = key
    # What has no default may be None all the same.
    passed |= dict.fromkeys(sorted(required - set(passed)), "None")
    returned = str(inspect.signature(reference).return_annotation)
    # The reference may return a tuple of more than the definition lists.
    returns_more = returned.startswith("tuple") and returned.count(",") >= len(outputs)
    rest = ", *_" if returns_more else ""
    lines.append(f"{', '.join(outputs)}{rest} = {reference.__name__}(")
    lines += [f"    {param}={key}," for param, key in passed.items()]
    lines.append(")")
    rounded = ", ".join(_rounded(key, dtype) for key, (_, dtype) in outputs.items())
    lines.append(f"return {rounded}")
    return f"def run({', '.join(inputs)}):\n" + textwrap.indent("\n".join(lines), "    ")


def _rounded(key: str, dtype: str) -> str:
    # Definitions have no unsigned bytes; they say int8, with the same bits.
    return f"{key}.to(torch.{dtype})" + (".view(torch.int8)" if dtype == "uint8" else "")


def _passed_inputs(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Expression for each argument that inputs go to; elements of a tuple are put together."""
    passed: dict[str, str] = {}
    elements: dict[str, list[str]] = {}
    for key, spec in inputs.items():
        param = spec.param or key
        if getattr(spec, "tuple_idx", None) is None:
            passed[param] = key
        else:
            elements.setdefault(param, []).append(key)
            passed[param] = f"({', '.join(elements[param])},)"
    return passed


def _literal(value: Any) -> str:
    """Expression for a value; the members of an enumeration of numbers are numbers."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(int(value)) if isinstance(value, enum.IntEnum) else repr(value)


def required_parameters(function: Callable[..., Any] | None) -> set[str]:
    """Names of the parameters that have no default."""
    if function is None:
        return set()
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is inspect.Parameter.empty}


def _size(axis: str, inputs: Mapping[str, Any], constants: Mapping[str, Any]) -> str:
    """Expression for the size of an axis inside ``run``; 0 where only the reference knows it."""
    if axis in constants:
        return str(constants[axis])
    for key, spec in inputs.items():
        dims = getattr(spec, "dim_names", ())
        if axis in dims:
            return f"{key}.shape[{list(dims).index(axis)}]"
    return "0"
