"""Many processes that load modules while others are killed and the cache is damaged.

    python tests/unit/jit/chaos.py --seconds 300 --processes 64

Each process loads one module and compares its answer. Meanwhile processes get SIGKILL, and files
of the cache get flipped bits, other lengths, other modes and other times, by replacement and in
place. Prints what happened as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import tvm_ffi  # noqa: F401  here, so that each process need not import it
from jit_helpers import Project, make_project

from flashinfer.jit import places, toolchain

KEYS = 6
ODD_TIMES = (0, 1_000_000_000, 2_000_000_000, 4_000_000_000)


def load(project: Project, key: int) -> int:
    """Answer of the module of this key; 42 + key is right."""
    spec = project.spec(f"answer{key}", extra_cflags=[f"-DKEY={key}"])
    return spec.build_and_load().answer()


def change(path: Path, changed: Callable[[bytearray], bytes | bytearray]) -> None:
    """Damage a file: another takes its place, or its own bytes change under who maps it."""
    data = changed(bytearray(path.read_bytes()))
    if random.random() < 0.5:
        path.write_bytes(data)
        return
    scratch = path.with_name("scratch")
    scratch.write_bytes(data)
    os.replace(scratch, path)


def flip(data: bytearray) -> bytearray:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data


def set_times(path: Path) -> None:
    moment = random.choice(ODD_TIMES)
    os.utime(path, (moment, moment))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": lambda path: change(path, flip),
    "truncation": lambda path: change(path, lambda data: data[: random.randrange(len(data) + 1)]),
    "zeros": lambda path: change(path, lambda data: bytes(len(data))),
    "removal": os.unlink,
    "mode": lambda path: path.chmod(random.choice((0o000, 0o200, 0o666, 0o777))),
    "mode of folder": lambda path: path.parent.chmod(random.choice((0o000, 0o300, 0o777))),
    "clock": set_times,
}


def damage_something(done: Counter) -> None:
    """Damage a random file of a random entry, or the memory of the toolchain."""
    entries = [p for p in places.jit_dir().glob("*/*") if not p.name.startswith(".")]
    if not entries:
        return
    entry = random.choice(entries)
    library = entry / f"{entry.parent.name}.so"
    targets = [library, library, entry / "manifest.json", toolchain._memory_file()]
    target = random.choice(targets)
    kind = random.choice(list(DAMAGES))
    if target == targets[-1] and kind.startswith("mode"):
        return  # its folder is the cache itself
    with contextlib.suppress(OSError, ValueError):
        DAMAGES[kind](target)
        done[kind] += 1


def run(project: Project, log: Path, processes: int, seconds: float) -> dict[str, object]:
    """Keep `processes` loading until the time is over; returns what happened."""
    running: dict[int, int] = {}
    victims: set[int] = set()
    done: Counter = Counter()
    damages: Counter = Counter()
    end = time.monotonic() + seconds
    next_blow = time.monotonic() + min(2.0, seconds / 4)
    while running or time.monotonic() < end:
        if len(running) < processes and time.monotonic() < end:
            key = random.randrange(KEYS)
            running[start(project, key, log)] = key
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                del running[pid]
                code = os.waitstatus_to_exitcode(status)
                end_of = {0: "right", 1: "wrong", 2: "error"}
                if code == -signal.SIGKILL and pid in victims:
                    end_of[code] = "killed"
                done[end_of.get(code, str(code))] += 1
        if next_blow < time.monotonic() < end:
            next_blow = time.monotonic() + random.uniform(0, 0.2)
            damage_something(damages)
            if running and random.random() < 0.5:
                victims.add(victim := random.choice(list(running)))
                os.kill(victim, signal.SIGKILL)
        time.sleep(0.001)
    return {"ends": dict(done), "damages": dict(damages)}


def start(project: Project, key: int, log: Path) -> int:
    """Fork a process that loads one module."""
    pid = os.fork()
    if pid:
        return pid
    code = 2
    try:
        random.seed()
        code = int(load(project, key) != 42 + key)
    except BaseException:
        with open(log, "a") as file:
            file.write(traceback.format_exc() + "\n")
    os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        root = Path(folder)
        os.environ["FLASHINFER_WORKSPACE_BASE"] = str(root / "base")
        os.environ["FLASHINFER_LOGGING_LEVEL"] = "ERROR"
        launcher, compiles = root / "launcher", root / "compiles"
        compiles.touch()
        count_one = f'case " $* " in *" -c "*) echo x >> {compiles};; esac'
        launcher.write_text(f'#!/bin/sh\n{count_one}\nexec "$@"\n')
        launcher.chmod(0o755)
        os.environ["FLASHINFER_CXX_LAUNCHER"] = str(launcher)
        project = make_project(root / "project")
        project.write("include/answer.h", "#include <deeper.h>\n#define ANSWER 40 + MORE + KEY\n")
        report = run(project, root / "log", options.processes, options.seconds)
        # Whatever is damaged now is repaired by whoever needs it, without help.
        last = [start(project, key, root / "log") for key in range(KEYS)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in last]
        count = len(compiles.read_text().split())
        allowed = KEYS + sum(report["damages"].values()) + report["ends"].get("killed", 0)
        report |= {"seed": options.seed, "compiles": count, "compiles allowed": allowed}
        report["at the end"] = codes
        report["errors"] = (root / "log").read_text()[-3000:] if (root / "log").exists() else ""
        print(json.dumps(report, indent=1))
    good = set(report["ends"]) <= {"right", "killed"} and not any(codes) and count <= allowed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
