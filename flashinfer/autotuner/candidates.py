"""Candidates of an operation: their compilation, and the race that picks the fastest."""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..jit.core import JitSpec, build_jit_specs
from ..jit.errors import JitError
from .measure import Timer
from .process_group import gathered
from .runner import TunableRunner, key_of
from .specs import OptimizationProfile, TuningConfig
from .statistics import AutoTunerStatistics
from .store import _tactic_to_json_hashable

HEURISTIC = -1
"""The tactic that leaves the choice to the runner."""

Candidate = tuple[int, Any]
"""The index of a runner, and one of its tactics."""

# A first round of a few samples leaves out what is clearly slower: 1.25 times the fastest.
_FIRST_SAMPLES, _WORTH_A_SECOND_ROUND = 3, 1.25
# The earlier of two nearly equal candidates wins, so that two tunings agree.
_A_TIE = 1.01

_logger = logging.getLogger("flashinfer.autotuner")


class _InThisThread(threading.local):
    measuring = False


_in_this_thread = _InThisThread()


def is_in_profile_measurement() -> bool:
    """Whether this thread runs a candidate in order to measure it."""
    return _in_this_thread.measuring


def candidates_for(
    runners: list[TunableRunner], inputs: list[Any], profile: OptimizationProfile
) -> list[Candidate]:
    """Every tactic of every runner; a runner that lists none has its heuristic."""
    return [
        (index, tactic)
        for index, runner in enumerate(runners)
        for tactic in runner.get_valid_tactics(inputs, profile) or [HEURISTIC]
    ]


def compile_candidates(
    runners: list[TunableRunner],
    jobs: list[tuple[OptimizationProfile, list[Any], list[Candidate]]],
    kwargs: dict[str, Any],
) -> None:
    """Build in parallel what the candidates of all (profile, inputs, candidates) need."""
    specs = {}
    for profile, inputs, candidates in jobs:
        for index, runner in enumerate(runners):
            tactics = [tactic for i, tactic in candidates if i == index]
            for spec in runner.jit_specs(inputs, tactics):
                specs[spec.name] = spec
            runner.precompile_tactics(inputs, tactics, profile, **kwargs)
    compile_specs(list(specs.values()))


def compile_specs(specs: list[JitSpec]) -> None:
    """Build modules in parallel; those that fail are warned of."""
    if specs:
        try:
            build_jit_specs(specs)
        except JitError as error:  # the others are built; what does not run is not chosen
            _logger.warning("Not every candidate could be compiled: %s", error)


@dataclass(frozen=True)
class Race:
    """How the candidates of one tuned call are measured.

    Attributes
    ----------
    custom_op, runners, config, kwargs
        The arguments of `AutoTuner.choose_one`.
    timer : Timer
        The clock.
    warmup : int
        Runs of a candidate before its first sample.
    repeat : int
        Samples of each candidate in the last round.
    replays : int
        Runs in one sample.
    stats : AutoTunerStatistics
        The race counts its failures here.
    """

    custom_op: str
    runners: list[TunableRunner]
    config: TuningConfig
    kwargs: dict[str, Any]
    timer: Timer
    warmup: int
    repeat: int
    replays: int
    stats: AutoTunerStatistics

    def fastest(
        self, candidates: list[Candidate], profile: OptimizationProfile, inputs: list[Any]
    ) -> Candidate | None:
        """The winner after two rounds; None if no candidate runs."""
        prepared: set[int] = set()

        def round_of(chosen: Sequence[Candidate], samples: int) -> list[float]:
            times = []
            for candidate in chosen:
                try:
                    self._prepare(candidate[0], inputs, prepared)
                    times.append(self._time(candidate, inputs, samples))
                except Exception as error:  # a candidate that does not run is not chosen
                    self._count_failure(candidate, profile, inputs, error)
                    times.append(float("inf"))
            return [statistics.fmean(column) for column in zip(*gathered(times), strict=True)]

        first = round_of(candidates, _FIRST_SAMPLES)
        limit = min(first, default=float("inf")) * _WORTH_A_SECOND_ROUND
        if limit == float("inf"):
            return None
        left = [c for c, time in zip(candidates, first, strict=True) if time <= limit]
        if len(left) == 1:
            return left[0]
        second = round_of(left, self.repeat)
        best = min(second)
        if best == float("inf"):
            return None
        return next(c for c, time in zip(left, second, strict=True) if time <= best * _A_TIE)

    def _prepare(self, index: int, inputs: list[Any], prepared: set[int]) -> None:
        """Run the heuristic of a runner once before its first candidate."""
        if index not in prepared:
            prepared.add(index)
            runner = self.runners[index]
            runner.forward(inputs, tactic=HEURISTIC, do_preparation=True, **self.kwargs)

    def _time(self, candidate: Candidate, inputs: list[Any], samples: int) -> float:
        index, tactic = candidate

        def call() -> object:
            return self.runners[index].forward(inputs, tactic=tactic, **self.kwargs)

        return statistics.median(self._samples(call, samples))

    def _samples(self, call: Callable[[], object], samples: int) -> list[float]:
        _in_this_thread.measuring = True
        try:
            for _ in range(self.warmup):
                call()
            return self.timer(call, samples, self.replays)
        finally:
            _in_this_thread.measuring = False

    def _count_failure(
        self,
        candidate: Candidate,
        profile: OptimizationProfile,
        inputs: list[Any],
        error: Exception,
    ) -> None:
        index, tactic = candidate
        key = key_of(self.custom_op, self.runners[index], profile, self.config, inputs)
        self.stats.failed_profiling_count.setdefault(self.custom_op, set()).add(key)
        failed = self.stats.failed_tactics.setdefault(self.custom_op, set())
        failed.add(_tactic_to_json_hashable(tactic))
        _logger.info("%s, tactic %s: %s", key.text(), tactic, error)
        if isinstance(error, torch.cuda.OutOfMemoryError):
            torch.cuda.empty_cache()
