"""CUDA graphs of one request that prefills beside a batch that decodes, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from tests.attention_plans import layout_of
from tests.unit import test_attention_graphs as graphs
from tests.unit.test_attention_graphs import (
    BF16,
    CACHE,
    CAPACITY,
    HEADS,
    PAGES,
    captured,
    int32,
    plan_decode,
    pretend_gpu,
    query,
    workspace,
    zeros,
)

pytestmark = pytest.mark.compiler

launches = graphs.launches  # a fixture


def graph_pod() -> Any:
    buffers = (zeros(CAPACITY + 1), zeros(PAGES), zeros(CAPACITY))
    return pretend_gpu(flashinfer.PODWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers))


def run_pod(wrapper: Any, tokens: int, **options: Any) -> None:
    keys = torch.zeros(tokens, 2, 128, dtype=BF16)
    wrapper.run(query(tokens), keys, keys, query(CAPACITY), CACHE, causal_p=True, **options)


@pytest.fixture
def pod(launches) -> Any:
    """A wrapper whose run with 50 tokens that prefill is in a CUDA graph."""
    wrapper = graph_pod()
    plan_decode(wrapper)
    run_pod(wrapper, 50)
    captured(launches, lambda: run_pod(wrapper, 50))
    return wrapper


def planned_tokens(wrapper: Any) -> tuple[int, int]:
    first, second = layout_of(wrapper._executor._planner)["groups"]
    return first["qo_tokens"], second["qo_tokens"]


def test_a_refused_plan_of_pod_does_not_unbind_its_graph(pod):
    kept = [buffer.clone() for buffer in pod._buffers]
    for batch_size, options in ((CAPACITY + 1, {}), (3, {"sm_scale": 2.0}), (3, {"page_size": 0})):
        with pytest.raises((TypeError, ValueError)):
            plan_decode(pod, batch_size, **options)
        with pytest.raises(ValueError, match=r"plan\(\) must be called"):
            run_pod(pod, 50)
    assert all(torch.equal(a, b) for a, b in zip(kept, pod._buffers, strict=True))
    plan_decode(pod, 2)  # what the graph replays next
    assert planned_tokens(pod) == (50, 2)
    assert pod._buffers[0][:3].tolist() == [0, 4, 8]


def test_runs_beside_a_graph_of_pod_keep_its_plan(pod):
    for tokens, options in ((30, {}), (50, {"causal_d": True})):
        with pytest.raises(ValueError, match="another wrapper"):
            run_pod(pod, tokens, **options)
    run_pod(pod, 50)
    assert planned_tokens(pod) == (50, 3)
    pod.reset_workspace_buffer(workspace(), workspace())
    pretend_gpu(pod)
    with pytest.raises(ValueError, match="`float_workspace_buffer` must stay"):
        plan_decode(pod)


def test_pages_of_pod_that_are_too_few_for_its_graph(launches):
    with pytest.raises(ValueError, match="`indices` must have from the 12"):
        graph_pod().plan(int32(0, 4, 8, 12), int32(*range(11)), int32(5, 5, 5), *HEADS)
