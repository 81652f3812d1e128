"""Building modules with ninja and publishing them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import env
from . import cache, cpp_ext, store, toolchain
from .errors import BuildError, JitError, build_error, killed_for_memory
from .fingerprint import Identity
from .log import logger
from .progress import Progress, Waiting
from .resources import default_jobs
from .spec import ModuleSpec

# ninja dies with the process that started it (and takes its compilers along): a killed server
# leaves no compilers running. Set between fork and exec, in a small interpreter of its own, since
# code after the fork of a process with threads may deadlock.
_DIE_WITH_PARENT = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,15);"
    "os.getppid()==int(sys.argv[1]) and os.execv(sys.argv[2],sys.argv[2:])"
)
_MAX_ATTEMPTS = 5  # of a build whose sources are written while it runs


@dataclass
class _Job:
    """One module in the course of a build."""

    spec: ModuleSpec
    identity: Identity
    stamps: dict[str, int]
    home: Path
    private: Path

    @property
    def library(self) -> Path:
        return self.private / f"{self.spec.name}.so"


def build(
    specs: Sequence[ModuleSpec], verbose: bool | None = None, skip_prebuilt: bool = True
) -> None:
    """Compile and publish the modules that are not there yet.

    Several processes may call this at the same time: one of them compiles a module, the others
    wait for it.
    """
    by_name = {spec.name: spec for spec in specs if store.find(spec, skip_prebuilt) is None}
    if not by_name:
        return
    for _ in range(_MAX_ATTEMPTS):
        changed = _build_once([by_name[n] for n in sorted(by_name)], verbose, skip_prebuilt)
        if not changed:
            return
        by_name = {spec.name: spec for spec in changed}
    raise BuildError(
        f"The sources of {', '.join(by_name)} kept changing while they were compiled.\n"
        "  hint: try again when the edit or checkout is finished"
    )


def _build_once(
    specs: Sequence[ModuleSpec], verbose: bool | None, skip_prebuilt: bool
) -> list[ModuleSpec]:
    """One attempt; returns the modules whose sources changed meanwhile."""
    for spec in specs:
        store.require_buildable(spec)
    root = cache.jit_dir(cache.writable_base())
    with contextlib.ExitStack() as stack, _explained(root):
        # Sorted by name, so that two builds of overlapping sets cannot wait for each other.
        for spec in specs:
            stack.enter_context(cache.building(root / spec.name, Waiting(spec.name)))
        # Somebody may have built some of them while we waited for the locks.
        jobs = [
            _begin(spec, root / spec.name)
            for spec in specs
            if store.find(spec, skip_prebuilt) is None
        ]
        for job in jobs:
            stack.callback(shutil.rmtree, job.private, ignore_errors=True)
        return _compile_and_publish(jobs, root, verbose) if jobs else []


def _begin(spec: ModuleSpec, home: Path) -> _Job:
    stamps = spec.reached().stamps  # before the identity: an edit in between is seen as one
    return _Job(spec, spec.identity(), stamps, home, cache.private_dir(home))


@contextlib.contextmanager
def _explained(root: Path):
    """Turn an operating-system error on the cache into one with a remedy."""
    try:
        yield
    except OSError as error:
        raise build_error(f"Cannot build in {root}.", f"error: {error}", "none") from error


def _compile_and_publish(jobs: list[_Job], root: Path, verbose: bool | None) -> list[ModuleSpec]:
    if verbose is None:
        verbose = env.FLASHINFER_JIT_VERBOSE.get()
    archs = sorted({arch for job in jobs for arch in job.identity.archs}, key=lambda a: (len(a), a))
    targets = ", ".join(f"sm_{arch}" for arch in archs) or "the host"
    progress = Progress([job.spec.name for job in jobs], targets, root)
    succeeded = False
    try:
        outputs = _run(jobs, progress, verbose)
        succeeded = all(job.library.exists() for job in jobs)
    finally:
        progress.done(succeeded)
    changed, errors = [], []
    for job in jobs:
        log = outputs if len(jobs) == 1 else _part_of(outputs, job.private.name)
        built = job.library.exists()
        # A generator that writes its sources in place may have shown the compiler half a file, or
        # an empty one, which compiles.
        touched = job.spec.reached().stamps != job.stamps
        if touched or job.spec.identity() != job.identity:
            changed.append(job.spec)
        elif not built:
            errors.append(_failed(job, targets, log))
        else:
            (job.private / "build.log").write_text(log)
            cache.publish(job.private, job.spec.name, job.identity)
    if errors:
        raise errors[0]
    return changed


def _failed(job: _Job, targets: str, output: str) -> JitError:
    log = job.home / "failed.log"
    try:
        scratch = job.private / "failed.log"
        scratch.write_text(output)
        scratch.replace(log)
    except OSError:
        log = Path("not written")
    return build_error(f"Building {job.spec.name} for {targets} failed.", output, log)


def _part_of(output: str, folder: str) -> str:
    """The lines of a joint build that belong to one module."""
    steps = re.split(r"^(?=\[\d+/\d+\] |FAILED: )", output, flags=re.MULTILINE)
    return "".join(step for step in steps if folder in step) or output


def _run(jobs: list[_Job], progress: Progress, verbose: bool) -> str:
    """Run ninja over all modules; what was killed for memory gets one more chance, alone."""
    for job in jobs:
        (job.private / "build.ninja").write_text(job.spec.ninja_module().text())
    if len(jobs) == 1:
        folder, ninja_file = jobs[0].private, "build.ninja"
    else:
        # Rules are named alike in each module, and a subninja file has its own scope for them.
        folder, ninja_file = jobs[0].private, "batch.ninja"
        lines = []
        for job in jobs:
            (job.private / "part.ninja").write_text(job.spec.ninja_module().text(str(job.private)))
            lines.append(f"subninja {cpp_ext.ninja_path(str(job.private / 'part.ninja'))}")
        (folder / ninja_file).write_text("\n".join(lines) + "\n")
    output, code = _ninja(folder, ninja_file, default_jobs(), len(jobs) > 1, progress, verbose)
    if code != 0 and killed_for_memory(output):
        victims = ", ".join(re.findall(r"^FAILED:(?: \[code=\d+\])? (\S+)", output, re.MULTILINE))
        logger.warning(
            "A compiler was killed, probably for lack of memory; trying %s alone", victims
        )
        again, code = _ninja(folder, ninja_file, 1, True, progress, verbose)
        if code != 0:
            return again
        output += again
    return output


def _ninja(
    folder: Path, ninja_file: str, jobs: int, keep_going: bool, progress: Progress, verbose: bool
) -> tuple[str, int]:
    command = [toolchain.require_ninja(), "-C", str(folder), "-f", ninja_file, f"-j{jobs}"]
    command += ["-k0"] if keep_going else []
    command += ["-v"] if verbose else []
    # An embedding program may have no interpreter to start.
    if sys.platform == "linux" and sys.executable and os.access(sys.executable, os.X_OK):
        prelude = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        command = [*prelude, *command]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        # Error messages are read by errors.py, which knows the English ones.
        env=env.child_environment({"NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}),
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            progress.line(line)
            if verbose:
                logger.info("%s", line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=0.1)
                break
            progress.tick()
    except BaseException:
        process.terminate()  # ninja then stops its compilers
        process.wait()
        raise
    reader.join()
    return "".join(lines), code
