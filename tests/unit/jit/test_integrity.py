"""Damaged modules are not loaded: they are built again, or passed over where prebuilt."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from jit_helpers import make_project

from flashinfer import aot, jit
from flashinfer.cli import main
from flashinfer.jit import cache as modules
from flashinfer.jit import publish, sealed, toolchain


def flip(path: Path, old: bytes = b"", new: bytes = b"") -> None:
    """Replace a file by one that differs in a few bits; processes that mapped it keep the old."""
    data = bytearray(path.read_bytes())
    place = data.find(old) if old else len(data) // 2
    assert place >= 0
    if old:
        data[place : place + len(old)] = new
    else:
        data[place] ^= 1
    scratch = path.with_name("scratch")
    scratch.write_bytes(data)
    os.replace(scratch, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, cut, zero, remove])
def test_damaged_library_is_built_again(project, compile_count, damage):
    spec = project.spec()
    spec.build()
    damage(spec.get_library_path())
    assert not spec.is_built()
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 2
    assert spec.is_built()


def test_changed_code_does_not_run(project, tmp_path):
    """The library of another module in its place, of which the manifest has even the size."""
    other = make_project(tmp_path / "other")
    other.write("include/deeper.h", "#define MORE 3\n")
    other.spec().build()
    wrong = other.spec().get_library_path().read_bytes()
    spec = project.spec()
    spec.build()
    library = spec.get_library_path()
    manifest = library.parent / modules.MANIFEST
    content = json.loads(manifest.read_text())
    library.write_bytes(wrong)
    manifest.write_text(json.dumps({**content, "library_size": len(wrong)}))
    assert spec.build_and_load().answer() == 42


NESTED = "[" * 100_000 + "]" * 100_000
MANIFESTS = {
    "empty": "",
    "list": "[]",
    "nested": NESTED,
    "no date": lambda m: {k: v for k, v in m.items() if k != "created"},
    "absolute library": lambda m: {**m, "library": "/etc/passwd", "library_size": 1},
    "other targets": lambda m: {**m, "archs": ["80"]},
    "size is text": lambda m: {**m, "library_size": "big"},
    "no hash": lambda m: {k: v for k, v in m.items() if k != "library_sha256"},
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_damaged_manifest(project, compile_count, change):
    spec = project.spec()
    spec.build()
    manifest = spec.get_library_path().parent / modules.MANIFEST
    text = (
        change if isinstance(change, str) else json.dumps(change(json.loads(manifest.read_text())))
    )
    manifest.write_text(text)
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 2


@pytest.mark.parametrize("damage", [flip, zero])
def test_damaged_prebuilt_module_is_passed_over(project, tmp_path, monkeypatch, messages, damage):
    spec = project.spec()
    aot.compile_and_package_modules(tmp_path / "aot", [spec])
    jit.clear_cache_dir()
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))
    prebuilt = spec.get_library_path()
    assert prebuilt.is_relative_to(tmp_path / "aot")
    damage(prebuilt)
    assert spec.build_and_load().answer() == 42
    assert not spec.get_library_path().is_relative_to(tmp_path / "aot")
    assert any(
        "passed over" in m and "SHA-256" in m and str(tmp_path / "aot") in m for m in messages
    )


def test_library_is_read_once_in_a_process(project, monkeypatch):
    spec = project.spec()
    spec.build()
    library = spec.get_library_path()
    os.utime(library, (1, 1))
    monkeypatch.setattr(modules.files, "has_settled", lambda status: True)
    modules.files._hashes.clear()
    opened = []
    real = open
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *a, **k: (
            (opened.append(path) if path == library else None) or real(path, *a, **k)
        ),
    )
    for _ in range(3):
        assert spec.build_and_load().answer() == 42
    assert opened.count(library) == 1


@pytest.mark.parametrize("damage", [flip, cut, halve, remove])
def test_a_library_that_changes_after_the_check(project, monkeypatch, compile_count, damage):
    """The system loads what was checked: a file cut short would end the process with SIGBUS."""
    spec = project.spec()
    spec.build()
    real = sealed._load_descriptor

    def load(descriptor):
        damage(spec.get_library_path())
        return real(descriptor)

    monkeypatch.setattr(sealed, "_load_descriptor", load)
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 1


def test_a_library_that_changes_in_place_while_it_is_mapped(project):
    spec = project.spec()
    module = spec.build_and_load()
    zero(spec.get_library_path())
    assert module.answer() == 42
    os.truncate(spec.get_library_path(), 0)
    assert module.answer() == 42


def test_a_sealed_copy_cannot_be_changed(project, monkeypatch):
    spec = project.spec()
    spec.build()
    refused = []

    def load(descriptor):
        for change in (lambda: os.truncate(descriptor, 0), lambda: os.pwrite(descriptor, b"x", 0)):
            with pytest.raises(PermissionError):
                change()
            refused.append(change)

    monkeypatch.setattr(sealed, "_load_descriptor", load)
    assert spec.build_and_load().answer() == 42  # None: so from the file
    assert len(refused) == 2


def test_loading_shares_modules_and_keeps_one_descriptor(project):
    """Two modules whose copies had the same descriptor are two libraries."""
    first = project.spec()
    second = project.spec("other", extra_cflags=["-DMORE=3"])
    second.sources[0].parent.joinpath("include/deeper.h").write_text(
        "#ifndef MORE\n#define MORE 2\n#endif\n"
    )
    jit.build_jit_specs([first, second])
    module = first.build_and_load()
    before = len(os.listdir("/proc/self/fd"))
    modules_ = module, second.build_and_load()
    assert [module.answer() for module in modules_] == [42, 43]
    assert len(os.listdir("/proc/self/fd")) == before
    assert project.spec().build_and_load().same_as(modules_[0])
    names = Path("/proc/self/maps").read_text()
    assert "/memfd:answer.so" in names and "/memfd:other.so" in names


READS_ITSELF = """
#include <dlfcn.h>
#include <cstdio>
static long own_size() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&own_size), &info) == 0) return -1;
  std::FILE* file = std::fopen(info.dli_fname, "rb");
  if (file == nullptr) return -2;
  std::fseek(file, 0, SEEK_END);
  const long size = std::ftell(file);
  std::fclose(file);
  return size;
}
static const long size_at_start = own_size();
#define ANSWER size_at_start
"""


def test_a_library_can_read_itself_while_it_is_loaded(project):
    """As a host part does, whose cubins stand after it in its file."""
    project.write("include/answer.h", READS_ITSELF)
    spec = project.spec()
    module = spec.build_and_load()
    assert module.answer() == spec.get_library_path().stat().st_size


def from_file(monkeypatch, how: str) -> None:
    """Let modules be loaded from their files: as on a system without sealed copies."""
    if how == "no memfd":
        monkeypatch.delattr(os, "memfd_create")
    elif how == "old TVM-FFI":
        monkeypatch.setattr(sealed, "_LOADER", "no such loader")
    elif how == "forbidden":
        monkeypatch.setattr(sealed, "_name_of", lambda descriptor: "/no such file")
    else:
        monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "1")


@pytest.mark.parametrize("how", ["no memfd", "old TVM-FFI", "forbidden", "debug"])
def test_loading_from_the_file(project, monkeypatch, how):
    from_file(monkeypatch, how)
    spec = project.spec()
    assert spec.build_and_load().answer() == 42
    assert f" {spec.get_library_path()}\n" in Path("/proc/self/maps").read_text()
    flip(spec.get_library_path())
    assert spec.try_load() is None
    assert spec.build_and_load().answer() == 42


def test_a_file_that_changes_while_it_is_loaded(project, monkeypatch, compile_count):
    """What was verified is not what the system loaded: the module is built and loaded again."""
    import tvm_ffi

    from_file(monkeypatch, "no memfd")
    spec = project.spec()
    spec.build()
    real, done = tvm_ffi.load_module, []

    def load(path):
        if not done:
            done.append(flip(Path(path)))
        return real(path)

    monkeypatch.setattr(tvm_ffi, "load_module", load)
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 2


def test_a_file_that_is_missing_for_a_moment(project, monkeypatch, compile_count):
    """Somebody removed it before the system opened it, and a builder has put it back since."""
    from_file(monkeypatch, "no memfd")
    project.spec().build()
    count = compile_count()
    import tvm_ffi

    real, calls = tvm_ffi.load_module, []

    def load(path):
        calls.append(path)
        if len(calls) == 1:
            raise RuntimeError("cannot open shared object file: No such file or directory")
        return real(path)

    monkeypatch.setattr(tvm_ffi, "load_module", load)
    assert project.spec().build_and_load().answer() == 42
    assert len(calls) == 2 and compile_count() == count


def test_a_library_that_the_system_cannot_load(project):
    """It is what was published: the error names its file, and what the system says of that."""
    project.write("include/answer.h", 'extern "C" int missing();\n#define ANSWER missing()\n')
    spec = project.spec("lame", extra_ldflags=["-Wl,-z,undefs", "-Wl,-z,now"])
    spec.build()
    path = re.escape(str(spec.get_library_path()))
    with pytest.raises(jit.JitError, match=f"(?s){path} cannot be loaded: .*{path}.*missing"):
        spec.build_and_load()


@pytest.mark.parametrize(
    "content",
    ["x", "[]", NESTED, '{"P": []}', '{"P": {"format": 3, "kind": "c++"}}'],
    ids=["text", "list", "nested", "no record", "half a record"],  # compilers inherit a test's name
)
def test_damaged_memory_of_the_toolchain(project, content):
    toolchain._remembered_for.cache_clear()
    program = toolchain.require_host_compiler().path
    toolchain._memory_file().write_text(content.replace("P", program))
    toolchain._remembered_for.cache_clear()
    assert toolchain.require_host_compiler().path == program
    assert project.spec().build_and_load().answer() == 42


def test_changed_memory_of_the_toolchain_is_not_believed(project):
    toolchain._remembered_for.cache_clear()
    version = toolchain.require_host_compiler().version
    flip(toolchain._memory_file(), version[:8].encode(), b"vershoon"[: len(version[:8])])
    toolchain._remembered_for.cache_clear()
    assert toolchain.require_host_compiler().version == version


def test_hint_names_no_folder_to_remove(project, tmp_path):
    """A file that the user names need not be of the cache."""
    file = tmp_path / "file.so"
    file.write_text("no library")
    with pytest.raises(jit.JitError, match="cannot be loaded") as caught:
        project.spec().load(file)
    assert "remove" not in str(caught.value)


def test_published_modules_are_on_the_disk(project, monkeypatch):
    """Library, manifest and their folder before the rename, the folder of names after it."""
    synced = []
    monkeypatch.setattr(publish.files, "sync", lambda path: synced.append(path.name))
    spec = project.spec()
    spec.build()
    assert synced[:2] == ["answer.so", "manifest.json"]
    assert synced[2].startswith(".build-") and synced[3:] == ["answer"]


def test_verify_command(project, tmp_path, monkeypatch):
    spec, other = project.spec(), project.spec("other")
    aot.compile_and_package_modules(tmp_path / "aot", [other])
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))
    spec.build()
    done = CliRunner().invoke(main, ["module-status", "--verify"])
    assert (done.exit_code, done.output) == (0, "3 modules verified, 0 damaged.\n")
    flip(spec.get_library_path())
    flip(other.get_library_path())
    done = CliRunner().invoke(main, ["module-status", "--verify", "--json"])
    report = json.loads(done.output)
    assert done.exit_code == 4 and report["verified"] == 3 and len(report["damaged"]) == 2
    assert all("SHA-256" in fault for fault in report["damaged"].values())
    done = CliRunner().invoke(main, ["module-status", "--verify", "--filter", "other"])
    assert "2 modules verified, 1 damaged." in done.output
