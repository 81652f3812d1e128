"""A store of tuning results that this package places, names and invalidates by itself.

    <root>/v2/<environment>/manifest.json          what the environment is, to be read by people
    <root>/v2/<environment>/entries/<hash>.json    {"key": ..., "runner": ..., "tactic": ...}

An environment, named by a hash, is a GPU, the versions of this package, CUDA and PyTorch, and the
way of measuring: results of another one lie in another folder, and nothing has to be invalidated.
Each entry is a file that is replaced as a whole as soon as its winner is known, so that no lock is
needed: ranks that tune the same operation at once each write one, and the last one stays. An entry
that cannot be used is missing, which costs a measurement and never a start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import env
from ..jit import env as jit_env
from .measure import MeasurementPolicy
from .store import _collect_metadata

_logger = logging.getLogger("flashinfer.autotuner")
_SCHEMA = "v2"


@dataclass(frozen=True)
class ManagedCacheEntry:
    """The winner of an operation with sizes of one bucket.

    Attributes
    ----------
    key : str
        The operation, its sizes, and what else its runners distinguish.
    runner : str
        Class of the runner that won.
    tactic
        Its tactic, as JSON holds it.
    """

    key: str
    runner: str
    tactic: Any


def get_default_cache_root() -> Path:
    """``FLASHINFER_AUTOTUNE_CACHE_DIR``, or the folder ``autotune`` in the cache folder."""
    chosen = env.FLASHINFER_AUTOTUNE_CACHE_DIR.get()
    return chosen if chosen is not None else jit_env.FLASHINFER_CACHE_DIR / "autotune"


class ManagedAutotuneCache:
    """Results of this environment below a folder.

    Parameters
    ----------
    root : path, optional
        `get_default_cache_root()` if it is left out. It says where the store lies and nothing else.
    policy : MeasurementPolicy, optional
        How its results were measured.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        policy: MeasurementPolicy | None = None,
    ) -> None:
        self.root = get_default_cache_root() if root is None else Path(root)
        measured = (policy or MeasurementPolicy()).manifest_fields()
        self.manifest = {**_collect_metadata(), "schema": _SCHEMA, **measured}
        text = json.dumps(self.manifest, sort_keys=True)
        self.path = self.root / _SCHEMA / hashlib.sha256(text.encode()).hexdigest()[:16]
        self._known: dict[str, ManagedCacheEntry | None] = {}  # one look at the disk for each key
        self._is_writable = True

    def lookup(self, key: str, from_disk: bool = True) -> ManagedCacheEntry | None:
        """The entry of a key, or None if there is none that can be used."""
        if from_disk and key not in self._known:
            self._known[key] = self._read(key)
        return self._known.get(key)

    def publish(self, entry: ManagedCacheEntry) -> None:
        """Keep an entry, and write it; where it cannot be written, a warning says so once."""
        self._known[entry.key] = entry
        if not self._is_writable:
            return
        try:
            file = self._file(entry.key)
            file.parent.mkdir(parents=True, exist_ok=True)
            if not (self.path / "manifest.json").exists():
                _replace(self.path / "manifest.json", self.manifest)
            _replace(file, asdict(entry))
        except OSError as error:
            self._is_writable = False
            _logger.warning("Tuning results are not kept in %s: %s", self.path, error)

    def clear_memo(self) -> None:
        """Read entries from the disk again."""
        self._known.clear()
        self._is_writable = True

    def _file(self, key: str) -> Path:
        return self.path / "entries" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _read(self, key: str) -> ManagedCacheEntry | None:
        file = self._file(key)
        try:
            content = json.loads(file.read_text())
            entry = ManagedCacheEntry(content["key"], content["runner"], content["tactic"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _logger.warning("Tuning result %s is not used: %r", file, error)
            return None
        if entry.key != key:
            _logger.warning("Tuning result %s is not used: it is of %s", file, entry.key)
            return None
        return entry


def _replace(file: Path, content: dict[str, Any]) -> None:
    """Write a file as a whole: readers see the former content or this."""
    handle, unfinished = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            json.dump(content, stream, indent=1, sort_keys=True)
        os.replace(unfinished, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
