"""Lines that tell how far a run of the tests is, and what each test file costs.

- ``--progress``: a line every few seconds with the time left, in place of dots. The time is
  estimated from `tests/costs/`: a compiling test counts more than a check of a message.
- ``--cpu-times FILE``: write the CPU seconds of each test function, processes that it started
  included, and print those of each folder. Wall times mislead on a shared machine; these do not.
"""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

COSTS = Path(__file__).with_name("costs")
USUAL_COST = 0.015  # CPU seconds of a test of which nothing is known
LEAST_RECORDED = 1.0  # CPU seconds of all cases of a test function
SECONDS_BETWEEN_LINES = 10.0


def cpu_seconds() -> float:
    """CPU seconds of this process and of the processes that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def function_of(nodeid: str) -> str:
    """The test function, without the parameters of a case."""
    return nodeid.split("[", 1)[0]


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def known_costs() -> dict[str, float]:
    """CPU seconds of one case of each test function that is worth counting, on such a machine."""
    files = [COSTS / "gpu.json"] * torch.cuda.is_available() + [COSTS / "cpu.json"]
    return next((json.loads(file.read_text()) for file in files if file.is_file()), {})


def in_a_line(report: pytest.TestReport) -> str:
    """Beginning and end of the error, for a run that may be cut before its summary."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = " | ".join((crash.message if crash else str(report.longrepr)).split("\n"))
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"


class CpuMeter:
    """Adds to each report the CPU time since the one before it; runs where tests run."""

    def __init__(self) -> None:
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self.before = cpu_seconds()  # what the process did before, it did for no test
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = cpu_seconds()
        report.user_properties = [*report.user_properties, ("cpu_seconds", now - self.before)]
        self.before = now
        return report


class CpuTimes:
    """Collects what `CpuMeter` measured in all processes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: Counter[str] = Counter()
        self.cases: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        function = function_of(report.nodeid)
        self.seconds[function] += dict(report.user_properties).get("cpu_seconds", 0.0)
        self.cases.setdefault(function, set()).add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: Counter[str] = Counter()
        for function, seconds in self.seconds.items():
            folders[function.rsplit("/", 1)[0]] += seconds
        costs = {
            function: round(seconds / len(self.cases[function]), 3)
            for function, seconds in sorted(self.seconds.items())
            if seconds >= LEAST_RECORDED
        }
        self.file.write_text(json.dumps(costs, indent=1) + "\n")
        terminalreporter.section("CPU seconds")
        for folder, seconds in folders.most_common():
            terminalreporter.line(f"{seconds:9.1f}  {folder}")
        terminalreporter.line(f"{folders.total():9.1f}  in all; by test function in {self.file}")


class Progress:
    """Prints a line every few seconds; runs where reports arrive."""

    def __init__(self, config: pytest.Config, costs: dict[str, float]) -> None:
        self.reporter = config.pluginmanager.get_plugin("terminalreporter")
        forks = config.getoption("fork", None)
        self.workers = forks or config.getoption("numprocesses", None) or 1
        self.costs = costs
        self.created = self.begun = self.printed = time.monotonic()
        self.left: dict[str, float] = {}
        self.total = self.failed = 0
        self.seconds_done = 0.0

    def expect(self, nodeids: list[str]) -> None:
        if not self.total:
            self.left = {n: self.costs.get(function_of(n), USUAL_COST) for n in nodeids}
            self.total = len(nodeids)
            self.begun = self.printed = time.monotonic()
            waited = time.monotonic() - self.created
            self.say(f"{self.total} tests, {self.workers} at a time; collected in {waited:.0f} s")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.expect(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport):
        """No dots and letters: what failed has a line."""
        if report.when == "call" or report.skipped:
            return report.outcome, "", ""
        return "error" if report.failed else "", "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
            self.say(f"FAILED {report.nodeid} ({report.when}): {in_a_line(report)}")
        if report.when == "teardown":
            self.seconds_done += self.left.pop(report.nodeid, 0.0)
        if time.monotonic() - self.printed >= SECONDS_BETWEEN_LINES:
            self.say(self.line())

    def time_left(self) -> float:
        """What is left of the known cost, at the speed so far; at first at the speed of the table.

        The table's speed counts for the first 20 seconds of work only, so a slower machine shows
        its own times soon.
        """
        gone, known = time.monotonic() - self.begun, 20.0
        speed = (self.seconds_done + known) / (gone + known / self.workers)
        return sum(self.left.values()) / speed

    def line(self) -> str:
        done, gone = self.total - len(self.left), time.monotonic() - self.begun
        failed = f", {self.failed} failed" if self.failed else ""
        share = self.seconds_done / max(self.seconds_done + sum(self.left.values()), 1e-9)
        return (
            f"[{share:4.0%}] {done} of {self.total} tests{failed}; "
            f"{clock(gone)} gone, about {clock(self.time_left())} left"
        )

    def say(self, text: str) -> None:
        self.printed = time.monotonic()
        self.reporter.ensure_newline()
        self.reporter.write_line(text)
        self.reporter.flush()


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--progress", action="store_true", help="lines with the time left in place of dots"
    )
    parser.addoption(
        "--cpu-times",
        type=Path,
        metavar="FILE",
        help="write the CPU seconds of each test function to FILE, and print those of each folder",
    )


def register(config: pytest.Config) -> None:
    """Add what the options ask for; xdist's workers measure, its controller collects."""
    manager, worker = config.pluginmanager, hasattr(config, "workerinput")
    if file := config.getoption("--cpu-times"):
        manager.register(CpuMeter())
        if not worker:
            manager.register(CpuTimes(file))
    if config.getoption("--progress") and not worker:
        manager.register(Progress(config, known_costs()))
