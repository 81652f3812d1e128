"""`--fork N`: collect once, then run the tests in N forked processes.

Importing thousands of tests takes a processor longer than many of them run, and pytest-xdist does
it in every worker. Here one process collects, and each worker is a fork of it. A worker asks for
its next test when it tears the last one down, so that fixtures of modules and of the session live
as long as the worker needs them, and sends its reports back. It stays with a file for a while, so
that few workers make the fixtures of each. Where a worker dies in a test (an illegal access ends
its CUDA context, a signal ends it) or runs it too long, the test has failed and another fork goes
on. CUDA does not survive a fork, so the collecting process has no context. Tests that are marked
`alone` run before all others, in two forks: on a GPU, while `tests/gpu_suite.py` compiles what the
others need.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from collections import deque
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.progress import USUAL_COST, function_of, known_costs

SECONDS_OF_A_TEST, FACTOR_WHEN_FULL = 240.0, 15  # after which a worker counts as stuck
SECONDS_BETWEEN_LOOKS = 1.0
# What one worker gets of a file at once: so much by `tests/costs/`, and a part of what is left, so
# that no other waits for it at the end.
SECONDS_OF_A_RUN, PARTS_OF_WHAT_IS_LEFT = 2.0, 4
FORKS_OF_ALONE = 2  # one test often waits for its ranks
FORK = multiprocessing.get_context("fork")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fork", type=int, metavar="N", help="run in N forks of the collecting process"
    )
    parser.addoption(
        "--fork-limit",
        type=float,
        default=SECONDS_OF_A_TEST,
        metavar="SECONDS",
        help=f"a test that runs longer has failed; under --full {FACTOR_WHEN_FULL} times as long",
    )


def register(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "alone: under --fork at most one test runs beside it, as its processes wait"
    )
    if config.getoption("--fork"):
        torch.set_num_threads(1)  # threads of the collecting process would be missing in a fork
        # A shell that starts commands in the background lets them ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        config.pluginmanager.register(Forks(config))


def exit_if_the_gpu_is_lost() -> None:
    """After an illegal access every later call of the process fails: another one goes on."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def cuda_is_initialized() -> bool:
    """Whether anything in this process has initialised the CUDA driver, torch or not."""
    not_initialized = 3
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialized


class Next:
    """The test after the current one, asked for when pytest needs to know its fixtures."""

    def __init__(self, pipe: Connection, items: list[pytest.Item]) -> None:
        self.pipe, self.items = pipe, items
        self.item: pytest.Item | None = None

    def pull(self) -> pytest.Item | None:
        self.pipe.send(("pull", None))
        index = self.pipe.recv()
        self.item = None if index is None else self.items[index]
        return self.item

    def listchain(self) -> list[Any]:
        item = self.pull()
        return [] if item is None else item.listchain()


class Reports:
    """Plugin of a worker: runs a test as pytest does, but sends its reports."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe, self.takes_warnings = config, pipe, False
        config.pluginmanager.register(self)  # pytest repeats to it the warnings so far
        self.takes_warnings = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: Any) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            self.pipe.send(("report", data))
        exit_if_the_gpu_is_lost()
        self.pipe.send(("done", None))
        return True

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        if not self.takes_warnings:
            return
        recorded = dict(
            warning_message=warning_message, when=when, nodeid=nodeid, location=location
        )
        try:
            pickle.loads(pickle.dumps(recorded))
        except Exception:  # the warning's class may be anything: the summary does without it
            return
        self.pipe.send(("warning", recorded))


def work(session: pytest.Session, pipe: Connection, others: list[Connection], name: str) -> None:
    """What a fork does: tests that it pulls, until there is none."""
    for connection in others:  # so that a worker sees when the collecting process has ended
        connection.close()
    os.setpgid(0, 0)  # what a test started ends with its worker
    config = session.config
    threads = max(1, len(os.sched_getaffinity(0)) // config.getoption("--fork"))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared by all forks
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # only the collecting process prints lines
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / name
    factory._basetemp.mkdir()
    Reports(config, pipe)
    item = Next(pipe, session.items).pull()
    while item is not None:
        following = Next(pipe, session.items)
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following.item
    os._exit(0)  # the usual way waits for processes that tests have left; `bury` ends those


class Worker:
    """One fork, as the collecting process sees it."""

    def __init__(self, session: pytest.Session, others: list[Connection], name: str) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(
            target=work, args=(session, theirs, [*others, self.pipe], name), name=name
        )
        with warnings.catch_warnings():  # threads that libraries have started hold no lock of ours
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        self.tests: deque[int] = deque()  # the one that runs, and the one that it asked for
        self.next: deque[int] = deque()  # what it gets when it asks again
        self.reports: list[pytest.TestReport] = []
        self.since = time.monotonic()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to it and to what it has started."""
        assert self.process.pid is not None
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # it has not made its group yet, or is gone
            self.process.kill()

    def end(self, number: int = signal.SIGKILL) -> None:
        """The same, and wait a little."""
        self.kill(number)
        self.process.join(2.0)


class Forks:
    """Plugin of the collecting process: deals the tests and replays the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        full = FACTOR_WHEN_FULL if config.getoption("--full") else 1
        self.limit = config.getoption("--fork-limit") * full
        self.workers: list[Worker] = []
        self.made = 0
        self.costs = known_costs()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if self.config.option.collectonly or session.testsfailed or not session.items:
            return None  # pytest says what it says without forks
        if cuda_is_initialized():
            raise pytest.UsageError(
                "`--fork` needs a process without CUDA, but collecting the tests has initialised "
                "it: no module of tests may ask a GPU at import; and set "
                "PYTORCH_NVML_BASED_CUDA_CHECK=1"
            )
        self.session = session
        alone = [item.get_closest_marker("alone") is not None for item in session.items]
        phases = [
            (FORKS_OF_ALONE, deque(i for i, a in enumerate(alone) if a)),
            (self.config.getoption("--fork"), deque(i for i, a in enumerate(alone) if not a)),
        ]
        self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.freeze()  # the forks share the pages of what was collected
        try:
            for count, self.left in phases:
                self.run(count)
        finally:
            for worker in self.workers:
                worker.kill()
            for worker in self.workers:
                worker.end()
        return True

    def run(self, count: int) -> None:
        """The tests that are left, in so many forks."""
        for _ in range(min(count, len(self.left))):
            self.fork()
        while self.workers:
            self.listen()
            if self.session.shouldfail:
                raise self.session.Failed(self.session.shouldfail)
            if self.session.shouldstop:
                raise self.session.Interrupted(self.session.shouldstop)
        if self.left:
            raise self.session.Interrupted(f"no fork works: {len(self.left)} tests have not run")

    def fork(self) -> None:
        self.config.get_terminal_writer().flush()
        others = [worker.pipe for worker in self.workers]
        self.workers.append(Worker(self.session, others, f"fork{self.made}"))
        self.made += 1

    def listen(self) -> None:
        """Answer what has come, then look after those that are dead or stuck."""
        wait([worker.pipe for worker in self.workers], SECONDS_BETWEEN_LOOKS)
        for worker in list(self.workers):
            alive = worker.process.is_alive()  # before the pipe is read to its end
            try:
                while worker.pipe.poll():
                    self.answer(worker, *worker.pipe.recv())
            except (EOFError, ConnectionError):
                worker.process.join(SECONDS_BETWEEN_LOOKS)
                alive = False
            if not alive:
                self.bury(worker, f"the process ended with exit code {worker.process.exitcode}")
            elif worker.tests and time.monotonic() - worker.since > self.limit:
                worker.end(signal.SIGABRT)  # faulthandler says where it was
                worker.end()
                self.bury(worker, f"still ran after {self.limit:.0f} s")

    def answer(self, worker: Worker, kind: str, data: Any) -> None:
        if kind == "pull":
            worker.next = worker.next or self.deal()
            index = worker.next.popleft() if worker.next else None
            if not worker.tests:
                worker.since = time.monotonic()
            if index is not None:
                worker.tests.append(index)
            worker.pipe.send(index)
        elif kind == "report":
            worker.reports.append(
                self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            )
        elif kind == "warning":
            self.config.hook.pytest_warning_recorded.call_historic(kwargs=data)
        else:
            worker.tests.popleft()
            worker.since = time.monotonic()
            self.replay(worker)

    def deal(self) -> deque[int]:
        """The first of the tests that are left, and what follows it in the same file."""
        run: deque[int] = deque()
        seconds, items = 0.0, self.session.items
        most = 1 + len(self.left) // (PARTS_OF_WHAT_IS_LEFT * len(self.workers))
        while self.left and seconds < SECONDS_OF_A_RUN and len(run) < most:
            item = items[self.left[0]]
            if run and item.path != items[run[0]].path:
                break
            run.append(self.left.popleft())
            seconds += self.costs.get(function_of(item.nodeid), USUAL_COST)
        return run

    def replay(self, worker: Worker) -> None:
        for report in worker.reports:
            self.config.hook.pytest_runtest_logreport(report=report)
        worker.reports = []

    def bury(self, worker: Worker, why: str) -> None:
        """The test that ran has failed; what the worker had asked for runs elsewhere."""
        self.workers.remove(worker)
        worker.pipe.close()
        self.left.extendleft(reversed(worker.next))
        if not worker.tests:
            worker.kill()
            return
        item = self.session.items[worker.tests.popleft()]
        self.left.extendleft(worker.tests)
        if not any(report.failed for report in worker.reports):
            result: Any = dict(nodeid=item.nodeid, location=item.location, keywords={item.name: 1})
            worker.reports = [
                pytest.TestReport(**result, outcome="failed", longrepr=why, when="call"),
                pytest.TestReport(**result, outcome="passed", longrepr=None, when="teardown"),
            ]
        self.replay(worker)
        self.fork()
