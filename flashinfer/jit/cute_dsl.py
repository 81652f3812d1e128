"""CuTe-DSL as a compiler: a ``.py`` source of a module is a kernel that it compiles.

`cute_dsl_compile.py` has the DSL write an object, in which the cubin lies, and a C header with the
function that launches it. A launcher in `csrc/` includes the header. The module is linked, cached,
verified and loaded like one of nvcc, and nothing of the DSL is needed to load it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import files, fingerprint
from .errors import JitError, ToolchainError

SUFFIXES = (".py",)
KERNELS = Path(__file__).resolve().parents[1] / "cute_dsl"
PROGRAM = Path(__file__).with_name("cute_dsl_compile.py")
_PACKAGE = "nvidia_cutlass_dsl"
_RUNTIME = "libcuda_dialect_runtime_static.a"


@dataclass(frozen=True)
class CuteDsl:
    """An installed CuTe-DSL.

    Attributes
    ----------
    version : str
        Version of its distribution.
    folders : tuple of str
        Folders that the module search path needs for ``import cutlass``.
    runtime : str
        The archive that the objects it writes are linked with.
    """

    version: str
    folders: tuple[str, ...]
    runtime: str

    def has_module(self, path: str) -> bool:
        """Whether it has a package or module, by its path from ``cutlass`` on."""
        place = Path(self.folders[0]) / path
        return place.is_dir() or place.with_suffix(".py").is_file()

    def command(self, defines: Iterable[str], archs: Sequence[str]) -> list[str]:
        """The command that compiles a kernel, without its source and outputs.

        Raises
        ------
        JitError
            If there is not exactly one target.
        """
        if len(archs) != 1:
            raise JitError(
                "CuTe-DSL compiles a kernel for one target, got "
                f"{', '.join(f'sm_{arch}' for arch in archs) or 'none'}.\n"
                "  hint: set FLASHINFER_CUDA_ARCH_LIST to one of them"
            )
        words = [sys.executable, str(PROGRAM), "--arch", archs[0]]
        for folder in self.folders:
            words += ["--path", folder]
        return [*words, *defines]


def find() -> CuteDsl | None:
    """The DSL of this Python, or None. Nothing of it is imported."""
    try:
        package = importlib.util.find_spec(_PACKAGE)
    except (ImportError, ValueError):
        return None
    places = list((package and package.submodule_search_locations) or ())
    return _find_in(places[0]) if places else None


@functools.lru_cache(maxsize=2)
def _find_in(place: str) -> CuteDsl | None:
    runtimes = sorted(Path(place).glob(f"**/lib/{_RUNTIME}"))  # cu13's after cu12's
    packages = sorted(Path(place).glob("*/cutlass/cute"))
    try:
        version = metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return None
    if not runtimes or not packages:
        return None
    folders = (str(packages[0].parents[1]), str(Path(place).parent))
    return CuteDsl(version, folders, str(runtimes[-1]))


def require() -> CuteDsl:
    """The DSL of this Python.

    Raises
    ------
    ToolchainError
        If it is not installed.
    """
    if dsl := find():
        return dsl
    raise ToolchainError(
        "nvidia-cutlass-dsl was not found, which compiles kernels that are written in CuTe-DSL.\n"
        "  hint: pip install -e '.[cute-dsl]', or compile these modules elsewhere "
        "and set FLASHINFER_AOT_DIR to their folder"
    )


def reached_files(sources: Iterable[Path]) -> fingerprint.Reached:
    """The files of kernels, those that they import beside them, and the program that compiles."""
    stamps: dict[str, files.Stamp] = {}
    hashes: dict[str, str] = {}
    todo = [*map(os.path.abspath, sources), str(PROGRAM)]
    while todo:
        path = todo.pop()
        if path in stamps:
            continue
        try:
            stamps[path] = files.stamp_of(os.stat(path))
            hashes[f"cute_dsl/{os.path.basename(path)}"] = files.sha256(Path(path))
        except OSError as error:
            raise JitError(f"The source {path} cannot be read ({error.strerror})") from error
        todo += _siblings(path, stamps[path])
    return fingerprint.Reached(sorted(hashes.items()), [], set(), stamps)


@functools.lru_cache(maxsize=64)
def _siblings(path: str, stamp: files.Stamp) -> tuple[str, ...]:
    """The files in the same folder that a file imports by ``from .name import ...``."""
    tree = ast.parse(Path(path).read_bytes())
    names = [
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    ]
    return tuple(os.path.join(os.path.dirname(path), f"{name}.py") for name in names)
