"""Loading a library from the very bytes that were checked.

Somebody can replace a library between its check and `dlopen`, or cut it short: SIGBUS then ends the
process. So the bytes that are hashed are copied into an anonymous file that nobody can change, and
the system loads that one.

`dlopen` gets the path of a descriptor, which stays the library's name. For the backtrace of an
error, TVM-FFI opens the files of all libraries by their names. By then a number could mean any
file, and an empty one ends the process with SIGBUS. So all libraries are loaded at one number,
which means a page of zeros afterwards, for as long as the process lives.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._common.locks import ForkSafeLock
from . import files
from .errors import DamagedError

# TVM-FFI's loader of libraries; `tvm_ffi.load_module` reaches it by the suffix of a path, and a
# descriptor has none.
_LOADER = "ffi.Module.load_from_file.so"
_KEEP_ALIVE = "ffi.ModuleGlobalsAdd"
_LONGEST_NAME = 240  # memfd_create takes 249 bytes

_loaded: dict[tuple[Path, str], Any] = {}
_serial = itertools.count(1)


class _Place:
    """The number of a descriptor at which libraries are loaded, one at a time."""

    def __init__(self) -> None:
        self._turn = ForkSafeLock()
        self._number = -1
        self._zeros: os.stat_result | None = None

    @contextmanager
    def holding(self, descriptor: int) -> Iterator[int]:
        """The number, which means the file of `descriptor` meanwhile and a page of zeros else."""
        with self._turn:
            if not self._is_ours():
                self._number = _memory_file("flashinfer")
                os.write(self._number, bytes(mmap.PAGESIZE))
                _seal(self._number)
                self._zeros = os.fstat(self._number)
            zeros = os.dup(self._number)
            try:
                os.dup2(descriptor, self._number, inheritable=False)
                yield self._number
            finally:
                os.dup2(zeros, self._number, inheritable=False)
                os.close(zeros)

    def _is_ours(self) -> bool:
        """False at first, and where somebody closed all descriptors that he does not know."""
        try:
            return self._zeros is not None and os.path.samestat(os.fstat(self._number), self._zeros)
        except OSError:
            return False


_place = _Place()


def load(library: Path, sha256: str) -> Any | None:
    """The module of a library, from a copy in memory; None where the system cannot do that.

    Two loads of the same bytes at one path share a module, as `dlopen` shares a file.

    Parameters
    ----------
    library : Path
        The file. It may change meanwhile.
    sha256 : str
        What its bytes must have.

    Raises
    ------
    DamagedError
        If they have another hash.
    """
    if (module := _loaded.get((library, sha256))) is not None:
        return module
    try:
        copy = _memory_file(library.name)
    except (AttributeError, OSError):  # another C library or kernel
        return None
    try:
        if files.copy(library, copy) != sha256:
            raise DamagedError("the SHA-256 of its library differs from the manifest's")
        _seal(copy)
        with _place.holding(copy) as descriptor:
            module = _load_descriptor(descriptor)
    except OSError:
        return None
    finally:
        os.close(copy)  # what is mapped stays
    return module if module is None else _loaded.setdefault((library, sha256), module)


def _memory_file(name: str) -> int:
    return os.memfd_create(name[:_LONGEST_NAME], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _seal(descriptor: int) -> None:
    """Forbid everybody to change the bytes."""
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def _load_descriptor(descriptor: int) -> Any | None:
    """The module of an open library; None if TVM-FFI or the system does not take it."""
    import tvm_ffi  # here, since importing it takes longer than importing this package

    loader = tvm_ffi.get_global_func(_LOADER, allow_missing=True)
    keep_alive = tvm_ffi.get_global_func(_KEEP_ALIVE, allow_missing=True)
    if loader is None or keep_alive is None:
        return None
    try:
        module = loader(_name_of(descriptor), "so")
    except Exception:  # such as where policy forbids code in anonymous files
        return None
    keep_alive(module)  # until the process ends, as `tvm_ffi.load_module` does
    return module


def _name_of(descriptor: int) -> str:
    """A path of an open file that this process never used before.

    `dlopen` takes a path that it knows for the library that it knows. Empty parts and dots change
    a path and not where it leads: they write the serial number, a dot for each binary 1.
    """
    digits = f"{next(_serial):b}"
    return "/proc/self/fd/" + "".join("./" if d == "1" else "/" for d in digits) + str(descriptor)
