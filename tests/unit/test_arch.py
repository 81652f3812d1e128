"""Device facts: what is accepted, what is refused, what is remembered. No GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flashinfer import utils
from flashinfer._common import arch


@pytest.fixture
def machine(monkeypatch):
    """A pretended machine with two GPUs; returns how often each was asked for its capability."""
    asked: list[int] = []
    capabilities = [(9, 0), (12, 1)]

    def get_device_capability(index):
        asked.append(index)
        return capabilities[index]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(arch, "_CAPABILITIES", {})
    return asked


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(arch, "_CAPABILITIES", {})


@pytest.mark.parametrize(
    "device, index",
    [("cuda:0", 0), ("cuda", 1), (torch.device("cuda"), 1), (torch.device("cuda", 0), 0), (0, 0)],
)
def test_devices_in_every_spelling(machine, device, index):
    assert arch.get_device_index(device) == index
    assert arch.get_compute_capability(device) == [(9, 0), (12, 1)][index]


def test_capability_is_asked_for_once_per_device(machine):
    for _ in range(3):
        arch.get_compute_capability(torch.device("cuda", 0))
        arch.get_compute_capability("cuda:0")
        arch.get_compute_capability(1)
    assert sorted(machine) == [0, 1]


def test_cuda_without_index_follows_the_current_device(machine, monkeypatch):
    device = torch.device("cuda")
    assert arch.get_compute_capability(device) == (12, 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert arch.get_compute_capability(device) == (9, 0)


@pytest.mark.parametrize(
    "device, error, message",
    [
        ("cpu", ValueError, "must be a cuda device such as 'cuda' or 'cuda:0', got 'cpu'"),
        (torch.device("meta"), ValueError, "got 'meta'"),
        ("gpu0", ValueError, "must name a CUDA device such as 'cuda:0', got 'gpu0'"),
        ("cuda:2", ValueError, r"must be in \[0, 2\), got 2"),
        (-1, ValueError, r"must be in \[0, 2\), got -1"),
        (True, TypeError, "got True"),
        (None, TypeError, "got None"),
        (1.0, TypeError, "got 1.0"),
    ],
)
def test_bad_devices(machine, device, error, message):
    with pytest.raises(error, match=message):
        arch.get_compute_capability(device)


def test_without_gpu_facts_raise_and_predicates_are_false(no_gpu):
    with pytest.raises(RuntimeError, match="no CUDA device is visible"):
        arch.get_compute_capability("cuda")
    for name in ("90a", "100a", "100f", "110a", "120a", "120f", "121a", "12x"):
        assert getattr(arch, f"is_sm{name}_supported")(torch.device("cuda")) is False


SUPPORTED = {
    (9, 0): {"90a"},
    (10, 0): {"100a", "100f"},
    (10, 3): {"100a", "100f"},
    (11, 0): {"110a"},
    (12, 0): {"120a", "120f", "12x"},
    (12, 1): {"120f", "121a", "12x"},
    (8, 9): set(),
}


@pytest.mark.parametrize("capability", SUPPORTED)
def test_predicates(machine, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    names = ("90a", "100a", "100f", "110a", "120a", "120f", "121a", "12x")
    found = {name for name in names if getattr(utils, f"is_sm{name}_supported")("cuda:0")}
    assert found == SUPPORTED[capability]
    assert utils.device_support_pdl("cuda:0") == (capability[0] >= 9)
    assert utils.device_support_pdl(torch.device("cpu")) is False


@pytest.mark.parametrize(
    "version, found", [("12.2", False), ("12.3", True), ("13.0", True), (None, False)]
)
def test_predicates_ask_for_the_cuda_version(machine, monkeypatch, version, found):
    monkeypatch.setattr(torch.version, "cuda", version)
    assert arch.is_sm90a_supported("cuda:0") is found


def test_import_initialises_no_cuda():
    code = (
        "import torch\n"
        "def refuse(*args): raise SystemExit('CUDA was touched at import')\n"
        "torch.cuda._lazy_init = torch.cuda.device_count = refuse\n"
        "import flashinfer.utils, flashinfer.api_logging\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
