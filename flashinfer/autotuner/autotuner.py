"""The tuner: measures candidates inside ``autotune()``, and serves results everywhere."""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import env
from .measure import MeasurementPolicy, Timer, cuda_timer
from .runner import TunableRunner
from .specs import (
    OptimizationProfile,
    ProfilingCacheKey,
    Shape,
    TuningConfig,
    make_bucket_mapper,
    make_inputs,
    profile_at,
    shape_of,
)
from .store import (
    UnusableFileError,
    _json_to_tactic,
    _tactic_to_json,
    _tactic_to_json_hashable,
    add_to_file,
    default_cache_path,
    read_file,
)
from .store import _classify_metadata_mismatches as _classify_metadata_mismatches
from .store import _collect_metadata as _collect_metadata

_logger = logging.getLogger("flashinfer.autotuner")

# A first round of a few samples leaves out what is clearly slower: 1.25 times the fastest.
_FIRST_SAMPLES, _WORTH_A_SECOND_ROUND = 3, 1.25
# Candidates that are nearly equal: the earlier one wins, so that two tunings agree.
_A_TIE = 1.01

_HEURISTIC = -1

_group: Any = None


def set_autotune_process_group(group: torch.distributed.ProcessGroup | None) -> None:
    """Tune with the processes of `group`: times are averaged over it, so that all choose the same.

    Every process of the group must make the same tuned calls in the same order. None ends it. A
    group of the CPU (gloo) keeps the exchange off the stream that is measured.
    """
    global _group
    _group = group


def get_autotune_process_group() -> torch.distributed.ProcessGroup | None:
    """The group of `set_autotune_process_group`."""
    return _group


class _InThisThread(threading.local):
    measuring = False


_in_this_thread = _InThisThread()


def is_in_profile_measurement() -> bool:
    """Whether this thread runs a candidate in order to measure it."""
    return _in_this_thread.measuring


@dataclass(frozen=True)
class _Mode:
    """What the surrounding ``autotune()`` asks for."""

    tune: bool = False
    skip_ops: frozenset[str] = frozenset()
    buckets: tuple[int, ...] | None = None
    round_up: bool | None = None
    replays: int | None = None
    policy: MeasurementPolicy = MeasurementPolicy()


@dataclass
class AutoTunerStatistics:
    """Counts since the start, or since `AutoTuner.reset_statistics`.

    Attributes
    ----------
    cache_misses : int
        Calls that took the heuristic for want of a result.
    cache_miss_config_collection : dict of str to set
        By operation, the shapes of those calls.
    failed_profiling_count : dict of str to set
        By operation, the keys of candidates that could not be measured.
    tuned_op_total_configs, tuned_op_successful_configs : dict of str to int
        By operation, profiles that were to be measured, and that gave a result.
    failed_tactics : dict of str to set
        By operation, tactics that could not be measured.
    """

    cache_misses: int = 0
    cache_miss_config_collection: dict[str, set[Any]] = field(default_factory=dict)
    failed_profiling_count: dict[str, set[ProfilingCacheKey]] = field(default_factory=dict)
    tuned_op_total_configs: dict[str, int] = field(default_factory=dict)
    tuned_op_successful_configs: dict[str, int] = field(default_factory=dict)
    failed_tactics: dict[str, set[Any]] = field(default_factory=dict)


class AutoTuner:
    """Results of tuning, and how they come about; there is one per process: `AutoTuner.get()`.

    Parameters
    ----------
    warmup : int
        Runs of a candidate before it is measured.
    repeat : int
        Samples of each candidate of the last round.
    stream_delay_micro_secs : int
        Taken for callers of FlashInfer; here the write before each sample keeps the GPU busy.
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
        self._mode = _Mode()
        self._lock = threading.RLock()
        self._results: dict[str, dict[str, Any]] = {}  # by the text of a key
        self._records: dict[str, dict[str, Any]] = {}
        self._tuned: set[Any] = set()  # calls whose profiles have been gone through
        self._known: dict[Any, tuple[int, Any]] = {}  # by operation, runners and shapes
        self._dirty = False

    @classmethod
    def get(cls) -> AutoTuner:
        """The tuner of this process."""
        with cls._making:
            if cls._instance is None:
                cls._instance = cls()
                if env.FLASHINFER_AUTOTUNER_LOAD_FROM_FILE.get():
                    path = default_cache_path()
                    if path.exists():
                        cls._instance.load_configs(str(path))
            return cls._instance

    @property
    def is_tuning_mode(self) -> bool:
        """Whether calls measure what has no result."""
        return self._mode.tune

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
            Implementations; the first serves calls without a result, by its heuristic.
        tuning_config : TuningConfig
            What varies, and how it is measured.
        inputs : list
            The call's tensors. A candidate is run on them, so that it may write to outputs.
        **kwargs
            Passed on to ``forward`` while measuring.

        Returns
        -------
        runner : TunableRunner
        tactic
            -1 if nothing is known for these shapes.
        """
        if not runners:
            raise ValueError(f"`runners` of {custom_op} must not be empty")
        shapes = tuple(map(shape_of, inputs))
        extras = tuple(runner.get_cache_key_extras(inputs) for runner in runners)
        names = tuple(type(runner).__qualname__ for runner in runners)
        mode = (self._mode.buckets, self._mode.round_up, id(_group))
        call = (custom_op, names, extras, shapes, mode)
        tune = (
            self._mode.tune
            and custom_op not in self._mode.skip_ops
            and not _in_this_thread.measuring
            and not _is_capturing()
        )
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

        `inputs` are what `get_cache_key_extras` of the runners is asked with.
        """
        profile = self._nearest(input_shapes, tuning_config)
        for index, runner in enumerate(runners):
            key = _key(custom_op, runner, profile, tuning_config, inputs or [])
            found = self._results.get(key.text())
            if found is not None:
                return True, index, _json_to_tactic(found["tactic"]), profile
        return False, 0, _HEURISTIC, None

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
            return 0, _HEURISTIC
        assert profile is not None
        if profile.get_opt_shapes() != shapes and tactic != _HEURISTIC:
            # A tactic of the bucket's size need not serve every size of the bucket.
            own = profile_at(shapes, config, _varying_sizes(shapes, config))
            valid = map(_tactic_to_json_hashable, runners[index].get_valid_tactics(inputs, own))
            if tactic not in valid:
                return index, _HEURISTIC
        return index, tactic

    def _nearest(self, shapes: tuple[Shape, ...], config: TuningConfig) -> OptimizationProfile:
        sizes = [
            self.get_effective_map_to_tuning_buckets(config, i)(size)
            for i, size in enumerate(_varying_sizes(shapes, config))
        ]
        return profile_at(shapes, config, sizes)

    def get_effective_map_to_tuning_buckets(
        self, tuning_config: TuningConfig, spec_idx: int = 0
    ) -> Callable[[int], int]:
        """From a size to its bucket, as the surrounding ``autotune()`` may have set it."""
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
        missing = [not self._has(custom_op, runners, p, config, inputs) for p in profiles]
        if _group is not None:  # who has a result must still measure with those who have none
            missing = [any(column) for column in zip(*_gathered(missing), strict=True)]
        todo = [p for p, is_missing in zip(profiles, missing, strict=True) if is_missing]
        jobs = [(p, make_inputs(inputs, p, config)) for p in todo]
        candidates = [
            [(r, t) for r, runner in enumerate(runners) for t in _tactics(runner, made, p)]
            for p, made in jobs
        ]
        _compile(runners, jobs, candidates, kwargs)
        for (profile, made), choices in zip(jobs, candidates, strict=True):
            total = self.stats.tuned_op_total_configs
            total[custom_op] = total.get(custom_op, 0) + 1
            best = self._fastest(custom_op, runners, choices, config, profile, made, kwargs)
            if best is None:
                _logger.warning(
                    "%s stays untuned for shapes %s: none of %d candidates could be measured",
                    *(custom_op, profile.get_opt_shapes(), len(choices)),
                )
                continue
            good = self.stats.tuned_op_successful_configs
            good[custom_op] = good.get(custom_op, 0) + 1
            self._keep(custom_op, runners, profile, config, inputs, *best)

    def _profiles(
        self, shapes: tuple[Shape, ...], config: TuningConfig
    ) -> Iterator[OptimizationProfile]:
        """The profiles of every combination of buckets, that of the call among them."""
        sizes = _varying_sizes(shapes, config)
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

    def _has(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        profile: OptimizationProfile,
        config: TuningConfig,
        inputs: list[Any],
    ) -> bool:
        keys = (_key(custom_op, runner, profile, config, inputs) for runner in runners)
        return any(key.text() in self._results for key in keys)

    def _keep(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        profile: OptimizationProfile,
        config: TuningConfig,
        inputs: list[Any],
        index: int,
        tactic: Any,
    ) -> None:
        """Store a result in place of those of the other runners."""
        for runner in runners:
            key = _key(custom_op, runner, profile, config, inputs)
            self._results.pop(key.text(), None)
        key = _key(custom_op, runners[index], profile, config, inputs)
        runner_name = type(runners[index]).__qualname__
        self._results[key.text()] = {"runner": runner_name, "tactic": _tactic_to_json(tactic)}
        self._known.clear()
        self._dirty = True

    def _fastest(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        choices: list[tuple[int, Any]],
        config: TuningConfig,
        profile: OptimizationProfile,
        inputs: list[Any],
        kwargs: dict[str, Any],
    ) -> tuple[int, Any] | None:
        """The best of `choices` in two rounds; None if none of them runs."""
        replays = self._mode.replays or config.cuda_graph_profile_replays
        repeat = config.profiling_repeat or self.repeat
        prepared: set[int] = set()

        def times(choice: tuple[int, Any], samples: int) -> float:
            index, tactic = choice
            runner = runners[index]
            if index not in prepared:
                prepared.add(index)
                runner.forward(inputs, tactic=_HEURISTIC, do_preparation=True, **kwargs)

            def call() -> object:
                return runner.forward(inputs, tactic=tactic, **kwargs)

            return statistics.median(self._measured(call, samples, replays))

        def round_of(chosen: Sequence[tuple[int, Any]], samples: int) -> list[float]:
            found = []
            for choice in chosen:
                try:
                    found.append(times(choice, samples))
                except Exception as error:  # a candidate that does not run is not chosen
                    self._failed(custom_op, runners, choice, profile, config, inputs, error)
                    found.append(float("inf"))
            if _group is not None:
                found = [statistics.fmean(c) for c in zip(*_gathered(found), strict=True)]
            return found

        first = round_of(choices, _FIRST_SAMPLES)
        limit = min(first, default=float("inf")) * _WORTH_A_SECOND_ROUND
        if limit == float("inf"):
            return None
        left = [choice for choice, time in zip(choices, first, strict=True) if time <= limit]
        if len(left) == 1:
            return left[0]
        second = round_of(left, repeat)
        best = min(second)
        if best == float("inf"):
            return None
        return next(c for c, time in zip(left, second, strict=True) if time <= best * _A_TIE)

    def _measured(self, call: Callable[[], object], samples: int, replays: int) -> list[float]:
        _in_this_thread.measuring = True
        try:
            for _ in range(self.warmup):
                call()
            return self._timer()(call, samples, replays)
        finally:
            _in_this_thread.measuring = False

    def _timer(self) -> Timer:
        if self._given_timer is not None:
            return self._given_timer
        policy = self._mode.policy
        if policy not in self._timers:
            self._timers[policy] = cuda_timer(policy)
        return self._timers[policy]

    def _failed(
        self,
        custom_op: str,
        runners: list[TunableRunner],
        choice: tuple[int, Any],
        profile: OptimizationProfile,
        config: TuningConfig,
        inputs: list[Any],
        error: Exception,
    ) -> None:
        index, tactic = choice
        key = _key(custom_op, runners[index], profile, config, inputs)
        self.stats.failed_profiling_count.setdefault(custom_op, set()).add(key)
        failed = self.stats.failed_tactics.setdefault(custom_op, set())
        failed.add(_tactic_to_json_hashable(tactic))
        _logger.info("%s, tactic %s: %s", key.text(), tactic, error)
        if isinstance(error, torch.cuda.OutOfMemoryError):
            torch.cuda.empty_cache()

    # ---- files ---------------------------------------------------------------------------------

    def load_configs(self, path: str) -> bool:
        """Take the results of a file, in place of present ones with the same keys.

        Returns
        -------
        bool
            False, with a warning that says why, if the file is missing, is no such file, or is
            of another GPU or version; nothing is taken then.
        """
        try:
            results, records = read_file(Path(path))
        except UnusableFileError as error:
            _logger.warning("Tuning results are not used: %s", error)
            return False
        with self._lock:
            self._results |= results
            for namespace, values in records.items():
                self._records.setdefault(namespace, {}).update(values)
            self._known.clear()
        return True

    def save_configs(self, path: str) -> None:
        """Write all results into a file, beside what other processes wrote there."""
        with self._lock:
            complaint = add_to_file(Path(path), self._results, self._records)
            self._dirty = False
        if complaint is not None:
            _logger.warning("Tuning results of a file are given up: %s", complaint)

    def get_namespaced_records(self, namespace: str) -> dict[str, Any]:
        """What `publish_namespaced_records` kept under a name; a copy."""
        return dict(self._records.get(namespace, {}))

    def publish_namespaced_records(self, namespace: str, records: dict[str, Any]) -> None:
        """Keep values that JSON can hold, beside the results: in files, too."""
        with self._lock:
            self._records.setdefault(namespace, {}).update(records)
            self._dirty = True

    def clear_cache(self) -> None:
        """Forget all results."""
        with self._lock:
            self._results.clear()
            self._records.clear()
            self._tuned.clear()
            self._known.clear()
            self._dirty = False

    def reset_statistics(self) -> None:
        """Begin counting anew."""
        self.stats = AutoTunerStatistics()


def _varying_sizes(shapes: tuple[Shape, ...], config: TuningConfig) -> list[int]:
    return [shapes[s.input_idx[0]][s.dim_idx[0]] for s in config.dynamic_tensor_specs]


def _key(
    custom_op: str,
    runner: TunableRunner,
    profile: OptimizationProfile,
    config: TuningConfig,
    inputs: list[Any],
) -> ProfilingCacheKey:
    shapes = [list(shape) for shape in profile.get_opt_shapes()]
    for constraint in config.constraint_specs:
        shapes[constraint.input_idx][constraint.dim_idx] = -1
    return ProfilingCacheKey(
        custom_op,
        type(runner).__qualname__,
        0,
        tuple(map(tuple, shapes)),
        tuple(runner.get_cache_key_extras(inputs)),
    )


def _tactics(runner: TunableRunner, inputs: list[Any], profile: OptimizationProfile) -> list[Any]:
    return runner.get_valid_tactics(inputs, profile) or [_HEURISTIC]


def _compile(
    runners: list[TunableRunner],
    jobs: list[tuple[OptimizationProfile, list[Any]]],
    candidates: list[list[tuple[int, Any]]],
    kwargs: dict[str, Any],
) -> None:
    """Build what all candidates of all profiles need, side by side."""
    specs = {}
    for (profile, made), choices in zip(jobs, candidates, strict=True):
        for index, runner in enumerate(runners):
            tactics = [tactic for i, tactic in choices if i == index]
            for spec in runner.jit_specs(made, tactics):
                specs[spec.name] = spec
            runner.precompile_tactics(made, tactics, profile, **kwargs)
    if specs:
        from ..jit.core import build_jit_specs

        build_jit_specs(list(specs.values()))


def _gathered(values: list[Any]) -> list[list[Any]]:
    """The lists of all processes of the group."""
    lists: list[Any] = [None] * torch.distributed.get_world_size(_group)
    torch.distributed.all_gather_object(lists, values, group=_group)
    return lists


def _is_capturing() -> bool:
    # The first question does not make a CUDA context.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
    """Measure, inside the block, what tuned operations have no result for.

    Parameters
    ----------
    tune_mode : bool
        Whether to measure; False only uses `cache`.
    cache : str, optional
        A file of results: read at the beginning if it exists, added to at the end.
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
        cache = str(default_cache_path())
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
    try:
        yield
        if tune_mode and cache is not None and tuner._dirty:
            tuner.save_configs(cache)
    finally:
        tuner._mode = before
        if not before.tune:
            tuner._timers.clear()  # and the memory that they write to
