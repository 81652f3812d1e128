"""Generators known to AOT builds and the command line, and the specs made in this process."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..compilation_context import NoTargetError
from .core import JitSpec

F = TypeVar("F", bound=Callable[..., Any])
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
    """

    name: str
    function: Callable[..., JitSpec]
    aot: Cases
    presets: Mapping[str, Cases] = field(default_factory=dict)

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
    *, aot: Cases, presets: Mapping[str, Cases] | None = None
) -> Callable[[F], F]:
    """Decorator that makes a ``gen_*_module`` function known.

    Parameters
    ----------
    aot : callable
        Yields the arguments of each case that AOT builds cover.
    presets : mapping, optional
        Named sets of cases.
    """

    def register(function: F) -> F:
        name = function.__name__
        known = _generators.get(name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(f"two generators are called {name!r}: module names would clash")
        _generators[name] = Generator(name, function, aot, dict(presets or {}))
        return function

    return register


def generators() -> dict[str, Generator]:
    """Every registered generator of the package, by name."""
    package = importlib.import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return dict(sorted(_generators.items()))


def aot_specs() -> list[JitSpec]:
    """The modules of every generator's AOT cases, without duplicates."""
    return _unique(spec for generator in generators().values() for spec in generator.specs())


def preset_names() -> list[str]:
    """The named sets that some generator takes part in."""
    return sorted({name for generator in generators().values() for name in generator.presets})


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
    return _unique(s for generator in generators().values() for s in generator.specs(preset))


def _unique(specs: Iterable[JitSpec]) -> list[JitSpec]:
    return list({spec.name: spec for spec in specs}.values())


@dataclass(frozen=True)
class JitSpecStatus:
    """State of one module.

    Attributes
    ----------
    name : str
        Name of the module.
    created_at : datetime
        When this process described it.
    is_compiled : bool
        Whether it is on disk.
    library_path : Path or None
        Where, if so.
    sources : list of Path
        What it is compiled from.
    needs_device_linking : bool
        Whether device code is linked.
    """

    name: str
    created_at: datetime.datetime
    is_compiled: bool
    library_path: Path | None
    sources: list[Path]
    needs_device_linking: bool


class JitSpecRegistry:
    """The modules described in this process."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[JitSpec, datetime.datetime]] = {}

    def register(self, spec: JitSpec) -> None:
        """Take note of a module; the latest of a name counts."""
        self._specs[spec.name] = (spec, datetime.datetime.now())

    def get_all_specs(self) -> dict[str, JitSpec]:
        """Every module by name."""
        return {name: spec for name, (spec, _) in self._specs.items()}

    def get_spec_status(self, name: str) -> JitSpecStatus | None:
        """State of a module, or None if it is not known."""
        if name not in self._specs:
            return None
        spec, created = self._specs[name]
        entry = spec.find()
        return JitSpecStatus(
            name=name,
            created_at=created,
            is_compiled=entry is not None,
            library_path=entry.library if entry else None,
            sources=list(spec.sources),
            needs_device_linking=spec.needs_device_linking,
        )

    def get_all_statuses(self) -> list[JitSpecStatus]:
        """State of every module."""
        statuses = map(self.get_spec_status, list(self._specs))
        return [status for status in statuses if status is not None]

    def get_stats(self) -> dict[str, int]:
        """Numbers of modules: ``total``, ``compiled``, ``not_compiled``."""
        compiled = sum(status.is_compiled for status in self.get_all_statuses())
        total = len(self._specs)
        return {"total": total, "compiled": compiled, "not_compiled": total - compiled}


jit_spec_registry = JitSpecRegistry()
