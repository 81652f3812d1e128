"""Who may have written a compiled module: to load one is to run its code.

A folder or file is trusted if it belongs to this user or to root and nobody else can write it, or
if it lies in a folder that ``FLASHINFER_TRUSTED_FOLDERS`` names. docs/security.md has the whole
model.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

from .. import env
from .errors import UntrustedError


def stranger(status: os.stat_result) -> str | None:
    """Who owns a file, if that is neither this user nor root."""
    if status.st_uid in (0, os.geteuid()):
        return None
    return f"it belongs to {_user(status.st_uid)}, not to {_user(os.geteuid())} or root"


def writers(status: os.stat_result) -> str | None:
    """Who but its owner can write a file or replace what is in a folder; None if nobody can."""
    mode = status.st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return None  # as in /tmp: others can add, but they cannot replace what is ours
    if mode & stat.S_IWOTH:
        return f"everybody can write it (mode {stat.S_IMODE(mode):04o})"
    if mode & stat.S_IWGRP and not _is_private_group(status.st_uid, status.st_gid):
        return f"the group {_group(status.st_gid)} can write it (mode {stat.S_IMODE(mode):04o})"
    return None


def is_named_by_user(path: str | Path) -> bool:
    """Whether ``FLASHINFER_TRUSTED_FOLDERS`` names the path or a folder that contains it."""
    named = env.FLASHINFER_TRUSTED_FOLDERS.get()
    if not named:
        return False
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(folder)) for folder in named)


def chain(folder: Path, root: Path) -> list[str]:
    """The folders from `root` down to `folder`, both included."""
    between, top = [str(folder)], str(root)
    while len(between[-1]) > len(top):
        between.append(os.path.dirname(between[-1]))
    return between[::-1]


def are_trusted(folders: Iterable[str | Path]) -> bool:
    """Whether nobody else can have put anything into these folders."""
    try:
        require_trusted(folders)
    except UntrustedError:
        return False
    return True


def require_trusted(folders: Iterable[str | Path]) -> None:
    """Refuse folders into which somebody else can put a library. A missing one is no danger.

    Raises
    ------
    UntrustedError
        The message names the folder, who can write it, and the ways out.
    """
    for folder in folders:
        try:
            status = os.stat(folder)
        except OSError:
            continue
        reason = stranger(status) or writers(status)
        if reason and not is_named_by_user(folder):
            raise refusal(folder, reason)


def refusal(path: str | Path, reason: str) -> UntrustedError:
    """The error for a file or folder that is not trusted."""
    return UntrustedError(
        f"Compiled modules of {path} are not loaded: {reason}, and to load one is to run its code."
        "\n  hint: set FLASHINFER_WORKSPACE_BASE (cache) or FLASHINFER_AOT_DIR (prebuilt modules) "
        "to a folder of your own that only you can write; or, if you trust everybody who can write "
        f"there, set FLASHINFER_TRUSTED_FOLDERS={path}"
    )


def _is_private_group(uid: int, gid: int) -> bool:
    """Whether a group is the one that many systems make for each user, with nobody else in it."""
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = None
    try:
        group = grp.getgrgid(gid)
    except KeyError:  # a container knows neither the user nor the group by name
        return owner is None and uid == gid
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"
