"""Building: what a user sees, joint builds, flags that reach the compilers, the registries."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from jit_helpers import in_processes

from flashinfer import aot, jit
from flashinfer.jit import cache, places, registry
from flashinfer.jit.config import ModuleConfig
from flashinfer.jit.progress import Progress, compile_seconds


@pytest.fixture
def aot_dir(project, tmp_path, monkeypatch):
    """A folder with the project's module built ahead of time, and an empty cache."""
    folder = tmp_path / "aot"
    aot.compile_and_package_modules(folder, [project.spec()])
    jit.clear_cache_dir()
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(folder))
    return folder


@pytest.fixture
def generator(project, monkeypatch):
    """A generator of two modules, one of which is in a preset."""
    monkeypatch.setattr(registry, "_generators", {})
    monkeypatch.setattr(registry, "_all_generators", lambda: registry._generators)

    @jit.register_generator(
        aot=lambda: ["one", ("two",), {"name": "blackwell", "majors": [10]}],
        presets={"small": lambda: ["one"]},
    )
    def gen_demo_module(name, majors=None):
        flags = jit.current_compilation_context.get_nvcc_flags_list(majors)
        return project.spec(name, extra_cuda_cflags=flags)

    return gen_demo_module


# --- Feedback ---------------------------------------------------------------------------------


def test_long_build_announces_itself(project, script, monkeypatch, messages, tmp_path):
    """The announcement comes while the compiler runs, not after it."""
    finished = tmp_path / "finished"
    order = []

    class Watch(logging.Handler):
        def emit(self, record):
            order.append((record.getMessage(), finished.exists()))

    watch = Watch()
    jit.logger.addHandler(watch)
    launcher = script(f'case "$*" in *" -c "*) sleep 1.5; touch {finished};; esac; exec "$@"\n')
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", launcher)
    project.spec().build()
    jit.logger.removeHandler(watch)
    (start, was_finished), (end, _) = order
    assert not was_finished
    assert start.startswith("Compiling answer for the host into") and ".cache/flashinfer" in start
    assert end.startswith("Compiled answer for the host in ") and end.endswith(" s")


def test_short_build_is_silent(project, messages):
    progress = Progress(["answer"], "sm_90a", project.root)
    progress.tick()
    progress.done(True)
    assert messages == []


def test_time_of_builds_is_summed(project, messages):
    progress = Progress(["answer"], "sm_90a", project.root)
    before = compile_seconds()
    time.sleep(0.02)
    progress.done(False)
    assert compile_seconds() - before >= 0.02
    before = compile_seconds()
    project.spec().build_and_load()
    after = compile_seconds()
    assert after > before
    project.spec().build_and_load()
    assert compile_seconds() == after  # it was there


def test_waiting_is_reported(project, script, monkeypatch, messages):
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script('sleep 1\nexec "$@"\n'))
    (other,) = in_processes(1, project.spec().build)
    home = places.jit_dir() / "answer"
    while not list(home.glob(".build-*")):
        time.sleep(0.01)
    assert project.spec().build_and_load().answer() == 42
    other.join()
    assert messages == ["Waiting for another process that is compiling answer"]


def test_progress_bar_on_a_terminal(project, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    jit.build_jit_specs([project.spec(name) for name in ("one", "two")])
    assert "compiling: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_daemon_without_standard_error_builds(project, monkeypatch, is_closed):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if is_closed else None)
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda error: errors.append(error.exc_value))
    specs = [project.spec("one"), project.spec("two")]
    jit.build_jit_specs(specs)
    assert [spec.try_load().answer() for spec in specs] == [42, 42]
    assert errors == []


def test_logging_level(project, script, monkeypatch, capfd, messages):
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script('sleep 0.3\nexec "$@"\n'))
    monkeypatch.setenv("FLASHINFER_LOGGING_LEVEL", "WARNING")
    project.spec().build()
    assert messages == []
    monkeypatch.setenv("FLASHINFER_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("FLASHINFER_JIT_VERBOSE", "1")
    project.spec("verbose").build()
    assert any(" -c " in message and "answer.cc" in message for message in messages)
    messages.clear()
    for _ in range(2):
        jit.logger.warning_once("only %s", "once")
    assert messages == ["only once"]


# --- What is built ----------------------------------------------------------------------------


@pytest.mark.compiler
def test_flags_reach_the_compilers(project, monkeypatch):
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-DHOST='a b'")
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "-DCUDA=$HOME")
    monkeypatch.setenv("FLASHINFER_EXTRA_LDFLAGS", "-Wl,-O1")
    monkeypatch.setenv("FLASHINFER_NVCC_THREADS", "2")
    monkeypatch.setenv("FLASHINFER_NVCC_LAUNCHER", "env A='1 2'")
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", "env")
    monkeypatch.setenv("FLASHINFER_JIT_LINEINFO", "1")
    spec = project.cuda_spec(
        extra_cuda_cflags_by_source={project.root / "store.cu": ["-DONLY_STORE"]},
        use_fast_math=True,
    )
    host, cuda = (entry["command"] for entry in spec.get_compile_commands())
    assert host.startswith("env /") and cuda.startswith("env 'A=1 2' /")
    assert "'-DHOST=a b'" in host and "-DCUDA" not in host
    for flag in ("'-DCUDA=$HOME'", "--threads=2", "-lineinfo", "-use_fast_math", "-DONLY_STORE"):
        assert flag in cuda
    assert cuda.count("-gencode") == 1 and "libcuda.so" not in cuda
    text = spec.write_ninja().read_text()
    assert "-Wl,-O1" in text and "-lcuda " not in text and "stubs" not in text
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "")
    assert spec.build_and_load().answer() == 42
    monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "1")
    host, cuda = (entry["command"] for entry in spec.get_compile_commands())
    assert "-O0" in host and "-G" in cuda.split() and "-lineinfo" not in cuda


@pytest.mark.compiler
def test_targets_of_a_module_replace_the_default(project, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a 12.0f")
    assert project.cuda_spec().identity().archs == ("80", "90a", "120f")
    flags = jit.current_compilation_context.get_nvcc_flags_list([9])
    spec = project.cuda_spec(extra_cuda_cflags=flags)
    assert spec.identity().archs == ("90a",)
    (cuda,) = [e["command"] for e in spec.get_compile_commands() if e["file"].endswith(".cu")]
    assert cuda.count("gencode") == 1 and "sm_90a" in cuda


@pytest.mark.compiler
def test_device_linking(project):
    project.write("store.cu", "__device__ int f();\n__global__ void store(int* p) { *p = f(); }\n")
    project.write("other.cu", "__device__ int f() { return 1; }\n")
    spec = project.spec("linked", ("answer.cc", "store.cu", "other.cu"), needs_device_linking=True)
    assert spec.build_and_load().answer() == 42


@pytest.mark.parametrize("variable", ["FLASHINFER_WORKSPACE_BASE", "HOME"])
def test_relative_paths(project, monkeypatch, tmp_path, variable):
    """They are the caller's; compilers run in folders of their own. Any name will do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE")
    monkeypatch.setenv(variable, "some $where: here")
    relative = Path("project/include")
    specs = [project.spec(name, extra_include_paths=[relative]) for name in ("one", "two")]
    jit.build_jit_specs(specs)
    monkeypatch.chdir("/")
    monkeypatch.setenv(variable, str(tmp_path / "some $where: here"))
    assert [spec.try_load().answer() for spec in specs] == [42, 42]


def test_same_file_name_in_two_folders(project):
    project.write("a/part.cc", "int a() { return 1; }\n")
    project.write("b/part.cc", "int b() { return 2; }\n")
    spec = project.spec(sources=("answer.cc", "a/part.cc", "b/part.cc"))
    assert spec.build_and_load().answer() == 42


def test_post_load_adapter(project):
    spec = project.spec(post_load_adapter=lambda module: module.answer)
    assert spec.build_and_load()() == 42 and spec.try_load()() == 42


# --- Registries and ahead-of-time builds ------------------------------------------------------


def test_spec_registry(project):
    specs = jit.JitSpecRegistry()
    specs.register(project.spec("one"))
    specs.register(project.spec("two"))
    specs.get_all_specs()["one"].build()
    assert [(s.name, s.is_compiled) for s in specs.get_all_statuses()] == [
        ("one", True),
        ("two", False),
    ]
    assert specs.get_spec_status("one").library_path.is_file()
    assert specs.get_spec_status("nothing") is None
    assert specs.get_stats() == {"total": 2, "compiled": 1, "not_compiled": 1}
    assert jit.jit_spec_registry.get_spec_status("two") is not None


def test_generators(generator):
    assert [spec.name for spec in registry.aot_specs()] == ["one", "two"]  # target is sm_90a
    assert registry.preset_names() == ["small"]
    assert [spec.name for spec in registry.preset_specs("small")] == ["one"]
    with pytest.raises(ValueError, match="preset 'big' does not exist; there are: small"):
        registry.preset_specs("big")


def test_a_configuration_names_the_targets_of_its_kernels(project, monkeypatch, generator):
    """Targets that its kernels are not written for are left out, and so are whole modules."""

    @dataclasses.dataclass(frozen=True)
    class TensorCoreConfig(ModuleConfig):
        module: ClassVar[str] = "demo"
        supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9)

    spec = project.cuda_spec(config=TensorCoreConfig())
    jit.register_generator(aot=lambda: [spec])(lambda spec: spec)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "7.5 8.0 9.0a")
    targets = re.findall(r"code=(sm_\w+)", spec.write_ninja().read_text())
    assert set(targets) == {"sm_80", "sm_90a"}
    assert spec in registry.aot_specs()
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "7.5")
    assert spec not in registry.aot_specs()
    with pytest.raises(RuntimeError, match=r"major versions \[8, 9\].*\['7.5'\]"):
        spec.build()


def test_every_generator_is_in_a_preset_and_in_the_table():
    """`flashinfer build <preset>` reaches each operation; the cases are among those of the AOT."""
    shipped = {spec.name for spec in registry.aot_specs()}
    # Generators of the package: examples register theirs in the same process.
    generators = registry.generators().values()
    ours = [g for g in generators if g.function.__module__.startswith("flashinfer.")]
    assert ours and [g.name for g in ours if not g.presets] == []
    table = (Path(jit.__file__).parents[2] / "docs/architecture.md").read_text()
    for preset in registry.preset_names():
        assert f"| `{preset}` |" in table
        specs = registry.preset_specs(preset)
        assert {spec.name for spec in specs if not spec.uses_cute_dsl} <= shipped


def test_own_generators_have_cases_and_unique_names():
    found = registry.generators()
    assert found
    for generator in found.values():
        specs = list(generator.specs())
        assert specs and len({spec.name for spec in specs}) == len(specs)
        assert all(os.path.isfile(source) for spec in specs for source in spec.sources)


def test_aot_folder_is_used(project, aot_dir, compile_count, monkeypatch, tmp_path):
    spec = project.spec()
    assert spec.get_library_path().is_relative_to(aot_dir)
    moved = aot_dir.rename(tmp_path / "moved")
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(moved))
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 0


def test_aot_reuses_what_is_prebuilt(project, aot_dir, compile_count, tmp_path):
    for folder in (tmp_path / "again", aot_dir):  # the second onto itself
        aot.compile_and_package_modules(folder, [project.spec()])
        assert len(list(folder.rglob("manifest.json"))) == 1
    assert compile_count() == 0
    assert project.spec().build_and_load().answer() == 42


def test_aot_of_other_sources_is_not_used(project, aot_dir, compile_count):
    (project.root / "include/deeper.h").write_text("#define MORE 3\n")
    assert project.spec().build_and_load().answer() == 43
    assert compile_count() == 1


def test_aot_of_another_version(project, aot_dir, monkeypatch):
    (manifest,) = aot_dir.rglob("manifest.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "version": "0.0.1"}))
    with pytest.raises(RuntimeError, match="is of FlashInfer 0.0.1, this is .*\n.*VERSION_CHECK"):
        project.spec().build_and_load()
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    assert project.spec().get_library_path().is_relative_to(aot_dir)


def test_jit_cache_package_is_used(project, aot_dir, monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHINFER_AOT_DIR")
    package = tmp_path / "site" / "flashinfer_jit_cache"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    aot_dir.rename(package / "jit_cache")
    monkeypatch.syspath_prepend(str(package.parent))
    places.jit_cache_package.cache_clear()
    assert project.spec().get_library_path().is_relative_to(package)
    places.jit_cache_package.cache_clear()


@pytest.mark.parametrize(
    ("built", "wanted", "fits"),
    [
        ("90a", "90a", True),
        ("90", "90a", False),
        ("120f", "120a", True),
        ("120f", "121a", True),
        ("121f", "120a", False),
        ("100f", "120a", False),
        ("100f", "103a", True),
        ("80", "86", False),
    ],
)
def test_which_prebuilt_targets_fit(built, wanted, fits):
    assert cache.covers(built, wanted) is fits


def test_aot_command(generator, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "out"
    assert aot.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == ["one", "two"]
    assert aot.main(["--out-dir", str(folder), "t*"]) == 0
    assert [path.name for path in folder.iterdir()] == ["two"]
    assert len(list((folder / "two").iterdir())) == 1
    assert aot.main(["--out-dir", str(folder), "--preset", "small"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    capsys.readouterr()
    assert aot.main(["--out-dir", str(folder), "nothing*"]) == 1
    assert "no module matches" in capsys.readouterr().err
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    monkeypatch.setattr("flashinfer.compilation_context._detect", lambda visible: frozenset())
    assert aot.main(["--out-dir", str(folder)]) == 1
    assert "set FLASHINFER_CUDA_ARCH_LIST" in capsys.readouterr().err
