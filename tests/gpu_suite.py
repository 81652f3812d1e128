"""The tests that a GPU decides, spread over the GPUs that are visible.

::

    python -m tests.gpu_suite [pytest options]

First the modules that are known before any test runs are compiled, on all cores. Then each GPU
runs its share of the tests in a pytest of its own, with its share of the cores, and prints a line
of progress now and then. At the end each share gives its summary line. A share sees its own GPU
first and the others after it, so tests of several GPUs run too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from flashinfer.jit import JitSpec, build_jit_specs

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("tests", "examples")


def gpus() -> list[str]:
    """Names of the visible GPUs, as CUDA_VISIBLE_DEVICES takes them; no CUDA context is made."""
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


def known_modules() -> list[JitSpec]:
    """What the fuzzers of the families need; attention compiles what its tests draw."""
    found: dict[str, JitSpec] = {}
    for file in sorted(ROOT.glob("tests/*/test_*fuzz.py")):
        module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
        if family := getattr(module, "FAMILY", None):
            found |= {spec.name: spec for spec in family.specs()}
    return list(found.values())


def run_share(index: int, names: list[str], cores: int, options: list[str]) -> tuple[int, str]:
    """Exit status and summary line of the share number `index`; its lines are printed as read."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--progress", *PATHS]
    command += ["--gpu-share", f"{index + 1}/{len(names)}"]
    command += ["-n", str(cores), "--maxschedchunk", "2"]
    command += ["-p", "no:benchmark", *options]  # a plugin that warns beside xdist
    order = names[index:] + names[:index]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(order)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    prefix, last = f"gpu {names[index]}: " if len(names) > 1 else "", ""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip():
            last = line.rstrip()
            print(f"{prefix}{last}", flush=True)
    return process.wait(), last


def main(options: list[str]) -> int:
    print("Looking for GPUs ...", flush=True)
    names, cores = gpus(), len(os.sched_getaffinity(0))
    if not names:
        print("no GPU is visible: `make test` runs what needs none")
        return 2
    begun = time.monotonic()
    modules = known_modules()
    print(f"{len(names)} GPUs, {cores} cores; compiling {len(modules)} modules ...", flush=True)
    os.environ.setdefault("MAX_JOBS", str(cores))
    build_jit_specs(modules)
    del os.environ["MAX_JOBS"]
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    with ThreadPoolExecutor(len(names)) as pool:
        shares = [
            pool.submit(run_share, i, names, max(1, cores // len(names)), options)
            for i in range(len(names))
        ]
        results = [share.result() for share in shares]
    for name, (status, line) in zip(names, results, strict=True):
        print(f"gpu {name}: exit status {status}: {line}")
    print(f"{time.monotonic() - begun:.0f} s in all, compiling included")
    return max(status for status, _ in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
