"""Every environment variable FlashInfer reads, declared once.

Nobody else in the package touches ``os.environ``. A variable is read when it is asked for
(``env.MAX_JOBS.get()``), not at import, so that a test or a server may still change it.
:func:`markdown` makes ``docs/environment.md``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class _Unusable(ValueError):
    """A value whose form is right, and the reason why it cannot be used."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: how it is parsed, what it means when absent.

    Parameters
    ----------
    name : str
        Name in the environment.
    type : str
        The form of a value, for messages and documentation.
    default : T
        Value when the variable is unset or empty.
    doc : str
        One line on what it does.
    parse : callable
        Text to value. Raises ``ValueError`` for text that is not allowed.
    group : str
        Heading under which the documentation lists it.
    shown_default : str
        Default as documented, where it is computed elsewhere.
    """

    name: str
    type: str
    default: T
    doc: str
    parse: Callable[[str], T]
    group: str
    shown_default: str

    def is_set(self) -> bool:
        """Whether the variable has a non-empty value."""
        return bool(os.environ.get(self.name))

    def get(self) -> T:
        """Parsed value, or the default.

        Raises
        ------
        ValueError
            If the text cannot be parsed; the message names the variable, the text and the type.
        """
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            why = f" ({error})" if isinstance(error, _Unusable) else ""
            raise ValueError(
                f"{self.name}={text!r} is not valid: expected {self.type}{why}"
            ) from error


VARIABLES: dict[str, Variable] = {}
_group = ""


def _heading(title: str) -> None:
    global _group
    _group = title


def _declare(
    name: str, type_: str, default: T, parse: Callable[[str], T], doc: str, shown: str | None = None
) -> Variable[T]:
    if shown is None:
        shown = "unset" if default in (None, "", ()) or default is False else str(default)
    variable = Variable(name, type_, default, doc, parse, _group, shown)
    VARIABLES[name] = variable
    return variable


def _text(name: str, doc: str, default: str = "", shown: str | None = None) -> Variable[str]:
    return _declare(name, "text", default, str, doc, shown)


def _words(name: str, doc: str) -> Variable[tuple[str, ...]]:
    return _declare(name, "shell words", (), lambda t: tuple(shlex.split(t)), doc, "unset")


def _path(name: str, doc: str, shown: str | None = None) -> Variable[Path | None]:
    """Absolute: compilers run in other folders."""
    return _declare(name, "path", None, _absolute, doc, shown)


def _absolute(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise _Unusable(f"there is no user {text.split('/')[0]}") from error
    except OSError as error:
        raise _Unusable("it is relative to the working folder, which was removed") from error


def _paths(name: str, doc: str) -> Variable[tuple[Path, ...]]:
    def parse(text: str) -> tuple[Path, ...]:
        return tuple(_absolute(part) for part in text.split(os.pathsep) if part)

    return _declare(name, "paths with `:` between", (), parse, doc, "unset")


def _flag(name: str, doc: str) -> Variable[bool]:
    """Any non-empty value switches it on."""
    return _declare(name, "set or unset", False, lambda _: True, doc)


def _switch(name: str, doc: str, default: bool = False) -> Variable[bool]:
    words = {"0": False, "false": False, "off": False, "no": False}
    words |= {"1": True, "true": True, "on": True, "yes": True}

    def parse(text: str) -> bool:
        if text.strip().lower() not in words:
            raise ValueError(text)
        return words[text.strip().lower()]

    return _declare(name, "0 or 1", default, parse, doc, str(int(default)))


def _integer(
    name: str, doc: str, default: int, minimum: int, shown: str | None = None
) -> Variable[int]:
    def parse(text: str) -> int:
        if int(text) < minimum:
            raise ValueError(text)
        return int(text)

    return _declare(name, f"integer >= {minimum}", default, parse, doc, shown)


def _number(name: str, doc: str, default: float) -> Variable[float]:
    def parse(text: str) -> float:
        if not float(text) > 0:
            raise ValueError(text)
        return float(text)

    return _declare(name, "number > 0", default, parse, doc)


def _choice(name: str, doc: str, default: str, allowed: tuple[str, ...]) -> Variable[str]:
    def parse(text: str) -> str:
        by_lower = {word.lower(): word for word in allowed}
        if text.strip().lower() not in by_lower:
            raise ValueError(text)
        return by_lower[text.strip().lower()]

    return _declare(name, " / ".join(allowed), default, parse, doc)


_heading("JIT and toolchain")
FLASHINFER_WORKSPACE_BASE = _path(
    "FLASHINFER_WORKSPACE_BASE",
    "Folder that holds `.cache/flashinfer`, the cache of compiled modules.",
    "home directory",
)
FLASHINFER_TRUSTED_FOLDERS = _paths(
    "FLASHINFER_TRUSTED_FOLDERS",
    "Folders whose compiled modules are loaded whoever owns or can write them "
    "([who is trusted](security.md)).",
)
FLASHINFER_BUILD_TIMEOUT = _number(
    "FLASHINFER_BUILD_TIMEOUT",
    "Seconds without any finished step after which compilers count as hanging and are ended.",
    1800.0,
)
FLASHINFER_TOOLCHAIN_TIMEOUT = _number(
    "FLASHINFER_TOOLCHAIN_TIMEOUT",
    "Seconds in which a compiler must answer what version it is.",
    60.0,
)
FLASHINFER_CUDA_ARCH_LIST = _text(
    "FLASHINFER_CUDA_ARCH_LIST",
    'Architectures to compile for, such as `"8.0 9.0a 12.0f"`.',
    shown="the GPUs of this machine",
)
MAX_JOBS = _integer(
    "MAX_JOBS",
    "Compiler processes at a time.",
    0,
    1,
    "cores, as far as memory (cgroup limit included) allows",
)
FLASHINFER_COMPILER = _choice(
    "FLASHINFER_COMPILER",
    "Who compiles kernels: `auto` takes NVRTC for modules with a prebuilt host part and nvcc for "
    "the others ([the two ways](design/nvrtc.md)).",
    "auto",
    ("auto", "nvcc", "nvrtc"),
)
FLASHINFER_NVRTC = _path(
    "FLASHINFER_NVRTC",
    "The NVRTC library to use.",
    "searched: the packages of NVIDIA, PyTorch, `CUDA_HOME`, `/usr/local/cuda`",
)
FLASHINFER_HOST_DIR = _path(
    "FLASHINFER_HOST_DIR",
    "Folder of prebuilt host parts, as `flashinfer build-host-parts` makes it.",
    "that of the package",
)
FLASHINFER_NVCC = _text(
    "FLASHINFER_NVCC",
    "The nvcc to use; a wrapper is followed to its toolkit.",
    shown="searched: `CUDA_HOME`, `PATH`, the PyPI toolkit, `/usr/local/cuda`",
)
FLASHINFER_NVCC_THREADS = _integer(
    "FLASHINFER_NVCC_THREADS", "`--threads` of each nvcc; memory grows with it.", 1, 1
)
FLASHINFER_NVCC_LAUNCHER = _words(
    "FLASHINFER_NVCC_LAUNCHER", "Command put before nvcc, such as `ccache`."
)
FLASHINFER_CXX_LAUNCHER = _words(
    "FLASHINFER_CXX_LAUNCHER", "Command put before the host C++ compiler."
)
FLASHINFER_EXTRA_CFLAGS = _words("FLASHINFER_EXTRA_CFLAGS", "More flags for the host C++ compiler.")
FLASHINFER_EXTRA_CUDAFLAGS = _words("FLASHINFER_EXTRA_CUDAFLAGS", "More flags for nvcc.")
FLASHINFER_EXTRA_LDFLAGS = _words("FLASHINFER_EXTRA_LDFLAGS", "More flags for the linker.")
FLASHINFER_DISABLE_JIT = _flag(
    "FLASHINFER_DISABLE_JIT",
    "Refuse to compile: a module must be in the cache or prebuilt.",
)
FLASHINFER_DISABLE_VERSION_CHECK = _flag(
    "FLASHINFER_DISABLE_VERSION_CHECK",
    "Take prebuilt modules of another FlashInfer version if their sources are the same.",
)
FLASHINFER_AOT_DIR = _path(
    "FLASHINFER_AOT_DIR", "Folder of prebuilt modules, looked at before the cache.", "unset"
)
FLASHINFER_JIT_VERBOSE = _switch(
    "FLASHINFER_JIT_VERBOSE", "Print each compiler command and its output."
)
FLASHINFER_JIT_DEBUG = _switch(
    "FLASHINFER_JIT_DEBUG",
    "Compile with debug symbols and without optimisation; load modules from their files.",
)
FLASHINFER_JIT_LINEINFO = _switch(
    "FLASHINFER_JIT_LINEINFO", "Add `-lineinfo`, so that profilers can show CUDA source lines."
)
FLASHINFER_LOGGING_LEVEL = _choice(
    "FLASHINFER_LOGGING_LEVEL",
    "Python logging level of the JIT.",
    "INFO",
    ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
)

_heading("Prebuilt kernels")
FLASHINFER_CUBIN_DIR = _path(
    "FLASHINFER_CUBIN_DIR",
    "Folder of cubins: downloads go there, and modules are joined from it.",
    "`.cache/flashinfer/cubins`",
)
FLASHINFER_CUBINS_REPOSITORY = _text(
    "FLASHINFER_CUBINS_REPOSITORY",
    "Where `flashinfer download-cubin` takes cubins: `https://...`, or a folder. Nothing is "
    "downloaded without it.",
)
FLASHINFER_CUBINS_SHA256 = _text(
    "FLASHINFER_CUBINS_SHA256",
    "SHA-256 of the manifest of that repository, by which you sign it off "
    "([who is trusted](security.md)).",
    shown="that which the package was built with",
)
FLASHINFER_CUBIN_DOWNLOAD_THREADS = _integer(
    "FLASHINFER_CUBIN_DOWNLOAD_THREADS", "Files that are downloaded at a time.", 4, 1
)
FLASHINFER_NO_DOWNLOAD = _flag(
    "FLASHINFER_NO_DOWNLOAD", "Refuse to download, whatever else is set."
)
FLASHINFER_WHEELS_REPOSITORY = _text(
    "FLASHINFER_WHEELS_REPOSITORY",
    "Where `flashinfer install-cubin-wheel` and `install-jit-cache-wheel` take wheels: a folder, "
    "or the address of a page with links to them.",
)

_heading("Behaviour")
FLASHINFER_TOPK_ALGO = _choice(
    "FLASHINFER_TOPK_ALGO",
    "Who shares a row of `top_k`: `auto` decides by the shape, `cta` one multiprocessor each; "
    "the other names of FlashInfer's algorithms mean `auto`.",
    "auto",
    ("auto", "cta", "multi_cta", "clusters", "filtered", "cub"),
)
FLASHINFER_AUTOTUNE_CACHE_DIR = _path(
    "FLASHINFER_AUTOTUNE_CACHE_DIR",
    "Folder of the tuning results that `autotune_v2()` keeps.",
    "`autotune` in the cache folder",
)
FLASHINFER_NVFP4_4OVER6 = _switch(
    "FLASHINFER_NVFP4_4OVER6",
    "Asks for NVFP4 blocks scaled to 4 where that is better than 6: refused, there is no kernel.",
)
FLASHINFER_AUTOTUNER_LOAD_FROM_FILE = _switch(
    "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE",
    "Keep tuning results in the cache folder: load them at the first use, add what is measured.",
)
FLASHINFER_BACKEND = _choice(
    "FLASHINFER_BACKEND",
    "`reference` runs every traced operation as plain PyTorch, on any device.",
    "auto",
    ("auto", "reference"),
)

FLASHINFER_COMM_TIMEOUT = _number(
    "FLASHINFER_COMM_TIMEOUT",
    "Seconds for which a kernel waits for another rank before it ends the program with an error.",
    300.0,
)

_heading("API logging and dumps")
FLASHINFER_LOGLEVEL = _integer(
    "FLASHINFER_LOGLEVEL",
    "0 off, 1 names, 3 inputs and outputs, 5 with statistics, 10 with dumps.",
    0,
    0,
)
FLASHINFER_LOGDEST = _text(
    "FLASHINFER_LOGDEST",
    "`stdout`, `stderr`, or a file or named pipe, which is created for the user alone (0600); `%i` "
    "becomes the process id.",
    "stdout",
)
FLASHINFER_DUMP_DIR = _text(
    "FLASHINFER_DUMP_DIR",
    "Where level 10 writes the tensors of each call, for the user alone (folders 0700, files "
    "0600).",
    "flashinfer_dumps",
)
FLASHINFER_DUMP_INCLUDE = _text(
    "FLASHINFER_DUMP_INCLUDE", "Dump only these APIs: names or `*` patterns, comma-separated."
)
FLASHINFER_DUMP_EXCLUDE = _text(
    "FLASHINFER_DUMP_EXCLUDE", "Do not dump these APIs: names or `*` patterns, comma-separated."
)
FLASHINFER_DUMP_MAX_COUNT = _integer(
    "FLASHINFER_DUMP_MAX_COUNT", "No more dumps after this many.", 1000, 0
)
FLASHINFER_DUMP_MAX_SIZE_GB = _number(
    "FLASHINFER_DUMP_MAX_SIZE_GB", "No more dumps beyond this size in total.", 20.0
)
FLASHINFER_DUMP_SAFETENSORS = _switch(
    "FLASHINFER_DUMP_SAFETENSORS", "Dump as `.safetensors` instead of `.pt`."
)

_heading("Trace capture")
FLASHINFER_TRACE_DUMP = _flag(
    "FLASHINFER_TRACE_DUMP", "Write a benchmark definition (JSON) for each traced call."
)
FLASHINFER_TRACE_DUMP_DIR = _path(
    "FLASHINFER_TRACE_DUMP_DIR", "Where those definitions go.", "working directory"
)
FLASHINFER_TRACE_APPLY = _path(
    "FLASHINFER_TRACE_APPLY",
    "Folder of solutions that `flashinfer.trace_apply.enable_apply()` takes.",
)

_heading("System variables that are also read")
CUDA_HOME = _text("CUDA_HOME", "CUDA toolkit, the second place where nvcc is looked for.")
CUDA_PATH = _text("CUDA_PATH", "Same as `CUDA_HOME`, which wins.")
CUDA_VISIBLE_DEVICES = _text(
    "CUDA_VISIBLE_DEVICES", "GPUs whose architectures are compiled for.", shown="all GPUs"
)
CXX = _text("CXX", "Host C++ compiler.", shown="g++, c++ or clang++ from `PATH`")
NVCC_PREPEND_FLAGS = _text("NVCC_PREPEND_FLAGS", "Flags that nvcc itself puts first.")
NVCC_APPEND_FLAGS = _text("NVCC_APPEND_FLAGS", "Flags that nvcc itself puts last.")
HOME = _text("HOME", "Home directory, the default cache base.")
TMPDIR = _text("TMPDIR", "Where compilers put temporary files.", "/tmp")
PATH = _text("PATH", "Where programs are looked for.", os.defpath)


_NOT_READ = """
## Variables of FlashInfer that are not read here

| Variable | Why |
| :-- | :-- |
| `FLASHINFER_CUBIN_CHECKSUM_DISABLED` | checksums are always compared |
| `FLASHINFER_VALIDATE_INPUTS` | arguments are always checked |
| `FLASHINFER_USE_CUDA_NORM` | there are no other norms |
| `FLASHINFER_FMHA_V2_VERBOSE`, `FLASHINFER_DSL_FMHA_LOCAL_DIR`, `FLASHINFER_ROUTING_*`, `FLASHINFER_B12X_*` | no such kernels |
"""  # noqa: E501


@contextlib.contextmanager
def temporary(key: str, value: str) -> Iterator[None]:
    """Set a variable of this process's environment for a while."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def child_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the environment for a child process, with `changes` applied."""
    return {**os.environ, **(changes or {})}


def markdown() -> str:
    """The table of every variable, as in ``docs/environment.md``."""
    lines = [
        "# Environment variables",
        "",
        "Generated from `flashinfer/env.py`, by",
        "`python -c 'from flashinfer import env; print(env.markdown(), end=\"\")'`.",
        "An empty value counts as unset.",
    ]
    group = None
    for variable in VARIABLES.values():
        if variable.group != group:
            group = variable.group
            lines += ["", f"## {group}", ""]
            lines += ["| Variable | Type | Default | Effect |", "| :-- | :-- | :-- | :-- |"]
        lines.append(
            f"| `{variable.name}` | {variable.type} | {variable.shown_default} | {variable.doc} |"
        )
    return "\n".join(lines) + "\n" + _NOT_READ
