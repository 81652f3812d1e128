"""How many compilers may run at a time."""

from __future__ import annotations

import os
from pathlib import Path

from .. import env

# One compiler of ours stays below 1 GiB; half of the memory is left to everybody else.
_BYTES_PER_JOB = 1 << 30
_SHARE = 0.5


def default_jobs() -> int:
    """``MAX_JOBS``, or one job per core as far as memory allows."""
    if env.MAX_JOBS.is_set():
        return env.MAX_JOBS.get()
    cores = len(os.sched_getaffinity(0))
    per_job = _BYTES_PER_JOB * env.FLASHINFER_NVCC_THREADS.get()
    return max(1, min(cores, int(available_memory() * _SHARE / per_job)))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be allocated: of the machine, or of the container if that is less.

    Parameters
    ----------
    root : Path
        Where `proc` and `sys` are found.
    """
    amounts = [_mem_available(root), _cgroup_v2(root), _cgroup_v1(root)]
    return max(0, min(amount for amount in amounts if amount is not None))


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_path(root: Path, controller: str) -> str | None:
    """Path of this process in a hierarchy of `/proc/self/cgroup`; "" is version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and (controller or not controllers):
            return path.lstrip("/")
    return None


def _cgroup_v2(root: Path) -> int | None:
    return _tightest(root, "", root / "sys/fs/cgroup", "memory.max", "memory.current")


def _cgroup_v1(root: Path) -> int | None:
    mount = root / "sys/fs/cgroup/memory"
    return _tightest(root, "memory", mount, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _tightest(root: Path, controller: str, mount: Path, limit: str, usage: str) -> int | None:
    """Room under the tightest limit, from our own group up to the root of the hierarchy.

    Inside a container the path of `/proc/self/cgroup` is often not visible; then only the mount
    point, which is the container's group, counts.
    """
    path = _cgroup_path(root, controller)
    folder = mount / path if path else mount
    rooms = []
    while True:
        try:
            allowed = (folder / limit).read_text().strip()
            if allowed != "max":
                rooms.append(int(allowed) - _used(folder, usage))
        except (OSError, ValueError):
            pass
        if folder in (mount, mount.parent):
            return min(rooms, default=None)
        folder = folder.parent


def _used(folder: Path, usage: str) -> int:
    """Memory in use, without the page cache, which the kernel gives back."""
    used = int((folder / usage).read_text())
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return used
    cached = dict(line.split() for line in lines if len(line.split()) == 2)
    return used - int(cached.get("inactive_file", cached.get("total_inactive_file", 0)))
