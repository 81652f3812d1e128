"""Builds that fail: the last lines of the exception name the cause and the remedy."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from flashinfer.jit import places, resources, toolchain

needs_nvcc = pytest.mark.compiler


def failure(build, *expected: str) -> str:
    """The exception's last 20 lines, which must contain all of `expected`."""
    with pytest.raises(RuntimeError) as caught:
        build()
    tail = "\n".join(str(caught.value).splitlines()[-20:])
    for text in expected:
        assert text in tail, f"{text!r} is missing from:\n{caught.value}"
    return tail


@pytest.fixture
def programs(tmp_path: Path, monkeypatch):
    """A PATH that holds only the given programs."""

    def only(*names: str) -> None:
        folder = tmp_path / "programs"
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(shutil.which(name))
        monkeypatch.setenv("PATH", str(folder))

    return only


def test_no_nvcc(project, programs, monkeypatch):
    programs("sh", "g++")
    monkeypatch.setattr(toolchain, "SYSTEM_TOOLKIT", "/nowhere/cuda")
    monkeypatch.setattr(toolchain, "_pypi_toolkits", lambda: ["/site/nvidia/cu13"])
    monkeypatch.setenv("CUDA_HOME", "/opt/missing")
    failure(
        project.cuda_spec().build_and_load,
        "nvcc was not found", "CUDA_HOME=/opt/missing", "PATH=", "/site/nvidia/cu13",
        "/nowhere/cuda", "hint: pip install -e '.[cuda]' in the checkout",
    )  # fmt: skip


def test_wrong_nvcc(project, monkeypatch, script):
    monkeypatch.setenv("FLASHINFER_NVCC", "/nowhere/nvcc")
    failure(
        project.cuda_spec().build, "FLASHINFER_NVCC='/nowhere/nvcc'", "hint: set it to the path"
    )
    monkeypatch.setenv("FLASHINFER_NVCC", script("echo broken toolkit >&2\nexit 3\n"))
    failure(project.cuda_spec().build, "returned 3", "broken toolkit", "hint:")


def test_no_host_compiler(project, programs):
    programs("sh")
    failure(project.spec().build, "No host C++ compiler", "g++", "hint: install g++")


def test_no_ninja(project, programs, monkeypatch):
    programs("sh", "g++")
    monkeypatch.setitem(__import__("sys").modules, "ninja", None)
    failure(project.spec().build, "ninja was not found", "hint: pip install ninja")


@needs_nvcc
def test_broken_header(project):
    project.write("include/broken.h", "inline int broken( { return 1; }\n")
    project.write("store.cu", "#include <broken.h>\n")
    failure(
        project.cuda_spec().build,
        "Building cuda_answer for sm_90a failed", "broken.h(1): error", "failed.log",
        "hint: the source",
    )  # fmt: skip


def test_missing_header(project):
    project.write("answer.cc", "#include <not_there.h>\n")
    failure(project.spec().build, "not_there.h: No such file", "hint: a header was not found")


def test_missing_source(project):
    spec = project.spec(sources=("nowhere.cc",))
    failure(spec.build, "nowhere.cc does not exist", "hint: check the `sources`")


@needs_nvcc
def test_unknown_architecture(project, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "3.5")  # exists, but this nvcc has left it
    failure(
        project.cuda_spec().build,
        "sm_35", "Unsupported gpu architecture", "hint: this nvcc does not know",
        "FLASHINFER_CUDA_ARCH_LIST",
    )  # fmt: skip


def test_no_architecture(project, monkeypatch):
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    monkeypatch.setattr("flashinfer.compilation_context._detect", lambda visible: frozenset())
    tail = failure(project.cuda_spec().build, "set FLASHINFER_CUDA_ARCH_LIST to")
    assert tail.count("\n") == 0
    assert project.spec().build_and_load().answer() == 42  # has no device code


def test_killed_for_memory(project, script, monkeypatch, messages):
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script("kill -9 $$\n"))
    failure(project.spec().build, "Killed", "hint: the compiler was killed", "memory")
    assert any("answer.o alone" in message for message in messages)


def test_killed_once_is_retried_alone(project, script, monkeypatch, messages, tmp_path):
    """Two compilers at a time are one too many here: the one that is killed runs again, alone."""
    for name in ("one.cc", "two.cc"):
        project.write(name, f"int {name[:3]}() {{ return 1; }}\n")
    mark = tmp_path / "running"
    monkeypatch.setenv("MAX_JOBS", "3")
    launcher = f'mkdir {mark} 2>/dev/null || kill -9 $$\nsleep 0.3\n"$@"; code=$?\n'
    launcher += f"rmdir {mark}\nexit $code\n"
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script(launcher))
    assert project.spec(sources=("answer.cc", "one.cc", "two.cc")).build_and_load().answer() == 42
    assert any("lack of memory" in m and ".o alone" in m for m in messages)


def test_disk_full_in_a_compiler(project, script, monkeypatch):
    full = 'echo "/tmp/cc1.s: fatal error: error writing: No space left on device" >&2\nexit 1\n'
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script(full))
    failure(project.spec().build, "No space left on device", "hint: the disk is full", "TMPDIR")


def test_disk_full_in_the_cache(project, monkeypatch):
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    spec = project.spec()
    monkeypatch.setattr(Path, "write_text", write)
    failure(spec.build, "No space left on device", "hint: the disk is full", "WORKSPACE_BASE")


def test_link_error(project):
    source = project.root / "answer.cc"
    source.write_text(source.read_text().replace("= ANSWER", "= elsewhere()") + "")
    source.write_text("int elsewhere();\n" + source.read_text())
    failure(project.spec().build, "undefined reference", "elsewhere", "hint: linking failed")


def test_launcher_that_does_not_exist(project, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", "/nowhere/ccache")
    failure(project.spec().build, "/nowhere/ccache", "hint: a program", "FLASHINFER_CXX_LAUNCHER")


def test_nowhere_to_write(project, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    places.fallback_base.cache_clear()
    failure(project.spec().build, "cannot be", "hint: set FLASHINFER_WORKSPACE_BASE")
    places.fallback_base.cache_clear()


def test_library_that_cannot_be_loaded(project):
    spec = project.spec()
    spec.build()
    library = spec.get_library_path()
    library.write_bytes(b"x" * library.stat().st_size)
    failure(lambda: spec.load(library), "cannot be loaded", "hint: it may be damaged")


@pytest.mark.parametrize("name", ["", "a/b", "../up", "a b", ".hidden", "x" * 201])
def test_bad_name(project, name):
    with pytest.raises(ValueError, match="name of a module"):
        project.spec(name)


def test_bad_sources(project):
    with pytest.raises(ValueError, match="must end in one of"):
        project.spec(sources=("kernel.cuh",))
    with pytest.raises(ValueError, match="sources of module 'answer' is empty"):
        project.spec(sources=())


def test_first_error_of_a_long_output_is_found(project):
    project.write("answer.cc", "int a = missing;\n" + "int b = also_missing;\n" * 200)
    tail = failure(
        project.spec().build, "'missing' was not declared", "hint: the source or a header"
    )
    assert len(tail.splitlines()) == 20


def test_jobs_fit_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for gib, threads, jobs in ((8, 1, 4), (8, 4, 1), (1, 1, 1), (0.1, 1, 1), (1000, 1, 64)):
        monkeypatch.setattr(resources, "available_memory", lambda gib=gib: int(gib * 2**30))
        monkeypatch.setenv("FLASHINFER_NVCC_THREADS", str(threads))
        assert resources.default_jobs() == jobs
    monkeypatch.setenv("MAX_JOBS", "7")
    assert resources.default_jobs() == 7


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("visible", [True, False], ids=["host view", "container view"])
def test_container_limit_counts(tmp_path, version, visible):
    group = "a/b"
    controllers = "0::" if version == 2 else "4:memory:"
    mount = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    limit, usage = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   64000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"7:cpu:/x\n{controllers}/{group}\n")
    folder = mount / group if visible else mount
    folder.mkdir(parents=True)
    (folder / limit).write_text("8000000000\n")
    (folder / usage).write_text("5000000000\n")
    cached = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 1\n{cached} 1000000000\n")
    assert resources.available_memory(tmp_path) == 4000000000
    (folder / limit).write_text("max\n")
    assert resources.available_memory(tmp_path) == 64000000 * 1024
