"""Objects that a graph refers to by a number: planned wrappers and generators."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, TypeVar

_numbers = itertools.count(1)
_number_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _References(dict[int, weakref.ref[Any]]):
    """Weak references to objects, by number."""

    def __missing__(self, handle: int) -> Any:
        raise RuntimeError(f"the object with handle {handle} that this graph uses no longer exists")


references = _References()
"""``references[handle]()`` is the object; a RuntimeError says that it is gone."""


_Wrapper = TypeVar("_Wrapper", bound="Planned")


class Planned:
    """Base of the wrappers: an object whose `run` a graph may call.

    A graph finds the number among the object's attributes, as text: Dynamo turns numbers that
    differ between objects into symbols, and texts never.
    """

    _handle: str

    def __new__(cls: type[_Wrapper], *args: Any, **kwargs: Any) -> _Wrapper:
        planned = super().__new__(cls)
        planned._handle = str(handle_of(planned))
        return planned

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_handle"}


def handle_of(target: Any) -> int:
    """The number of an object, the same each time; the object is not kept alive.

    Numbers follow the order of first use or construction, so that a process that does the same
    work as an earlier one finds the graphs which that one has compiled and stored.
    """
    number = _number_of.get(target)
    if number is None:
        number = _number_of[target] = next(_numbers)
        references[number] = weakref.ref(target, lambda _: references.pop(number, None))
    return number


# Dynamo calls the function while it traces, and guards on the identity of the object.
handle_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def object_of(handle: int) -> Any:
    """The object that has a number.

    Raises
    ------
    RuntimeError
        If the object is gone.
    """
    return references[handle]()
