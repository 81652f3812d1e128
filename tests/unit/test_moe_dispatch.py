"""The one-sided all-to-all of experts without a GPU: shapes of what arrives, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer import SfLayout, comm
from flashinfer.comm import expert_memory, moe_a2a
from flashinfer.comm.expert_memory import Layout
from flashinfer.comm.peer_workspace import CommWorkspace


@pytest.mark.parametrize(
    ("shape", "dtype", "elements"),
    [
        ((5,), torch.float32, 1),
        ((5, 8), torch.bfloat16, 8),
        ((5, 2, 3), torch.uint8, 6),
        ((5, 0), torch.int32, 0),
    ],
)
def test_what_arrives_has_three_dimensions(shape, dtype, elements) -> None:
    memory: Any = SimpleNamespace(
        num_bytes=4096,
        tensor=torch.zeros(4096, dtype=torch.uint8),
        reserve=lambda outputs_end, tokens_begin: None,
    )
    payloads = [torch.zeros(shape, dtype=dtype)]
    ranges = moe_a2a._received(memory, payloads, Layout.of(2, 7, 0), 6)
    (view,) = moe_a2a._views(memory, payloads, ranges, (2, 6))
    assert view.shape == (2, 6, elements) and view.dtype == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_scalar_scale": 0.5}, "`output_scalar_scale` must be 1, got 0.5"),
        ({"output_scalar_scale": "1"}, "`output_scalar_scale` must be a number"),
        ({"sf_layout": SfLayout.layout_128x4}, "`sf_layout` must be SfLayout.layout_linear, got "),
        ({"sf_layout": None}, "`sf_layout` must be SfLayout.layout_linear, got None"),
        ({"output_scales": torch.ones(1)}, "`output_scales` must be None"),
        ({"top_k": 0}, "`top_k` must be "),
        ({"top_k": None}, "`top_k` must be "),
        ({}, "`workspace` must be of MoeAlltoAll.get_workspace"),
    ],
)
def test_what_a_combine_refuses(change, message) -> None:
    call = {
        "payload": torch.zeros(2, 3, 8),
        "local_num_tokens": 3,
        "workspace": torch.zeros(8, dtype=torch.uint8),
        "metainfo": torch.zeros(6),
        "runtime_max_tokens_per_rank": 3,
        "ep_rank": 0,
        "ep_size": 2,
        "top_k": 2,
        "combine_payload_offset": 0,
        **change,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        comm.moe_a2a_combine(**call)


@pytest.mark.compiler
@pytest.mark.usefixtures("bindings_on_the_cpu")
def test_the_binding_of_a_combine(monkeypatch) -> None:
    monkeypatch.setattr(expert_memory, "_modules", {})
    struct = CommWorkspace(world_size=2, half_bytes=1 << 16)
    outputs = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    kernel = expert_memory.combine_kernel(*[torch.bfloat16] * 3, 2)
    call = (
        torch.frombuffer(struct, dtype=torch.uint8),
        outputs,
        outputs[0],
        3,
        (False, 0, 0),
        None,
    )
    with pytest.raises(ValueError, match="`payload` must be a CUDA tensor"):
        kernel(*call)


def test_payloads_of_another_kind_get_views_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may begin and end where others did."""
    peers = SimpleNamespace(launch=lambda *arguments: None)
    memory: Any = SimpleNamespace(
        num_bytes=1 << 16,
        tensor=torch.zeros(1 << 16, dtype=torch.uint8),
        reserve=lambda outputs_end, tokens_begin: None,
        peers=peers,
    )
    layout = Layout.of(2, 8, 0)
    monkeypatch.setattr(moe_a2a, "_opened", lambda *arguments: memory)
    monkeypatch.setattr(moe_a2a, "_layout", lambda metainfo: layout)
    monkeypatch.setattr(moe_a2a.checks, "cuda_tensors", lambda **tensors: None)
    monkeypatch.setattr(expert_memory, "dispatch_kernel", lambda ranks: None)
    monkeypatch.setattr(moe_a2a, "_active", lambda *arguments: 3)
    cache: dict[Any, Any] = {}

    def received(payload: torch.Tensor) -> torch.Tensor:
        experts = torch.zeros(4, 2, dtype=torch.int32)
        views, *_ = moe_a2a.moe_a2a_dispatch(
            experts, [payload], torch.zeros(1), torch.zeros(6), 4, 0, 2, 2, 8, recv_view_cache=cache
        )
        return views[0]

    for shape, dtype in (
        ((4, 64), torch.bfloat16),
        ((4, 64), torch.float16),
        ((4, 128), torch.int8),
    ):
        view = received(torch.zeros(shape, dtype=dtype))
        assert view.dtype == dtype and view.shape == (2, 4, shape[1])
