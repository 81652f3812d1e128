"""The cache of compiled modules on disk: how a module is found and checked.

    <base>/.cache/flashinfer/<version>/<archs>/generated/<uri>/       rendered sources
    <base>/.cache/flashinfer/<version>/<archs>/cached_ops/<uri>/<content>-<archs>-<toolchain>/
        <uri>.so  manifest.json  build.ninja  build.log

A module appears by one rename of a private folder and is never changed afterwards, so readers
need no lock. Builders hold the lock of the `<uri>` folder; whatever private folder one finds
under that lock belongs to a builder that was killed, and is removed.

The manifest has the SHA-256 of the library. A module whose library is another is passed over, as
if it was not there, and the next build replaces it. A module that a stranger can have written is
refused (`trust.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..version import __version__
from . import files, places, trust
from .errors import DamagedError, JitError, UntrustedError
from .fingerprint import Identity
from .log import logger

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """A compiled module on disk."""

    folder: Path
    library: Path
    manifest: dict


_MANIFEST_TYPES: dict[str, type | tuple[type, ...]] = {
    "library": str,
    "library_size": int,
    "created": (int, float),
    "version": str,
    "content": str,
    "archs": list,
    "toolchain": str,
}


def checked_entry(folder: Path, verify: bool = True) -> Entry:
    """The module in a folder.

    Parameters
    ----------
    folder : Path
        ``<name>/<content>-<archs>-<toolchain>``.
    verify : bool
        Hash the library; else only its size is looked at.

    Raises
    ------
    FileNotFoundError
        If there is no manifest: nothing was published here.
    DamagedError
        If the folder does not hold what was published in it.
    """
    try:
        with open(folder / MANIFEST, encoding="utf-8") as file:
            manifest = json.load(file)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"its manifest cannot be read ({type(error).__name__})") from error
    if not isinstance(manifest, dict) or not all(
        isinstance(manifest.get(name), type_) for name, type_ in _MANIFEST_TYPES.items()
    ):
        raise DamagedError("its manifest has not the fields of one")
    archs = tuple(map(str, manifest["archs"]))
    identity = Identity(manifest["content"], archs, manifest["toolchain"], {})
    library = folder / manifest["library"]
    if manifest["library"] != f"{folder.parent.name}.so" or identity.key != folder.name:
        raise DamagedError("its manifest is of another module")
    try:
        if library.stat().st_size != manifest["library_size"]:
            raise DamagedError("the size of its library differs from the manifest's")
    except OSError as error:
        raise DamagedError(f"its library cannot be read ({error.strerror})") from error
    entry = Entry(folder, library, manifest)
    if verify:
        _require_hash(entry)
    return entry


def _require_hash(entry: Entry) -> None:
    if not is_intact(entry):
        raise DamagedError("the SHA-256 of its library differs from the manifest's")


def read_entry(folder: Path, verify: bool = False) -> Entry | None:
    """The module in a folder, or None if the folder does not hold a whole one."""
    try:
        return checked_entry(folder, verify)
    except (FileNotFoundError, DamagedError):
        return None


def is_intact(entry: Entry) -> bool:
    """Whether the library of an entry still is what the manifest says."""
    try:
        return files.sha256(entry.library) == entry.manifest.get("library_sha256")
    except OSError:
        return False


def _usable(folder: Path, root: Path | None, verify: bool) -> Entry | None:
    """The module in a folder if it may be loaded; one that is damaged counts as missing.

    Parameters
    ----------
    folder : Path
        The entry's folder.
    root : Path or None
        Nobody else may write this folder or one below; None trusts the place, as that of Python
        packages.
    verify : bool
        As for `checked_entry`.

    Raises
    ------
    UntrustedError
        If somebody else owns the entry, or can write a folder that contains it.
    """
    try:
        entry = checked_entry(folder, verify=False)
        if root is not None:
            trust.require_trusted(trust.chain(folder.parent, root))
            _require_own_files(entry)
        if verify:
            _require_hash(entry)
        return entry
    except FileNotFoundError:
        return None
    except DamagedError as damage:
        logger.warning_once("The compiled module %s is passed over: %s.", folder, str(damage))
        return None


def _require_own_files(entry: Entry) -> None:
    """Refuse an entry of a stranger; one that others can write counts as damaged."""
    for path in (entry.folder, entry.folder / MANIFEST, entry.library):
        status = path.stat()
        reason = trust.stranger(status)
        open_to = trust.writers(status)
        if (reason or open_to) and trust.is_named_by_user(path):
            return
        if reason:
            raise trust.refusal(entry.folder, reason)
        if open_to:
            raise DamagedError(f"of {path.name}, {open_to}")


def find(uri: str, identity: Identity, verify: bool = True) -> Entry | None:
    """The module with this identity from the cache, compiled by the same toolchain.

    Raises
    ------
    UntrustedError
        If it is there, but a stranger can have written it.
    """
    for base in places.bases():
        if entry := _usable(Path(f"{places.jit_dir(base)}/{uri}/{identity.key}"), base, verify):
            return entry
    return None


def find_of_any_toolchain(uri: str, identity: Identity, verify: bool = True) -> Entry | None:
    """The newest module in the cache with this content and these targets.

    For when nothing can be compiled here: whoever built it had some compiler that worked.
    """
    for base in places.bases():
        same = [
            entry
            for entry in entries_of(places.jit_dir(base) / uri)
            if entry.folder.name.startswith(identity.key_without_toolchain)
        ]
        for entry in sorted(same, key=lambda entry: entry.manifest["created"], reverse=True):
            if usable := _usable(entry.folder, base, verify):
                return usable
    return None


def find_prebuilt(uri: str, identity: Identity, verify: bool = True) -> Entry | None:
    """A prebuilt module with the same content that runs on at least the targets wanted here.

    Raises
    ------
    JitError
        If prebuilt modules of another version of FlashInfer are installed.
    UntrustedError
        If a stranger can have written the module.
    """
    for root in places.prebuilt_roots():
        entries = entries_of(root / uri)
        for entry in entries:
            _check_version(entry)
            built = entry.manifest["archs"]
            covered = all(any(covers(b, wanted) for b in built) for wanted in identity.archs)
            if covered and entry.manifest["content"] == identity.content:
                # Whoever can write an installed package can write this one too.
                trusted = root == places.jit_cache_package()
                if usable := _usable(entry.folder, None if trusted else root, verify):
                    return usable
        if entries:
            logger.debug("prebuilt %s was built from other sources or targets", root / uri)
    return None


def covers(built: str, wanted: str) -> bool:
    """Whether code built for one target is meant for another: the same one, or its family."""
    if built == wanted:
        return True
    family, number = built.removesuffix("f"), wanted.rstrip("af")
    return built.endswith("f") and family[:-1] == number[:-1] and family <= number


def _check_version(entry: Entry) -> None:
    version = entry.manifest.get("version")
    if version != __version__ and not env.FLASHINFER_DISABLE_VERSION_CHECK.get():
        raise JitError(
            f"The prebuilt module {entry.folder} is of FlashInfer {version}, this is "
            f"{__version__}.\n  hint: install flashinfer-jit-cache=={__version__}, or set "
            "FLASHINFER_DISABLE_VERSION_CHECK=1 to use it where its sources are the same"
        )


def entry_folders(home: Path) -> list[Path]:
    """The folders of published modules in a module's folder, whole or not."""
    try:
        return sorted(f for f in home.iterdir() if not f.name.startswith(".") and f.is_dir())
    except OSError:
        return []


def entries_of(home: Path) -> list[Entry]:
    """The modules in a module's folder whose manifest and size are right."""
    return [entry for folder in entry_folders(home) if (entry := read_entry(folder))]


def verify_all() -> dict[Path, str | None]:
    """Every module on disk of this version, of any target: None if it is whole, or what is wrong.

    Looks at the cache and at the prebuilt modules.
    """
    homes = [
        (base, home)
        for base in places.bases()
        for home in places.version_dir(base).glob("*/cached_ops/*")
    ]
    homes += [(root, home) for root in places.prebuilt_roots() for home in root.glob("*")]
    found: dict[Path, str | None] = {}
    for root, home in sorted(homes):
        for folder in entry_folders(home):
            try:
                entry = checked_entry(folder)
                if root != places.jit_cache_package():
                    trust.require_trusted(trust.chain(home, root))
                    _require_own_files(entry)
                found[folder] = None
            except FileNotFoundError:
                found[folder] = "it has no manifest"
            except DamagedError as error:
                found[folder] = str(error)
            except UntrustedError as error:
                found[folder] = str(error).splitlines()[0]
    return found
