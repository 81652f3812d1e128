"""Building modules with ninja and publishing them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import env
from . import cpp_ext, cubins, files, locks, nvrtc, places, publish, store, toolchain, trust
from .errors import (
    BuildError,
    JitError,
    ToolchainError,
    build_error,
    killed_for_memory,
    system_error,
)
from .fingerprint import Identity
from .log import logger
from .process import run_ninja
from .progress import Progress, Waiting
from .resources import default_jobs
from .spec import ModuleSpec

_MAX_ATTEMPTS = 5  # of a build whose sources or folders change while it runs


@dataclass
class _Job:
    """One module in the course of a build."""

    spec: ModuleSpec
    identity: Identity
    stamps: dict[str, files.Stamp]
    home: Path
    private: Path
    recipe: cpp_ext.NinjaModule | nvrtc.NvrtcModule | cubins.Prebuilt

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
        f"The sources of {', '.join(by_name)}, or its folders in the cache, kept changing while "
        "they were compiled.\n  hint: try again when the edit, checkout or clean-up is finished"
    )


def _build_once(
    specs: Sequence[ModuleSpec], verbose: bool | None, skip_prebuilt: bool
) -> list[ModuleSpec]:
    """One attempt; returns the modules whose sources or folders changed meanwhile."""
    for spec in specs:
        store.require_buildable(spec)
    base = places.writable_base()
    root = places.jit_dir(base)
    trust.require_trusted(trust.chain(root, base))
    failures = {spec.name: locks.last_failure(root / spec.name) for spec in specs}
    with contextlib.ExitStack() as stack, _explained(root):
        # Sorted by name, so that two builds of overlapping sets cannot wait for each other.
        for spec in specs:
            stack.enter_context(locks.building(root / spec.name, Waiting(spec.name)))
        # Somebody may have built some of them, or failed to, while we waited for the locks.
        missing = [spec for spec in specs if store.find(spec, skip_prebuilt) is None]
        errors: list[JitError] = []
        jobs: list[_Job] = []
        for spec in missing:
            home, key = root / spec.name, spec.identity().key
            if failure := locks.shared_failure(home, failures[spec.name], key):
                errors.append(failure)
                continue
            jobs.append(_begin(spec, home))
            stack.callback(files.remove_tree, jobs[-1].private)
        changed = _compile_and_publish(jobs, root, verbose, errors) if jobs else []
        if errors:
            raise errors[0]
        return changed


def _begin(spec: ModuleSpec, home: Path) -> _Job:
    if "`" in str(home) and spec.uses_cuda(spec.reached().external):
        raise ToolchainError(
            f"nvcc cannot work in {home}: its path has a backtick in it.\n"
            "  hint: set FLASHINFER_WORKSPACE_BASE to another folder"
        )
    stamps = spec.reached().stamps  # before the identity: an edit in between is seen as one
    identity, recipe = spec.identity(), spec.recipe()
    return _Job(spec, identity, stamps, home, publish.private_dir(home), recipe)


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Turn an operating-system error on the cache into one with a remedy."""
    try:
        yield
    except OSError as error:
        raise system_error(root, error) from error


def _compile_and_publish(
    jobs: list[_Job], root: Path, verbose: bool | None, errors: list[JitError]
) -> list[ModuleSpec]:
    """Build, publish what succeeds, add to `errors`; returns what must be built again."""
    if verbose is None:
        verbose = env.FLASHINFER_JIT_VERBOSE.get()
    archs = sorted({arch for job in jobs for arch in job.identity.archs}, key=lambda a: (len(a), a))
    targets = ", ".join(f"sm_{arch}" for arch in archs) or "the host"
    progress = Progress([job.spec.name for job in jobs], targets, root)
    succeeded = False
    try:
        outputs = _run(jobs, progress, verbose)
        succeeded = all(job.library.exists() for job in jobs)
    except TimeoutError as error:
        outputs = _timeout_message(jobs, error)
    except FileNotFoundError:
        if all(job.private.is_dir() for job in jobs):
            raise
        return [job.spec for job in jobs]
    finally:
        progress.done(succeeded)
    changed = []
    for job in jobs:
        log = outputs if len(jobs) == 1 else _part_of(outputs, job.private.name)
        try:
            if _has_changed(job):
                changed.append(job.spec)
            elif not job.library.exists():
                errors.append(_failed(job, targets, log))
            elif problem := job.recipe.problem_of(job.library):
                errors.append(_failed(job, targets, log + problem))
            else:
                (job.private / "build.log").write_text(log)
                publish.publish(job.private, job.spec.name, job.identity)
        except FileNotFoundError:
            if job.private.is_dir():
                raise
            changed.append(job.spec)
    return changed


def _has_changed(job: _Job) -> bool:
    """Whether what was compiled may be something else than what the identity says.

    A generator that writes its sources in place may have shown the compiler half a file, or an
    empty one, which compiles. Somebody may have removed the folder of the build.
    """
    if not job.private.is_dir():
        return True
    return job.spec.reached().stamps != job.stamps or job.spec.identity() != job.identity


def _timeout_message(jobs: list[_Job], error: TimeoutError) -> str:
    waiting = [job.spec.name for job in jobs if not job.library.exists()]
    return f"error: a compiler hangs: {error} ({', '.join(waiting)})\n"


def _failed(job: _Job, targets: str, output: str) -> JitError:
    log = job.home / "failed.log"
    try:
        scratch = job.private / "failed.log"
        scratch.write_text(output)
        scratch.replace(log)
    except OSError:
        log = Path("not written")
    error = build_error(f"Building {job.spec.name} for {targets} failed.", output, log)
    locks.record_failure(job.home, job.private, job.identity.key, error)
    return error


def _part_of(output: str, folder: str) -> str:
    """The lines of a joint build that belong to one module."""
    steps = re.split(r"^(?=\[\d+/\d+\] |FAILED: )", output, flags=re.MULTILINE)
    return "".join(step for step in steps if folder in step) or output


def _run(jobs: list[_Job], progress: Progress, verbose: bool) -> str:
    """Run ninja over all modules; what was killed for memory gets one more chance, alone."""
    folder = jobs[0].private
    for job in jobs:
        module = job.recipe
        (job.private / "build.ninja").write_text(module.text())
        for place, link in module.links().items():
            (job.private / link).symlink_to(place)
        if len(jobs) > 1:
            # Relative: nvcc takes only some characters in the path of a file.
            part = module.text(os.path.relpath(job.private, folder))
            (job.private / "part.ninja").write_text(part)
    ninja_file = "build.ninja"
    if len(jobs) > 1:
        # Rules are named alike in each module, and a subninja file has its own scope for them.
        ninja_file = "batch.ninja"
        parts = (cpp_ext.ninja_path(str(job.private / "part.ninja")) for job in jobs)
        (folder / ninja_file).write_text("".join(f"subninja {part}\n" for part in parts))
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

    def on_line(line: str) -> None:
        progress.line(line)
        if verbose:
            logger.info("%s", line.rstrip())

    return run_ninja(command, on_line, progress.tick)
