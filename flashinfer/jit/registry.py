"""Generators known to ahead-of-time builds and to the command line."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..compilation_context import NoTargetError
from .core import JitSpec
from .spec import ModuleSpec

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=ModuleSpec)
Cases = Callable[[], Iterable[Any]]

_generators: dict[str, Generator] = {}


@dataclass(frozen=True)
class Generator:
    """A function that describes modules, with the cases that are worth building beforehand.

    Attributes
    ----------
    name : str
        Name of the function, such as ``gen_norm_module``.
    function : callable
        Makes a :class:`JitSpec`.
    aot : callable
        Yields its arguments, case by case: a tuple is unpacked, a dictionary gives keywords,
        anything else is the only argument.
    presets : mapping of str to callable
        The same for named sets, such as ``"llama-bf16"``.
    hosts : callable
        Yields more modules whose host parts come in the wheel (`host_parts.py`).
    compiler : str
        The extra of this package whose compiler the modules need, or nothing. What needs one is
        built by its preset, not with everything.
    """

    name: str
    function: Callable[..., JitSpec]
    aot: Cases
    presets: Mapping[str, Cases] = field(default_factory=dict)
    hosts: Callable[[], Iterable[ModuleSpec]] = tuple
    compiler: str = ""

    def specs(self, preset: str | None = None) -> Iterator[JitSpec]:
        """The modules of the AOT cases, or of a preset (none if it is not in it).

        Cases that do not exist for the current targets are left out.
        """
        cases = self.aot if preset is None else self.presets.get(preset, tuple)
        for case in cases():
            with contextlib.suppress(NoTargetError):  # a kernel for other architectures
                spec = self._describe(case)
                if spec.has_target():
                    yield spec

    def _describe(self, case: Any) -> JitSpec:
        if isinstance(case, Mapping):
            return self.function(**case)
        if isinstance(case, tuple):
            return self.function(*case)
        return self.function(case)


def register_generator(
    *,
    aot: Cases,
    presets: Mapping[str, Cases] | None = None,
    hosts: Callable[[], Iterable[ModuleSpec]] = tuple,
    compiler: str = "",
) -> Callable[[F], F]:
    """Decorator that makes a ``gen_*_module`` function known.

    Parameters
    ----------
    aot : callable
        Yields the arguments of each case that AOT builds cover.
    presets : mapping, optional
        Named sets of cases.
    hosts : callable, optional
        Yields more modules whose host parts come in the wheel.
    compiler : str
        The extra whose compiler the modules need.
    """

    def register(function: F) -> F:
        name = function.__name__
        known = _generators.get(name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(f"two generators are called {name!r}: module names would clash")
        _generators[name] = Generator(name, function, aot, dict(presets or {}), hosts, compiler)
        return function

    return register


def generators(compiler: str = "") -> dict[str, Generator]:
    """The registered generators by name: those that need no extra, or one extra's compiler."""
    return {name: g for name, g in _all_generators().items() if g.compiler == compiler}


def _all_generators() -> dict[str, Generator]:
    package = importlib.import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return dict(sorted(_generators.items()))


def aot_specs() -> list[JitSpec]:
    """The modules of every generator's AOT cases, without duplicates."""
    return _unique(spec for generator in generators().values() for spec in generator.specs())


def host_specs() -> list[ModuleSpec]:
    """What a wheel has host parts of: the modules of the AOT cases, and those that `hosts` adds."""
    more = (spec for generator in generators().values() for spec in generator.hosts())
    return _unique([*aot_specs(), *(spec for spec in more if spec.has_target())])


def preset_names() -> list[str]:
    """The named sets that some generator takes part in."""
    return sorted({name for generator in _all_generators().values() for name in generator.presets})


def preset_specs(preset: str) -> list[JitSpec]:
    """The modules of a named set.

    Raises
    ------
    ValueError
        If there is no such set.
    """
    if preset not in preset_names():
        raise ValueError(
            f"preset {preset!r} does not exist; there are: {', '.join(preset_names())}"
        )
    return _unique(s for generator in _all_generators().values() for s in generator.specs(preset))


def _unique(specs: Iterable[S]) -> list[S]:
    return list({spec.name: spec for spec in specs}.values())
