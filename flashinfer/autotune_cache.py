"""Tuning with results that this package keeps on disk by itself: ``autotune_v2()``.

Whoever serves decides when to tune and how ranks wait for each other, and nothing else: where
results lie, what they depend on and when they are too old is said in `ManagedAutotuneCache`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from ._common import checks
from .autotuner import listeners
from .autotuner.autotuner import AutoTuner
from .autotuner.context import autotune
from .autotuner.managed import ManagedAutotuneCache as ManagedAutotuneCache
from .autotuner.managed import ManagedCacheEntry as ManagedCacheEntry
from .autotuner.managed import get_default_cache_root as get_default_cache_root
from .autotuner.measure import MeasurementPolicy as MeasurementPolicy

_MODES = ("tune", "replay")


@contextlib.contextmanager
def autotune_v2(
    mode: Literal["tune", "replay"] = "tune",
    persistent_cache: bool = True,
    cache_root: str | os.PathLike[str] | None = None,
    tuning_buckets: tuple[int, ...] | None = None,
    round_up: bool | None = None,
    skip_ops: str | set[str] | None = None,
    measurement_policy: MeasurementPolicy | None = None,
) -> Iterator[None]:
    """Measure inside the block what has no result, and keep results on disk as they come.

    The block says when time may be spent on measuring. The store, once it is taken up, serves all
    calls of the process from then on, also after the block and in other threads; the last one that
    was taken up does.

    Parameters
    ----------
    mode : {"tune", "replay"}
        Measure, or take up the store and measure nothing.
    persistent_cache : bool
        Whether results are read from the disk and written to it. If not, the block knows only what
        is in memory, and what it measures stays there.
    cache_root : path, optional
        Folder of the store, not read without `persistent_cache`; `get_default_cache_root()` if it
        is left out. Results of other GPUs, versions and ways of measuring may lie in it, too.
    tuning_buckets, round_up, skip_ops
        As for `autotune`.
    measurement_policy : MeasurementPolicy, optional
        How to measure; results of different ways do not mix.

    Raises
    ------
    TypeError, ValueError
        If an argument has a value that is not listed above.
    RuntimeError
        If the block is inside another one of its kind: there would be two stores to write to.

    Examples
    --------
    >>> with flashinfer.autotune_v2(mode="tune"):
    ...     pass  # run the model once for each batch size that is to come
    """
    if mode not in _MODES:
        raise ValueError(f"`mode` must be one of {_MODES}, got {mode!r}")
    persistent = checks.flag("persistent_cache", persistent_cache)
    if cache_root is not None and not isinstance(cache_root, (str, os.PathLike)):
        raise TypeError(f"`cache_root` must be a path or None, got {type(cache_root).__name__}")
    if not isinstance(measurement_policy, (MeasurementPolicy, type(None))):
        raise TypeError(
            "`measurement_policy` must be a MeasurementPolicy or None, got "
            f"{type(measurement_policy).__name__}"
        )
    tuner = AutoTuner.get()
    if tuner._mode.managed is not None:
        raise RuntimeError("`autotune_v2` cannot be used inside another `autotune_v2`")
    options = {
        "tuning_buckets": tuning_buckets,
        "round_up": round_up,
        "skip_ops": skip_ops,
        "measurement": measurement_policy,
    }
    with autotune(mode == "tune", **options):  # type: ignore[arg-type]
        if persistent:
            tuner.attach(ManagedAutotuneCache(cache_root, measurement_policy))
        # `autotune` restores the mode when the block ends.
        tuner._mode = replace(tuner._mode, managed=persistent)
        listeners.tell()
        yield


def autotune_v2_reload() -> None:
    """Forget the winners that this process measured, so that entries of the store serve.

    Ranks that tuned at the same time may have measured different winners, of which the store has
    the last. After a barrier, this call and another barrier all ranks serve the same. What was
    never written, as in blocks without `persistent_cache`, has no result any more.
    """
    AutoTuner.get().forget_measured()
