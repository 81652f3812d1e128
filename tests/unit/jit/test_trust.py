"""Modules that a stranger can have written are refused, and homes that cannot be used replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flashinfer import aot, env, jit
from flashinfer.jit import places, toolchain, trust
from flashinfer.jit.errors import UntrustedError

ROOT = Path(env.__file__).parents[1]
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
NOBODY = 65534


@pytest.fixture(autouse=True)
def no_remembered_fallback(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    places.fallback_base.cache_clear()
    yield scratch
    places.fallback_base.cache_clear()


def levels(library: Path, base: Path) -> list[Path]:
    return [Path(folder) for folder in trust.chain(library.parent.parent, base)]


@pytest.mark.parametrize("level", [0, 2, 4, 6])
def test_folder_that_everybody_can_write(project, cache, level):
    spec = project.spec()
    spec.build()
    folder = levels(spec.get_library_path(), cache)[level]
    folder.chmod(0o777)
    with pytest.raises(UntrustedError) as caught:
        spec.build_and_load()
    text = str(caught.value)
    assert str(folder) in text and "everybody can write it (mode 0777)" in text
    assert "FLASHINFER_WORKSPACE_BASE" in text and "FLASHINFER_TRUSTED_FOLDERS=" in text


def test_nothing_is_built_where_everybody_can_write(project, cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(UntrustedError, match="everybody can write it"):
        project.spec().build()


def test_trusted_folder(project, cache, monkeypatch, compile_count):
    spec = project.spec()
    spec.build()
    cache.chmod(0o777)
    monkeypatch.setenv("FLASHINFER_TRUSTED_FOLDERS", f"/nowhere:{cache}")
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 1


def test_sticky_folder_is_as_safe_as_tmp(project, cache):
    cache.mkdir()
    cache.chmod(0o1777)
    assert project.spec().build_and_load().answer() == 42


def test_umask_does_not_open_the_cache(project, cache):
    before = os.umask(0)
    try:
        spec = project.spec()
        assert spec.build_and_load().answer() == 42
    finally:
        os.umask(before)
    paths = [cache, *cache.rglob("*")]
    assert not [p for p in paths if not p.is_symlink() and p.stat().st_mode & 0o022]


def test_entry_that_others_can_write_is_built_again(project, messages, compile_count):
    spec = project.spec()
    spec.build()
    spec.get_library_path().chmod(0o666)
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 2
    assert any("everybody can write it (mode 0666)" in message for message in messages)


def test_private_group_of_a_user_is_no_stranger(monkeypatch):
    status = os.stat_result((0o40775, 0, 0, 1, os.getuid(), os.getgid(), 0, 0, 0, 0))
    monkeypatch.setattr(trust, "_is_private_group", lambda uid, gid: True)
    assert trust.writers(status) is None
    monkeypatch.setattr(trust, "_is_private_group", lambda uid, gid: False)
    assert "can write it (mode 0775)" in trust.writers(status)


@root_only
@pytest.mark.parametrize("level", [0, 3, 7])
def test_library_of_another_user(project, cache, level):
    spec = project.spec()
    spec.build()
    library = spec.get_library_path()
    folder = [*levels(library, cache), library][level]
    os.chown(folder, NOBODY, -1)
    with pytest.raises(UntrustedError) as caught:
        spec.build_and_load()
    assert f"(uid {NOBODY}), not to root (uid 0)" in str(caught.value)
    assert str(folder if level < 7 else library.parent) in str(caught.value)


@root_only
def test_prebuilt_modules_of_another_user(project, tmp_path, monkeypatch):
    spec = project.spec()
    aot.compile_and_package_modules(tmp_path / "aot", [spec])
    jit.clear_cache_dir()
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))
    os.chown(tmp_path / "aot", NOBODY, -1)
    with pytest.raises(UntrustedError, match="FLASHINFER_AOT_DIR"):
        spec.build_and_load()
    monkeypatch.setenv("FLASHINFER_TRUSTED_FOLDERS", str(tmp_path / "aot"))
    assert spec.build_and_load().answer() == 42


def test_compilers_of_a_stranger_are_not_believed(cache):
    """`toolchain.json` names folders of headers: it decides what is compiled."""
    toolchain._remembered_for.cache_clear()
    version = toolchain.require_host_compiler().version
    memory = toolchain._memory_file()
    assert toolchain._read_memory(str(memory))
    cache.chmod(0o777)
    toolchain._read_memory_of.cache_clear()
    assert toolchain._read_memory(str(memory)) == {}
    toolchain._remembered_for.cache_clear()
    assert toolchain.require_host_compiler().version == version


# --- Homes that cannot be used ------------------------------------------------------------------


def circle(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.cache").symlink_to(".cache")
    return tmp_path / "home"


def dangling(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.cache").symlink_to("/nowhere/at/all")
    return tmp_path / "home"


HOMES = {
    "circle of links": (circle, "levels of symbolic links"),
    "dangling link": (dangling, "a link that leads nowhere"),
    "name of 300 characters": (lambda tmp: tmp / ("x" * 300), "File name too long"),
    "path of 5000 characters": (lambda tmp: Path(str(tmp) + "/abcdefghi" * 500), "too long"),
    "path of 3700 characters": (lambda tmp: Path(str(tmp) + "/abcdefghi" * 370), "too long"),
}


@pytest.mark.parametrize("variable", ["HOME", "FLASHINFER_WORKSPACE_BASE"])
@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_unusable_home_falls_back(
    project, tmp_path, monkeypatch, messages, no_remembered_fallback, home, variable
):
    make, reason = home
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE")
    monkeypatch.setenv(variable, str(make(tmp_path)))
    assert project.spec().build_and_load().answer() == 42
    assert project.spec().get_library_path().is_relative_to(no_remembered_fallback)
    (line,) = [m for m in messages if "compiled modules go to" in m]
    assert line.startswith(f"{variable}={os.environ[variable]}: ") and reason in line


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_unsearchable_home_falls_back():
    """As `sudo -u nobody` without -H: HOME lies below a folder that one may not search."""
    with tempfile.TemporaryDirectory(prefix="shared-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        closed, scratch = Path(folder, "closed"), Path(folder, "scratch")
        closed.mkdir(mode=0o700)
        scratch.mkdir()
        scratch.chmod(0o1777)
        code = (
            f"import os, tempfile; tempfile.tempdir = {str(scratch)!r}\n"
            "from flashinfer.jit import places\n"
            f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            f"os.environ['HOME'] = {str(closed / 'me')!r}\n"
            "print(places.writable_base())\n"
        )
        environment = {k: v for k, v in os.environ.items() if k != "FLASHINFER_WORKSPACE_BASE"}
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert done.stdout.strip().startswith(str(scratch)), done.stderr
        assert "Permission denied" in done.stderr


def test_lock_that_is_a_link(project, cache, tmp_path):
    """The file that the link names is not made."""
    spec = project.spec()
    home = places.jit_dir() / "answer"
    home.mkdir(parents=True)
    (home / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(jit.BuildError, match=r"\.lock is a link"):
        spec.build()
    assert not (tmp_path / "victim").exists()
