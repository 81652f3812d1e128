"""The command line: what scripts rely on (exit codes, JSON) and what people read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click import Context
from click.testing import CliRunner, Result

from flashinfer.cli import cold_build, main
from flashinfer.jit import JitSpec, current_compilation_context, registry
from flashinfer.reference_backend import reference_backend

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "version.txt").read_text().strip()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, for sm_90a; the targets are as before afterwards."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    yield tmp_path / ".cache" / "flashinfer"
    current_compilation_context.reset()


def flashinfer(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=input)


def test_every_command_has_help(cache: Path):
    expected = {"build", "clear-cache", "collect-env", "export-compile-commands", "list-modules"}
    expected |= {
        "build-host-parts",
        "compare-compilers",
        "compare-sass",
        "module-status",
        "new-op",
        "replay",
    }
    expected |= {"show-config", "version"}
    expected |= {"build-cubins", "clear-cubin", "download-cubin", "list-cubins"}
    expected |= {"download-kernels", "install-cubin-wheel", "install-jit-cache-wheel"}
    assert set(main.list_commands(Context(main))) == expected
    for name in expected:
        result = flashinfer(name, "--help")
        assert result.exit_code == 0 and len(result.output) > 60


def test_scripts_that_fetch_cubins_go_on(cache: Path):
    for name in ("clear-cubin", "download-cubin", "list-cubins"):
        result = flashinfer(name)
        assert result.exit_code == 0 and not (cache / "cubins").exists()


def test_runs_as_a_module():
    command = [sys.executable, "-m", "flashinfer", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out == f"flashinfer {VERSION}\n"


def test_version_names_the_commit():
    result = flashinfer("version")
    assert result.exit_code == 0
    assert result.output.startswith(f"{VERSION} (")


def test_unknown_command_is_wrong_usage():
    assert flashinfer("no-such-command").exit_code == 2


def test_collect_env_json(cache: Path):
    report = json.loads(flashinfer("collect-env", "--json").output)
    sections = "flashinfer system packages gpu toolchain cache variables"
    assert list(report) == sections.split()
    assert report["flashinfer"]["version"] == VERSION
    assert report["toolchain"]["targets"] == "9.0a"
    assert report["variables"]["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
    assert report["cache"]["base"] == str(cache.parents[1])
    assert "HOME" not in report["variables"]


def test_collect_env_table(cache: Path):
    output = flashinfer("collect-env").output
    assert "apache-tvm-ffi" in output and "targets" in output


def test_show_config_tells_set_from_default(cache: Path):
    rows = [line.split() for line in flashinfer("show-config").output.splitlines()]
    origin = {row[0]: row[-1] for row in rows if row and row[0].startswith("FLASHINFER_")}
    assert origin["FLASHINFER_CUDA_ARCH_LIST"] == "set"
    assert origin["FLASHINFER_DISABLE_JIT"] == "default"


def test_list_modules_agrees_with_the_registry():
    listed = json.loads(flashinfer("list-modules", "--json").output)
    assert [row["generator"] for row in listed] == list(registry.generators())
    names = [name for row in listed for name in row["modules"]]
    assert names == [spec.name for spec in registry.aot_specs()]
    assert "gen_norm_module" in flashinfer("list-modules").output


def test_module_status_of_an_empty_cache(cache: Path):
    result = flashinfer("module-status", "--json")
    assert result.exit_code == 0
    status = json.loads(result.output)
    assert status == [{"name": s.name, "built": False} for s in registry.aot_specs()]
    assert flashinfer("module-status", "--check").exit_code == 3
    assert "0 of " in flashinfer("module-status").output


def test_module_status_filter(cache: Path):
    names = {row["name"] for row in json.loads(flashinfer("module-status", "--json").output)}
    kept = {
        "norm_dtype_f16_*": {name for name in names if name.startswith("norm_dtype_f16_")},
        "silu": {name for name in names if "silu" in name},
    }
    for pattern, expected in kept.items():
        found = json.loads(flashinfer("module-status", "--json", "--filter", pattern).output)
        assert expected and {row["name"] for row in found} == expected
    # Nothing matched, so nothing is built: a script must not take a typing error for a yes.
    assert flashinfer("module-status", "--filter", "nothing", "--check").exit_code == 3


def test_no_target_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    current_compilation_context.reset()
    for command in (["build", "llama-bf16"], ["module-status"]):
        result = flashinfer(*command)
        assert result.exit_code == 1
        assert "set FLASHINFER_CUDA_ARCH_LIST" in result.output
        assert "Traceback" not in result.output


def test_bad_arch_is_wrong_usage(cache: Path):
    result = flashinfer("build", "llama-bf16", "--arch", "hopper")
    assert result.exit_code == 2 and "hopper" in result.output


def test_build_of_nothing_known_says_what_there_is(cache: Path):
    result = flashinfer("build", "no-such-thing")
    assert result.exit_code == 1
    assert "llama-bf16" in result.output and "gen_norm_module" in result.output


def test_a_module_with_the_name_of_a_preset_is_compared_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(JitSpec, "build_and_load", lambda self: None)
    monkeypatch.setattr(JitSpec, "get_library_path", lambda self: Path(f"{self.name}.so"))
    cold_build.main(["speculative"])
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == [
        "speculative"
    ]


@pytest.mark.compiler
def test_build_status_clear(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """A module through its life: built once, found again, described, removed."""
    name = "act_and_mul_activation_silu_dtype_bf16"
    first = flashinfer("build", name)
    assert first.exit_code == 0, first.output
    assert "1 modules to build, 0 are there already" in first.output
    assert "0 modules to build, 1 are there already" in flashinfer("build", name).output

    result = flashinfer("module-status", "--filter", name, "--check", "--json", "--detailed")
    assert result.exit_code == 0
    (status,) = json.loads(result.output)
    assert status["built"] and status["archs"] == "sm_90a"
    library = Path(status["library"])
    assert library.is_relative_to(cache) and library.stat().st_size == status["bytes"]
    assert {k["arch"] for k in status["kernels"]} == {"sm_90a"}
    assert {k["stack_bytes"] for k in status["kernels"]} == {0}
    assert "registers" in flashinfer("module-status", "--filter", name, "--detailed").output

    with monkeypatch.context() as patch:
        patch.setattr("flashinfer.cli.cache.is_asked", lambda: True)
        refused = flashinfer("clear-cache", input="n\n")
        assert refused.exit_code == 1 and library.exists()
    assert "1 modules" in flashinfer("clear-cache").output  # where there is no terminal
    assert not library.exists()
    assert "nothing to remove" in flashinfer("clear-cache", "--yes").output


@pytest.mark.compiler
def test_export_compile_commands(cache: Path, tmp_path: Path):
    out = tmp_path / "compile_commands.json"
    assert flashinfer("export-compile-commands", str(out)).exit_code == 0
    commands = json.loads(out.read_text())
    files = {command["file"] for command in commands}
    sources = {Path(file).name for file in files}
    assert {"norm.cu", "norm_jit_binding.cc", "activation.cu"} <= sources
    assert len(files) == len(commands)
    for command in commands:
        assert Path(command["file"]).is_file()
        assert {"file", "directory", "command"} <= set(command)


RECORD = """
import torch, flashinfer
for rows in (2, 3):
    flashinfer.silu_and_mul(torch.randn(rows, 32))
"""


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Two recorded calls, made by the reference backend so that they run anywhere."""
    changes = {"FLASHINFER_LOGLEVEL": "10", "FLASHINFER_DUMP_DIR": str(tmp_path / "dumps")}
    changes |= {"FLASHINFER_LOGDEST": str(tmp_path / "log"), "FLASHINFER_BACKEND": "reference"}
    environment = os.environ | changes | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", RECORD], env=environment, check=True)
    return tmp_path / "dumps"


def test_replay(dumps: Path):
    with reference_backend():
        result = flashinfer("replay", str(dumps), "--compare", "--device", "cpu")
        assert result.exit_code == 0, result.output
        assert result.output.count("same") == 2
        (first, _) = sorted(dumps.iterdir())
        single = flashinfer("replay", str(first), "--device", "cpu")
        assert single.exit_code == 0 and single.output.count("ran") == 1


def test_replay_tells_a_difference(dumps: Path):
    (first, _) = sorted(dumps.iterdir())
    recorded = torch.load(first / "outputs.pt", weights_only=True)
    (name,) = recorded
    recorded[name][0] += 1
    torch.save(recorded, first / "outputs.pt")
    with reference_backend():
        result = flashinfer("replay", str(dumps), "--compare", "--device", "cpu")
    assert result.exit_code == 3
    assert "differs" in result.output and "same" in result.output


def test_replay_of_a_call_that_fails(dumps: Path):
    result = flashinfer("replay", str(dumps), "--device", "cpu")  # kernels need a GPU
    assert result.exit_code == 1
    assert "must be a CUDA tensor" in result.output


def test_replay_of_nothing(tmp_path: Path):
    result = flashinfer("replay", str(tmp_path))
    assert result.exit_code == 1 and "metadata.json" in result.output
    assert flashinfer("replay", str(tmp_path / "missing")).exit_code == 2
