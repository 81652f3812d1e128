"""The harness of tests/comm without a GPU: ranks that share one meet around every launch."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch

from flashinfer.comm.peer_workspace import PeerWorkspace
from tests.comm import ranks

RANKS, CALLS = 4, 10
X = torch.empty(0)


class Stream:
    def synchronize(self) -> None:
        """Nothing runs here."""


class Workspace(PeerWorkspace):
    def __init__(self) -> None:
        self.bytes, self.device = torch.empty(0), torch.device("cpu")

    def check(self) -> None:
        """Nothing fails here."""


@pytest.fixture
def one_device(monkeypatch):
    for name, value in (
        ("device_count", lambda: 1),
        ("Stream", lambda device: Stream()),
        ("stream", lambda stream: contextlib.nullcontext()),
        ("current_stream", Stream),
        ("set_device", lambda device: None),
        ("is_current_stream_capturing", lambda: False),
    ):
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize("freely", [False, True])
def test_no_rank_goes_on_before_all_have_launched(one_device, freely):
    log: list[int] = []

    def kernel(workspace: torch.Tensor, x: torch.Tensor, call: int) -> None:
        time.sleep(random.random() * 0.002)
        log.append(call)

    def body(backend):
        for call in range(CALLS):
            Workspace().launch(kernel, X, call)
        return backend.Get_rank()

    assert ranks.run_ranks(RANKS, body, freely=freely) == list(range(RANKS))
    in_rounds = [call for call in range(CALLS) for _ in range(RANKS)]
    assert log == in_rounds * (2 if freely else 1)
    assert PeerWorkspace.launch.__name__ == "launch"  # as it was


def test_an_error_of_one_rank_ends_the_others(one_device):
    def body(backend):
        if backend.Get_rank() == 2:
            raise ValueError("rank 2")
        Workspace().launch(lambda workspace, x: None, X)

    with pytest.raises(ValueError, match="rank 2"):
        ranks.run_ranks(RANKS, body)


def test_another_number_of_calls_is_an_error(one_device, monkeypatch):
    meeting = ranks.Meeting

    class Short(meeting):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.barrier._timeout = 0.2

    monkeypatch.setattr(ranks, "Meeting", Short)

    def body(backend):
        for _ in range(1 + (backend.Get_rank() == 1)):
            Workspace().launch(lambda workspace, x: None, X)

    with pytest.raises(RuntimeError, match="another number of calls"):
        ranks.run_ranks(2, body)
