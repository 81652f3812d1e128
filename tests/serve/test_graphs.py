"""Decoding from graphs: buffers of more rows than requests, plans of new lengths."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from examples.serve import checkpoint
from examples.serve.engine import Engine, SamplingParams
from examples.serve.graphs import Graph
from examples.serve.model import Model
from examples.serve.runner import Runner


class _RepeatedOnCPU:
    """In place of a CUDA graph: runs the model again on the buffers, into the same result."""

    def __init__(self, runner: Runner, graph: Graph) -> None:
        self._runner, self._graph = runner, graph
        self.replays = 0

    def __call__(self) -> torch.Tensor:
        return self._runner._compute(self._graph)

    def replay(self) -> None:
        assert self._graph.rows is not None
        self._graph.rows.copy_(self())
        self.replays += 1


def _capture_on_cpu(runner: Runner, graph: Graph) -> torch.Tensor:
    graph.graph = _RepeatedOnCPU(runner, graph)
    logits = graph.graph()
    # Outputs of a capture have no values yet.
    graph.rows = torch.full_like(logits, float("nan"))
    return logits


def _model(folder: Any, device: str) -> Model:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    # Layers with and without a window have wrappers of their own on the same buffers.
    qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    window = {"sliding_window": 6, "max_window_layers": 1, "max_position_embeddings": 128}
    config = {**checkpoint.SMALL, **shape, **qwen, **window}
    return checkpoint.load(checkpoint.write_random_checkpoint(folder, config), device)[0]


def _tokens(engine: Engine) -> dict[str, list[int]]:
    """Seven requests of different lengths, which arrive over time."""
    rng = random.Random(0)
    tokens: dict[str, list[int]] = {}
    coming = list(range(7))
    while coming or engine.has_work:
        for number in coming[:3]:
            prompt = [rng.randrange(256) for _ in range(5 + 4 * number)]
            params = SamplingParams(temperature=0, max_tokens=12 + number, ignore_eos=True)
            engine.add_request(str(number), prompt, params)
        del coming[:3]
        for _ in range(3):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).append(output.token_id)
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"]
    return tokens


def test_padded_batches_give_the_same_tokens(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """The buffers and their padding, with the operations' references."""
    model = _model(tmp_path, "cpu")
    options = {"num_pages": 64, "page_size": 4, "max_batch_size": 6}
    expected = _tokens(Engine(model, None, **options))
    engine = Engine(model, None, **options)
    engine._runner.use_cuda_graph = True
    monkeypatch.setattr(Runner, "_capture", _capture_on_cpu)
    assert _tokens(engine) == expected
    graphs = engine._runner._graphs
    # 3 requests take the graph for 4, 5 and more that for the largest batch.
    assert {4, 6} <= set(graphs) <= {1, 2, 4, 6}
    assert sum(graph.graph.replays for graph in graphs.values()) > 8


@pytest.mark.gpu
def test_cuda_graphs_give_the_same_tokens(tmp_path: Any):
    model = _model(tmp_path, "cuda")
    options = {"num_pages": 64, "page_size": 4, "max_batch_size": 6}
    expected = _tokens(Engine(model, None, **options))
    engine = Engine(model, None, use_cuda_graph=True, **options)
    assert _tokens(engine) == expected
    assert all(graph.graph is not None for graph in engine._runner._graphs.values())
    # Again, from nothing but replays.
    assert _tokens(engine) == expected


def test_graphs_need_a_gpu(tmp_path: Any):
    with pytest.raises(ValueError, match="`use_cuda_graph` needs a GPU, the model is on cpu"):
        Engine(_model(tmp_path, "cpu"), None, num_pages=8, use_cuda_graph=True)


@pytest.mark.gpu
def test_graphs_beside_guesses_penalties_and_probabilities(tmp_path: Any):
    """Steps with guesses are eager, those without are replayed; the tokens are the same."""
    model = _model(tmp_path, "cuda")
    answers = []
    for options in ({}, {"speculation": 3, "ngram": 1}, {"speculation": 3, "use_cuda_graph": True}):
        engine = Engine(model, None, num_pages=64, page_size=4, batch_invariant=True, **options)
        for number in range(4):
            params = SamplingParams(
                temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2,
                frequency_penalty=0.5 * (number % 2), logit_bias={7: 0.5},
            )  # fmt: skip
            engine.add_request(str(number), [5, 6, 7, 8] * (1 + number), params)
        tokens: dict[str, list[int]] = {str(number): [] for number in range(4)}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].append(output.token_id)
                assert output.logprobs is not None and len(output.logprobs.top) == 2
        answers.append(tokens)
        assert engine.stats()["pages_free"] == 64
    assert answers[0] == answers[1] == answers[2]
