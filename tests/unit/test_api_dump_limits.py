"""What is dumped of calls, and what a dump that cannot be written or read leads to."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import flashinfer
from flashinfer._instrument import call as api_call
from flashinfer._instrument import dump as api_dump
from flashinfer.api_logging import replay_from_dump, replay_sequence
from tests.unit.test_api_dump import (
    Wrapper,
    add_in_place,
    dumped,
    dumps,
    metadata,
    replay_only,
    scale,
)
from tests.unit.test_api_dump import folder as folder


@pytest.mark.parametrize(
    "include, exclude, expected",
    [
        ("", "", ["scale", "add_in_place"]),
        ("scale", "", ["scale"]),
        ("sc*, nothing", "", ["scale"]),
        ("", "*_in_place", ["scale"]),
        ("*", "scale,add*", []),
        (f"{scale.__module__}.scale", "", ["scale"]),
        ("SCALE", "", []),
    ],
)
def test_include_and_exclude(folder, monkeypatch, include, exclude, expected):
    monkeypatch.setenv("FLASHINFER_DUMP_INCLUDE", include)
    monkeypatch.setenv("FLASHINFER_DUMP_EXCLUDE", exclude)
    scale(torch.ones(1), 1.0)
    add_in_place(torch.ones(1), torch.ones(1))
    assert [metadata(dump)["api"] for dump in dumps(folder)] == expected


def test_patterns_are_of_public_paths():
    """Whatever private module a function stands in."""
    run = flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run
    call = api_call.ApiCall(run, inspect.signature(run).parameters, (None,), {})
    path = "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.run"
    assert api_call.public_path(run) == path and api_call.matches(call, f"other, {path}")
    assert api_call.matches(call, "flashinfer.prefill.*")
    assert not api_call.matches(call, "flashinfer._attention.*")
    assert api_call.public_path(flashinfer.rmsnorm) == "flashinfer.norm.rmsnorm"
    assert api_call.public_path(flashinfer.softmax) == "flashinfer.sampling.softmax"
    assert api_call.public_path(scale) == f"{scale.__module__}.scale"


def test_include_matches_class_and_method(folder, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DUMP_INCLUDE", "Wrapper.run")
    wrapper = Wrapper(torch.zeros(1))
    wrapper.plan(torch.tensor([1]))
    wrapper.run(torch.ones(1))
    assert [metadata(dump)["api"] for dump in dumps(folder)] == ["Wrapper.run"]


def test_max_count(folder, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FLASHINFER_DUMP_MAX_COUNT", "2")
    for _ in range(4):
        scale(torch.ones(1), 1.0)
    assert len(dumps(folder)) == 2
    assert capsys.readouterr().err.count("FLASHINFER_DUMP_MAX_COUNT=2 is reached") == 1
    assert (tmp_path / "log").read_text().count("not dumped: FLASHINFER_DUMP_MAX_COUNT=2") == 2


def test_max_size_counts_inputs_and_outputs(folder, monkeypatch, capsys):
    monkeypatch.setenv("FLASHINFER_DUMP_MAX_SIZE_GB", "0.000010")
    x = torch.ones(1000)  # 4000 bytes in, 4000 bytes out
    scale(x, 1.0)
    assert "outputs" in metadata(*dumps(folder))
    scale(x[:500], 1.0)  # 2000 bytes in: full; its outputs no longer fit
    scale(x[:500], 1.0)
    assert len(dumps(folder)) == 2
    last = metadata(dumps(folder)[-1])
    assert last["outputs_missing"] == "FLASHINFER_DUMP_MAX_SIZE_GB=1e-05 is reached"
    assert "FLASHINFER_DUMP_MAX_SIZE_GB" in capsys.readouterr().err
    replay = replay_from_dump(str(dumps(folder)[-1]), compare_outputs=True, device="cpu")
    assert not replay["comparison_match"] and "no recorded outputs" in replay["differences"][0]


def test_no_dump_during_graph_capture(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(api_dump, "is_capturing", lambda: True)
    scale(torch.ones(1), 1.0)
    assert dumps(folder) == []
    assert "scale not dumped: CUDA graph capture" in (tmp_path / "log").read_text()


def test_unwritable_folder_does_not_stop_the_call(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHINFER_DUMP_DIR", str(tmp_path / "file"))
    assert torch.equal(scale(torch.ones(1), 2.0), torch.tensor([2.0]))
    assert "scale not dumped: NotADirectoryError" in (tmp_path / "log").read_text()


def test_missing_safetensors_is_said(monkeypatch):
    monkeypatch.setenv("FLASHINFER_DUMP_SAFETENSORS", "1")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match="DUMP_SAFETENSORS=1 needs the package"):
        scale(torch.ones(1), 1.0)


def test_crash_leaves_a_dump_that_loads(folder):
    code = """
        import os, torch
        from flashinfer.api_logging import flashinfer_api

        @flashinfer_api
        def kernel(x, scale):
            os.abort()

        kernel(torch.full((3, 5), 2.0), 0.25)
    """
    environment = {**os.environ, "FLASHINFER_LOGLEVEL": "10"}
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True
    )
    assert child.returncode < 0
    assert metadata(*dumps(folder))["status"] == "called"
    replay = replay_only(folder)
    assert torch.equal(replay["args"][0], torch.full((3, 5), 2.0)) and replay["args"][1] == 0.25
    with pytest.raises(ValueError, match="__main__:kernel is no operation of this program"):
        replay_only(folder, run=True)


def test_device_that_is_not_there(folder, monkeypatch):
    scale(torch.ones(2), 1.0)
    (dump,) = dumps(folder)
    with pytest.raises(ValueError, match="got 'gpu'"):
        replay_from_dump(str(dump), device="gpu")
    recorded = metadata(dump)
    recorded["inputs"]["tensors"][0]["device"] = "cuda:0"
    (dump / "metadata.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda' is not available here; device='cpu'"):
        replay_from_dump(str(dump))
    assert replay_from_dump(str(dump), device="cpu")["tensors"]["input"].device.type == "cpu"


def test_bad_folders(tmp_path):
    with pytest.raises(ValueError, match="must hold a readable metadata.json"):
        replay_from_dump(str(tmp_path))
    with pytest.raises(ValueError, match="root_dir must hold dumps"):
        replay_sequence(str(tmp_path))
    (tmp_path / "metadata.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has dump format 99, this version reads 1"):
        replay_from_dump(str(tmp_path))


def test_local_functions_cannot_be_found_again(folder):
    dumped(lambda x: x)(torch.ones(1))
    with pytest.raises(ValueError, match="cannot find .*<lambda>"):
        replay_only(folder, run=True)
