"""Cubins from a repository that the user names: list, download, look at, remove.

A repository is a folder as `flashinfer build-cubins` makes it, or an address where a web server
shows one. Its manifest counts if it is signed off: its SHA-256 is the one that this package was
built with, or the one in ``FLASHINFER_CUBINS_SHA256``. The names are FlashInfer's; its vendor
libraries of cubins have no counterpart here, every cubin is of a kernel of this package.
"""

from __future__ import annotations

import hashlib
import html.parser
import os
import urllib.parse
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import env
from .env import temporary as temp_env_var
from .jit import cubin_loader, cubins, files, places
from .jit.cubin_loader import safe_urljoin
from .jit.cubin_manifest import MANIFEST, parse_manifest, require_version
from .jit.errors import ArtifactError, JitError
from .version import __cubins_sha256__, __version__

__all__ = [
    "ArtifactPath",
    "CheckSumHash",
    "clear_cubin",
    "download_artifacts",
    "get_artifacts_status",
    "get_available_cubin_files",
    "get_available_header_files",
    "get_checksums",
    "get_subdir_file_list",
    "temp_env_var",
]


class ArtifactPath:
    """Folders of a repository."""

    MODULES: str = f"{__version__}/"


class CheckSumHash:
    """SHA-256 of the manifests that this package was built with; "unknown" for none."""

    MODULES: str = __cubins_sha256__
    map_checksums: dict[str, str] = {safe_urljoin(ArtifactPath.MODULES, MANIFEST): MODULES}


def get_available_cubin_files(
    source: str, retries: int = 3, delay: int = 5, timeout: int = 10
) -> tuple[str, ...]:
    """Names of the cubins in a folder, or in the listing that a web server shows of it.

    Parameters
    ----------
    source : str
        Address or path of the folder.
    retries : int
        Attempts, at least 1.
    delay : int
        Seconds between attempts.
    timeout : int
        Seconds without any answer after which an attempt fails.

    Raises
    ------
    ArtifactError
        If it cannot be read.
    """
    return _listed(source, ".cubin", retries, delay, timeout)


def get_available_header_files(
    source: str, retries: int = 3, delay: int = 5, timeout: int = 10
) -> tuple[str, ...]:
    """Names of the headers (``.h``) in a folder; see :func:`get_available_cubin_files`."""
    return _listed(source, ".h", retries, delay, timeout)


def _listed(source: str, suffix: str, retries: int, delay: int, timeout: int) -> tuple[str, ...]:
    if cubin_loader.is_address(source):
        names = _links(cubin_loader.fetch(f"{source.rstrip('/')}/", retries, delay, timeout))
    else:
        try:
            names = os.listdir(source)
        except OSError as error:
            raise ArtifactError(f"{source} cannot be read ({error.strerror})") from error
    return tuple(sorted({name for name in names if name.endswith(suffix)}))


def _links(page: bytes) -> list[str]:
    """Last parts of what the links of a page lead to."""
    found: list[str] = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            target = dict(attributes).get("href") if tag == "a" else None
            if target:
                path = urllib.parse.unquote(urllib.parse.urlsplit(target).path)
                found.append(path.rpartition("/")[2])

    Reader().feed(page.decode(errors="replace"))
    return found


def get_checksums(subdirs: Iterable[str]) -> dict[str, str]:
    """SHA-256 of every file in folders of the repository, by name from the repository on.

    Parameters
    ----------
    subdirs : iterable of str
        Such as `ArtifactPath.MODULES`.

    Raises
    ------
    ArtifactError
        If no repository is set, a manifest cannot be had, is of another version, or is not signed
        off.
    """
    checksums: dict[str, str] = {}
    for subdir in subdirs:
        checksums |= _signed_off(subdir)[1]
    return checksums


def _signed_off(subdir: str) -> tuple[bytes, dict[str, str]]:
    """The manifest of a folder of the repository: as it is there, and what it lists."""
    name = safe_urljoin(subdir, MANIFEST)
    source = safe_urljoin(cubin_loader.repository(), name)
    data = cubin_loader.fetch(source)
    found = hashlib.sha256(data).hexdigest()
    pinned = env.FLASHINFER_CUBINS_SHA256.get() or CheckSumHash.map_checksums.get(name, "unknown")
    if pinned == "unknown":
        raise ArtifactError(
            f"{source} is refused: it is not signed off. Its SHA-256 is {found}.\n"
            "  hint: compare it with what whoever built the repository says, and set "
            "FLASHINFER_CUBINS_SHA256 to that"
        )
    if found != pinned.lower():
        raise ArtifactError(
            f"{source} is refused: its SHA-256 is {found}, the one signed off is {pinned}.\n"
            "  hint: the repository changed, or is another one; download nothing from it unless "
            "whoever built it gives you the new hash"
        )
    listed = parse_manifest(data, source)
    require_version(listed, subdir.rstrip("/"), source)
    return data, listed


def get_subdir_file_list() -> Generator[tuple[str, str], None, None]:
    """Name and SHA-256 of every file of the repository, for this version.

    Raises
    ------
    ArtifactError
        As :func:`get_checksums`.
    """
    yield from get_checksums([ArtifactPath.MODULES]).items()


def download_artifacts() -> None:
    """Download the cubins of this version to `FLASHINFER_CUBIN_DIR`.

    What is there and whole is kept. The manifest comes last: before it, no module is joined from
    these files.

    Raises
    ------
    ArtifactError
        As :func:`get_checksums`, or if files are refused or cannot be had; all of them are named.
    """
    manifest, listed = _signed_off(ArtifactPath.MODULES)
    folder = places.cubin_dir()
    threads = env.FLASHINFER_CUBIN_DOWNLOAD_THREADS.get()
    with ThreadPoolExecutor(threads) as pool:
        failures = [message for message in pool.map(_download, listed.items()) if message]
    if failures:
        raise ArtifactError("\n".join(failures))
    cubin_loader.publish(manifest, folder / ArtifactPath.MODULES / MANIFEST)


def _download(file: tuple[str, str]) -> str | None:
    """Get one file unless it is there; returns why that fails."""
    name, sha256 = file
    try:
        if not cubin_loader.verify_cubin(str(places.cubin_dir() / name), sha256):
            cubin_loader.download_artifact(name, sha256)
    except (JitError, OSError) as error:
        return str(error)
    return None


def get_artifacts_status() -> tuple[tuple[str, bool], ...]:
    """Each cubin that there should be, and whether it is there and whole.

    The list is the repository's if one is set; otherwise it comes from the manifests on disk.

    Raises
    ------
    ArtifactError
        As :func:`get_checksums`.
    """
    if env.FLASHINFER_CUBINS_REPOSITORY.is_set():
        listed = dict(get_subdir_file_list())
        return tuple((name, _problem(places.cubin_dir(), name, listed) is None) for name in listed)
    return tuple((str(path), problem is None) for path, problem in cubin_problems().items())


def cubin_problems() -> dict[Path, str | None]:
    """What is wrong with each cubin that a manifest on disk lists; None if it is whole."""
    found: dict[Path, str | None] = {}
    for root in places.cubin_roots():
        listed = cubins.read_manifest(root, cubins.version_in(root))
        found |= {root / name: _problem(root, name, listed) for name in listed}
    return found


def _problem(root: Path, name: str, listed: dict[str, str]) -> str | None:
    try:
        cubins.require_whole_file(root, root / name, listed[name])
    except ArtifactError as error:
        return str(error)
    return None


def clear_cubin() -> None:
    """Remove the downloaded cubins of every version; those of the package flashinfer_cubin stay.

    Of `FLASHINFER_CUBIN_DIR`, folders are removed that have a manifest or the name of this version.
    """
    folder = places.cubin_dir()
    for version in {folder / __version__, *(m.parent for m in folder.glob(f"*/{MANIFEST}"))}:
        files.remove_tree(version)
