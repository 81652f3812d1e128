"""Finding nvcc, its toolkit, the host compiler and ninja.

Asking a compiler for its version costs a process. The answer is remembered in `toolchain.json`
of the cache, under size and mtime of the program, so that loading a compiled module starts none.
Only this shortcut trusts an mtime; the identity of a module is the version text.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from .. import env
from . import files, places, process, trust
from .errors import BrokenToolError, ToolchainError, scratch_problem
from .fingerprint import digest

SYSTEM_TOOLKIT = "/usr/local/cuda"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit.

    Attributes
    ----------
    nvcc : str
        The program to start; a wrapper stays a wrapper.
    version : str
        Release and build, such as ``V13.0.88 cuda_13.0.r13.0/compiler.36424714_0``.
    root : str
        The toolkit that nvcc itself names.
    include_dirs, library_dirs : tuple of str
        Folders for headers and libraries that exist.
    """

    nvcc: str
    version: str
    root: str
    include_dirs: tuple[str, ...]
    library_dirs: tuple[str, ...]

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        match = re.search(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    def static_cudart(self) -> str | None:
        """Folder of `libcudart_static.a`, which lets a module load on a box without a driver."""
        return self._library_dir("libcudart_static.a")

    def shared_cudart(self) -> str | None:
        """Path of the shared CUDA runtime (PyPI ships it without the `libcudart.so` link)."""
        names = ("libcudart.so", f"libcudart.so.{self.release[0]}")
        return next((f"{d}/{n}" for n in names if (d := self._library_dir(n))), None)

    def _library_dir(self, name: str) -> str | None:
        return next((d for d in self.library_dirs if os.path.isfile(f"{d}/{name}")), None)


@dataclass(frozen=True)
class HostCompiler:
    """The C++ compiler: its path and what identifies it (version and target)."""

    path: str
    version: str


def find_toolkit() -> Toolkit | None:
    """The first toolkit of the search order, or None."""
    for _, nvcc in _nvcc_candidates():
        if nvcc is not None:
            return _describe_nvcc(nvcc)
    return None


def require_toolkit() -> Toolkit:
    """The toolkit, or an error that lists where it was looked for."""
    toolkit = find_toolkit()
    if toolkit is None:
        tried = ", ".join(place for place, _ in _nvcc_candidates())
        raise ToolchainError(
            f"nvcc was not found. Looked in: {tried}.\n"
            "  hint: pip install -e '.[cuda]' in the checkout, or install the CUDA toolkit and set "
            "CUDA_HOME or FLASHINFER_NVCC"
        )
    return toolkit


def _nvcc_candidates() -> Iterator[tuple[str, str | None]]:
    """Pairs of a place (as shown to the user) and the nvcc found there."""
    path = env.PATH.get()
    if asked := env.FLASHINFER_NVCC.get():
        found = shutil.which(asked, path=path)
        if found is None:
            raise ToolchainError(
                f"FLASHINFER_NVCC={asked!r} is not a program that can be run.\n"
                "  hint: set it to the path of nvcc, or unset it"
            )
        yield f"FLASHINFER_NVCC={asked}", found
    for variable in (env.CUDA_HOME, env.CUDA_PATH):
        # Some shells leave an empty entry in front (":/usr/local/cuda"), as in a search path.
        for root in [variable.get(), *variable.get().split(":")]:
            if root:
                yield f"{variable.name}={root}", _executable(f"{root}/bin/nvcc")
    yield f"PATH={path}", shutil.which("nvcc", path=path)
    for root in _pypi_toolkits():
        yield root, _executable(f"{root}/bin/nvcc")
    yield SYSTEM_TOOLKIT, _executable(f"{SYSTEM_TOOLKIT}/bin/nvcc")


def _pypi_toolkits() -> list[str]:
    """Toolkits unpacked by the `nvidia-cuda-nvcc` package: `nvidia/cu13` (CUDA 13 and later)."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    places = list(spec.submodule_search_locations or ()) if spec else []
    roots = [str(root) for place in places for root in Path(place).glob("cu[0-9]*")]
    found = sorted(roots, key=lambda r: int(re.sub(r"\D", "", Path(r).name)), reverse=True)
    return found or [f"{place}/cu13" for place in places]


def _executable(path: str) -> str | None:
    return path if os.path.isfile(path) and os.access(path, os.X_OK) else None


def find_host_compiler() -> HostCompiler | None:
    """The C++ compiler named by `CXX`, or g++, c++, clang++ from `PATH`; None without any."""
    path = env.PATH.get()
    names = [_program_of_cxx()] if env.CXX.is_set() else ["g++", "c++", "clang++"]
    found = next((p for name in names if (p := shutil.which(name, path=path))), None)
    return _describe_host_compiler(os.path.abspath(found)) if found else None


def _program_of_cxx() -> str:
    """The program that `CXX` names: the last word, as launchers have their own variable."""
    asked = env.CXX.get()
    try:
        words = shlex.split(asked)
        why = "" if words else "it is blank"
    except ValueError as error:
        words, why = [], str(error)
    if flags := [word for word in words if word.startswith("-")]:
        why = f"{flags[0]} is a flag"
    if why:
        raise BrokenToolError(
            f"CXX={asked!r} does not name a C++ compiler: {why}.\n  hint: set it to one program, "
            "such as CXX=g++; flags belong in FLASHINFER_EXTRA_CFLAGS"
        )
    return words[-1]


def require_host_compiler() -> HostCompiler:
    """The host compiler, or an error that says how to get one."""
    compiler = find_host_compiler()
    if compiler is None:
        if env.CXX.is_set():
            what = f"CXX={env.CXX.get()!r} is not a program that can be run"
        else:
            what = "none of g++, c++, clang++ was found"
        raise ToolchainError(
            f"No host C++ compiler: {what} (PATH={env.PATH.get()}).\n"
            "  hint: install g++ (`apt install g++`), or set CXX to a C++17 compiler"
        )
    return compiler


def require_ninja() -> str:
    """Path of ninja: of the PyPI package, or from `PATH`."""
    try:
        import ninja

        found = shutil.which("ninja", path=ninja.BIN_DIR)
    except ImportError:
        found = None
    found = found or shutil.which("ninja", path=env.PATH.get())
    if found is None:
        raise ToolchainError(
            f"ninja was not found, neither as a Python package nor in PATH={env.PATH.get()}.\n"
            "  hint: pip install ninja"
        )
    return found


def ingredients(uses_cuda: bool) -> dict[str, str] | None:
    """Identity of a module's compilers, or None if it cannot be compiled here."""
    import tvm_ffi

    try:
        host = find_host_compiler()
        toolkit = find_toolkit() if uses_cuda and host else None
    except BrokenToolError:  # said when it comes to compiling; what is cached can be used
        return None
    if host is None or (uses_cuda and toolkit is None):
        return None
    found = {"host compiler": host.version, "tvm_ffi": tvm_ffi.__version__}
    with contextlib.suppress(OSError, ValueError):
        found["libc"] = os.confstr("CS_GNU_LIBC_VERSION") or ""
    if toolkit is not None:
        found["nvcc"] = toolkit.version
        found["cudart"] = "static" if toolkit.static_cudart() else "shared"
    return found


def _ask(command: list[str], what: str) -> str:
    """Standard output and error of a short command."""
    hint = f"hint: check {command[0]}"
    try:
        output, code = process.ask(command, env.FLASHINFER_TOOLCHAIN_TIMEOUT.get())
    except TimeoutError as error:
        raise BrokenToolError(
            f"{what} hangs: `{shlex.join(command)}` gave {error}.\n"
            f"  {hint}, or raise FLASHINFER_TOOLCHAIN_TIMEOUT"
        ) from error
    except OSError as error:
        raise BrokenToolError(f"{what} does not run: {error}\n  {hint}") from error
    if code != 0:
        raise BrokenToolError(
            f"{what} failed: `{shlex.join(command)}` returned {code}:\n{output.strip()}\n"
            f"  {hint}, and that a host C++ compiler is in PATH or named by CXX{scratch_problem()}"
        )
    return output


def _query_nvcc(nvcc: str) -> tuple[dict, list[str]]:
    """What nvcc says about itself, and the programs whose change makes that stale.

    Its own folder says nothing about the toolkit when `nvcc` is a link or a wrapper, so it is
    asked for the settings of a compile that it does not carry out.
    """
    text = _ask([nvcc, "--version"], "nvcc")
    release = re.search(r"\bV\d[\w.]*", text)
    build = re.search(r"^Build (\S+)", text, re.MULTILINE)
    if release is None:
        raise BrokenToolError(
            f"{nvcc} is not nvcc: its --version says {text.strip()[:200]!r}.\n"
            "  hint: set FLASHINFER_NVCC or CUDA_HOME to another one"
        )
    command = [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"]
    if host := find_host_compiler():
        command.insert(1, f"-ccbin={host.path}")
    settings = dict(re.findall(r"^#\$ (\w+)\s*=(.*)$", _ask(command, "nvcc"), re.MULTILINE))
    top = settings.get("TOP", "").strip() or str(Path(nvcc).resolve().parent.parent)
    root = os.path.realpath(top)
    try:
        includes = shlex.split(
            settings.get("INCLUDES", "") + " " + settings.get("SYSTEM_INCLUDES", "")
        )
        libraries = shlex.split(settings.get("LIBRARIES", ""))
    except ValueError as error:
        raise BrokenToolError(
            f"{nvcc} is not nvcc, or a wrapper that changes what it prints: the settings that "
            f"`{shlex.join(command)}` lists cannot be read ({error}).\n"
            "  hint: set FLASHINFER_NVCC or CUDA_HOME to another one"
        ) from error
    include_dirs = [w.removeprefix("-I") for w in includes if w != "-isystem"] + [f"{root}/include"]
    library_dirs = [w.removeprefix("-L") for w in libraries]
    library_dirs += [f"{root}/lib64", f"{root}/lib"]
    description = {
        "version": " ".join([release[0]] + ([build[1]] if build else [])),
        "root": root,
        "include_dirs": _existing(include_dirs),
        "library_dirs": [d for d in _existing(library_dirs) if not d.endswith("/stubs")],
    }
    return description, [nvcc, f"{root}/bin/nvcc"]


def _existing(folders: list[str]) -> list[str]:
    return list(dict.fromkeys(os.path.realpath(f) for f in folders if os.path.isdir(f)))


def _describe_nvcc(nvcc: str) -> Toolkit:
    nvcc = os.path.abspath(nvcc)
    found = _remembered(nvcc, "nvcc")
    return Toolkit(
        nvcc, found["version"], found["root"],
        tuple(found["include_dirs"]), tuple(found["library_dirs"]),
    )  # fmt: skip


def _query_host_compiler(path: str) -> tuple[dict, list[str]]:
    text = _ask([path, "-v"], "the host C++ compiler")
    version = re.search(r"^.*\bversion \d.*$", text, re.MULTILINE)
    target = re.search(r"^Target: (\S+)", text, re.MULTILINE)
    parts = [match[0].strip() for match in (version, target) if match]
    return {"version": "; ".join(parts) or text.strip()[-200:]}, [path]


def nvrtc_version(library: str) -> str:
    """Version of an NVRTC library, with a hash of its built-in headers for the patch release."""
    return _remembered(library, "nvrtc")["version"]


def _query_nvrtc(library: str) -> tuple[dict, list[str]]:
    program = Path(__file__).with_name("nvrtc_compile.py")
    command = [sys.executable, "-I", "-S", str(program), "--nvrtc", library, "--version"]
    text = _ask(command, "NVRTC").strip()
    if not re.fullmatch(r"\d+\.\d+", text):
        raise BrokenToolError(
            f"{library} is not NVRTC: asked for its version, it says {text[:200]!r}.\n"
            "  hint: set FLASHINFER_NVRTC to another library"
        )
    # NVRTC does not tell its patch release.
    builtins = sorted(Path(library).parent.glob("libnvrtc-builtins*"))
    hashes = [files.sha256(path) for path in builtins]
    return {"version": f"{text} {digest(hashes)[:12]}"}, [library, *map(str, builtins)]


def _describe_host_compiler(path: str) -> HostCompiler:
    return HostCompiler(path, _remembered(path, "c++")["version"])


_QUERIES = {"nvcc": _query_nvcc, "c++": _query_host_compiler, "nvrtc": _query_nvrtc}
_ANSWERS: dict[str, dict[str, type]] = {  # types of what is remembered
    "nvcc": {"version": str, "root": str, "include_dirs": list, "library_dirs": list},
    "c++": {"version": str},
    "nvrtc": {"version": str},
}
_FORMAT = 3  # of the remembered answers
_RETRY_SECONDS = 30.0  # until a compiler that did not answer is asked again
_silent: dict[tuple, tuple[float, BrokenToolError]] = {}


def _stamp(program: str) -> list | None:
    try:
        real = os.path.realpath(program)
        status = os.stat(real)
    except OSError:
        return None
    return [real, status.st_size, status.st_mtime_ns]


def _remembered(program: str, kind: str) -> dict:
    """The answer of a query, from this process, from `toolchain.json`, or by asking."""
    stamp = _stamp(program)
    return _remembered_for(program, kind, tuple(stamp) if stamp else None, str(_memory_file()))


@functools.lru_cache(maxsize=64)
def _remembered_for(program: str, kind: str, stamp: tuple | None, memory: str) -> dict:
    entry = _read_memory(memory).get(program)
    if _is_answer(entry, kind):
        stamps = entry["stamps"]
        if stamps and all(_stamp(path) == then for path, then in stamps.items()):
            return entry["answer"]
    question = (program, kind, stamp, memory, env.CXX.get())
    asked, failure = _silent.get(question, (0.0, None))
    if failure is not None and time.monotonic() - asked < _RETRY_SECONDS:
        raise failure
    try:
        answer, programs = _QUERIES[kind](program)
    except BrokenToolError as error:  # one call asks several times, and each may take a minute
        _silent[question] = time.monotonic(), error
        raise
    stamps = {path: _stamp(path) for path in programs}
    remembered = dict(format=_FORMAT, kind=kind, stamps=stamps, answer=answer)
    _write_memory(memory, program, {**remembered, "digest": digest(remembered)})
    return answer


def _is_answer(entry: Any, kind: str) -> TypeGuard[dict[str, Any]]:
    """Whether something from `toolchain.json` is what this version wrote, unchanged."""
    if not isinstance(entry, dict) or entry.get("format") != _FORMAT or entry.get("kind") != kind:
        return False
    if entry.get("digest") != digest({k: v for k, v in entry.items() if k != "digest"}):
        return False
    answer, stamps = entry.get("answer"), entry.get("stamps")
    return (
        isinstance(stamps, dict)
        and isinstance(answer, dict)
        and all(isinstance(answer.get(n), type_) for n, type_ in _ANSWERS[kind].items())
    )


def _memory_file() -> Path:
    return places.version_dir() / "toolchain.json"


def _read_memory(memory: str) -> dict:
    """The remembered answers; none from a folder where a stranger can have written them.

    They name folders of headers, so they decide what is compiled.
    """
    try:
        stamp = files.stamp_of(os.stat(memory))
    except OSError:
        return {}
    return _read_memory_of(memory, stamp)


@functools.lru_cache(maxsize=1)
def _read_memory_of(memory: str, stamp: files.Stamp) -> dict:
    if not trust.are_trusted([*trust.chain(Path(memory).parent, places.base_dir()), memory]):
        return {}
    try:
        with open(memory, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_memory(memory: str, program: str, entry: dict) -> None:
    """Best effort: with a read-only cache the compilers are asked in each process."""
    text = json.dumps({**_read_memory(memory), program: entry}, indent=1)
    with contextlib.suppress(OSError):
        files.write_if_different(memory, text)


def describe() -> dict[str, object]:
    """What was found, for `flashinfer collect-env`; an error text where something is missing."""

    def attempt(find):
        try:
            found = find()
        except ToolchainError as error:
            return str(error)
        return asdict(found) if hasattr(found, "__dataclass_fields__") else found

    return {
        "nvcc": attempt(require_toolkit),
        "host compiler": attempt(require_host_compiler),
        "ninja": attempt(require_ninja),
    }
