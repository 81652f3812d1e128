"""The command line where something is broken: a line that says so, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner

from flashinfer import collect_env
from flashinfer.cli import COMMANDS, main
from flashinfer.cli.modules import _describe
from flashinfer.jit.cache import Entry

ROOT = Path(__file__).resolve().parents[2]

# A console script, as pip writes it.
SCRIPT = """import sys
from flashinfer.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


def start(*arguments: str, launcher: tuple[str, ...] = ("-m", "flashinfer"), **variables: str):
    """`flashinfer ARGUMENTS` in a process of its own."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    environment = keep | {"PYTHONPATH": str(ROOT), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"} | variables
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, cwd="/", text=True)


BROKEN = [
    ("FLASHINFER_CUDA_ARCH_LIST", "banana"),
    ("FLASHINFER_LOGLEVEL", "abc"),
    ("FLASHINFER_BACKEND", "abc"),
    ("FLASHINFER_NVCC", "garbage"),
    ("FLASHINFER_WORKSPACE_BASE", "~nosuchuser/x"),
]


@pytest.mark.parametrize("name, value", BROKEN, ids=[name for name, _ in BROKEN])
def test_a_broken_setting_is_a_line_of_each_report(tmp_path, name, value):
    if value == "garbage":  # a compiler that prints no text
        value = str(tmp_path / "nvcc")
        Path(value).write_text("#!/bin/sh\nprintf '\\377\\376 release ?\\n'\n")
        Path(value).chmod(0o755)
    settings = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), name: value}
    commands = ["collect-env", "version"]
    if name in ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_LOGLEVEL"):
        commands += ["show-config", "module-status"]
    for command in commands:
        done = start(command, **settings)
        assert "Traceback" not in done.stdout + done.stderr, command
        assert done.returncode == 0 or command == "module-status" and done.returncode == 1
        if command == "show-config":
            assert value in done.stdout
        if done.returncode == 1:
            assert done.stderr.startswith("Error: ")


def test_a_broken_part_does_not_hide_the_others(monkeypatch):
    def fails(*_):
        raise KeyError("stamps")

    monkeypatch.setattr(collect_env.toolchain, "describe", fails)
    monkeypatch.setattr(collect_env, "_gpu", fails)
    monkeypatch.setattr(collect_env.importlib.metadata, "version", fails)
    report = collect_env.collect_env()
    assert report["toolchain"]["programs"] == "broken: KeyError: 'stamps'"
    assert report["gpu"] == {"all": "broken: KeyError: 'stamps'"}
    assert report["packages"]["torch"].startswith("broken: ")
    assert report["flashinfer"]["version"] and "targets" in report["toolchain"]
    assert CliRunner().invoke(main, ["collect-env"]).exit_code == 0
    assert "broken: KeyError" in CliRunner().invoke(main, ["show-config"]).output


@pytest.mark.parametrize(
    "manifest", [{}, {"created": "now", "archs": 5}, {"created": 1e300, "archs": []}], ids=str
)
def test_module_status_of_an_entry_without_its_facts(tmp_path, manifest):
    library = tmp_path / "x.so"
    library.write_bytes(b"1234")
    assert _describe(Entry(tmp_path, library, manifest)) == {
        "archs": "unknown",
        "bytes": 4,
        "created": "unknown",
    }


@pytest.mark.parametrize("how", ["module", "script"])
@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["--version"], ["version"]], ids=str)
def test_help_and_version_do_not_import_torch(tmp_path, how, words):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is imported')\n")
    launcher = ("-m", "flashinfer")
    if how == "script":
        (tmp_path / "flashinfer").write_text(SCRIPT)
        launcher = (str(tmp_path / "flashinfer"),)
    done = start(*words, launcher=launcher, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "torch" not in done.stderr, done.stderr
    assert done.returncode == 0 or not words  # newer versions of click exit with 2 without words
    assert ("replay" in done.stdout + done.stderr) == (words in ([], ["--help"], ["-h"]))


def test_a_reader_that_has_gone_is_no_error():
    code = "import os; os.close(1); os.dup2(os.pipe()[1], 1); os.close(3)\n"
    code += "from flashinfer.cli import main; main(['show-config'])"
    assert start(launcher=("-c", code)).stderr == ""


def test_the_program_of_the_table_has_help_and_refuses_what_is_no_document(tmp_path):
    program = ("-m", "flashinfer.cli.support")
    assert "documents" in start("--help", launcher=program).stdout
    (tmp_path / "text.md").write_text("no marks")
    for name, message in (("missing.md", "No such file"), ("text.md", "operations")):
        done = start(str(tmp_path / name), launcher=program)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_program_of_another_name_gets_all_operations(tmp_path):
    """Its arguments do not matter: `serve --help` imports what it needs."""
    (tmp_path / "serve").write_text("from flashinfer import rmsnorm, __version__\nprint('fine')\n")
    assert start("--help", launcher=(str(tmp_path / "serve"),)).stdout == "fine\n"
    code = "import flashinfer; print(flashinfer.rmsnorm.__name__)"
    assert start("version", launcher=("-c", code)).stdout == "rmsnorm\n"


def test_the_table_of_commands_is_what_they_are():
    context = Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None and command.name == name
    assert main.get_command(context, "no-such-command") is None


def test_modules_are_the_same_with_and_without_the_operations():
    """The command line does not import the operations, and lists the same modules."""
    without = start("list-modules", "--json")
    program = "import flashinfer.norm; from flashinfer.cli import main; main()"
    with_operations = start("list-modules", "--json", launcher=("-c", program))
    assert json.loads(without.stdout) == json.loads(with_operations.stdout)
