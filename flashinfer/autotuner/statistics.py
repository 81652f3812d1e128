"""Counts of what the tuner measured and served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .specs import ProfilingCacheKey


@dataclass
class AutoTunerStatistics:
    """Counts since the start, or since `AutoTuner.reset_statistics`.

    Attributes
    ----------
    cache_misses : int
        Calls that had no result and took the heuristic.
    cache_miss_config_collection : dict of str to set
        The shapes of those calls, by operation.
    failed_profiling_count : dict of str to set
        Keys of candidates that could not be measured, by operation.
    tuned_op_total_configs, tuned_op_successful_configs : dict of str to int
        Profiles that were to be measured and profiles that gave a result, by operation.
    failed_tactics : dict of str to set
        Tactics that could not be measured, by operation.
    """

    cache_misses: int = 0
    cache_miss_config_collection: dict[str, set[Any]] = field(default_factory=dict)
    failed_profiling_count: dict[str, set[ProfilingCacheKey]] = field(default_factory=dict)
    tuned_op_total_configs: dict[str, int] = field(default_factory=dict)
    tuned_op_successful_configs: dict[str, int] = field(default_factory=dict)
    failed_tactics: dict[str, set[Any]] = field(default_factory=dict)
