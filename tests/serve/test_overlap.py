"""Copies beside the stream that computes come in time, and not too early, whatever is late."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.serve import checkpoint, copies, graphs, kernels
from examples.serve.engine import Engine, SamplingParams
from examples.serve.graphs import Graph
from examples.serve.invariance import round_up
from examples.serve.model import Model
from examples.serve.runner import Chunk
from examples.serve.sampling import sample
from examples.serve.table import Table
from tests.serve.mixes import Requests, alone, mixed, requests_of
from tests.serve.models import write

PAUSE = 20_000_000  # cycles: longer than the host takes to prepare a step
PAGES = 28  # too few for the requests
NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers"
)


def _graph() -> Graph:
    packed = torch.zeros(Table.length(2, 2, 4), dtype=torch.int32)
    return Graph(2, Table.divide(packed, 2, 2), {})


class _Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.name)


def test_copies_wait_for_the_layers_and_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []
    graph = _graph()
    graph._was_read, graph._beside = "layers", _Stream("copies", notes)  # type: ignore
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: _Stream("graph", notes))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with graph.overwriting():
        notes.append("first plan")
    graph.graph = "captured"
    for failure in (None, ValueError):
        with pytest.raises(failure) if failure else nullcontext(), graph.overwriting():
            notes.append("plan")
            if failure:
                raise failure
    beside = ["copies waits for layers", "plan", "graph waits for copies"]
    assert notes == ["first plan", *beside, *beside]


def test_without_events_in_graphs_nothing_is_beside(monkeypatch: pytest.MonkeyPatch):
    class Event:  # of an older PyTorch
        def __init__(self, enable_timing: bool = False) -> None: ...

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert graphs._event_of_replays() is None
    graph = _graph()
    graph.graph, graph._beside = "captured", None
    graph.note_read()
    with graph.overwriting():
        pass


@pytest.mark.any_device
@pytest.mark.parametrize("invariant", [False, True], ids=["usual", "invariant"])
def test_the_host_numbers_decoding_tokens_as_the_kernel_does(model: Model, invariant: bool):
    runner = Engine(model, None, num_pages=8, page_size=4, batch_invariant=invariant)._runner
    with runner.backend():
        for starts in ([0], [3, 4, 17], [30, 0, 2, 15, 16]):
            chunks = [Chunk([7], start, range(8)) for start in starts]
            for requests in (len(chunks), 6):
                host = runner._table(chunks, requests, round_up(requests, runner._tile))
                expected = kernels.get_batch_indices_positions(
                    host.qo_indptr.to(model.device),
                    host.lengths.to(model.device),
                    len(host.tokens),
                )
                assert host.batch_indices.tolist() == expected[0].tolist()
                assert host.positions.tolist() == expected[1].tolist()


@pytest.mark.any_device
def test_greedy_tokens_are_those_of_top_k_without_a_cast(model: Model):
    logits = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(model.device)
    greedy, drawn = SamplingParams(temperature=0), SamplingParams()
    with kernels.on(model.device):
        best = sample(logits, [greedy] * 3, [1] * 3, [0] * 3)
        some = sample(logits, [greedy, drawn, greedy], [1] * 3, [0] * 3)
    assert best.dtype == torch.int64 and best.tolist() == logits.argmax(1).tolist()
    assert some.dtype == torch.int32 and some[::2].tolist() == best[::2].tolist()


# --- On a GPU, with pauses -----------------------------------------------------------------------


def _late_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Graph.replay

    def late(graph: Graph) -> torch.Tensor:
        torch.cuda._sleep(PAUSE)
        return replay(graph)

    monkeypatch.setattr(Graph, "replay", late)


def _late_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    overwriting = Graph.overwriting

    @contextmanager
    def late(graph: Graph) -> Iterator[None]:
        with overwriting(graph):
            torch.cuda._sleep(PAUSE)
            yield

    monkeypatch.setattr(Graph, "overwriting", late)


def _late_copies_to_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stream_of = copies._to_host_stream

    def late(device: torch.device) -> torch.cuda.Stream:
        stream = stream_of(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(PAUSE)
        return stream

    monkeypatch.setattr(copies, "_to_host_stream", late)


LATE = [_late_replays, _late_tables, _late_copies_to_host]


def _requests(seed: int, greedy: bool) -> Requests:
    """With answers that are long enough for steps from graphs to follow each other."""
    requests = requests_of(random.Random(seed), 8)
    changes: dict[str, Any] = {"max_tokens": 24} | ({"temperature": 0.0} if greedy else {})
    return {
        name: (prompt, replace(params, **changes)) for name, (prompt, params) in requests.items()
    }


def _serve(model: Model, requests: Requests, **options: Any) -> dict[str, list[int]]:
    tokens, preempted = mixed(
        model, requests, random.Random(1), guests=0.05, num_pages=PAGES, **options
    )
    assert preempted
    return tokens


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Capacities of the graphs that are replayed, in turn."""
    seen: list[int] = []
    replay = Graph.replay

    def noted(graph: Graph) -> torch.Tensor:
        seen.append(graph.capacity)
        return replay(graph)

    monkeypatch.setattr(Graph, "replay", noted)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("greedy", [False, True], ids=["drawn", "greedy"])
@pytest.mark.parametrize("late", LATE)
def test_graphs_give_each_request_what_it_gets_alone(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    replays: list[int],
    late: Callable[[pytest.MonkeyPatch], None],
    greedy: bool,
):
    """Without graphs and alone; with them beside others that come, leave and lose their pages."""
    requests = _requests(1, greedy)
    expected = alone(model, requests)
    late(monkeypatch)
    assert _serve(model, requests, use_cuda_graph=True) == expected
    assert len(replays) > 20 and len(set(replays)) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(
    "name",
    [
        "windows",
        *(
            pytest.param(name, marks=NEEDS_TRANSFORMERS)
            for name in ("gpt_oss", "deepseek_v2", "qwen3_next")
        ),
    ],
)
def test_other_wrappers_do_not_mind_either(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replays: list[int],
    late: Callable[[pytest.MonkeyPatch], None],
    name: str,
):
    """Two plans, plans of all rows, latent attention, states: as without pauses."""
    if name == "windows":
        qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
        config = {**checkpoint.SMALL, **qwen, "sliding_window": 6, "max_window_layers": 1}
        checkpoint.write_random_checkpoint(tmp_path, config)
    else:
        write(tmp_path, name)
    model = checkpoint.load(tmp_path, "cuda", torch.float16)[0]
    requests = _requests(1, True)
    options = {"use_cuda_graph": True, "batch_invariant": False}
    expected = _serve(model, requests, **options)
    late(monkeypatch)
    assert _serve(model, requests, **options) == expected
    assert len(replays) > 40 and len(set(replays)) > 2


@pytest.mark.gpu
def test_what_arrives_on_the_host_is_whole(monkeypatch: pytest.MonkeyPatch):
    """The copy waits for what makes the tensor, and its event for the copy."""
    _late_copies_to_host(monkeypatch)
    numbers = torch.arange(1 << 20, device="cuda")
    torch.cuda._sleep(PAUSE)
    doubled = 2 * numbers
    copy, arrived = copies.to_host(doubled)
    assert arrived is not None and not arrived.query()
    arrived.synchronize()
    assert torch.equal(copy, 2 * torch.arange(1 << 20))
