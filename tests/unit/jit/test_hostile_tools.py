"""Compilers and settings that are broken: one message that names the variable and its value."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from jit_helpers import HOST_SOURCE, in_processes

from flashinfer import jit
from flashinfer.compilation_context import parse_arch_list
from flashinfer.jit import errors, places, toolchain
from flashinfer.jit.fingerprint import reached_files

needs_nvcc = pytest.mark.compiler


@pytest.fixture(autouse=True)
def forget_answers():
    toolchain._remembered_for.cache_clear()
    toolchain._silent.clear()


# --- Settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (" ", "it is blank"),
        ("'x", "No closing quotation"),
        ("g++ -m64", "-m64 is a flag"),
        ("/nonexistent", "is not a program that can be run"),
    ],
)
def test_bad_cxx(project, monkeypatch, value, why):
    monkeypatch.setenv("CXX", value)
    with pytest.raises(jit.ToolchainError) as caught:
        project.spec().build()
    text = str(caught.value)
    assert f"CXX={value!r}" in text and why in text and "hint: " in text


def test_bad_cxx_does_not_matter_to_what_is_cached(project, monkeypatch):
    project.spec().build()
    monkeypatch.setenv("CXX", "'x")
    assert project.spec().build_and_load().answer() == 42


def test_base_of_a_user_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "~nosuchuser/x")
    message = "FLASHINFER_WORKSPACE_BASE='~nosuchuser/x'.*expected path.*no user ~nosuchuser"
    with pytest.raises(ValueError, match=message):
        places.base_dir()


def test_relative_base_in_a_removed_folder(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "cache")
    with pytest.raises(ValueError, match="FLASHINFER_WORKSPACE_BASE='cache'.*was removed"):
        places.base_dir()


@pytest.mark.parametrize("text", ["9.9", "9.9a", "13.0", "8.0a", "9.0f", "8.0 10.4a"])
def test_architecture_that_does_not_exist(text):
    with pytest.raises(ValueError, match=r"FLASHINFER_CUDA_ARCH_LIST=.*there is no.*7\.5, 8\.0"):
        parse_arch_list(text)


def test_architectures_that_exist():
    assert parse_arch_list("7.5 9.0 9.0a 10.0f 10.7a 12.1a")[-1] == (12, "1a")


# --- Programs -----------------------------------------------------------------------------------

ANSWERS = 'case "$*" in *--version*) echo "release 13.0, V13.0.88";; *) %s;; esac\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("printf '\\377\\376 V\\n'", "is not nvcc"),
        (ANSWERS % """printf '#$ INCLUDES="open\\n'""", "cannot be read (No closing quotation)"),
        ("exec /nowhere", "returned 127"),
    ],
    ids=["bytes", "dryrun", "missing"],
)
def test_strange_nvcc(project, script, monkeypatch, text, expected):
    monkeypatch.setenv("FLASHINFER_NVCC", script(text + "\n"))
    with pytest.raises(jit.ToolchainError) as caught:
        project.cuda_spec().build()
    assert expected in str(caught.value) and "hint: " in str(caught.value)


def test_nvcc_that_hangs_is_asked_once(project, script, monkeypatch, tmp_path):
    nvcc = script(f"echo x >> {tmp_path}/asked\nsleep 1000\n")
    monkeypatch.setenv("FLASHINFER_NVCC", nvcc)
    monkeypatch.setenv("FLASHINFER_TOOLCHAIN_TIMEOUT", "0.5")
    message = "nvcc hangs: .*no answer within 0.5 s.*\n.*FLASHINFER_TOOLCHAIN_TIMEOUT"
    with pytest.raises(jit.ToolchainError, match=message):
        project.cuda_spec().build_and_load()
    assert (tmp_path / "asked").read_text().split() == ["x"]


def test_compiler_that_hangs_is_ended(project, script, monkeypatch, tmp_path):
    """Even one that does not obey SIGTERM; nothing is left running."""
    launcher = script(f"trap '' TERM\necho $$ > {tmp_path}/pid\nsleep 1000\n")
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", launcher)
    monkeypatch.setenv("FLASHINFER_BUILD_TIMEOUT", "1")
    with pytest.raises(jit.BuildError, match="a compiler hangs: no step .* within 1 s") as caught:
        project.spec().build()
    assert "FLASHINFER_BUILD_TIMEOUT" in str(caught.value)
    pid = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        time.sleep(0.01)  # until the test's own time limit


def test_processes_that_wait_share_a_failure(project, compile_count, tmp_path):
    """One compiles, all get its error; who asks later compiles again."""
    project.write("answer.cc", "int broken( {\n#include <answer.h>\n")
    spec = project.spec()
    launcher = os.environ["FLASHINFER_CXX_LAUNCHER"]
    Path(launcher).write_text(Path(launcher).read_text().replace("exec", "sleep 1\nexec"))

    def fail():
        try:
            spec.build()
        except jit.BuildError as error:
            (tmp_path / f"error{os.getpid()}").write_text(str(error))

    for process in in_processes(8, fail):
        process.join()
    found = [path.read_text() for path in tmp_path.glob("error*")]
    assert len(found) == 8
    assert all("broken" in text and "hint: the source" in text for text in found)
    assert sum("Another process compiled this" in text for text in found) == 7
    assert compile_count() == 1
    fail()
    assert compile_count() == 2


def test_crash_of_a_compiler_is_named(project, script, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script("kill -SEGV $$\n"))
    with pytest.raises(jit.BuildError, match="hint: a compiler crashed"):
        project.spec().build()


def test_compiler_that_writes_nothing_is_named(project, script, monkeypatch):
    nothing = 'case " $* " in *" -c "*) exit 0;; esac\nexec "$@"\n'
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", script(nothing))
    with pytest.raises(jit.BuildError, match=r"first error: .*answer\.o") as caught:
        project.spec().build()
    assert "hint: a compiler ended well but wrote no object file" in str(caught.value)


def test_full_scratch_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    output = "nvcc fatal   : Failed to preprocess host compiler properties."
    assert "TMPDIR" not in errors.remedy(output)
    monkeypatch.setattr(errors, "_SCRATCH_BYTES", 1 << 62)
    assert f"TMPDIR={tmp_path} has only" in errors.remedy(output)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    assert f"TMPDIR={tmp_path}/gone cannot be used (No such file" in errors.remedy(output)


def test_file_that_grows_too_large(project):
    command = ["bash", "-c", "ulimit -f 1; head -c 9999 /dev/zero > big"]
    output = subprocess.run(command, cwd=project.root, capture_output=True, text=True).stderr
    assert "ulimit -f" in errors.remedy(output)


def test_name_that_is_too_long_in_bytes(project):
    with pytest.raises(ValueError, match="1 to 200 bytes"):
        project.spec("\u00e9" * 150)


def test_clearing_beside_builders_is_harmless(project, compile_count):
    """Builders are not disturbed, and what they publish can be loaded."""
    specs = [project.spec(f"answer{i}") for i in range(3)]

    def build(spec):
        for i in range(4):
            again = project.spec(spec.name, extra_cflags=[f"-DROUND={i}"])
            assert again.build_and_load().answer() == 42

    processes = [p for spec in specs for p in in_processes(1, lambda spec=spec: build(spec))]
    clears = 0
    while any(process.is_alive() for process in processes):
        jit.clear_cache_dir()
        clears += 1
        time.sleep(0.01)
    assert [process.exitcode for process in processes] == [0] * 3
    assert clears > 10


# --- Spellings of #include ----------------------------------------------------------------------

USES_V = HOST_SOURCE.replace("= ANSWER", "= V").replace("#include <answer.h>", "")
SPELLINGS = [
    '#include/**/"v.h"', '#inc\\\nlude "v.h"', '%:include "v.h"', '/**/ #include "v.h"',
    '/* a\n b */ # /* c\n */ include /* d */ "v.h"', '#include\\\n "v.h"', '#import "v.h"',
    '\ufeff#include "v.h"', '#\tinclude\t<v.h>', "#include \\ \n<v.h>",
]  # fmt: skip


@pytest.mark.parametrize("line", SPELLINGS)
def test_every_spelling_of_an_include_is_followed(project, line):
    header = project.write("include/v.h", "#define V 42\n")
    project.write("answer.cc", f"{line}\n{USES_V}")
    spec = project.spec()
    assert str(header) in spec.reached().stamps
    before = spec.fingerprint
    header.write_text("#define V 43\n")
    assert spec.fingerprint != before


def test_unusual_spelling_rebuilds(project):
    header = project.write("include/v.h", "#define V 42\n")
    project.write("answer.cc", f"/**/ %:inc\\\nlude/**/<v.h>\n{USES_V}")
    assert project.spec().build_and_load().answer() == 42
    header.write_text("#define V 43\n")
    assert project.spec().build_and_load().answer() == 43


def test_include_that_cannot_be_followed_is_refused(project):
    project.write("answer.cc", "#define W <v.h>\n%:include/**/W\n")
    with pytest.raises(jit.JitError, match="`#include W` cannot be followed"):
        project.spec().identity()


@pytest.mark.parametrize("line", ['// #include "no.h"', 'const char* s = "#include <no.h>";'])
def test_what_is_no_directive_is_not_followed(project, line):
    source = project.write("plain.cc", line + "\n")
    assert reached_files([source], [], {}).external == []


def test_edit_of_the_same_size_and_time_is_seen(project):
    header = project.root / "include/deeper.h"
    times = header.stat().st_mtime_ns
    before = project.spec().fingerprint
    header.write_text("#define MORE 3\n")
    os.utime(header, ns=(times, times))
    assert project.spec().fingerprint != before


# --- Paths --------------------------------------------------------------------------------------

AWKWARD = [
    """a,b'c$d"e""",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("a;b", "a&b", "a(b", "a\\b", "a b")),
]


@needs_nvcc
@pytest.mark.parametrize("name", AWKWARD)
def test_sources_headers_and_cache_in_an_awkward_folder(project, tmp_path, monkeypatch, name):
    place = tmp_path / name
    project.root.rename(place)
    project.root = place
    project.write("store.cu", '#include <deeper.h>\n#include "beside.h"\n__global__ void f() {}\n')
    project.write("beside.h", "#if MORE != 2\n#error\n#endif\n")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(place / "cache"))
    jit.build_jit_specs([project.cuda_spec("one"), project.cuda_spec("two")])
    assert project.cuda_spec("two").load().answer() == 42
    entry = project.cuda_spec("two").get_library_path().parent
    assert {path.name for path in entry.iterdir()} == {
        "two.so", "manifest.json", "build.log", "build.ninja", "part.ninja",
    }  # fmt: skip
    assert json.loads((entry / "manifest.json").read_text())["library"] == "two.so"


@needs_nvcc
def test_folder_and_file_that_nvcc_cannot_take(project, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "a`b"))
    with pytest.raises(jit.ToolchainError, match="a backtick in it"):
        project.cuda_spec().build()
    with pytest.raises(ValueError, match="nvcc cannot read a file with ','"):
        project.spec(sources=("answer.cc", "a,b.cu"))
