"""Dumps that are damaged, or made by somebody else: a message each, and nothing of theirs runs."""

from __future__ import annotations

import json
import os
import pickle
import sys

import pytest
import torch
from click.testing import CliRunner

from flashinfer.api_logging import replay_from_dump, replay_sequence
from flashinfer.cli import main
from tests.unit.test_api_dump import Wrapper, dumps, look, metadata, scale
from tests.unit.test_api_dump import folder as folder


def rewrite(dump, change):
    """Change what a dump's metadata says."""
    recorded = metadata(dump)
    recorded = change(recorded) or recorded
    (dump / "metadata.json").write_text(json.dumps(recorded))


def drop(*path):
    def change(recorded):
        for key in path[:-1]:
            recorded = recorded[key]
        del recorded[path[-1]]

    return change


def put(value, *path):
    def change(recorded):
        for key in path[:-1]:
            recorded = recorded[key]
        recorded[path[-1]] = value

    return change


TENSOR = ("inputs", "tensors", 0)
DAMAGES = {
    "a list": (lambda recorded: [1, 2], "must hold an object, got list"),
    "no format": (drop("format"), "dump format None"),
    **{
        f"no {k}": (drop(k), f"'{k}' must be") for k in ("args", "kwargs", "inputs", "run", "owner")
    },
    "number is text": (put("1", "number"), "'number' must be int, got '1'"),
    "arguments are a list": (put([], "kwargs"), "'kwargs' must be dict"),
    "no file": (drop("inputs", "file"), "KeyError: 'file'"),
    "another file": (put("../../../etc/passwd", "inputs", "file"), "'file' must be one of"),
    "file is no name": (put(3, "inputs", "file"), "TypeError"),
    "unknown blob": (put("other", *TENSOR, "blob"), "KeyError: 'other'"),
    "unknown value": (put({"code": "x"}, "args", 0), "a kind that this version does not know"),
    "empty value": (put({}, "args", 0), "a kind that this version does not know"),
    "index beyond": (put({"tensor": 99}, "args", 0), "tensor 99 is not among the 1 recorded"),
    "negative index": (put({"tensor": -1}, "args", 0), "tensor -1 is not among"),
    "index is text": (put({"tensor": "0"}, "args", 0), "tensor '0' is not among"),
    "bad dtype": (put("load", *TENSOR, "dtype"), "dtype must name a dtype of torch"),
    "bad dtype value": (put({"dtype": "serialization"}, "args", 0), "dtype must name a dtype"),
    "bad device": (put("gpu", *TENSOR, "device"), "RuntimeError"),
    "no device": (drop(*TENSOR, "device"), "KeyError: 'device'"),
    "before the memory": (put(-64, *TENSOR, "offset"), "does not lie in the 16 bytes"),
    "after the memory": (put(10**9, *TENSOR, "offset"), "does not lie in the 16 bytes"),
    "one element too far": (put(4, *TENSOR, "offset"), "does not lie in the 16 bytes"),
    "between elements": (put(2, *TENSOR, "offset"), "does not lie in the 16 bytes"),
    "too long": (put([5], *TENSOR, "shape"), "does not lie in the 16 bytes"),
    "too wide": (put([2], *TENSOR, "stride"), "does not lie in the 16 bytes"),
    "backwards": (put([-1], *TENSOR, "stride"), "does not lie in the 16 bytes"),
    "huge": (put([2**80], *TENSOR, "shape"), "does not lie in the 16 bytes"),
    "shape is text": (put("ab", *TENSOR, "shape"), "cannot be loaded"),
    "ranks differ": (put([2, 2], *TENSOR, "shape"), "cannot be loaded"),
    "bad generator": (put({"generator": "cpu", "state": 5}, "args", 0), "cannot be loaded"),
    "unhashable key": (put({"dict": [[[], 1]]}, "args", 0), "cannot be loaded"),
    "no run of ours": (put("os:system", "function"), "os:system is no operation"),
    "no operation": (put("flashinfer.env:markdown", "function"), "markdown is no operation"),
    "no module": (put("no_such_module:f", "function"), "f is no operation of this program"),
    "no result": (drop("result"), "cannot be compared: KeyError: 'result'"),
    "bad outputs": (put({"file": "outputs.pt"}, "outputs"), "cannot be compared: KeyError"),
    "bad status": (put("raised", "status"), "cannot be compared: KeyError: 'error'"),
}


def three_dumps(folder):
    for _ in range(3):
        scale(torch.arange(4.0), 2.0)
    return dumps(folder)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metadata_is_one_error_of_a_sequence(folder, damage):
    change, message = DAMAGES[damage]
    second = three_dumps(folder)[1]
    rewrite(second, change)
    with pytest.raises(ValueError) as caught:
        replay_from_dump(str(second), True, "cpu")
    assert str(second) in str(caught.value) and message in str(caught.value)
    replays = replay_sequence(str(folder), "cpu")
    assert sorted(r["comparison_match"] for r in replays) == [False, True, True]
    (failed,) = [r for r in replays if not r["comparison_match"]]
    assert failed["dump_dir"] == str(second) and str(failed["error"]) == str(caught.value)


def truncated(path):
    os.truncate(path, 700)


def pickled(path):
    path.write_bytes(pickle.dumps({"input": os.getcwd}))


def garbage(path):
    path.write_bytes(b"\xff" * 1000)


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def missing(path):
    path.unlink()


def other_object(path):
    torch.save([1, 2], path)


def expanded(path):
    torch.save({"input": torch.zeros(1).expand(2**40)}, path)


FILES = [
    ("inputs.pt", truncated),
    ("inputs.pt", pickled),
    ("inputs.pt", garbage),
    ("inputs.pt", a_pipe),
    ("inputs.pt", missing),
    ("inputs.pt", other_object),
    ("inputs.pt", expanded),
    ("outputs.pt", truncated),
    ("outputs.pt", missing),
    ("metadata.json", truncated),
    ("metadata.json", garbage),
    ("metadata.json", a_pipe),
]


@pytest.mark.parametrize("name, damage", FILES, ids=lambda p: getattr(p, "__name__", p))
def test_damaged_files_are_one_error_of_a_sequence(folder, name, damage):
    second = three_dumps(folder)[1]
    damage(second / name)
    replays = replay_sequence(str(folder), "cpu")
    (failed,) = [r for r in replays if not r["comparison_match"]]
    assert len(replays) == 3 and failed["dump_dir"] == str(second)
    assert isinstance(failed["error"], ValueError) and str(second) in str(failed["error"])


def test_deeply_nested_metadata_is_an_error(folder):
    second = three_dumps(folder)[1]
    text = json.dumps(metadata(second))
    nested = text.replace('"kwargs": {', '"deep": ' + "[" * 10**5 + "]" * 10**5 + ', "kwargs": {')
    (second / "metadata.json").write_text(nested)
    assert [r["comparison_match"] for r in replay_sequence(str(folder), "cpu")].count(False) <= 1


@pytest.mark.parametrize("command", [[], ["--compare"]], ids=["run", "compare"])
def test_the_command_line_says_what_is_damaged(folder, command):
    first, second, _ = three_dumps(folder)
    truncated(second / "inputs.pt")
    rewrite(first, drop("args"))
    result = CliRunner().invoke(main, ["replay", str(folder), "--device", "cpu", *command])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "'args' must be list, got nothing" in result.output
    assert "inputs.pt" in result.output or "cannot be loaded" in result.output
    states = [line.split()[-1] for line in result.output.splitlines()[2:5]]
    assert sorted(states) == sorted(["failed", "failed", "same" if command else "ran"])
    alone = CliRunner().invoke(main, ["replay", str(first), "--device", "cpu"])
    assert alone.exit_code == 1 and isinstance(alone.exception, SystemExit)


PLANTED = [
    {"namedtuple": "os:system", "items": ["echo ran"]},
    {"namedtuple": "posix:system", "items": ["echo ran"]},
    {"namedtuple": "flashinfer.jit.builder:subprocess.Popen", "items": ["true"]},
    {"namedtuple": "collections:namedtuple", "items": ["x", "y"]},
    {"namedtuple": "flashinfer.env:Variable", "items": []},
    {"enum": "os:environ", "name": "HOME"},
    {"enum": "planted_module:Mode", "name": "FAST"},
    {"import": "planted_module:anything"},
    {"import": "os:system"},
    {"import": "flashinfer.jit.core:build_jit_specs"},
    {"import": "flashinfer.jit.core:Path"},
]


@pytest.mark.parametrize("node", PLANTED, ids=json.dumps)
def test_nothing_planted_runs_or_is_imported(folder, monkeypatch, tmp_path, capfd, node):
    (tmp_path / "planted_module.py").write_text("print('ran')\nclass Mode: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    look(1)
    (dump,) = dumps(folder)
    rewrite(dump, put([node], "args"))
    with pytest.raises(ValueError, match="cannot be loaded: "):
        replay_from_dump(str(dump), device="cpu")
    assert "planted_module" not in sys.modules and "ran" not in capfd.readouterr().out


def test_an_object_is_made_of_a_class_that_has_the_method(folder):
    Wrapper(torch.zeros(1))
    (dump,) = dumps(folder)
    for planted in ("subprocess:Popen", "os:system", "tests.unit.test_api_dump:scale"):
        rewrite(dump, put(planted, "owner", "type"))
        with pytest.raises(ValueError, match="is no class with the method"):
            replay_from_dump(str(dump), run=True, device="cpu")
        replay_from_dump(str(dump), device="cpu")  # loading makes no object


def test_operations_of_a_module_are_found_after_its_import(folder, monkeypatch, tmp_path):
    (tmp_path / "my_operations.py").write_text(
        "from flashinfer.api_logging import flashinfer_api\n"
        "@flashinfer_api\ndef double(x):\n    return x * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    look(torch.ones(2))
    (dump,) = dumps(folder)
    rewrite(dump, put("my_operations:double", "function"))
    command = ["replay", str(dump), "--device", "cpu"]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 1 and "my_operations" not in sys.modules
    assert "no operation of this program" in refused.output
    assert CliRunner().invoke(main, [*command, "--import", "my_operations"]).exit_code == 0
    assert CliRunner().invoke(main, [*command, "--import", "no_such_module"]).exit_code == 2
