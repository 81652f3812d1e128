"""The package whose operations serve: `flashinfer` of this repository, or what `--kernels` names.

The engine reaches every operation through this module, as `kernels.rmsnorm` or
`kernels.fused_moe.cutlass_fused_moe`, by public names alone. FlashInfer 0.7.2 therefore serves a
model, too, where it has the model's operations, and both can be compared on one machine.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_package: ModuleType | None = None


class MissingOperation(AttributeError):
    """The package does not have an operation that a model needs."""


def use(name: str) -> None:
    """Choose the package, before its first operation is called.

    Parameters
    ----------
    name : str
        Name of a module that can be imported; or the folder that has another `flashinfer`, as
        ``pip install --target`` makes it.

    Raises
    ------
    ValueError
        If there is no such module, or another package of that name has been imported before.
    """
    global _package
    if (Path(name) / "flashinfer").is_dir():
        folder, name = str(Path(name).resolve()), "flashinfer"
        if name in sys.modules and not _lies_in(sys.modules[name], folder):
            found = Path(sys.modules[name].__file__ or "").parent
            raise ValueError(f"`--kernels` must come before {name} is imported, from {found}")
        sys.path.insert(0, folder)
    try:
        _package = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"`--kernels` must be a module or a folder with one: {error}") from error


def _lies_in(module: ModuleType, folder: str) -> bool:
    return module.__file__ is not None and module.__file__.startswith(folder + "/")


def package() -> ModuleType:
    """The package; `flashinfer` if none has been chosen."""
    if _package is None:
        use("flashinfer")
    assert _package is not None
    return _package


def __getattr__(name: str) -> Any:
    """An operation, or a module of operations."""
    if name.startswith("__"):
        raise AttributeError(name)
    chosen = package()
    if hasattr(chosen, name):
        return getattr(chosen, name)
    try:
        return importlib.import_module(f"{chosen.__name__}.{name}")
    except ModuleNotFoundError:
        raise MissingOperation(
            f"{describe()} has no `{name}`, which this model needs; another package may be named "
            "by --kernels"
        ) from None


def describe() -> str:
    """Name and version, for messages."""
    chosen = package()
    name = "FlashInfer" if chosen.__name__ == "flashinfer" else chosen.__name__
    return f"{name} {getattr(chosen, '__version__', '(of unknown version)')}"


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Where operations run: the kernels of a GPU, or their references on the CPU."""
    if device.type == "cpu":
        if not hasattr(package(), "reference_backend"):
            raise ValueError(f"`device` must be a GPU: {describe()} has no kernels for the CPU")
        return package().reference_backend()
    return torch.cuda.device(device)  # streams and graphs are those of this GPU


def compile_seconds() -> float:
    """Seconds that this process has compiled; 0 if the package does not count them."""
    counter = getattr(package().jit, "compile_seconds", None)
    return 0.0 if counter is None else counter()


def is_failure(error: Exception) -> bool:
    """Whether the package could not build or find a kernel."""
    failure = getattr(package().jit, "JitError", None)
    return failure is not None and isinstance(error, failure)
