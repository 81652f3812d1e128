"""Names of operations and types in dumps, and what they may stand for when a dump is read.

A dump may come from anybody. Its names are looked up among the decorated operations and among the
types of this package. Only modules of this package are imported for it. Attributes are read from
namespaces, so that no property, descriptor or module hook runs.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable
from typing import Any

_PACKAGE = __name__.partition(".")[0]

_operations: set[str] = set()


def import_path(value: Any) -> str:
    """``module:qualified.name`` of a class or function."""
    return f"{value.__module__}:{value.__qualname__}"


def register_operation(func: Callable[..., Any]) -> None:
    """Let dumps name a function or method, because ``@flashinfer_api`` marks it."""
    _operations.add(import_path(func))


def find_operation(path: str) -> Callable[..., Any]:
    """The operation that an import path names.

    Raises
    ------
    ValueError
        If this program has no such operation.
    """
    _import_ours(path)
    if path not in _operations:
        raise ValueError(
            f"{path} is no operation of this program: operations are what @flashinfer_api marks in "
            f"{_PACKAGE} and in modules that the program has imported"
        )
    found = _lookup(path)
    return getattr(found, "__func__", found)  # the function in a staticmethod or classmethod


def find_owner(path: str, operation: str) -> type:
    """The class of the object that a method is called on.

    Raises
    ------
    ValueError
        If it cannot be found, or does not have the method.
    """
    module, _, qualname = operation.partition(":")
    base = _lookup(f"{module}:{qualname.rpartition('.')[0]}")
    found = _lookup(path)
    if not isinstance(found, type) or not isinstance(base, type) or not issubclass(found, base):
        raise ValueError(f"{path} is no class with the method {operation}")
    return found


def find_type(path: str, kind: type = object) -> type:
    """The class of this package that an import path names, and that derives from `kind`.

    Raises
    ------
    ValueError
        If this package has no such class.
    """
    _import_ours(path)
    found: Any = _lookup(path) if path.startswith((f"{_PACKAGE}.", f"{_PACKAGE}:")) else None
    is_class = isinstance(found, type) and issubclass(found, kind)
    if not is_class or import_path(found) != path:  # a class of others that the module imports
        raise ValueError(
            f"{path} is no {'class' if kind is object else kind.__name__} of {_PACKAGE}"
        )
    return found


def find_named_tuple(path: str) -> Any:
    """The named tuple of this package that an import path names.

    Raises
    ------
    ValueError
        If there is no such type.
    """
    found = find_type(path, tuple)
    if "_fields" not in vars(found):
        raise ValueError(f"{path} is no named tuple")
    return found


def find_member(path: str, name: str) -> enum.Enum:
    """The member `name` of an enumeration of this package.

    Raises
    ------
    ValueError
        If there is no such enumeration or member.
    """
    found: Any = find_type(path, enum.Enum)
    if name not in found.__members__:
        raise ValueError(f"{path} has no member {name!r}")
    return found.__members__[name]


def find_argument(path: str) -> Any:
    """The operation or class of this package that was passed as an argument.

    Raises
    ------
    ValueError
        If it is neither.
    """
    _import_ours(path)
    return find_operation(path) if path in _operations else find_type(path)


def is_known(value: Any, find: Callable[[str], Any]) -> bool:
    """Whether one of the functions above finds a class or function again by its name."""
    if not hasattr(value, "__module__") or not hasattr(value, "__qualname__"):
        return False
    try:
        return find(import_path(value)) is value
    except ValueError:
        return False


def _import_ours(path: str) -> None:
    """Import the module of a path if it belongs to this package, and no other module."""
    module, _, qualname = path.partition(":")
    if module.startswith(f"{_PACKAGE}.") and module not in sys.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"cannot find {qualname} of module {module}: {error}") from error


def _lookup(path: str) -> Any:
    """The object that a path names, looked up in the namespaces of a module and its classes."""
    module, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module)
    if found is None:
        raise ValueError(f"cannot find {qualname} of module {module}: it is not imported")
    for depth, part in enumerate(qualname.split(".")):
        if (depth and not isinstance(found, type)) or part not in vars(found):
            raise ValueError(f"cannot find {qualname} of module {module}: it has no {part!r}")
        found = vars(found)[part]
    return found
