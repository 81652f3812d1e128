"""Which kernels ran for which call, and when: a recording through CUPTI's activity API.

CUPTI stamps every launch on the host (RUNTIME and DRIVER records) and every kernel, copy and fill
on the device, and gives both the same correlation id. The host clock read around a call therefore
names the launches of that call, and the launches name its kernels, without a synchronisation
between calls. A replayed graph is one launch whose id all its kernels carry."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["CuptiUnavailableError", "Trace", "load_cupti", "record"]

_BUFFER_BYTES = 8 << 20
_FORCE_FLUSH = 1
_LAUNCH_KINDS = ("RUNTIME", "DRIVER")
_DEVICE_KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET")


class CuptiUnavailableError(RuntimeError):
    """CUPTI cannot be used; the message says why and what to do."""


def load_cupti() -> Any:
    """The module ``cupti.cupti`` of the package ``cupti-python``.

    Raises
    ------
    CuptiUnavailableError
        If it is not installed, too old (before CUDA 13) or its library does not load.
    """
    try:
        cupti = importlib.import_module("cupti.cupti")
    except Exception as error:  # ImportError; RuntimeError or OSError where libcupti is missing
        raise CuptiUnavailableError(
            f"cupti-python does not import ({error}); pip install -U cupti-python"
        ) from error
    try:
        from importlib.metadata import version

        installed = version("cupti-python")
    except ImportError:
        return cupti  # installed by other means than a wheel: nothing to check against
    if int(installed.split(".")[0]) < 13:
        raise CuptiUnavailableError(f"cupti-python {installed} is too old, 13 or later is needed")
    return cupti


@dataclasses.dataclass
class Trace:
    """Records of one recording; times in nanoseconds."""

    launches: list[tuple[int, int]] = dataclasses.field(
        default_factory=list
    )  # (host start, correlation id)
    device_work: list[tuple[int, int, int, str]] = dataclasses.field(
        default_factory=list
    )  # (id, start, end, name)

    def add(
        self, activities: Iterable[Any], launch_kinds: frozenset[int], device_kinds: frozenset[int]
    ) -> None:
        """Keep what is needed of CUPTI's records, which are only valid inside the callback."""
        for activity in activities:
            kind = int(activity.kind)
            if kind in device_kinds:
                name = getattr(activity, "name", "") or "copy or fill"
                self.device_work.append(
                    (activity.correlation_id, activity.start, activity.end, name)
                )
            elif kind in launch_kinds:
                self.launches.append((activity.start, activity.correlation_id))

    def spans_ms(self, windows: list[tuple[int, int]]) -> list[float]:
        """First start to last end of the device work launched in each window of host time.

        Parameters
        ----------
        windows : list of (int, int)
            Host nanoseconds, ordered and disjoint.

        Returns
        -------
        list of float
            Milliseconds, one per window.

        Raises
        ------
        CuptiUnavailableError
            If a window has no device work: the recording is incomplete, or the call launched
            nothing.
        """
        begins = [begin for begin, _ in windows]
        window_of: dict[int, int] = {}
        for start, correlation in self.launches:
            i = bisect.bisect_right(begins, start) - 1
            if i >= 0 and start <= windows[i][1]:
                window_of[correlation] = i
        stamps: list[list[tuple[int, int]]] = [[] for _ in windows]
        for correlation, start, end, _ in self.device_work:
            if correlation in window_of:
                stamps[window_of[correlation]].append((start, end))
        if missing := sum(not found for found in stamps):
            raise CuptiUnavailableError(
                f"CUPTI recorded no kernel for {missing} of {len(windows)} timed calls "
                f"({len(self.device_work)} device records, {len(self.launches)} launches)"
            )
        return [
            (max(end for _, end in found) - min(start for start, _ in found)) / 1e6
            for found in stamps
        ]


@contextlib.contextmanager
def record(cupti: Any, synchronize: Callable[[], None]) -> Iterator[Trace]:
    """Record launches and device work inside the block; the trace is complete after it.

    Parameters
    ----------
    cupti : module
        As given by :func:`load_cupti`.
    synchronize : Callable
        Waits for the device, so that every record exists before the buffers are flushed.

    Raises
    ------
    CuptiUnavailableError
        If CUPTI refuses, for example because another profiler holds the device.
    """
    trace = Trace()
    kinds = {name: getattr(cupti.ActivityKind, name) for name in _LAUNCH_KINDS + _DEVICE_KINDS}
    launch_kinds = frozenset(int(kinds[name]) for name in _LAUNCH_KINDS)
    device_kinds = frozenset(int(kinds[name]) for name in _DEVICE_KINDS)
    enabled = []
    try:
        cupti.activity_register_callbacks(
            lambda: (_BUFFER_BYTES, 0),
            lambda activities: trace.add(activities, launch_kinds, device_kinds),
        )
        for kind in kinds.values():
            cupti.activity_enable(kind)
            enabled.append(kind)
    except Exception as error:  # cuptiError, but its class only exists where the module loads
        for kind in enabled:
            cupti.activity_disable(kind)
        raise CuptiUnavailableError(f"CUPTI refused to record: {error}") from error
    try:
        yield trace
        synchronize()
        cupti.activity_flush_all(_FORCE_FLUSH)
    finally:
        for kind in enabled:
            cupti.activity_disable(kind)
