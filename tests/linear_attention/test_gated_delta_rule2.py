"""The delta rule with gates by channel, against its recurrence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer import chunk_gated_delta_rule2, gdn2_prefill
from tests.bodies import body_of
from tests.linear_attention.recurrences import (
    STORAGE_ERROR,
    gated_delta_rule,
    relative_error,
)


def recurrence(q, k, v, decay, erase, write, state, scale):
    """Outputs and the last state of one sequence; all operands have state heads."""
    outputs = []
    for t in range(len(q)):
        state = state * decay[t, :, None]
        change = write[t] * v[t] - (state * (erase[t] * k[t])[:, None]).sum(-1)
        state = state + change[..., None] * k[t, :, None]
        outputs.append(scale * (state * q[t][:, None]).sum(-1))
    return torch.stack(outputs) if outputs else v, state


def run_on_the_cpu(
    out, q, k, v, gates, states, *, scale, normalize_qk, cu_seqlens, may_grow
) -> None:
    """The kernel's results."""
    assert gates.by_channel and gates.beta is None and not normalize_qk
    bounds = cu_seqlens.tolist()
    for i in range(len(bounds) - 1):
        part = slice(bounds[i], bounds[i + 1])
        shape = (q.shape[2], v.shape[3], q.shape[3])
        start = torch.zeros(shape) if states.initial is None else states.initial[i]
        last = start
        if bounds[i + 1] > bounds[i]:
            tokens = (x[0, part] for x in (q, k, v))
            ones = torch.ones(q[0, part].shape[:2])
            decay = gates.gate[0, part].double().exp()
            found, kept = gated_delta_rule(*tokens, decay, ones, start, scale, False)
            out[0, part] = found.to(out.dtype)
            last = kept[-1]
        if states.final is not None:
            states.final[i] = last.float()


@pytest.fixture(params=["called", "body"])
def function(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """On a GPU the function, otherwise its reference, and its body with an emulated kernel."""
    if request.param == "called":
        return chunk_gated_delta_rule2
    if device.type == "cuda":
        pytest.skip("the call runs the body there")
    monkeypatch.setattr(gdn2_prefill, "run_by_channel", run_on_the_cpu)
    return body_of(chunk_gated_delta_rule2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gates", [("g", "beta", "w"), ("g",), ("beta",), ()], ids=str)
def test_packed_sequences(
    gates: tuple[str, ...], dtype: torch.dtype, device: torch.device, function: Any
) -> None:
    """Grouped heads, an empty sequence, rates of zero, states in the type of the queries."""
    torch.manual_seed(0)
    lengths, heads, v_heads, dim_k, dim_v = [5, 0, 30, 1], 2, 4, 32, 24
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    total = sum(lengths)
    q, k = (torch.randn(total, heads, dim_k, device=device).to(dtype) for _ in "qk")
    v = torch.randn(total, v_heads, dim_v, device=device).to(dtype)
    rate = torch.rand(total, v_heads, dim_k, device=device)
    rate[rate < 0.1] = 0.0
    every = {
        "g": -torch.rand(total, v_heads, dim_k, device=device),
        "beta": rate,
        "w": torch.randn(total, v_heads, dim_v, device=device),
    }
    given = {name: every[name] for name in gates}
    start = torch.randn(len(lengths), v_heads, dim_v, dim_k, device=device).to(dtype)
    state = start.clone()
    out, final = function(
        q, k, v, **given, scale=0.2, initial_state=state, output_final_state=True,
        cu_seqlens=bounds, use_qk_l2norm_in_kernel=True, output_state=state,
    )  # fmt: skip
    assert final is state
    q, k, v = (x.double().repeat_interleave(v_heads // x.shape[1], 1) for x in (q, k, v))
    q, k = (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = given["g"].double().exp() if "g" in given else torch.ones_like(k)
    erase = given["beta"].double() if "beta" in given else torch.ones_like(k)
    write = given["w"].double() if "w" in given else torch.ones_like(v)
    for i in range(len(lengths)):
        part = slice(int(bounds[i]), int(bounds[i + 1]))
        inputs = (x[part] for x in (q, k, v, decay, erase, write))
        wanted, last = recurrence(*inputs, start[i].double(), 0.2)
        assert relative_error(out[part], wanted) < 3 * STORAGE_ERROR[dtype]
        assert relative_error(final[i], last) < 3 * STORAGE_ERROR[dtype]


def test_without_states(device: torch.device, function: Any) -> None:
    torch.manual_seed(1)
    q = torch.randn(4, 2, 32, device=device).to(torch.bfloat16)
    bounds = torch.tensor([0, 4], device=device, dtype=torch.int32)
    out = torch.full_like(q, float("nan"))
    assert function(q, q, q, cu_seqlens=bounds, output=out) is out and out.isfinite().all()
    _, final = function(q, q, q, cu_seqlens=bounds, output_final_state=True)
    assert final.dtype == torch.float32 and final.shape == (1, 2, 32, 32)


def test_refusals(device: torch.device, function: Any) -> None:
    q = torch.zeros(6, 2, 32, dtype=torch.bfloat16, device=device)
    call = {"q": q, "k": q, "v": q, "cu_seqlens": torch.tensor([0, 6], device=device)}
    gate, state = q.float(), torch.zeros(1, 2, 32, 32, device=device)
    for name, wrong in {
        "k": q[:, :1],
        "v": q.float(),
        "g": gate[:, :, :8],
        "beta": gate[:3],
        "w": gate[:, :1],
        "scale": "large",
        "cu_seqlens": None,
        "initial_state": state[:, :1],
        "output": gate,
        "output_state": state,
        "backend": "cudnn",
    }.items():
        with pytest.raises((TypeError, ValueError), match=name):
            function(**{**call, name: wrong})
            pytest.fail(f"{name} was accepted")
