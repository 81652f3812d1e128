"""``autotune()``: the block inside which operations are tuned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import env
from .._common import checks
from . import listeners, store
from .autotuner import AutoTuner
from .measure import MeasurementPolicy


@contextlib.contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | None = None,
    tuning_buckets: tuple[int, ...] | None = None,
    round_up: bool | None = None,
    skip_ops: str | set[str] | None = None,
    cuda_graph_profile_replays: int | None = None,
    *,
    measurement: MeasurementPolicy | None = None,
) -> Iterator[None]:
    """Measure the candidates of tuned operations inside the block, where a result is missing.

    Parameters
    ----------
    tune_mode : bool
        Whether to measure; False only reads `cache`.
    cache : str, optional
        A file of results. It is read at the beginning, if it exists, and extended at the end.
    tuning_buckets : tuple of int, optional
        Sizes to measure in place of the operations' own.
    round_up : bool, optional
        Whether a size between two buckets gets the result of the larger one; None leaves it to
        the operation.
    skip_ops : str or set of str, optional
        Operations that are not measured.
    cuda_graph_profile_replays : int, optional
        Replays in one timed sample, in place of the operations' own.
    measurement : MeasurementPolicy, optional
        How to measure.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Examples
    --------
    >>> with flashinfer.autotuner.autotune(cache=None):
    ...     pass  # run the model once for each batch size that is to come
    """
    checks.flag("tune_mode", tune_mode)
    checks.optional_flag("round_up", round_up)
    buckets = None if tuning_buckets is None else _sizes(tuning_buckets)
    skipped = _names(skip_ops)
    if cuda_graph_profile_replays is not None:
        checks.count("cuda_graph_profile_replays", cuda_graph_profile_replays)
    if not isinstance(measurement, (MeasurementPolicy, type(None))):
        raise TypeError(
            f"`measurement` must be a MeasurementPolicy or None, got {type(measurement).__name__}"
        )
    tuner = AutoTuner.get()
    if cache is None and env.FLASHINFER_AUTOTUNER_LOAD_FROM_FILE.get():
        cache = str(store.default_cache_path())
    elif cache is not None and Path(cache).exists():
        tuner.load_configs(cache)
    before = tuner._mode
    tuner._mode = replace(
        before,
        tune=bool(tune_mode),
        skip_ops=skipped,
        buckets=before.buckets if buckets is None else buckets,
        round_up=before.round_up if round_up is None else bool(round_up),
        replays=cuda_graph_profile_replays or before.replays,
        policy=measurement or before.policy,
    )
    listeners.tell()
    try:
        yield
        if tune_mode and cache is not None and tuner._dirty:
            tuner.save_configs(cache)
    finally:
        tuner._mode = before
        listeners.tell()
        if not before.tune:
            tuner._timers.clear()  # they hold the memory that they write to


def _sizes(tuning_buckets: Any) -> tuple[int, ...]:
    """Sizes, in order."""
    if not isinstance(tuning_buckets, Iterable) or isinstance(tuning_buckets, str):
        raise TypeError(
            f"`tuning_buckets` must be a tuple of int, got {type(tuning_buckets).__name__}"
        )
    sizes = {checks.count("tuning_buckets", size) for size in tuning_buckets}
    if not sizes:
        raise ValueError("`tuning_buckets` must hold a size, got none")
    return tuple(sorted(sizes))


def _names(skip_ops: Any) -> frozenset[str]:
    """Names of operations."""
    names = (skip_ops,) if isinstance(skip_ops, str) else () if skip_ops is None else skip_ops
    if not isinstance(names, Iterable):
        raise TypeError(f"`skip_ops` must be a str or a set of them, got {type(names).__name__}")
    for name in (names := [*names]):
        if not isinstance(name, str):
            raise TypeError(f"`skip_ops` must have names, got {type(name).__name__}")
    return frozenset(names)
