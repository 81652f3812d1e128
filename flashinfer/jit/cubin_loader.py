"""Files from a repository that the user names: fetched, compared with their SHA-256, kept.

Names and signatures are FlashInfer's. Nothing is fetched unless `FLASHINFER_CUBINS_REPOSITORY` is
set or the caller gives an address, and no file gets its name before its hash was compared.
"""

from __future__ import annotations

import ctypes
import hashlib
import http.client
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import env
from . import env as jit_env
from . import files, locks, places
from .cubin_manifest import parse_manifest, require_whole
from .errors import ArtifactError
from .log import logger

__all__ = [
    "convert_to_ctypes_char_p",
    "download_file",
    "ensure_symlink",
    "get_artifact",
    "get_meta_hash",
    "load_cubin",
    "safe_urljoin",
    "setup_cubin_loader",
    "verify_cubin",
    "verify_symlinked_headers",
]

_MAX_BYTES = 1 << 30
_ATTEMPTS, _DELAY, _TIMEOUT = 4, 5, 10
_NOT_SET = (
    "FLASHINFER_CUBINS_REPOSITORY is not set, and nothing is downloaded from elsewhere.\n"
    "  hint: set it to the address or folder of a repository that you trust"
)


def safe_urljoin(base: str, path: str) -> str:
    """Join an address and a path below it; neither replaces a part of the other.

    Parameters
    ----------
    base : str
        Address or folder, with or without a slash at its end.
    path : str
        Relative path.

    Raises
    ------
    ValueError
        If `path` is absolute, an address, or leads upwards.
    """
    parts = urllib.parse.urlsplit(path)
    if parts.scheme or parts.netloc or path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"path must be relative and lead nowhere upwards, got {path!r}")
    return f"{base.rstrip('/')}/{path}" if base else path


def is_address(source: str) -> bool:
    """Whether a source is fetched over the network; everything else is a path.

    Raises
    ------
    ValueError
        If it is an address of another kind than http and https.
    """
    scheme, separator, _ = source.partition("://")
    if separator and scheme not in ("http", "https"):
        raise ValueError(f"source must be an http(s) address or a path, got {source!r}")
    return bool(separator)


def fetch(
    source: str,
    retries: int = _ATTEMPTS,
    delay: float = _DELAY,
    timeout: float = _TIMEOUT,
    session: Any = None,
) -> bytes:
    """The bytes at an address or path.

    Parameters
    ----------
    source : str
        ``http://``, ``https://``, or a path.
    retries : int
        Attempts, at least 1. A refusal of the server (status 4xx) is final.
    delay : float
        Seconds between attempts.
    timeout : float
        Seconds without any answer after which an attempt fails.
    session : requests.Session, optional
        Who asks; anything with its `get`.

    Raises
    ------
    ArtifactError
        If it cannot be had, or ``FLASHINFER_NO_DOWNLOAD`` forbids it.
    ValueError
        If `retries` is below 1, or the address is neither http nor https.
    """
    if retries < 1:
        raise ValueError(f"retries must be at least 1, got {retries}")
    if not is_address(source):
        try:
            return Path(source).read_bytes()
        except OSError as error:
            raise ArtifactError(f"{source} cannot be read ({error.strerror})") from error
    if env.FLASHINFER_NO_DOWNLOAD.get():
        raise ArtifactError(f"{source} is not downloaded: FLASHINFER_NO_DOWNLOAD is set")
    for attempt in range(1, retries + 1):
        try:
            return _request(source, timeout, session)
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500
            if refused or attempt == retries:
                raise ArtifactError(f"{source} cannot be downloaded: {error}") from error
            logger.warning("%s: %s; attempt %d of %d", source, error, attempt + 1, retries)
            time.sleep(delay)
    raise AssertionError("unreachable")


def _request(address: str, timeout: float, session: Any) -> bytes:
    if session is not None:
        answer = session.get(address, timeout=timeout)
        answer.raise_for_status()
        return answer.content
    with urllib.request.urlopen(address, timeout=timeout) as answer:
        data = answer.read(_MAX_BYTES + 1)
        expected = answer.headers.get("Content-Length")
    if len(data) > _MAX_BYTES:
        raise OSError(f"it has more than {_MAX_BYTES} bytes")
    if expected is not None and len(data) != int(expected):
        raise OSError(f"only {len(data)} of {expected} bytes came")
    return data


def publish(data: bytes, destination: Path, lock_timeout: float = 30) -> None:
    """Write a file in one step; the folder's lock is held, so that one process writes at a time.

    Raises
    ------
    TimeoutError
        If another process holds the lock for longer than `lock_timeout` seconds.
    """

    def on_wait(waited: float) -> None:
        if waited > lock_timeout:
            raise TimeoutError(f"another process has written {destination} for {waited:.0f} s")

    with locks.building(destination.parent, on_wait):
        handle, scratch = tempfile.mkstemp(dir=destination.parent, prefix=locks.PRIVATE)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(scratch, 0o644)
        files.sync(Path(scratch))
        os.replace(scratch, destination)


def download_file(
    source: str,
    destination: str,
    retries: int = _ATTEMPTS,
    delay: int = _DELAY,
    timeout: int = _TIMEOUT,
    lock_timeout: int = 30,
    session: Any = None,
) -> bool:
    """Copy a file from an address or path.

    Nothing is compared with a hash: :func:`get_artifact` does that.

    Parameters
    ----------
    source : str
        ``http://``, ``https://``, or a path.
    destination : str
        The file, which gets its name when it is whole. Folders are made.
    retries : int
        Attempts, at least 1.
    delay : int
        Seconds between attempts.
    timeout : int
        Seconds without any answer after which an attempt fails.
    lock_timeout : int
        Seconds to wait for another process that writes in the same folder.
    session : requests.Session, optional
        Who asks; anything with its `get`.

    Returns
    -------
    bool
        Whether the file is there. The log says why it is not.

    Raises
    ------
    ValueError
        If `retries` is below 1, or the address is neither http nor https.
    """
    try:
        publish(fetch(source, retries, delay, timeout, session), Path(destination), lock_timeout)
    except (ArtifactError, OSError) as error:
        logger.error("%s was not copied to %s: %s", source, destination, error)
        return False
    return True


def get_meta_hash(checksums_bytes: bytes, target_file: str = "flashinferMetaInfo.h") -> str:
    """The SHA-256 of one file in a manifest.

    Parameters
    ----------
    checksums_bytes : bytes
        The manifest, as ``sha256sum`` writes it.
    target_file : str
        Last part, or last parts, of the file's name.

    Raises
    ------
    ValueError
        If the manifest does not list exactly one such file.
    ArtifactError
        If it is no manifest.
    """
    listed = parse_manifest(checksums_bytes, "checksums_bytes")
    found = {sha for name, sha in listed.items() if f"/{name}".endswith(f"/{target_file}")}
    if len(found) != 1:
        raise ValueError(f"target_file must be in the manifest once, got {target_file!r}")
    return found.pop()


def verify_cubin(cubin_path: str, expected_sha256: str) -> bool:
    """Whether a file is there and has this SHA-256; if it has another one, the log says so."""
    return bool(load_cubin(cubin_path, expected_sha256))


def load_cubin(cubin_path: str, sha256: str) -> bytes:
    """The bytes of a file.

    Returns
    -------
    bytes
        Empty if the file is missing, truncated, changed, or code for another architecture than its
        name says; the log says which.
    """
    try:
        data = Path(cubin_path).read_bytes()
        require_whole(cubin_path, data, sha256, cubin_path)
    except FileNotFoundError:
        return b""
    except (ArtifactError, OSError) as error:
        logger.warning("%s", error)
        return b""
    return data


def get_artifact(file_name: str, sha256: str, session: Any = None) -> bytes:
    """A file of the repository: from `FLASHINFER_CUBIN_DIR`, else fetched, compared and kept there.

    Parameters
    ----------
    file_name : str
        Its name from the folder, or the repository, on.
    sha256 : str
        Its hash.
    session : requests.Session, optional
        Who asks; anything with its `get`.

    Raises
    ------
    ArtifactError
        If it is not there and no repository is set, it cannot be had, or it is not what the hash
        says: the message names what is wrong with it.
    ValueError
        If the name leads out of the folder.
    """
    path = safe_urljoin(str(jit_env.FLASHINFER_CUBIN_DIR), file_name)
    return load_cubin(path, sha256) or download_artifact(file_name, sha256, session)


def download_artifact(file_name: str, sha256: str, session: Any = None) -> bytes:
    """A file of the repository, which is fetched, compared and kept; see :func:`get_artifact`."""
    source = safe_urljoin(repository(), file_name)
    data = fetch(source, session=session)
    require_whole(file_name, data, sha256, source)
    publish(data, places.cubin_dir() / file_name)
    return data


def repository() -> str:
    """Address or folder of the repository.

    Raises
    ------
    ArtifactError
        If none is set.
    """
    address = env.FLASHINFER_CUBINS_REPOSITORY.get()
    if not address:
        raise ArtifactError(_NOT_SET)
    return address


def ensure_symlink(link: str | Path, target: str | Path) -> None:
    """Make a link to `target`; an older link, file or folder of that name is replaced.

    Parameters
    ----------
    link : str or Path
        The link. Folders above it are made.
    target : str or Path
        Where it leads.
    """
    link = Path(link)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() and os.readlink(link) == str(target):
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    scratch = Path(tempfile.mkdtemp(dir=link.parent, prefix=".link-"))
    try:
        (scratch / "link").symlink_to(target)
        (scratch / "link").replace(link)
    finally:
        scratch.rmdir()


def verify_symlinked_headers(symlink_path: str | Path, headers: list, checksums: bytes) -> None:
    """Compare headers with a manifest.

    Parameters
    ----------
    symlink_path : str or Path
        Folder, or link to the folder, of the headers.
    headers : list of str
        Their names in it.
    checksums : bytes
        The manifest.

    Raises
    ------
    ArtifactError
        If a header is missing or another one.
    ValueError
        If the manifest does not list it.
    """
    for header in headers:
        path = Path(symlink_path) / header
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read ({error.strerror})") from error
        if found != (expected := get_meta_hash(checksums, header)):
            raise ArtifactError(f"{path} is refused: its SHA-256 is {found}, not {expected}")


def convert_to_ctypes_char_p(data: bytes) -> ctypes.c_char_p:
    """Bytes as a C pointer; it is valid as long as the result lives."""
    return ctypes.c_char_p(data)


_callbacks: dict[str, Callable] = {}  # C code holds them as long as the process lives


def setup_cubin_loader(dll_path: str) -> None:
    """Let a library of the user ask for artifacts by name and hash.

    The library exports ``FlashInferSetCubinCallback(void (*)(const char* name, const char* sha))``
    and ``FlashInferSetCurrentCubin(const char* data, int size)``: the callback hands the bytes to
    the second one before it returns, and nothing if :func:`get_artifact` fails; the log says why.

    Parameters
    ----------
    dll_path : str
        The library. A second call for it does nothing.

    Raises
    ------
    OSError
        If it cannot be loaded.
    AttributeError
        If it lacks an export.
    """
    if dll_path in _callbacks:
        return
    library = ctypes.CDLL(dll_path)
    receive = library.FlashInferSetCurrentCubin

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
    def ask(name: bytes, sha256: bytes) -> None:
        try:
            data = get_artifact(name.decode(), sha256.decode())
        except (ArtifactError, OSError, ValueError) as error:
            logger.error("%s", error)
            return
        receive(convert_to_ctypes_char_p(data), ctypes.c_int(len(data)))

    library.FlashInferSetCubinCallback(ask)
    _callbacks[dll_path] = ask
