"""Where logs, dumps and definitions go: private, and never in the way of the program."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from flashinfer._common.locks import ForkSafeLock
from flashinfer._instrument import text as api_log_text
from flashinfer._instrument.definitions import save_definition
from flashinfer._instrument.files import AppendedFile
from flashinfer._instrument.text import write_record
from tests.unit.test_api_dump import dumps, scale
from tests.unit.test_api_dump import folder as folder

ROOT = Path(__file__).resolve().parents[2]

# Threads log, dump and write definitions all the time, while the main thread forks.
FORKS = """
import os, signal, sys, threading, time, torch
import flashinfer
from flashinfer._instrument.definitions import _dumped

x, w = torch.randn(2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)

def work():
    while True:
        flashinfer.rmsnorm(x, w)
        _dumped.clear()  # the definition is written again

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
ended = 0
for _ in range(10):
    child = os.fork()
    if child == 0:
        _dumped.clear()
        flashinfer.rmsnorm(x, w)
        os._exit(0)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)[0]) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    ended += done == child
    if not done:
        os.kill(child, signal.SIGKILL)
        break
print("ended", ended, file=sys.stderr)
os._exit(0)
"""


@pytest.mark.parametrize("level", [1, 10])
@pytest.mark.parametrize("destination", ["file", "stdout"])
def test_forked_children_of_threads_that_log_do_not_hang(tmp_path, level, destination):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "FLASHINFER_BACKEND": "reference",
        "FLASHINFER_LOGLEVEL": str(level),
        "FLASHINFER_LOGDEST": str(tmp_path / "log") if destination == "file" else destination,
        "FLASHINFER_DUMP_DIR": str(tmp_path / "dumps"),
        "FLASHINFER_DUMP_MAX_COUNT": "200",
        "FLASHINFER_TRACE_DUMP": "1",
        "FLASHINFER_TRACE_DUMP_DIR": str(tmp_path / "definitions"),
        "OMP_NUM_THREADS": "1",
    }
    with open(tmp_path / "stdout", "w") as stdout:
        child = subprocess.run(
            [sys.executable, "-c", FORKS], env=environment, stdout=stdout, stderr=subprocess.PIPE
        )
    assert b"ended 10" in child.stderr, child.stderr


def test_a_lock_that_another_thread_holds_is_free_in_a_child():
    lock = ForkSafeLock()
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        with lock, lock:  # its own thread may take it again, as a signal handler does
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    done.set()
    thread.join()


@pytest.fixture
def log(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_LOGDEST", str(tmp_path / "log"))
    monkeypatch.setattr(api_log_text, "_warned", set())
    monkeypatch.setattr(api_log_text, "_files", {})
    return tmp_path / "log"


def test_a_pipe_without_a_reader_does_not_block(log, capsys):
    os.mkfifo(log)
    write_record("first")
    write_record("second")
    error = capsys.readouterr().err
    assert error.count("cannot write API log") == 1
    assert "first" in error and "second" in error
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    write_record("third")
    assert b"third" in os.read(reader, 1000)
    os.close(reader)
    write_record("fourth")  # the reader left: no SIGPIPE
    assert "fourth" in capsys.readouterr().err


def test_a_pipe_that_nobody_empties_does_not_block(log, capsys):
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    for number in range(30):
        write_record(f"record {number} " + "x" * 10_000)
    os.close(reader)
    error = capsys.readouterr().err
    assert "record 29" in error and "record 0 " not in error


def test_a_short_write_is_finished(monkeypatch, log):
    write, sizes = os.write, []

    def short(descriptor, data):
        sizes.append(len(data))
        return write(descriptor, bytes(data)[:7])

    monkeypatch.setattr(os, "write", short)
    write_record("a record of some length")
    assert log.read_text().endswith("a record of some length\n") and len(sizes) > 5


def test_a_full_disk_is_said_and_the_next_record_starts_a_line(monkeypatch, log, capsys):
    write, room = os.write, [40]

    def full(descriptor, data):
        taken = bytes(data)[: room[0]]
        if not taken:
            raise OSError(28, "No space left on device")
        room[0] -= len(taken)
        return write(descriptor, taken)

    monkeypatch.setattr(os, "write", full)
    write_record("the record that does not fit")
    error = capsys.readouterr().err
    assert "No space left" in error and "the record that does not fit" in error
    room[0] = 10_000
    write_record("one that fits")
    cut, whole = log.read_text().splitlines()
    assert len(cut) == 40 and whole.endswith("one that fits")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_file_system(tmp_path):
    """A log on a file system of 4 KiB: the records that it does not hold are on stderr."""
    code = """
        from flashinfer._instrument.text import write_record
        for number in range(100):
            write_record(f"record {number} " + "x" * 100)
    """
    script = 'mount -t tmpfs -o size=4k none $1 && exec $2 -c "$3"'
    command = ["unshare", "-m", "sh", "-c", script, "sh"]
    environment = os.environ | {"FLASHINFER_LOGDEST": f"{tmp_path}/log", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [*command, str(tmp_path), sys.executable, textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if "unshare" in child.stderr or "mount:" in child.stderr:
        pytest.skip(f"no mount here: {child.stderr.strip()}")
    assert child.returncode == 0 and "No space left on device" in child.stderr
    assert "record 99" in child.stderr and "record 0 " not in child.stderr


def test_a_descriptor_that_now_belongs_to_the_program_is_left_alone(tmp_path):
    """A daemon closes all descriptors, and opens a socket under the number of the log."""
    log = AppendedFile(str(tmp_path / "log"))
    log.append(b"first\n")
    ours, theirs = socket.socketpair()
    os.dup2(ours.fileno(), log._descriptor)
    log.append(b"second\n")
    assert (tmp_path / "log").read_text() == "first\nsecond\n"
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(100)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_private(folder, monkeypatch, log, tmp_path):
    before = os.umask(0)
    try:
        scale(torch.ones(4), 2.0)
        monkeypatch.setenv("FLASHINFER_LOGDEST", str(tmp_path / "logs" / "deep" / "log"))
        write_record("a record")
        path = save_definition({"name": "scale_c4"}, tmp_path / "definitions" / "deep")
    finally:
        os.umask(before)
    (dump,) = dumps(folder)
    files = [*dump.iterdir(), tmp_path / "logs" / "deep" / "log", path]
    assert len(files) == 5 and {mode(file) for file in files} == {0o600}
    folders = [dump, dump.parent, tmp_path / "logs", tmp_path / "logs" / "deep"]
    folders += [path.parent, path.parent.parent]
    assert {mode(made) for made in folders} == {0o700}


def test_a_dump_that_does_not_fit_leaves_no_folder(folder, monkeypatch, log):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert torch.equal(scale(torch.ones(1), 2.0), torch.tensor([2.0]))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "", ".", "..", ".x", "a\0b", "a\n", 5])
def test_a_definition_cannot_leave_its_folder(tmp_path, name):
    with pytest.raises(ValueError, match=r"definition\['name'\] must consist of letters"):
        save_definition({"name": name}, tmp_path / "definitions")
    assert not (tmp_path / "definitions").exists()


def test_a_pipe_in_the_place_of_a_definition_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "scale_c4.json")
    path = save_definition({"name": "scale_c4"}, tmp_path)
    assert json.loads(path.read_text()) == {"name": "scale_c4"}
    assert os.listdir(tmp_path) == ["scale_c4.json"]
