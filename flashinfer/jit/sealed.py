"""Loading a library from the very bytes that were checked.

Somebody can replace a library between its check and `dlopen`, or cut it short: SIGBUS then ends the
process. So the bytes that are hashed are copied into an anonymous file that nobody can change, and
the system loads that one.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path
from typing import Any

from . import files
from .errors import DamagedError

# TVM-FFI's loader of libraries; `tvm_ffi.load_module` reaches it by the suffix of a path, and a
# descriptor has none.
_LOADER = "ffi.Module.load_from_file.so"
_KEEP_ALIVE = "ffi.ModuleGlobalsAdd"
_LONGEST_NAME = 240  # memfd_create takes 249 bytes

_loaded: dict[tuple[Path, str], Any] = {}
_serial = itertools.count(1)


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
        copy = os.memfd_create(library.name[:_LONGEST_NAME], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # another C library or kernel
        return None
    try:
        if files.copy(library, copy) != sha256:
            raise DamagedError("the SHA-256 of its library differs from the manifest's")
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
        module = _load_descriptor(copy)
    except OSError:
        return None
    finally:
        os.close(copy)  # what is mapped stays
    return module if module is None else _loaded.setdefault((library, sha256), module)


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

    `dlopen` takes a path that it knows for the library that it knows, and numbers of descriptors
    come again. Empty parts and dots change a path and not where it leads: they write the serial
    number, a dot for each binary 1.
    """
    digits = f"{next(_serial):b}"
    return "/proc/self/fd/" + "".join("./" if d == "1" else "/" for d in digits) + str(descriptor)
