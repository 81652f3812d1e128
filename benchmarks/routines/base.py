"""The declaration of a routine; command line, timing, checks and output are shared."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashinfer.testing import CheckOptions

Arguments = dict[str, Any]

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_SHORT = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def dtype_name(text: str) -> str:
    """Canonical torch name of a dtype given on the command line (``bf16`` or ``bfloat16``)."""
    name = _SHORT.get(text, text)
    if name not in _DTYPES:
        raise ValueError(f"{text!r} is no dtype; use one of {', '.join([*_DTYPES, *_SHORT])}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a canonical name."""
    return _DTYPES[name]


def positive(text: str) -> int:
    """A positive integer."""
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is not positive")
    return value


def not_negative(text: str) -> int:
    """Zero or a positive integer."""
    value = int(text)
    if value < 0:
        raise ValueError(f"{value} is negative")
    return value


@dataclasses.dataclass(frozen=True)
class Flag:
    """A command line flag that shapes a routine's inputs.

    Attributes
    ----------
    name : str
        Without the leading dashes; also the column of the output files.
    parse : Callable[[str], Any]
        A function of the text; it raises ValueError and says what is wrong. ``bool`` makes a
        switch without a value.
    default : Any
        Value when the flag is not given.
    help : str
        One line.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation that a routine can time.

    Attributes
    ----------
    function : str or Callable
        The function, or its import path ``"module:name"`` (imported when it is run). A method,
        ``"module:Class.name"``, is called with its object as argument ``self``.
    omits : sequence of str
        Arguments that it does not take.
    roundings : int
        Times it rounds a value to the output's dtype, for the bound of the reference check.
    """

    function: str | Callable[..., Any]
    omits: Sequence[str] = ()
    roundings: int = 1

    def resolve(self) -> Callable[..., Any]:
        """The function itself."""
        if not isinstance(self.function, str):
            return self.function
        module, name = self.function.split(":")
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        return found

    def arguments(self, arguments: Mapping[str, Any]) -> Arguments:
        """The ``arguments`` that it takes."""
        return {name: value for name, value in arguments.items() if name not in self.omits}


@dataclasses.dataclass(frozen=True)
class Routine:
    """A public function with the inputs to time it on.

    Attributes
    ----------
    name : str
        Value of ``--routine``.
    api : str
        Import path ``"module:name"`` of the public function (or method, as in `Backend`); its
        trace template gives the reference.
    flags : sequence of Flag
        The flags that shape the inputs.
    build : Callable[[Namespace, str], dict]
        A function of the flags' values and a device; it returns the arguments by name.
    reads, writes : sequence of str
        Arguments whose elements the operation must read and write once each. They make the bytes
        that the bandwidth is computed from; an argument that is updated in place is in both.
    fresh : Callable[[dict], int], optional
        A function of the arguments; it returns bytes of results that the operation allocates.
    check_options : Callable[[TraceTemplate, dict], CheckOptions], optional
        A function of the template and the arguments; it says how closely to compare. Without it,
        results may be off by as many roundings as the backend says.
    flops : Callable[[Namespace], int], optional
        Floating-point operations of a call, where arithmetic is what limits it.
    captures : bool
        Whether a CUDA graph can hold the call; one that copies from the host's memory cannot.
    backends : Mapping[str, Backend]
        The backends by name; the first one is the default. Without any there is ``"cuda"``, `api`.
    """

    name: str
    api: str
    flags: Sequence[Flag]
    build: Callable[[Namespace, str], Arguments]
    reads: Sequence[str]
    writes: Sequence[str]
    backends: Mapping[str, Backend] = dataclasses.field(default_factory=dict)
    flops: Callable[[Namespace], int] | None = None
    fresh: Callable[[Arguments], int] | None = None
    check_options: Callable[[Any, Arguments], CheckOptions] | None = None
    captures: bool = True

    def __post_init__(self) -> None:
        if not self.backends:
            object.__setattr__(self, "backends", {"cuda": Backend(self.api)})

    def nbytes(self, arguments: Mapping[str, Any]) -> int:
        """Bytes that a call must move, from its arguments."""
        names = [*self.reads, *self.writes]
        given = sum(arguments[n].numel() * arguments[n].element_size() for n in names)
        return given + (self.fresh(dict(arguments)) if self.fresh else 0)


ROUTINES: dict[str, Routine] = {}


def register(routine: Routine) -> Routine:
    """Make a routine known to the command line."""
    if routine.name in ROUTINES:
        raise ValueError(f"routine {routine.name} is registered twice")
    ROUTINES[routine.name] = routine
    return routine
