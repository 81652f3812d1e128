"""The cache: many processes, killed builds, copies, read-only places, other users."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jit_helpers import in_processes, make_project

from flashinfer import jit
from flashinfer.jit import locks, places, toolchain

# Events that a warm load must not cause.
_FORBIDDEN = {
    "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.system", "fcntl.flock",
    "fcntl.lockf", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
    "os.chmod", "os.utime", "os.truncate", "shutil.rmtree", "tempfile.mkstemp",
}  # fmt: skip


def no_compiler(monkeypatch):
    """As on a machine with neither nvcc, nor g++, nor ninja."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(toolchain, "SYSTEM_TOOLKIT", "/nowhere")
    monkeypatch.setattr(toolchain, "_pypi_toolkits", lambda: [])


def private_folders(base: Path) -> list[Path]:
    return list(base.rglob(".build-*"))


@pytest.mark.compiler
def test_32_processes_compile_once(project, compile_count, full, tmp_path):
    """Exactly one of the processes compiles, all load."""
    spec = project.cuda_spec() if full else project.spec()
    barrier = tmp_path / "go"

    def load():
        while not barrier.exists():
            time.sleep(0.001)
        assert spec.build_and_load().answer() == 42

    processes = in_processes(32, load)
    barrier.touch()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 32
    assert compile_count() == (2 if full else 1)  # one per source


def test_threads_of_one_process_compile_once(project, compile_count):
    spec = project.spec()
    barrier = threading.Barrier(8)

    def load() -> int:
        barrier.wait()
        return spec.build_and_load().answer()

    with ThreadPoolExecutor(8) as pool:
        assert [f.result() for f in [pool.submit(load) for _ in range(8)]] == [42] * 8
    assert compile_count() == 1


def test_killed_builds_need_no_cleaning(project, cache, script, monkeypatch, full):
    """SIGKILL at a random moment of a build: the next process simply succeeds."""
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script('sleep 0.05\nexec "$@"\n'))
    source = project.root / "answer.cc"
    text = source.read_text()
    randomness = random.Random(7)
    interrupted = 0
    for round_number in range(50 if full else 6):
        source.write_text(f"{text}// {round_number}\n")
        spec = project.spec()
        (victim,) = in_processes(1, spec.build)
        time.sleep(randomness.uniform(0, 0.4))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        interrupted += not spec.is_built()
        (successor,) = in_processes(1, spec.build)
        successor.join()
        assert successor.exitcode == 0
        assert spec.try_load().answer() == 42
        assert private_folders(cache) == []
    assert interrupted > 0


@pytest.mark.parametrize("killed", [False, True])
def test_a_worker_forked_during_a_build_does_not_keep_its_lock(tmp_path, killed):
    home, forked, end = tmp_path / "home", tmp_path / "forked", tmp_path / "end"

    def build():
        with locks.building(home, lambda _: None):
            if os.fork() == 0:
                forked.touch()
                while not end.exists():
                    time.sleep(0.01)
                os._exit(0)
            while not forked.exists():
                time.sleep(0.01)
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)

    (builder,) = in_processes(1, build)
    builder.join()
    try:
        with locks.building(home, lambda _: pytest.fail("the worker has the lock")):
            pass
    finally:
        end.touch()


def test_compilers_die_with_the_process(project, script, monkeypatch, tmp_path):
    """A killed process leaves no compiler running."""
    started, survived = tmp_path / "started", tmp_path / "survived"
    launcher = script(f"echo $$ > {started}\nsleep 30\ntouch {survived}\n")
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", launcher)
    (victim,) = in_processes(1, project.spec().build)
    while not (started.exists() and started.read_text().strip()):
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    compiler = int(started.read_text())
    while Path(f"/proc/{compiler}").exists():  # until the test's own time limit
        if "Z" in Path(f"/proc/{compiler}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            break
        time.sleep(0.01)
    assert not survived.exists()


def test_sources_edited_while_compiling(project, script, monkeypatch):
    """What is published was compiled from what its key says, even if a header changes meanwhile."""
    header = project.root / "include/deeper.h"
    edit = f'[ -e {header}.done ] || {{ echo "#define MORE 5" > {header}; touch {header}.done; }}'
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script(f'"$@" || exit\n{edit}\n'))
    assert project.spec().build_and_load().answer() == 45
    header.write_text("#define MORE 2\n")
    assert project.spec().build_and_load().answer() == 42


def test_generator_that_writes_in_place(project, tmp_path):
    """Many processes run a generator that copies its source over the one others compile."""
    generated = tmp_path / "generated.cc"
    barrier = tmp_path / "go"

    def load():
        while not barrier.exists():
            time.sleep(0.001)
        for _ in range(20):
            shutil.copy(project.root / "answer.cc", generated)
        spec = project.spec(sources=("../generated.cc",))
        assert spec.build_and_load().answer() == 42

    processes = in_processes(8, load)
    barrier.touch()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8


@pytest.mark.parametrize("half", ["int f( {", ""])
def test_half_a_file_is_compiled_again(half, project, script, monkeypatch, compile_count):
    """A source is truncated when the compiler reads it, and whole again afterwards."""
    source = project.root / "answer.cc"
    kept = shutil.copy(source, project.root / "kept")
    counter = os.environ["FLASHINFER_CXX_LAUNCHER"]
    once = f"[ -e {kept}.done ] || {{ touch {kept}.done; echo '{half}' > {source}; broken=1; }}"
    launcher = script(
        f'{once}\n{counter} "$@"; code=$?\n[ $broken ] && cp {kept} {source}\nexit $code\n'
    )
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", launcher)
    assert project.spec().build_and_load().answer() == 42
    assert compile_count() == 2


@pytest.mark.compiler
def test_moved_cache_loads_without_compiler(project, cache, tmp_path, monkeypatch, compile_count):
    project.cuda_spec().build()
    moved = tmp_path / "copied cache"
    shutil.move(cache, moved)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(moved))
    assert project.cuda_spec().try_load().answer() == 42
    no_compiler(monkeypatch)
    assert project.cuda_spec().build_and_load().answer() == 42
    (project.root / "include/deeper.h").write_text("#define MORE 3\n")
    with pytest.raises(jit.ToolchainError):
        project.cuda_spec().build_and_load()
    assert compile_count() == 2


@pytest.mark.compiler
def test_broken_compiler_does_not_matter_to_what_is_cached(project, script, monkeypatch):
    project.cuda_spec().build()
    monkeypatch.setenv("FLASHINFER_NVCC", script("echo broken >&2\nexit 1\n"))
    assert project.cuda_spec().build_and_load().answer() == 42
    (project.root / "include/deeper.h").write_text("#define MORE 3\n")
    with pytest.raises(jit.ToolchainError, match="broken"):
        project.cuda_spec().build_and_load()


def test_disable_jit(project, cache, monkeypatch, compile_count):
    spec = project.spec()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(jit.MissingJITCacheError, match="FLASHINFER_DISABLE_JIT") as caught:
        spec.build_and_load()
    assert caught.value.spec is spec
    assert spec.try_load() is None
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    spec.build()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert spec.build_and_load().answer() == 42
    # Whatever compiler made it: none is looked at.
    monkeypatch.setattr(toolchain, "ingredients", None)
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 1


def test_another_compiler_rebuilds(project, monkeypatch, compile_count):
    project.spec().build()
    real = toolchain.ingredients
    monkeypatch.setattr(toolchain, "ingredients", lambda cuda: {**real(cuda), "host": "newer"})
    assert not project.spec().is_built()
    project.spec().build()
    assert compile_count() == 2


@pytest.mark.compiler
def test_warm_load_starts_locks_and_writes_nothing(project):
    project.cuda_spec().build()
    toolchain._remembered_for.cache_clear()  # as in a new process
    seen: list[str] = []
    watching = [True]

    def watch(event, arguments):
        if not watching:
            return
        writes = (
            event == "open"
            and isinstance(arguments[2], int)
            and not isinstance(arguments[0], int)  # the copy in memory has only a descriptor
            and (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
        )
        if event in _FORBIDDEN or writes:
            seen.append(f"{event} {arguments}")

    sys.addaudithook(watch)
    try:
        module = project.cuda_spec().build_and_load()
    finally:
        watching.clear()
    assert module.answer() == 42
    assert seen == []


def test_broken_entry_is_rebuilt(project, compile_count):
    spec = project.spec()
    spec.build()
    library = spec.get_library_path()
    library.write_bytes(library.read_bytes()[:1000])
    assert not spec.is_built()
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 2


def test_unset_home(project, tmp_path, monkeypatch, messages):
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    places.fallback_base.cache_clear()
    assert project.spec().build_and_load().answer() == 42
    assert project.spec().get_library_path().is_relative_to(tmp_path / "scratch")
    assert sum("HOME is not set" in message for message in messages) == 1
    places.fallback_base.cache_clear()


def test_fallback_is_not_shared_with_strangers(tmp_path, monkeypatch):
    """A folder of the expected name that others can write is not used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"flashinfer-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    places.fallback_base.cache_clear()
    chosen = places.fallback_base("a test")
    places.fallback_base.cache_clear()
    assert chosen != planted and chosen.stat().st_mode & 0o077 == 0


def test_package_folders_are_not_written(project):
    package = Path(jit.__file__).parents[1]
    folders = [package, package.parent / "csrc", package.parent / "include", project.root]

    def listing():
        files = (path for folder in folders for path in folder.rglob("*"))
        return {(p, p.stat().st_mtime_ns) for p in files if "__pycache__" not in p.parts}

    before = {path for path, _ in listing() if path.is_relative_to(project.root)}, listing()
    project.spec().build_and_load()
    project.spec().write_ninja()
    after = {path for path, _ in listing() if path.is_relative_to(project.root)}, listing()
    assert after[0] == before[0]
    assert {p for p, _ in after[1]} == {p for p, _ in before[1]}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_second_user():
    """Another user loads what is there, and builds the rest somewhere else."""
    with contextlib.ExitStack() as stack:
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shared-")))
        shared.chmod(0o755)
        code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from jit_helpers import make_project
import tempfile
root = Path({str(shared)!r})
os.environ["FLASHINFER_WORKSPACE_BASE"] = str(root / "cache")
os.umask(0o022)
project = make_project(root / "project")
project.spec().build()
(root / "scratch").mkdir(); (root / "scratch").chmod(0o1777)
tempfile.tempdir = str(root / "scratch")
import flashinfer.jit.builder, flashinfer.jit.cache
flashinfer.jit.builder.toolchain.require_ninja()
os.setgid(65534); os.setuid(65534); os.environ["HOME"] = "/nowhere"
assert project.spec().build_and_load().answer() == 42
assert not list((root / "scratch").iterdir()), "a warm load wrote"
other = project.spec(extra_cflags=["-DOTHER"])
assert other.build_and_load().answer() == 42
assert other.get_library_path().is_relative_to(root / "scratch")
print("second user done")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "second user done", done.stderr


def test_write_if_different(tmp_path):
    path = tmp_path / "sub" / "file.inc"
    jit.write_if_different(path, "one")
    stamp = path.stat().st_ino
    jit.write_if_different(path, "one")
    assert path.stat().st_ino == stamp
    jit.write_if_different(path, "two")
    assert path.read_text() == "two" and [p.name for p in path.parent.iterdir()] == ["file.inc"]


def test_clear_cache_dir(project, cache):
    module = project.spec().build_and_load()
    jit.clear_cache_dir()
    assert not project.spec().is_built() and not list(cache.rglob("*.so"))
    assert module.answer() == 42
    assert make_project(project.root).spec().build_and_load().answer() == 42


def test_failed_module_does_not_hold_back_the_others(project, cache):
    project.write("broken.cc", "int f( {\n")
    good = [project.spec(name) for name in ("one", "two", "three")]
    broken = project.spec("broken", ("broken.cc",))
    with pytest.raises(jit.BuildError, match="Building broken"):
        jit.build_jit_specs([good[0], broken, *good[1:]])
    assert all(spec.is_built() for spec in good) and not broken.is_built()
    assert [spec.load().answer() for spec in good] == [42] * 3
    assert private_folders(cache) == []
