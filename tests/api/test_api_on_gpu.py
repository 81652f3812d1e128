"""The decorators with CUDA tensors: capabilities, statistics, graph capture, dumps."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from flashinfer._common import arch
from flashinfer._instrument import dump as api_dump
from flashinfer.api_logging import flashinfer_api, replay_from_dump
from flashinfer.compat.backends import (
    BackendSupportedError,
    backend_requirement,
    supported_compute_capability,
)

pytestmark = pytest.mark.gpu


def dumped(func):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_LOGLEVEL", "10")
        return flashinfer_api(func)


@dumped
def scale_rows(x, lengths, factor, out=None):
    return torch.mul(x, factor, out=out)


@pytest.fixture(autouse=True)
def log(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setenv("FLASHINFER_LOGDEST", str(tmp_path / "log"))
    monkeypatch.setattr(api_dump, "_budget", api_dump._Budget())
    return tmp_path / "log"


def only_dump(log):
    (path,) = (log.parent / "dumps").glob("*/metadata.json")
    return path.parent


def test_facts_are_those_of_the_device():
    capability = torch.cuda.get_device_capability(0)
    assert arch.get_compute_capability("cuda:0") == capability
    assert arch.get_compute_capability(torch.ones(1, device="cuda:0").device) == capability
    assert arch.get_device_name(0) == torch.cuda.get_device_name(0)
    assert arch.get_device_sm_count("cuda:0") > 0
    assert arch.get_shared_bytes_per_block_optin("cuda:0") >= 48 * 1024


def test_backends_are_checked_against_the_device():
    major, minor = torch.cuda.get_device_capability(0)
    here, elsewhere = 10 * major + minor, 75 if major != 7 else 80

    @supported_compute_capability([here])
    def _runs_here(x):
        return True

    @supported_compute_capability([elsewhere])
    def _runs_elsewhere(x):
        return True

    @backend_requirement(
        {"here": _runs_here, "elsewhere": _runs_elsewhere},
        heuristic_func=lambda found, x: found,
    )
    def api(x, backend="auto"):
        return list(api.suitable_auto_backends) if backend == "auto" else backend

    x = torch.ones(1, device="cuda:0")
    assert api(x) == ["here"] and api(x, backend="here") == "here"
    with pytest.raises(BackendSupportedError) as error:
        api(x, backend="elsewhere")
    assert str(error.value) == (
        f"{api.__qualname__}: backend 'elsewhere' does not support compute capability {here} of "
        f"cuda:0 ({torch.cuda.get_device_name(0)}); it supports {elsewhere}"
    )
    assert api([torch.ones(1), (x,)]) == ["here"]


def test_dump_of_views_replays_bit_for_bit(log):
    x = torch.randn(8, 96, device="cuda", dtype=torch.bfloat16)[:, 3:67]
    lengths = torch.arange(8)
    result = scale_rows(x, lengths, 0.3)
    replay = replay_from_dump(str(only_dump(log)), compare_outputs=True)
    restored, restored_lengths, _ = replay["args"]
    assert replay["comparison_match"] and replay["differences"] == []
    assert torch.equal(replay["execution_result"], result)
    assert restored.is_cuda and restored.stride() == x.stride()
    assert restored.data_ptr() % 256 == x.data_ptr() % 256
    assert not restored_lengths.is_cuda


def test_dump_of_a_gpu_loads_on_the_cpu(log):
    x = torch.randn(4, 4, device="cuda")
    scale_rows(x, None, 2.0)
    replay = replay_from_dump(str(only_dump(log)), compare_outputs=True, device="cpu")
    assert replay["comparison_match"] and not replay["args"][0].is_cuda


def test_capture_has_no_statistics_and_no_dump(log):
    x, out = torch.ones(16, device="cuda"), torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale_rows(x, None, 3.0, out=out)
    text = log.read_text()
    assert "no statistics: CUDA graph capture" in text and "min=" not in text
    assert "scale_rows not dumped: CUDA graph capture" in text
    graph.replay()
    assert torch.equal(out, torch.full_like(out, 3.0))
    scale_rows(x, None, 3.0, out=out)
    assert "min=1 max=1 mean=1 nan=0 inf=0" in log.read_text()
    assert json.loads((only_dump(log) / "metadata.json").read_text())["status"] == "returned"


def test_public_function_is_dumped_and_replayed(log, monkeypatch):
    import flashinfer

    rmsnorm = dumped(flashinfer.rmsnorm)
    x = torch.randn(33, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    rmsnorm(x, weight, out=torch.zeros_like(x))
    replay = replay_from_dump(str(only_dump(log)), compare_outputs=True)
    assert replay["comparison_match"] and replay["differences"] == []
    monkeypatch.setattr(sys.modules[rmsnorm.__module__], "rmsnorm", lambda x, weight, out: out)
    replay = replay_from_dump(str(only_dump(log)), compare_outputs=True)
    assert not replay["comparison_match"]
