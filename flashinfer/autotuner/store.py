"""Results on disk: one JSON file for one kind of GPU and one version of this package.

``{"_metadata": {...}, "_records": {...}, "<key>": {"runner": ..., "tactic": ...}, ...}``. Files
are replaced as a whole; processes that save to the same file add to what it has.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._common.arch import get_compute_capability, get_device_name, get_device_sm_count
from ..jit import env as jit_env
from ..version import __version__

_METADATA, _RECORDS = "_metadata", "_records"
# A result of another GPU or another version may name a tactic that means something else.
_MUST_AGREE = ("format", "flashinfer_version", "gpu")


def _collect_metadata() -> dict[str, str]:
    """The origin of a file's results, as the file states it."""
    gpu = "none"
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        major, minor = get_compute_capability(device)
        name = get_device_name(device)
        gpu = f"{name}, SM{10 * major + minor}, {get_device_sm_count(device)} SMs"
    return {
        "format": "1",
        "flashinfer_version": __version__,
        "gpu": gpu,
        "cuda_version": str(torch.version.cuda),
        "torch_version": torch.__version__,
    }


def _classify_metadata_mismatches(
    saved: dict[str, str], current: dict[str, str]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Entries that differ, as ``(saved, current)``: those that forbid a file, and the others."""
    differing = {
        key: (saved.get(key), value) for key, value in current.items() if saved.get(key) != value
    }
    hard = {key: pair for key, pair in differing.items() if key in _MUST_AGREE}
    return hard, {key: pair for key, pair in differing.items() if key not in hard}


def default_cache_path() -> Path:
    """File in the cache folder that ``FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1`` reads and adds to."""
    gpu = _collect_metadata()["gpu"].partition(",")[0]
    name = "".join(c if c.isalnum() else "_" for c in gpu)
    return jit_env.FLASHINFER_WORKSPACE_DIR / "autotuner" / f"{name}.json"


class UnusableFileError(ValueError):
    """A file with results that must not be used here; the message says why."""


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results by key, and records by namespace.

    Raises
    ------
    UnusableFileError
        If the file cannot be read, is no file of results, or is of another GPU or version.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnusableFileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UnusableFileError(f"{path} cannot be read: {error}") from None
    metadata = content.pop(_METADATA, None) if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        raise UnusableFileError(f"{path} is not a file of tuning results: it lacks {_METADATA!r}")
    hard, _ = _classify_metadata_mismatches(metadata, _collect_metadata())
    if hard:
        differing = "; ".join(f"{k}: {old!r}, here {new!r}" for k, (old, new) in hard.items())
        raise UnusableFileError(f"{path} is from elsewhere ({differing})")
    records = content.pop(_RECORDS, {})
    for key, entry in content.items():
        if not isinstance(entry, dict) or {"runner", "tactic"} - entry.keys():
            raise UnusableFileError(f"{path} has no runner and tactic under {key!r}")
    return content, records


def add_to_file(path: Path, results: dict[str, Any], records: dict[str, Any]) -> str | None:
    """Write `results` and `records` into a file, beside what it has from other processes.

    Returns
    -------
    str, optional
        Why the file's former content is given up, if it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    complaint = None
    with _locked(path):
        if path.exists():
            try:
                old, old_records = read_file(path)
                results, records = old | results, old_records | records
            except UnusableFileError as error:
                complaint = str(error)
        content = {_METADATA: _collect_metadata(), _RECORDS: records, **results}
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
    return complaint


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- tactics in JSON ---------------------------------------------------------------------------


def _tactic_to_json(tactic: Any) -> Any:
    """A tactic as JSON holds it: tuples become lists."""
    if isinstance(tactic, (list, tuple)):
        return [_tactic_to_json(part) for part in tactic]
    if tactic is None or isinstance(tactic, (bool, int, float, str)):
        return tactic
    raise TypeError(f"a tactic must be numbers, strings or lists of them, got {tactic!r}")


def _json_to_tactic(val: Any) -> Any:
    """A tactic from JSON: lists become tuples."""
    return tuple(map(_json_to_tactic, val)) if isinstance(val, list) else val


def _tactic_to_json_hashable(tactic: Any) -> Any:
    """A tactic that can be compared and be the key of a dictionary, whatever its lists are."""
    return _json_to_tactic(_tactic_to_json(tactic))
