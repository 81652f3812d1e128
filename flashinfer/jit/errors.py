"""Errors of the JIT, and the reading of compiler output that explains them."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterable
from typing import Any

from .. import env


class JitError(RuntimeError):
    """A module could not be built or loaded; the last lines say why and what to do."""


class ToolchainError(JitError):
    """A program that a build needs was not found or does not work."""


class BrokenToolError(ToolchainError):
    """A program that a build needs is there, but fails to say even what it is."""


class DamagedError(JitError):
    """A compiled module on disk is not what its manifest says; the message says why."""


class UntrustedError(JitError):
    """A compiled module is not loaded, since a stranger can have written it."""


class ArtifactError(JitError):
    """Something prebuilt is not what was signed off, or there is nowhere to get it from."""


class BuildError(JitError):
    """A compiler or the linker failed."""


class MissingJITCacheError(JitError):
    """A module is not in the cache, and compiling is switched off.

    Attributes
    ----------
    spec : JitSpec or None
        The module that was asked for.
    """

    def __init__(self, message: str, spec: Any = None) -> None:
        super().__init__(message)
        self.spec = spec


# Text to look for in the output, and the remedy. The first match wins, so causes stand before
# the errors that they produce further on.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free some space, or point FLASHINFER_WORKSPACE_BASE (cache) or TMPDIR "
        "(compiler scratch) elsewhere",
    ),
    (
        r"a compiler hangs",
        "look why it waits (a licence, a network file system, a full disk); if it only is slow, "
        "raise FLASHINFER_BUILD_TIMEOUT",
    ),
    (
        r"died due to signal 9|Killed signal terminated|\bKilled\b|code=137|std::bad_alloc"
        r"|out of memory|Cannot allocate memory",
        "the compiler was killed, most likely for lack of memory, also when it ran alone: give "
        "the container more memory, or lower FLASHINFER_NVCC_THREADS",
    ),
    (
        r"Unsupported gpu architecture|is not (?:a supported|defined for option 'gpu-arch)"
        r"|Value '\S+' is not defined for option 'gpu-",
        "this nvcc does not know the architecture: change FLASHINFER_CUDA_ARCH_LIST "
        "(`nvcc --list-gpu-arch` lists what it knows) or use another toolkit with FLASHINFER_NVCC",
    ),
    (
        r"unsupported GNU version|unsupported clang version|host compiler targets unsupported",
        "the host compiler is too new for this nvcc: point CXX at an older one",
    ),
    (
        r"Failed to preprocess host compiler properties|cannot find compiler",
        "nvcc cannot run the host C++ compiler: install g++, or point CXX at one",
    ),
    (
        r"File too large|File size limit exceeded|died due to signal 25\b",
        "a file would be larger than this process may write: raise `ulimit -f`",
    ),
    (
        r"Segmentation fault|Bus error|Illegal instruction|Aborted|died due to signal",
        "a compiler crashed: try another toolkit (FLASHINFER_NVCC) or host compiler (CXX); "
        "FLASHINFER_JIT_VERBOSE=1 shows the command",
    ),
    (
        r"cannot find \S+\.o\b|\S+\.o: No such file or directory",
        "a compiler ended well but wrote no object file: check FLASHINFER_NVCC, CXX and the "
        "launchers (FLASHINFER_NVCC_LAUNCHER, FLASHINFER_CXX_LAUNCHER)",
    ),
    (
        r"fatal error: \S+: No such file or directory|cannot open source file",
        "a header was not found: check extra_include_paths and the installation of that package",
    ),
    (
        r"undefined reference|undefined symbol|ld returned \d+ exit|cannot find -l"
        r"|collect2: error|hidden symbol",
        "linking failed: a source or a library is missing from the module (sources, extra_ldflags; "
        "driver functions come from cudaGetDriverEntryPoint, not from libcuda)",
    ),
    (
        r"ptxas (?:fatal|error)",
        "ptxas refused the code for this architecture: check that the kernel supports the targets "
        "in FLASHINFER_CUDA_ARCH_LIST",
    ),
    (
        r"Permission denied|Read-only file system",
        "a folder cannot be written: point FLASHINFER_WORKSPACE_BASE or TMPDIR at one that can",
    ),
    (
        r"No such file or directory|command not found|not found$",
        "a program of the command line does not exist: check FLASHINFER_NVCC_LAUNCHER, "
        "FLASHINFER_CXX_LAUNCHER and the toolkit",
    ),
)
_CODE_REMEDY = (
    "the source or a header does not compile: fix it at the line above; "
    "FLASHINFER_JIT_VERBOSE=1 shows each command"
)
# The remedy for an error of the operating system on a folder of the cache.
_DISK_FULL = _REMEDIES[0][1]
_OTHER_BASE = "set FLASHINFER_WORKSPACE_BASE to a folder that can be written"
_REMEDIES_BY_NUMBER = {
    errno.ENOSPC: _DISK_FULL,
    errno.EDQUOT: _DISK_FULL,
    errno.EFBIG: "a file would be larger than this process may write: raise `ulimit -f`",
    errno.EMFILE: "this process has too many open files: raise `ulimit -n`",
    errno.ENFILE: "the system has too many open files: close some programs",
    errno.EAGAIN: "no process can be started: raise `ulimit -u`",
    errno.ENOMEM: "the memory is full: end some programs, or give the container more",
    errno.ELOOP: f"links of this path lead in a circle: remove them, or {_OTHER_BASE}",
    errno.ENOENT: f"a folder was removed, or a link leads nowhere: try again, or {_OTHER_BASE}",
    errno.ENOTDIR: f"a file lies where a folder is needed: remove it, or {_OTHER_BASE}",
    errno.EEXIST: f"a file lies where a folder is needed: remove it, or {_OTHER_BASE}",
    errno.ENAMETOOLONG: "the path is too long: set FLASHINFER_WORKSPACE_BASE to a shorter one",
}
_SCRATCH_BYTES = 16 << 20  # that compilers of a small module write to TMPDIR, with a margin
_OUT_OF_MEMORY = re.compile(_REMEDIES[2][0])
_ERROR_LINE = re.compile(
    r"\berror\b\s*[:#]|\bfatal\b\s*:|fatal error|error\s*:|undefined reference|cannot find -l"
    r"|cannot find \S+\.o\b|died due to signal|Killed|No space left"
    r"|Permission denied|not found$|Segmentation fault",
    re.IGNORECASE,
)


def killed_for_memory(output: str) -> bool:
    """Whether the output shows a process killed the way the out-of-memory killer does it."""
    return _OUT_OF_MEMORY.search(output) is not None


def first_error(lines: Iterable[str]) -> str:
    """The first line that looks like an error; the last line if none does."""
    lines = [line.rstrip() for line in lines if line.strip()]
    for line in lines:
        if _ERROR_LINE.search(line) and not line.startswith(("FAILED:", "ninja:")):
            return line.strip()
    return lines[-1].strip() if lines else "the compiler printed nothing"


def remedy(output: str) -> str:
    """One sentence on what to do about failed compiler output."""
    for pattern, advice in _REMEDIES:
        if re.search(pattern, output, re.MULTILINE):
            return f"{advice}{scratch_problem()}"
    return _CODE_REMEDY + scratch_problem()


def scratch_problem() -> str:
    """A clause for a hint if compilers have no room for temporary files, else nothing.

    They seldom say so themselves.
    """
    folder = env.TMPDIR.get()
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"; TMPDIR={folder} cannot be used ({error.strerror})"
    if free < _SCRATCH_BYTES:
        return f"; TMPDIR={folder} has only {free >> 10} KiB free for compilers"
    return ""


def system_error(place: Any, error: OSError) -> BuildError:
    """The exception for an error of the operating system while a module is built in `place`."""
    advice = _REMEDIES_BY_NUMBER.get(error.errno or 0, f"check this path, or {_OTHER_BASE}")
    what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return BuildError(f"Cannot build in {place}.\n  first error: {what}\n  hint: {advice}")


def build_error(title: str, output: str, log: Any) -> BuildError:
    """The exception for a failed build: the output's end, then cause, log file and hint.

    The summary stands last, where a terminal and a truncated server log still show it.
    """
    lines = output.splitlines()
    shown = lines if len(lines) <= 60 else ["[...]", *lines[-60:]]
    summary = [
        title,
        f"  first error: {first_error(lines)[:600]}",
        f"  full log: {log}",
        f"  hint: {remedy(output)}",
    ]
    return BuildError("\n".join([*shown, *summary]))
