"""The tests that a GPU decides, spread over the GPUs that are visible.

::

    python -m tests.gpu_suite [--tests PATH ...] [--limit SECONDS] [--logs FOLDER] [pytest options]

Each GPU runs its share of the tests in a pytest of its own, on its share of the cores
(`tests/forked.py`: one process collects, and its forks run), and prints a line of progress now and
then. While these collect, the modules that are known before any test runs are compiled; a test
that needs one earlier waits for it. At the end each share gives its summary line, also where a
limit, Ctrl-C or a signal to end cuts the run. A share sees its own GPU first and the others after
it, so tests of several GPUs run too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import mean

from flashinfer.jit import build_jit_specs
from tests.fuzzing import families

ROOT = Path(__file__).resolve().parents[1]
WORKERS_PER_CORE = 2.0  # for tests wait: for the GPU, for compilers, for modules of other tests
SECONDS_TO_END = 20  # that a share may take to print its summary after it was cut
# The process that collects is forked: it has no CUDA context and no threads.
ENVIRONMENT = os.environ | {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


def gpus() -> list[str]:
    """Names of the visible GPUs, as CUDA_VISIBLE_DEVICES takes them; no CUDA context is made."""
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


def compile_known_modules(paths: list[str], options: list[str]) -> int:
    """Compile what the fuzzers of the families need; how many modules that are.

    Attention compiles what its tests draw. A family is published when it is built, so an end in
    between loses one family and not all.
    """
    count = 0
    for family in families(paths):
        specs = family.modules("--full" in options)
        build_jit_specs(specs)
        count += len(specs)
    return count


class Share:
    """The pytest of one GPU; a thread prints its lines as they come."""

    def __init__(
        self, index: int, names: list[str], workers: int, logs: Path | None, options: list
    ):
        self.name, self.last = names[index], "no line at all"
        self.prefix = f"gpu {self.name}: " if len(names) > 1 else ""
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--progress"]
        command += ["--gpu-share", f"{index + 1}/{len(names)}"]
        command += ["--fork", str(workers), "-p", "no:xdist", "-p", "no:benchmark"]
        command += ["--ignore=tests/unit"]  # no GPU decides them
        if logs:
            command += [f"--junit-xml={logs / f'gpu{self.name}.xml'}"]
            command += [f"--cpu-times={logs / f'gpu{self.name}.json'}"]
        order = names[index:] + names[:index]
        self.log = (logs / f"gpu{self.name}.log").open("w") if logs else None
        self.process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ",".join(order)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what ends this program does not reach it: `cut` does
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in filter(str.strip, self.process.stdout):
            self.last = line.rstrip()
            print(f"{self.prefix}{self.last}", flush=True)
            if self.log:
                self.log.write(line)
                self.log.flush()

    def cut(self) -> None:
        """Ask for the summary of what has run."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Exit status, after the last line."""
        try:
            self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.reader.join(SECONDS_TO_END)
        return self.process.wait()


def start_shares(names: list[str], cores: int, arguments, options: list) -> list[Share]:
    workers, options = int(WORKERS_PER_CORE * cores / len(names)), [*arguments.tests, *options]
    return [Share(i, names, max(1, workers), arguments.logs, options) for i in range(len(names))]


def end_shares(shares: list[Share], end: float) -> int:
    """Wait for all shares, until `end` at most, and tell their outcome; the largest exit status."""
    try:
        while any(share.process.poll() is None for share in shares):
            if time.monotonic() > end:
                print("cut at the limit", flush=True)
                raise KeyboardInterrupt
            time.sleep(0.2)
    except KeyboardInterrupt:
        for share in shares:
            share.cut()
    statuses = [share.end() for share in shares]
    for share, status in zip(shares, statuses, strict=True):
        print(f"gpu {share.name}: exit status {status}: {share.last}", flush=True)
    return max(statuses, default=0)


def merge_costs(files: list[Path], merged: Path) -> None:
    """Write what a case of each test function costs: the mean over the shares that ran it."""
    shares = [json.loads(file.read_text()) for file in files if file.is_file()]
    functions = sorted(set().union(*shares))
    costs = {f: round(mean(share[f] for share in shares if f in share), 3) for f in functions}
    merged.write_text(json.dumps(costs, indent=1) + "\n")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description="The tests that a GPU decides.")
    parser.add_argument("--tests", nargs="+", default=["tests", "examples"], help="files, folders")
    parser.add_argument("--limit", type=float, help="seconds after which the run is cut")
    parser.add_argument(
        "--logs",
        type=Path,
        help="folder for each share's lines, JUnit XML and CPU seconds; costs.json joins them",
    )
    parser.add_argument("--compile-only", action="store_true", help="compile, run no test")
    arguments, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, _interrupt)
    print("Looking for GPUs ...", flush=True)
    begun = time.monotonic()
    names, cores = gpus(), len(os.sched_getaffinity(0))
    if not names:
        print("no GPU is visible: `make test` runs what needs none")
        return 2
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    print(f"{len(names)} GPUs, {cores} cores; collecting and compiling ...", flush=True)
    shares = [] if arguments.compile_only else start_shares(names, cores, arguments, options)
    end = begun + arguments.limit if arguments.limit else float("inf")
    try:
        count = compile_known_modules(arguments.tests, options)
        print(f"compiled {count} modules in {time.monotonic() - begun:.0f} s", flush=True)
    except BaseException as error:  # Ctrl-C, or no compiler: nothing goes on alone
        print(f"ended while it compiled: {error!r}", flush=True)
        end = 0.0
    status = end_shares(shares, end)
    if arguments.logs and shares:
        files = [arguments.logs / f"gpu{name}.json" for name in names]
        merge_costs(files, arguments.logs / "costs.json")
    print(f"{time.monotonic() - begun:.0f} s in all, compiling included", flush=True)
    return status if end else 2


if __name__ == "__main__":
    sys.exit(main())
