"""Running compilers: with a limit of time, and such that nothing is left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import env

# ninja dies with the process that started it (and takes its compilers along): a killed server
# leaves no compilers running. Set between fork and exec, in a small interpreter of its own, since
# code after the fork of a process with threads may deadlock.
_DIE_WITH_PARENT = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,15);"
    "os.getppid()==int(sys.argv[1]) and os.execv(sys.argv[2],sys.argv[2:])"
)
_GRACE = 2.0  # seconds between the request to end and SIGKILL
# If malloc asks for huge pages, ptxas and the assembler in NVRTC take a fifth less time.
_TUNABLES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def ask(command: Sequence[str], seconds: float) -> tuple[str, int]:
    """Output (standard output, then error) and exit status of a short command.

    Raises
    ------
    OSError
        If it cannot be started.
    TimeoutError
        If it has not ended after `seconds`; it and what it started have been killed.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=env.child_environment({"LC_ALL": "C"}),
        start_new_session=True,
    )
    try:
        output, complaints = process.communicate(timeout=seconds)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        raise
    return output + complaints, process.returncode


def run_ninja(
    command: Sequence[str],
    on_line: Callable[[str], None],
    on_tick: Callable[[], None],
) -> tuple[str, int]:
    """Output and exit status of ninja, which ends if no step finishes for too long.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    on_line : callable
        Gets each line that is printed, as soon as it is.
    on_tick : callable
        Called a few times a second.

    Raises
    ------
    TimeoutError
        If no step ended for ``FLASHINFER_BUILD_TIMEOUT`` seconds.
    """
    limit = env.FLASHINFER_BUILD_TIMEOUT.get()
    # An embedding program may have no interpreter to start.
    if sys.platform == "linux" and sys.executable and os.access(sys.executable, os.X_OK):
        prelude = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        command = [*prelude, *command]
    # Error messages are read by errors.py, which knows the English ones.
    environment = env.child_environment({"NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"})
    environment.setdefault(*_TUNABLES)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
    )
    lines: list[str] = []
    last = time.monotonic()

    def read() -> None:
        nonlocal last
        assert process.stdout is not None
        for line in process.stdout:
            last = time.monotonic()
            lines.append(line)
            on_line(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=0.1)
                break
            on_tick()
            if time.monotonic() - last > limit:
                raise TimeoutError(f"no step of the build ended within {limit:g} s")
    except BaseException:
        _end(process)
        raise
    reader.join()
    return "".join(lines), code


def _end(process: subprocess.Popen) -> None:
    """End ninja, which then asks its compilers to stop; kill those that do not obey."""
    family = _descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_GRACE)
    for pid, started in {process.pid: None, **family}.items():
        with contextlib.suppress(OSError):
            if started is None and process.poll() is None or _status(pid)[1] == started:
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _status(pid: int) -> tuple[int, int]:
    """Parent and start time of a process, which tell it from a later one of the same number."""
    # "pid (name) state parent ...", where the name may contain anything
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def _descendants(pid: int) -> dict[int, int]:
    """Processes that a process has started, and those that these have, with their start times."""
    children: dict[int, dict[int, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent, started = _status(int(folder.name))
            children.setdefault(parent, {})[int(folder.name)] = started
    found: dict[int, int] = {}
    todo = [pid]
    while todo:
        new = children.get(todo.pop(), {})
        found |= new
        todo += new
    return found
