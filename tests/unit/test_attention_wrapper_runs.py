"""Bad arguments of the runs of sparse, mixed and cascaded attention, refused without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.reference_backend import reference_backend
from tests.unit.test_attention_wrapper_refusals import (
    LONG,
    WRONG_PLANS,
    argument_of,
    half,
    plan_batch_pod,
    plan_bsr,
    plan_cascade,
    plan_mixed,
    plan_pod,
    plan_sinks,
    plan_variable,
    workspace,
)

_Q, _CACHE = half(21, 8, 64), half(5, 2, 16, 2, 64)
_RUNS: dict[Callable[..., Any], tuple[dict[str, Any], list[tuple[str, Any]]]] = {
    plan_bsr: (
        {"q": half(48, 8, 64), "k": half(64, 2, 64), "v": half(64, 2, 64)},
        [("k", half(63, 2, 64)), ("v", half(64, 2, 80)), ("scale_q", LONG), ("k", [1])],
    ),
    plan_variable: (
        {"q": half(8, 10, 64), "k": half(2, 32, 64), "v": half(2, 32, 64)},
        [
            ("q", half(10, 8, 64)),
            ("k", half(2, 31, 64)),
            ("v", half(32, 2, 64)),
            ("out", half(8, 10, 80)),
            ("out", torch.empty(8, 10, 64)),
            ("lse", torch.empty(10, 8)),
            ("lse", half(8, 10)),
        ],
    ),
    plan_pod: (
        {
            **{"q_p": half(9, 8, 64), "k_p": half(12, 2, 64), "v_p": half(12, 2, 64)},
            **{"q_d": half(2, 8, 64), "paged_kv_cache_d": _CACHE},
        },
        [
            ("q_p", half(9, 64)),
            ("k_p", half(12, 64)),
            ("q_p", [1]),
            ("causal_p", 1),
            ("causal_d", "no"),
            ("kv_layout_p", "DHN"),
            ("kv_layout_d", "HND"),
            ("pos_encoding_mode_p", "ROPE"),
            ("pos_encoding_mode_d", "ALIBI"),
            ("sm_scale_p", "1"),
            ("sm_scale_d", 1.0),
            ("window_left_p", 3.5),
            ("rope_theta_p", -1.0),
            ("window_left_d", 3),
            ("custom_mask_p", torch.ones(9, 11, dtype=torch.bool)),
            ("packed_custom_mask_d", torch.ones(2, dtype=torch.uint8)),
            ("custom_mask_d", "mask"),
            ("use_fp16_qk_reduction", True),
            ("paged_kv_cache_d", (_CACHE,)),
        ],
    ),
    plan_batch_pod: (
        {
            **{"q_p": half(27, 8, 64), "paged_kv_cache_p": _CACHE},
            **{"q_d": half(2, 8, 64), "paged_kv_cache_d": _CACHE},
        },
        [
            ("causal_p", "yes"),
            ("custom_mask_p", torch.ones(5, dtype=torch.bool)),
            ("paged_kv_cache_p", None),
            ("use_fp16_qk_reduction", True),
        ],
    ),
    plan_mixed: (
        {"q": _Q, "kv_cache": _CACHE},
        [
            ("logits_soft_cap", 3.0),
            ("profiler_buffer", LONG),
            ("kv_cache_sf", LONG),
            ("kv_cache", [1, 2, 3]),
            ("k_scale", torch.ones(3)),
            ("k_scale", torch.ones(2, 1)),
            ("v_scale", torch.ones(2, device="meta")),
            ("v_scale", float("nan")),
            ("q", None),
        ],
    ),
    plan_sinks: (
        {"q": _Q, "paged_kv_cache": _CACHE, "sinks": torch.ones(8)},
        [("sinks", None), ("sinks", 1.0), ("kv_cache_sf", LONG), ("q_scale", "1")],
    ),
    plan_cascade: ({"q": half(2, 8, 64), "paged_kv_cache": _CACHE}, [("q", "query")]),
}
_CALLS = [(plan, name, value) for plan, (_, bad) in _RUNS.items() for name, value in bad]


@pytest.mark.parametrize(
    ("plan", "name", "value"),
    _CALLS,
    ids=[f"{p.__name__}-{n}-{i}" for i, (p, n, _) in enumerate(_CALLS)],
)
@pytest.mark.parametrize("by_reference", [False, True])
def test_run_refuses(plan, name, value, by_reference):
    """The function's own checks refuse it, and so do those of the reference backend."""
    with reference_backend():
        wrapper = plan()
        arguments = {**_RUNS[plan][0], name: value}
        if by_reference:
            with pytest.raises((TypeError, ValueError), match=name):
                wrapper.run(**arguments)
            return
    with pytest.raises((TypeError, ValueError), match=name):
        wrapper.run(**arguments)


@pytest.mark.parametrize("plan", _RUNS, ids=lambda plan: plan.__name__)
def test_run_before_plan(plan):
    with reference_backend():
        made = type(plan())
    if made is flashinfer.BatchAttention:
        wrapper = made(device="cpu")
    elif made is flashinfer.MultiLevelCascadeAttentionWrapper:
        wrapper = made(2, workspace())
    else:
        wrapper = made(workspace())
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(**_RUNS[plan][0])


@pytest.mark.parametrize("plan", WRONG_PLANS, ids=lambda plan: plan.__name__)
def test_a_refused_plan_leaves_nothing_to_run(plan, monkeypatch):
    """Not the plan before it either, whose lengths it may have changed."""
    with reference_backend():
        wrapper = plan()
    monkeypatch.setattr(flashinfer, type(wrapper).__name__, lambda *_, **__: wrapper)
    for name, value in WRONG_PLANS[plan]:
        if name == "num_qo_heads" and value == 8:
            continue  # 8.0 is what the plan before it had
        with reference_backend():
            plan()
            with pytest.raises((TypeError, ValueError)):
                plan(**{argument_of(plan, name): value})
            with pytest.raises(ValueError, match="plan.* must be called before"):
                wrapper.run(**_RUNS[plan][0])


def test_new_workspaces_need_a_new_plan():
    with reference_backend():
        wrapper = plan_bsr()
    wrapper.reset_workspace_buffer(workspace(), workspace())
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(**_RUNS[plan_bsr][0])
