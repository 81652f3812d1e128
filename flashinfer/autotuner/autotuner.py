"""The tuner: measures candidates inside ``autotune()``, and serves results everywhere."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import env
from . import listeners, store
from .candidates import (
    HEURISTIC,
    Candidate,
    Race,
    candidates_for,
    compile_candidates,
    is_in_profile_measurement,
)
from .managed import ManagedAutotuneCache, ManagedCacheEntry
from .measure import MeasurementPolicy, Timer, cuda_timer
from .process_group import gathered, get_autotune_process_group
from .runner import TunableRunner, key_of
from .specs import (
    OptimizationProfile,
    Shape,
    TuningConfig,
    make_bucket_mapper,
    make_inputs,
    profile_at,
    shape_of,
    varying_sizes,
)
from .statistics import AutoTunerStatistics
from .store import (
    UnusableFileError,
    _json_to_tactic,
    _tactic_to_json,
    _tactic_to_json_hashable,
    add_to_file,
    read_file,
)
from .store import _classify_metadata_mismatches as _classify_metadata_mismatches
from .store import _collect_metadata as _collect_metadata

_logger = logging.getLogger("flashinfer.autotuner")


@dataclass(frozen=True)
class TuningMode:
    """The arguments of the surrounding ``autotune()``."""

    tune: bool = False
    skip_ops: frozenset[str] = frozenset()
    buckets: tuple[int, ...] | None = None
    round_up: bool | None = None
    replays: int | None = None
    policy: MeasurementPolicy = MeasurementPolicy()
    managed: bool | None = None  # of a surrounding ``autotune_v2()``: whether the store takes part


class AutoTuner:
    """Holds the results of tuning and makes new ones; `AutoTuner.get()` is the process's tuner.

    Parameters
    ----------
    warmup : int
        Runs of a candidate before it is measured.
    repeat : int
        Samples of each candidate of the last round.
    stream_delay_micro_secs : int
        Accepted for callers of FlashInfer; the write before each sample keeps the GPU busy here.
    timer : callable, optional
        ``timer(call, samples, replays)`` returns milliseconds; CUDA events by default.
    """

    _instance: AutoTuner | None = None
    _making = threading.Lock()

    def __init__(
        self,
        warmup: int = 3,
        repeat: int = 10,
        stream_delay_micro_secs: int = 5000,
        *,
        timer: Timer | None = None,
    ) -> None:
        self.warmup = warmup
        self.repeat = repeat
        self.stream_delay_micro_secs = stream_delay_micro_secs
        self.stats = AutoTunerStatistics()
        self._given_timer = timer
        self._timers: dict[MeasurementPolicy, Timer] = {}
        self._mode = TuningMode()
        self._lock = threading.RLock()
        self._results: dict[str, dict[str, Any]] = {}  # keyed by the text of a key
        self._records: dict[str, dict[str, Any]] = {}
        self._measured: set[str] = set()  # keys of results that this process made
        self._managed: ManagedAutotuneCache | None = None
        self._tuned: set[Any] = set()  # calls whose profiles were tried
        self._known: dict[Any, tuple[int, Any]] = {}  # keyed by operation, runners and shapes
        self._dirty = False

    @classmethod
    def get(cls) -> AutoTuner:
        """The tuner of this process."""
        with cls._making:
            if cls._instance is None:
                cls._instance = cls()
                if env.FLASHINFER_AUTOTUNER_LOAD_FROM_FILE.get():
                    path = store.default_cache_path()
                    if path.exists():
                        cls._instance.load_configs(str(path))
            return cls._instance

    @property
    def is_tuning_mode(self) -> bool:
        """Whether calls measure shapes that have no result."""
        return self._mode.tune

    @property
    def is_idle(self) -> bool:
        """Whether calls neither measure nor find a result."""
        return not self._mode.tune and not self._results and self._managed is None

    @property
    def given_buckets(self) -> tuple[int, ...] | None:
        """``tuning_buckets`` of the surrounding ``autotune()``."""
        return self._mode.buckets

    def measures(self, custom_op: str) -> bool:
        """Whether a call of an operation measures, in this thread and on its stream."""
        return (
            self._mode.tune
            and custom_op not in self._mode.skip_ops
            and not is_in_profile_measurement()
            and not _is_capturing()
        )

    # ---- serving -------------------------------------------------------------------------------

    def choose_one(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        tuning_config: TuningConfig,
        inputs: list[Any],
        **kwargs: Any,
    ) -> tuple[TunableRunner, Any]:
        """The runner and the tactic for a call.

        Parameters
        ----------
        custom_op : str
            Name of the operation; results are kept under it.
        runners : list of TunableRunner
            Implementations. The heuristic of the first serves calls that have no result.
        tuning_config : TuningConfig
            The sizes that vary, and how they are measured.
        inputs : list
            The call's tensors. Candidates run on them and may overwrite the outputs.
        **kwargs
            Passed to ``forward`` when a candidate is measured.

        Returns
        -------
        runner : TunableRunner
        tactic
            -1 if these shapes have no result.
        """
        if not runners:
            raise ValueError(f"`runners` of {custom_op} must not be empty")
        shapes = tuple(map(shape_of, inputs))
        extras = tuple(runner.get_cache_key_extras(inputs) for runner in runners)
        names = tuple(type(runner).__qualname__ for runner in runners)
        mode = (self._mode.buckets, self._mode.round_up, id(get_autotune_process_group()))
        call = (custom_op, names, extras, shapes, mode)
        tune = self.measures(custom_op)
        if not tune or call in self._tuned:
            known = self._known.get(call)
            if known is not None:
                index, tactic = known
                return runners[index], tactic
        with self._lock:
            if tune and call not in self._tuned:
                self._tune(custom_op, runners, tuning_config, inputs, kwargs)
                self._tuned.add(call)
            index, tactic = self._look_up(custom_op, runners, tuning_config, inputs, shapes)
            self._known[call] = index, tactic
            return runners[index], tactic

    def search_cache(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        input_shapes: tuple[Shape, ...],
        tuning_config: TuningConfig,
        inputs: list[Any] | None = None,
        *,
        require_profiling_policy: bool = False,
    ) -> tuple[bool, int, Any, OptimizationProfile | None]:
        """Whether there is a result, the index of its runner, its tactic, and its profile.

        `inputs` are passed to `get_cache_key_extras` of the runners.
        """
        profile = self._nearest(input_shapes, tuning_config)
        found = self._find(custom_op, runners, profile, tuning_config, inputs or [])
        return (False, 0, HEURISTIC, None) if found is None else (True, *found, profile)

    def _find(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        profile: OptimizationProfile,
        config: TuningConfig,
        inputs: list[Any],
    ) -> Candidate | None:
        """The winner of a profile: of the managed store, of this process, or of a file."""
        keys = [key_of(custom_op, runner, profile, config, inputs).text() for runner in runners]
        if self._managed is not None:
            entry = self._managed.lookup(keys[0], from_disk=self._mode.managed is not False)
            names = [type(runner).__qualname__ for runner in runners]
            if entry is not None and entry.runner in names:
                return names.index(entry.runner), _json_to_tactic(entry.tactic)
        for index, key in enumerate(keys):
            if key in self._results:
                return index, _json_to_tactic(self._results[key]["tactic"])
        return None

    def _look_up(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        config: TuningConfig,
        inputs: list[Any],
        shapes: tuple[Shape, ...],
    ) -> tuple[int, Any]:
        found, index, tactic, profile = self.search_cache(
            custom_op, runners, shapes, config, inputs
        )
        if not found:
            self.stats.cache_misses += 1
            self.stats.cache_miss_config_collection.setdefault(custom_op, set()).add(shapes)
            return 0, HEURISTIC
        assert profile is not None
        if profile.get_opt_shapes() != shapes and tactic != HEURISTIC:
            # A tactic that serves the bucket's size may not serve every size in the bucket.
            own = profile_at(shapes, config, varying_sizes(shapes, config))
            valid = map(_tactic_to_json_hashable, runners[index].get_valid_tactics(inputs, own))
            if tactic not in valid:
                return index, HEURISTIC
        return index, tactic

    def _nearest(self, shapes: tuple[Shape, ...], config: TuningConfig) -> OptimizationProfile:
        sizes = [
            self.get_effective_map_to_tuning_buckets(config, i)(size)
            for i, size in enumerate(varying_sizes(shapes, config))
        ]
        return profile_at(shapes, config, sizes)

    def get_effective_map_to_tuning_buckets(
        self, tuning_config: TuningConfig, spec_idx: int = 0
    ) -> Callable[[int], int]:
        """A function from a size to its bucket, as the surrounding ``autotune()`` may set it."""
        own = tuning_config.dynamic_tensor_specs[spec_idx]
        mode = self._mode
        if mode.buckets is not None:
            return make_bucket_mapper(mode.buckets, bool(mode.round_up))
        if mode.round_up is not None and not callable(own.gen_tuning_buckets):
            return make_bucket_mapper(own.gen_tuning_buckets, mode.round_up)
        return own.map_to_tuning_buckets

    # ---- tuning --------------------------------------------------------------------------------

    def _tune(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        config: TuningConfig,
        inputs: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Measure the candidates of every profile that has no result."""
        shapes = tuple(map(shape_of, inputs))
        profiles = list(self._profiles(shapes, config))
        missing = [self._find(custom_op, runners, p, config, inputs) is None for p in profiles]
        # A process that has a result still measures with the processes that have none.
        is_missing = [any(column) for column in zip(*gathered(missing), strict=True)]
        jobs = []
        for profile in itertools.compress(profiles, is_missing):
            made = make_inputs(inputs, profile, config)
            jobs.append((profile, made, candidates_for(runners, made, profile)))
        compile_candidates(runners, jobs, kwargs)
        race = Race(
            custom_op=custom_op,
            runners=runners,
            config=config,
            kwargs=kwargs,
            timer=self._time,
            warmup=self.warmup,
            repeat=config.profiling_repeat or self.repeat,
            replays=self._mode.replays or config.cuda_graph_profile_replays,
            stats=self.stats,
        )
        for profile, made, candidates in jobs:
            total = self.stats.tuned_op_total_configs
            total[custom_op] = total.get(custom_op, 0) + 1
            winner = race.fastest(candidates, profile, made)
            if winner is None:
                _logger.warning(
                    "%s stays untuned for shapes %s: none of %d candidates could be measured",
                    custom_op,
                    profile.get_opt_shapes(),
                    len(candidates),
                )
                continue
            good = self.stats.tuned_op_successful_configs
            good[custom_op] = good.get(custom_op, 0) + 1
            self._record(custom_op, runners, profile, config, inputs, winner)

    def _profiles(
        self, shapes: tuple[Shape, ...], config: TuningConfig
    ) -> Iterator[OptimizationProfile]:
        """The profile of each combination of buckets; the call's own bucket is among them."""
        sizes = varying_sizes(shapes, config)
        seen = set()
        axes = []
        for i, (spec, size) in enumerate(zip(config.dynamic_tensor_specs, sizes, strict=True)):
            nearest = self.get_effective_map_to_tuning_buckets(config, i)(size)
            axes.append(sorted({*(self._mode.buckets or spec.buckets(size)), nearest}))
        for combination in itertools.product(*axes):
            profile = profile_at(shapes, config, combination)
            if profile.get_hash_key() not in seen:
                seen.add(profile.get_hash_key())
                yield profile

    def _record(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        profile: OptimizationProfile,
        config: TuningConfig,
        inputs: list[Any],
        winner: Candidate,
    ) -> None:
        """Store the winner, and remove the results of the other runners."""
        keys = [key_of(custom_op, runner, profile, config, inputs).text() for runner in runners]
        for key in keys:
            self._results.pop(key, None)
        index, tactic = winner
        name, saved = type(runners[index]).__qualname__, _tactic_to_json(tactic)
        if self._mode.managed and self._managed is not None:
            self._managed.publish(ManagedCacheEntry(keys[0], name, saved))
        else:
            self._results[keys[index]] = {"runner": name, "tactic": saved}
            self._measured.add(keys[index])
            self._dirty = True
        self._known.clear()
        listeners.tell()

    def _time(self, call: Callable[[], object], samples: int, replays: int) -> list[float]:
        """Milliseconds of each sample, by the timer that is in force."""
        if self._given_timer is not None:
            return self._given_timer(call, samples, replays)
        policy = self._mode.policy
        if policy not in self._timers:
            self._timers[policy] = cuda_timer(policy)
        return self._timers[policy](call, samples, replays)

    # ---- files ---------------------------------------------------------------------------------

    def attach(self, managed: ManagedAutotuneCache) -> None:
        """Serve the results of a store from now on, in place of another one's."""
        with self._lock:
            if self._managed is None or self._managed.path != managed.path:
                self._managed = managed
            self._forget_answers()

    def forget_measured(self) -> None:
        """Forget what this process measured, and read the store again."""
        with self._lock:
            for key in self._measured:
                self._results.pop(key, None)
            self._measured.clear()
            if self._managed is not None:
                self._managed.clear_memo()
            self._forget_answers()

    def _forget_answers(self) -> None:
        self._tuned.clear()
        self._known.clear()
        listeners.tell()

    def load_configs(self, path: str) -> bool:
        """Add the results of a file; they replace present ones with the same keys.

        Returns
        -------
        bool
            False if nothing was added, because the file is missing, is no file of results, or is
            of another GPU or version; a warning says why.
        """
        try:
            results, records = read_file(Path(path))
        except UnusableFileError as error:
            _logger.warning("Tuning results are not used: %s", error)
            return False
        with self._lock:
            self._results |= results
            self._measured -= results.keys()
            for namespace, values in records.items():
                self._records.setdefault(namespace, {}).update(values)
            self._known.clear()
        listeners.tell()
        return True

    def save_configs(self, path: str) -> None:
        """Add all results to a file; results of other processes stay in it."""
        with self._lock:
            complaint = add_to_file(Path(path), self._results, self._records)
            self._dirty = False
        if complaint is not None:
            _logger.warning("Tuning results of a file are given up: %s", complaint)

    def get_namespaced_records(self, namespace: str) -> dict[str, Any]:
        """A copy of the values that `publish_namespaced_records` keeps under a name."""
        return dict(self._records.get(namespace, {}))

    def publish_namespaced_records(self, namespace: str, records: dict[str, Any]) -> None:
        """Keep values that JSON can hold with the results, also in files."""
        with self._lock:
            self._records.setdefault(namespace, {}).update(records)
            self._dirty = True

    def clear_cache(self) -> None:
        """Delete all results in memory, and let go of the managed store."""
        with self._lock:
            self._results.clear()
            self._records.clear()
            self._measured.clear()
            self._managed = None
            self._dirty = False
            self._forget_answers()

    def reset_statistics(self) -> None:
        """Start new counts."""
        self.stats = AutoTunerStatistics()


def _is_capturing() -> bool:
    # The first question does not make a CUDA context.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
