"""Makes the import of the package quick."""

from __future__ import annotations

import difflib
import gc
import importlib
import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Two threads that import packages which need modules of each other would end in a deadlock, which
# Python turns into an error.
_LATER_IMPORTS = threading.RLock()


def is_command_line() -> bool:
    """Whether this process is ``flashinfer COMMAND``, with a command that calls no operation.

    Commands import what they need. So ``flashinfer --help`` needs no PyTorch, and a report about a
    setting that is wrong does not fail because of it.
    """
    arguments = getattr(sys, "argv", None) or [""]
    started = arguments[0]
    if started == "-m":  # so long as Python looks for the module that it is to run
        started = sys.orig_argv[-len(arguments)]
    return Path(started).name == "flashinfer" and arguments[1:2] != ["replay"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Create objects that stay, and are not garbage to be looked for.

    A full collection while the package is imported visits all that PyTorch has made: 90 of 165 ms.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:
                gc.freeze()  # All objects become old ones without a visit,
                gc.unfreeze()  # which the next collection of the young would be.
            gc.enable()


def missing_attribute(
    name: str, package: dict[str, Any], later: Mapping[str, Sequence[str]]
) -> object:
    """The public submodule, or name of one, that a package does not have yet.

    Parameters
    ----------
    name : str
        The attribute that a program asks for.
    package : dict
        The package's namespace, which keeps what is found.
    later : mapping of str to sequence of str
        Submodules that are not imported with the package, and the names it has from them.

    Raises
    ------
    AttributeError
        If there is none; it names the closest public names.
    """
    for submodule, names in later.items():
        if name in names:
            with _LATER_IMPORTS:
                module = importlib.import_module(f"{package['__name__']}.{submodule}")
            package[name] = getattr(module, name)
            return package[name]
    full = f"{package['__name__']}.{name}"
    if not name.startswith("_") and importlib.util.find_spec(full) is not None:
        with _LATER_IMPORTS:
            return importlib.import_module(full)
    everything = {*package, *itertools.chain(*later.values())}
    public = [known for known in everything if not known.startswith("_")]
    close = difflib.get_close_matches(name, public, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    if not name.startswith("_"):
        hint += "; docs/engines.md lists what is still to come"
    raise AttributeError(
        f"module {package['__name__']!r} has no attribute {name!r}{hint}", name=name
    )
