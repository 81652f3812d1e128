"""The identity of a compiled module.

A module is the same if its sources, the headers they reach, the flags, the targets and the ABI
are the same (`content`), and the compilers too (`toolchain`). Neither a path nor an mtime counts:
the same checkout elsewhere, or a cache copied to another machine, gives the same key.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import files
from .errors import JitError, ToolchainError
from .files import Stamp

# White space and comments may stand between the words of a directive.
_GAP = rb"(?:[ \t\f\v\r]|/\*(?s:.*?)\*/)*"
_DIRECTIVE = re.compile(
    rb"(?:#|%:|\?\?=)" + _GAP + rb"(?:include_next|include|import)\b" + _GAP
    + rb'("[^"\n]+"|<[^>\n]+>|\w+)?'
)  # fmt: skip
_COMMENT = re.compile(rb"/\*(?s:.*?)\*/")
_SPLICE = re.compile(rb"(?:\\|\?\?/)[ \t\f\v\r]*\n")  # a line that goes on in the next one
_PATH_FLAG = re.compile(
    r"(-I|-L|-isystem|-iquote|-idirafter|-Wl,-rpath,?=?|-Wl,-rpath-link,?=?)(.*)"
)
_GENCODE = re.compile(r"-?-(?:gencode|generate-code)(?:=(.*))?")


@dataclass(frozen=True)
class Identity:
    """What a compiled module was, or must be, built from.

    Attributes
    ----------
    content : str
        Hash of sources, headers, flags and ABI.
    archs : tuple of str
        Targets, such as ``("80", "90a")``; empty for a module without device code.
    toolchain : str
        Hash of the compilers, or "" if they are not there.
    ingredients : dict
        The hashed facts, for the manifest.
    uses_cuda : bool
        Whether the toolkit is among the compilers.
    """

    content: str
    archs: tuple[str, ...]
    toolchain: str
    ingredients: dict = field(compare=False, repr=False)
    uses_cuda: bool = field(default=False, compare=False, repr=False)

    @property
    def key_without_toolchain(self) -> str:
        label = "_".join(self.archs) or "host"
        # Longer than any sensible list: keep file names short.
        label = label if len(label) <= 80 else digest(label)[:16]
        return f"{self.content}-{label}-"

    @property
    def key(self) -> str:
        """Name of the module's folder in the cache."""
        return self.key_without_toolchain + self.toolchain


def digest(value: object) -> str:
    """Hash of a JSON value, independent of dictionary order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def system_abi() -> dict[str, str]:
    """The platform and the FFI interface that a binary is made for.

    Raises
    ------
    ToolchainError
        If TVM-FFI is not installed: no module can be built or loaded without it.
    """
    try:
        import tvm_ffi
    except ModuleNotFoundError as error:
        raise ToolchainError(
            f"TVM-FFI, which every compiled module needs, cannot be imported: {error}.\n"
            "  hint: pip install apache-tvm-ffi"
        ) from error

    # Patch releases keep the C ABI; they count as part of the toolchain.
    abi = ".".join(tvm_ffi.__version__.split(".")[:2])
    return {"system": f"{sys.platform}-{platform.machine()}", "tvm_ffi": abi}


def split_targets(cuda_flags: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Separate `-gencode` from the other nvcc flags.

    Returns
    -------
    (flags, archs)
        `archs` are the targets in order, such as ``"90a"``, with ``"+ptx"`` for PTX.
    """
    rest: list[str] = []
    codes: list[str] = []
    words = iter(cuda_flags)
    for word in words:
        if match := _GENCODE.fullmatch(word):
            value = match[1] or next(words, "")
            found = re.search(r"code=\[?([\w,]+)", value)
            codes += found[1].split(",") if found else [value]
        else:
            rest.append(word)
    archs = {re.sub(r"^compute_(\w+)$", r"\1+ptx", c).removeprefix("sm_") for c in codes}
    return rest, tuple(sorted(archs, key=lambda a: (len(a.rstrip("af")), a)))


def without_paths(flags: Iterable[str]) -> list[str]:
    """Flags with search paths removed and files replaced by name and content hash."""
    cleaned: list[str] = []
    words = iter(flags)
    for word in words:
        if match := _PATH_FLAG.fullmatch(word):
            if not match[2]:
                next(words, None)
        elif not word.startswith("-") and os.path.isfile(word):
            cleaned.append(f"{os.path.basename(word)}:{_read(word).hash}")
        else:
            cleaned.append(word)
    return cleaned


def include_flags_of(flags: Sequence[str]) -> list[str]:
    """The folders that `-I` and its relatives name in a list of flags."""
    folders = []
    for i, word in enumerate(flags):
        match = _PATH_FLAG.fullmatch(word)
        if match and match[1] in ("-I", "-isystem", "-iquote", "-idirafter"):
            folders.append(match[2] or "".join(flags[i + 1 : i + 2]))
    return folders


@dataclass(frozen=True)
class _File:
    hash: str
    includes: tuple[str, ...]
    names_tensor_view: bool


# Only saves reading a file again in this process: the stat is not part of the identity.
_files: dict[str, tuple[Stamp, _File]] = {}


def _read(path: str) -> _File:
    return _read_with_stamp(path)[0]


def _read_with_stamp(path: str) -> tuple[_File, Stamp]:
    status = os.stat(path)
    stamp = files.stamp_of(status)
    known = _files.get(path)
    if known and known[0] == stamp:
        return known[1], stamp
    with open(path, "rb") as file:
        text = file.read()
    parsed = _File(hashlib.sha256(text).hexdigest(), _includes_of(text), b"TensorView" in text)
    if len(text) == status.st_size and files.has_settled(status):  # else somebody is writing it
        _files[path] = (stamp, parsed)
    return parsed, stamp


def _includes_of(text: bytes) -> tuple[str, ...]:
    """The names in the directives of a source, with quotes or brackets; "" for anything else.

    Directives are found however they are spelled: with digraphs, comments inside or before them,
    or broken over lines. Text in a comment or string that looks like one is taken along, which only
    makes the identity depend on one file more.
    """
    if b"\\" in text or b"??/" in text:
        text = _SPLICE.sub(b"", text)
    found: dict[str, None] = {}
    for match in _DIRECTIVE.finditer(text):
        before = text[text.rfind(b"\n", 0, match.start()) + 1 : match.start()]
        if before:
            before = _COMMENT.sub(b"", before).rpartition(b"*/")[2]
            before = before.strip(b" \t\f\v\r\xef\xbb\xbf")
        if not before:
            found[(match[1] or b"").decode(errors="replace")] = None
    return tuple(found)


def takes_tensor_view_for_granted(path: str | Path) -> bool:
    """Whether a source names `TensorView` and includes no header that declares it."""
    if not os.path.isfile(path):
        return False
    file = _read(str(path))
    declares = any("tvm_ffi_utils.h" in name or "tvm/ffi/" in name for name in file.includes)
    return file.names_tensor_view and not declares


@dataclass(frozen=True)
class Reached:
    """The files that a module's sources reach through `#include`.

    Attributes
    ----------
    files : list of (str, str)
        Location-independent name and content hash of every file of ours, sorted.
    external : list of str
        Names of the headers found in none of our folders (CUDA, TVM-FFI, the system), for which
        the toolchain stands.
    included_sources : set of str
        Sources that another file includes.
    stamps : dict of str to tuple
        Inode, size and times of each file: not part of the identity, but a sign that somebody
        writes it.
    """

    files: list[tuple[str, str]]
    external: list[str]
    included_sources: set[str]
    stamps: dict[str, Stamp]

    def joined(self, other: Reached) -> Reached:
        """These files and those of another kind of source."""
        return Reached(
            sorted([*self.files, *other.files]),
            sorted({*self.external, *other.external}),
            self.included_sources | other.included_sources,
            {**self.stamps, **other.stamps},
        )


def reached_files(
    sources: Sequence[Path], include_dirs: Sequence[Path], macros: dict[str, str]
) -> Reached:
    """Every file of ours that the sources reach through `#include`, conditional or not.

    Parameters
    ----------
    sources : sequence of Path
        Sources of the module.
    include_dirs : sequence of Path
        Search path for headers of ours.
    macros : dict
        Macros defined by flags, for ``#include MACRO``.

    Raises
    ------
    JitError
        If a source is missing, or an include is computed in a way that cannot be followed.
    """
    found: dict[str, str] = {}  # path -> name
    hashes: list[tuple[str, str]] = []
    stamps: dict[str, Stamp] = {}
    folders = [str(folder) for folder in include_dirs]
    external: set[str] = set()
    included: set[str] = set()
    todo: list[tuple[str, str]] = []

    def visit(path: str, name: str) -> None:
        if path not in found:
            found[path] = name
            todo.append((path, name))

    for index, source in enumerate(sources):
        if not os.path.isfile(source):
            raise JitError(
                f"The source {source} does not exist.\n"
                "  hint: check the `sources` of the module, and that the package data is complete"
            )
        visit(os.path.abspath(source), f"source{index}/{os.path.basename(source)}")
    while todo:
        path, name = todo.pop()
        file, stamps[path] = _read_with_stamp(path)
        hashes.append((name, file.hash))
        for token in file.includes:
            spelled = macros.get(token, token) if token[:1] not in ("<", '"') else token
            if spelled[:1] not in ("<", '"'):
                raise JitError(
                    f"{path}: `#include {token}` cannot be followed, so edits of that header would "
                    f"go unseen.\n  hint: write the name literally, or define {token} by a -D flag"
                )
            header = spelled[1:-1]
            target = _resolve(header, path if spelled[0] == '"' else None, folders)
            if target is None:
                external.add(header)
                continue
            included.add(target[0])
            if target[1] is None:  # next to the file that includes it
                visit(target[0], os.path.normpath(f"{os.path.dirname(name)}/{header}"))
            else:
                visit(target[0], f"include{target[1]}/{os.path.normpath(header)}")
    return Reached(
        sorted(hashes), sorted(external), included & {os.path.abspath(s) for s in sources}, stamps
    )


def _resolve(
    header: str, includer: str | None, include_dirs: Sequence[str]
) -> tuple[str, int | None] | None:
    if includer is not None:
        beside = os.path.normpath(os.path.join(os.path.dirname(includer), header))
        if os.path.isfile(beside):
            return beside, None
    for index, folder in enumerate(include_dirs):
        candidate = os.path.normpath(os.path.join(folder, header))
        if os.path.isfile(candidate):
            return candidate, index
    return None


def macros_of(flags: Iterable[str]) -> dict[str, str]:
    """`-DNAME=value` flags as a dictionary."""
    pairs = (f[2:].partition("=") for f in flags if f.startswith("-D"))
    return {name: value for name, _, value in pairs if value}
