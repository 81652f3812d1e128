"""`--fork`: tests run in forks of the process that collected; a lost fork is one failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.forked import Forks

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import multiprocessing, os, signal, time, warnings
import pytest

FOLDER = os.environ["TOY_FOLDER"]

def note(what):
    with open(os.path.join(FOLDER, f"{what}-{os.getpid()}"), "a") as file:
        file.write("x")

@pytest.fixture(scope="session")
def session():
    note("made")
    yield os.getpid()
    note("gone")

@pytest.fixture(scope="module", autouse=True)
def module(session):
    yield
    note("module")

@pytest.mark.parametrize("number", range(40))
def test_fixture(session, number, tmp_path):
    assert session == os.getpid()
    (tmp_path / "file").write_text("")
    time.sleep(0.01)

def test_fails():
    print("what was printed")
    assert [1, 2] == [1, 3]

def test_skips():
    pytest.skip("for a reason")

def test_warns():
    warnings.warn("heed this")

def test_crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def test_exit():
    os._exit(3)

def test_hangs():
    time.sleep(600)

def test_leaves_a_process():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()

@pytest.mark.alone
@pytest.mark.parametrize("number", range(2))
def test_alone(session, number):
    made = [name for name in os.listdir(FOLDER) if name.startswith("made-")]
    assert f"made-{session}" in made and len(made) <= 2, "two forks so far, this one among them"

@pytest.fixture
def broken():
    yield
    raise RuntimeError("torn down badly")

def test_teardown(broken):
    pass
"""


COMMAND = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, "-q"]
COMMAND += ["-p", "no:cacheprovider", "--fork", "3"]


def run_toys(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "toys").mkdir(exist_ok=True)
    (folder / "toys" / "test_toys.py").write_text(TESTS)
    (folder / "notes").mkdir(exist_ok=True)
    return subprocess.run(
        [*COMMAND, "--fork-limit", "3", *options, str(folder / "toys")],
        cwd=ROOT,
        env=os.environ | {"TOY_FOLDER": str(folder / "notes"), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("forked")
    options = ["-rfE", "--progress", f"--junit-xml={folder}/toys.xml"]
    return folder, run_toys(folder, *options, f"--cpu-times={folder}/cpu.json")


def test_every_test_has_its_outcome(toys):
    _, ran = toys
    assert "4 failed, 45 passed, 1 skipped, 1 warning, 1 error" in ran.stdout, ran.stdout
    assert ran.returncode == 1
    assert "assert [1, 2] == [1, 3]" in ran.stdout and "what was printed" in ran.stdout
    assert "test_fails (call): assert [1, 2] == [1, 3]" in ran.stdout, "at once"
    assert "heed this" in ran.stdout and "torn down badly" in ran.stdout
    for name, why in {
        "crash": "the process ended with exit code -11",
        "exit": "the process ended with exit code 3",
        "hangs": "still ran after 3 s",
    }.items():
        assert why in ran.stdout
        assert f"test_toys.py::test_{name}" in ran.stdout.split("short test summary")[1]
    assert "50 tests, 3 at a time" in ran.stdout
    assert "test_hangs" in ran.stderr, "faulthandler says where it hung"


def test_each_fork_has_its_fixtures(toys):
    folder, _ = toys
    notes = [path.name.split("-") for path in (folder / "notes").iterdir()]
    by = {kind: {pid for k, pid in notes if k == kind} for kind in ("made", "module", "gone")}
    assert by["gone"] == by["module"] <= by["made"]
    assert len(by["made"]) - len(by["gone"]) == 3, "those that were lost"
    assert all(path.read_text() == "x" for path in (folder / "notes").iterdir())


def test_reports_are_written(toys):
    folder, _ = toys
    cases = list(ElementTree.parse(folder / "toys.xml").iter("testcase"))
    assert len(cases) == 50
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    assert failed == {"test_fails", "test_crash", "test_exit", "test_hangs"}
    assert isinstance(json.loads((folder / "cpu.json").read_text()), dict)


def test_the_first_failure_may_end_the_run(tmp_path: Path):
    ran = run_toys(tmp_path, "-x", "-k", "fails or fixture")
    assert ran.returncode == 1 and "stopping after 1 failures" in ran.stdout


def test_an_interrupted_run_ends_with_its_summary(tmp_path: Path):
    """As `tests/gpu_suite.py` cuts it, also where the shell made it ignore the signal."""
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "test_toys.py").write_text(TESTS)
    (tmp_path / "notes").mkdir()
    words = [*COMMAND, "--fork-limit", "100", "--progress", "-k", "fails or hangs"]
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'trap "" INT; exec "$0" "$@"', *words, str(tmp_path / "toys")],
        cwd=ROOT,
        env=os.environ | {"TOY_FOLDER": str(tmp_path / "notes"), "CUDA_VISIBLE_DEVICES": "-1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = next(line for line in process.stdout if line.startswith("FAILED"))
    time.sleep(1.0)  # pytest counts the failure after the line
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert "test_fails" in first and "KeyboardInterrupt" in rest and "1 failed" in rest


def test_a_worker_stays_with_a_file():
    """It gets tests of one file, and fewer where little is left or where they take long."""
    forks = object.__new__(Forks)
    names = [f"a::test[{i}]" for i in range(90)] + [f"b::test[{i}]" for i in range(30)]
    names += ["c::long[1]", "c::long[2]"]
    items = [SimpleNamespace(nodeid=name, path=name[0]) for name in names]
    forks.session, forks.workers = SimpleNamespace(items=items), [None, None]
    forks.costs, forks.left = {"a::test": 0.1, "c::long": 5.0}, deque(range(len(names)))
    runs = []
    while forks.left:
        runs.append([items[index] for index in forks.deal()])
    assert [item for run in runs for item in run] == items
    assert all(len({item.path for item in run}) == 1 for run in runs)
    assert len(runs[0]) == 16 and len(runs[-1]) == 1, "a part of what is left"
    assert all(len(run) <= 21 for run in runs), "2 s"
    assert [len(run) for run in runs[-2:]] == [1, 1], "each of the long ones alone"
