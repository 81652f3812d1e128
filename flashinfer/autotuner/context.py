"""``autotune()``: the block inside which operations are tuned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .. import env
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
    ValueError
        If an argument has a value that is not listed above.

    Examples
    --------
    >>> with flashinfer.autotuner.autotune(cache=None):
    ...     pass  # run the model once for each batch size that is to come
    """
    if tuning_buckets is not None and not tuning_buckets:
        raise ValueError("`tuning_buckets` must hold a size, got none")
    if cuda_graph_profile_replays is not None and cuda_graph_profile_replays < 1:
        raise ValueError(
            f"`cuda_graph_profile_replays` must be at least 1, got {cuda_graph_profile_replays}"
        )
    tuner = AutoTuner.get()
    if cache is None and env.FLASHINFER_AUTOTUNER_LOAD_FROM_FILE.get():
        cache = str(store.default_cache_path())
    elif cache is not None and Path(cache).exists():
        tuner.load_configs(cache)
    before = tuner._mode
    skipped = {skip_ops} if isinstance(skip_ops, str) else set(skip_ops or ())
    tuner._mode = replace(
        before,
        tune=bool(tune_mode),
        skip_ops=frozenset(skipped),
        buckets=before.buckets if tuning_buckets is None else tuple(sorted(set(tuning_buckets))),
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
