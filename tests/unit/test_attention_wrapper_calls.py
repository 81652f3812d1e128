"""Arguments that the wrappers hand to the launch: a stand-in computes it in float64.

Plans are made by the reference backend; runs are the wrappers' own, with the executor's launch
replaced by one that reads pages as the kernel does, and compared with the reference of the call.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import masks
from flashinfer._attention.plan.choice import KernelChoice
from flashinfer._attention.plan.executor import AttentionExecutor
from flashinfer._attention.plan.launch import PlanOptions
from flashinfer._attention.wrappers import cascade, two_parts
from flashinfer.jit import attention as attention_jit
from flashinfer.reference_backend import reference_backend
from flashinfer.testing.tensors import iter_tensors
from flashinfer.trace.templates.attention_arguments import problem_arguments
from flashinfer.trace.templates.attention_reference import (
    _paged_attention_reference,
    _ragged_attention_reference,
)
from tests.unit.test_attention_wrapper_refusals import (
    half,
    plan_batch_pod,
    plan_bsr,
    plan_cascade,
    plan_mixed,
    plan_pod,
    plan_sinks,
    plan_variable,
)
from tests.unit.test_attention_wrapper_runs import _RUNS


def _launch(
    problem: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    **options: Any,
) -> None:
    """Do what the kernel and the checks before it do."""
    spec, requests, tensors = problem
    assert q.shape == (requests.num_qo_tokens, spec.num_qo_heads, spec.head_dim_qk)
    assert out.shape == (*q.shape[:2], spec.head_dim_vo) and out.dtype == spec.o_data_type
    assert lse is None or (lse.shape == q.shape[:2] and lse.is_contiguous())
    inputs = {**problem_arguments(problem, {}, q.device), **options}
    inputs.pop("o_dtype")
    if v is None:
        k, v = k.unbind(1)
    page_size = requests.page_size
    if tensors.rows_as_pages:
        rows = requests.kv_lengths()[0]
        k, v = (x if spec.kv_layout == "NHD" else x.transpose(0, 1) for x in (k, v))
        assert len(k) == len(v) == rows
        padding = -len(k) % page_size
        k, v = (torch.cat([x, x.new_zeros(padding, *x.shape[1:])]) for x in (k, v))
        k, v = (x.unflatten(0, (-1, page_size)) for x in (k, v))
    elif spec.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if page_size:
        assert k.shape[1:3] == (page_size, spec.num_kv_heads)
        results = _paged_attention_reference(q, k, v, **inputs)
    else:
        results = _ragged_attention_reference(q, k, v, **inputs)
    out.copy_(results[0])
    if lse is not None:
        lse.copy_(results[1])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the executor's launches; the list of those that happened."""
    happened: list[str] = []
    plan = AttentionExecutor.plan

    def planned(self: Any, problem: Any, *args: Any, second: Any = None, **options: Any) -> None:
        self.second_problem = second
        happened.append("plan")
        with reference_backend():
            plan(self, problem, *args, second=second, **options)

    def set_second(self, q, k, v, out, lse, **numbers):
        happened.append("second")
        self.second_part = (q, k, v, out, lse), numbers

    def run(
        self, q, k, v, out, lse, *, sm_scale, v_scale, window_left, sinks=None, enable_pdl=None,
        additional=(), head_scales=(), block_scales=None, output_scale=None,
    ):  # fmt: skip
        assert block_scales is None and output_scale is None
        happened.append("run")
        numbers = {"sm_scale": sm_scale, "v_scale": v_scale, "window_left": window_left}
        parts = [(self.problem, (q, k, v, out, lse), numbers)]
        if self.second_problem is not None:
            parts.append((self.second_problem, *self.second_part))
        assert len(head_scales) in (0, len(parts))
        for i, (problem, tensors, own) in enumerate(parts):
            options = {**own, "sinks": sinks}
            if head_scales:
                options["sm_scale"] *= head_scales[i].logits
                for operand, scale in zip("qkv", head_scales[i][1:], strict=True):
                    spec = problem.spec
                    heads = spec.num_qo_heads if operand == "q" else spec.num_kv_heads
                    expanded = None if scale is None else scale.expand(heads)
                    options[f"{operand}_head_scale"] = expanded
            _launch(problem, *tensors, **options)

    def make_mask(*arguments: Any) -> Any:
        with reference_backend():  # packs the bits
            return masks.make_mask(*arguments)

    monkeypatch.setattr(two_parts, "make_mask", make_mask)
    monkeypatch.setattr(AttentionExecutor, "plan", planned)
    monkeypatch.setattr(AttentionExecutor, "set_second", set_second)
    monkeypatch.setattr(AttentionExecutor, "run", run)
    return happened


def _same_as_reference(wrapper: Any, **arguments: Any) -> Any:
    with reference_backend():
        expected = wrapper.run(**arguments)
    actual = wrapper.run(**arguments)
    assert _form(actual) == _form(expected)
    for mine, theirs in zip(iter_tensors(actual), iter_tensors(expected), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2**-9, atol=2**-12)
    return actual


def _form(results: Any) -> Any:
    return [_form(r) for r in results] if isinstance(results, tuple) else tuple(results.shape)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask": torch.rand(5, 16, 16) < 0.5}, {"sm_scale": 0.4}]
)
def test_block_sparse(options, return_lse, launches):
    wrapper = plan_with(plan_bsr, **options)
    _same_as_reference(wrapper, **_RUNS[plan_bsr][0], return_lse=return_lse)
    assert launches[-1] == "run"


def plan_with(plan: Any, **options: Any) -> Any:
    with reference_backend():
        return plan(**options)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("num_qo_heads", [2, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_variable_blocks(num_qo_heads, causal, return_lse, launches):
    wrapper = plan_with(plan_variable, num_qo_heads=num_qo_heads, causal=causal)
    run = {**_RUNS[plan_variable][0], "q": half(num_qo_heads, 10, 64)}
    expected = _same_as_reference(wrapper, **run, return_lse=return_lse)
    turned = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in run.items()}
    out = torch.empty(10, num_qo_heads, 64, dtype=torch.float16).transpose(0, 1)
    for destination in (out, torch.empty(num_qo_heads, 10, 64, dtype=torch.float16)):
        lse = torch.full((num_qo_heads, 10), torch.nan)
        returned = wrapper.run(**turned, out=destination, lse=lse, return_lse=return_lse)
        results = returned if return_lse else (returned,)
        assert results[0] is destination and (not return_lse or results[1] is lse)
        wanted = expected if return_lse else (expected,)
        for mine, theirs in zip(results, wanted, strict=True):
            assert torch.equal(mine, theirs)
        assert not lse.isnan().any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal_p": True, "return_lse_p": True},
        {"return_lse_d": True, "q_scale": 2.0, "v_scale": 0.5},
        {"k_scale_p": 2.0, "v_scale_p": 0.5, "k_scale": 2.0},
        {"q_scale_p": torch.arange(1, 9) / 8, "v_scale_p": torch.tensor(3.0), "q_scale": 2.0},
        {"q_scale_p": 3.0, "k_scale": torch.tensor([2.0, 0.5]), "v_scale": torch.ones(2) / 3},
        {"custom_mask_p": torch.rand(9, 12) < 0.5, "return_lse_p": True, "return_lse_d": True},
        {"custom_mask_d": torch.rand(35) < 0.5, "return_lse_d": True},
        {"window_left_p": 3, "sm_scale_p": -0.3, "return_lse_p": True},
        {"pos_encoding_mode_p": "ROPE_LLAMA", "rope_theta_p": 100.0, "k_scale_p": -2.0},
        {"pos_encoding_mode_p": "ALIBI", "causal_p": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_pod(options, launches):
    wrapper = plan_with(plan_pod)
    run = _RUNS[plan_pod][0]
    _same_as_reference(wrapper, **run, **options)
    assert launches == ["plan", "second", "run"]
    _same_as_reference(wrapper, **run, **options)
    masked = any(name.startswith("custom_mask") for name in options)
    assert launches[3:] == [*(["plan"] if masked else []), "second", "run"]
    _same_as_reference(wrapper, **{**run, "k_p": half(7, 2, 64), "v_p": half(7, 2, 64)})
    assert launches.count("plan") == 2 + masked


def test_pod_with_heads_first(launches):
    wrapper = plan_with(plan_pod)
    run = {**_RUNS[plan_pod][0], "k_p": half(2, 12, 64), "v_p": half(2, 12, 64)}
    _same_as_reference(wrapper, **run, kv_layout_p="HND", causal_p=True)


@pytest.mark.parametrize("return_lse", [False, True])
def test_batch_pod(return_lse, launches):
    wrapper = plan_with(plan_batch_pod)
    run = _RUNS[plan_batch_pod][0]
    launches.clear()
    _same_as_reference(wrapper, **run, return_lse=return_lse)
    assert "plan" not in launches  # plan() has done it
    for _ in range(2):
        _same_as_reference(wrapper, **run, return_lse=return_lse, causal_p=True, k_scale=0.5)
    assert launches.count("plan") == 1
    bits = 20 * 19 + 7 * 16
    _same_as_reference(wrapper, **run, custom_mask_p=torch.rand(bits) < 0.5)
    _same_as_reference(wrapper, **run)


@pytest.mark.parametrize("tokens", [(0, 20, 21), (0, 1, 2), (0, 40, 90)])
def test_batch_attention(tokens, launches):
    wrapper = plan_with(plan_mixed, qo_indptr=torch.tensor(tokens).int(), causal=True)
    run = {"q": half(tokens[-1], 8, 64), "kv_cache": half(5, 2, 16, 2, 64)}
    _same_as_reference(wrapper, **run)
    _same_as_reference(wrapper, **run, k_scale=2.0, v_scale=0.5)
    _same_as_reference(wrapper, **run, k_scale=torch.tensor([2.0, 0.5]), v_scale=0.5)
    _same_as_reference(wrapper, **run, v_scale=torch.tensor([3.0, 0.25]))


def test_sinks(launches):
    wrapper = plan_with(plan_sinks, causal=True, window_left=4)
    run = _RUNS[plan_sinks][0]
    _same_as_reference(wrapper, **run, return_lse=True, q_scale=0.5)
    of_heads = torch.arange(1, 9) / 4
    _same_as_reference(wrapper, **run, return_lse=True, q_scale=of_heads)
    q, cache, sinks = run["q"], run["paged_kv_cache"], run["sinks"]
    planned = wrapper.run(q, cache, sinks)
    assert torch.equal(wrapper.run(q, cache, sinks, 64**-0.5), planned)
    out, lse = wrapper.run_return_lse(q, cache, sinks, 64**-0.5)
    assert torch.equal(out, planned)
    assert torch.equal(lse, wrapper.run(q, cache, sinks=sinks, return_lse=True)[1])
    scaled = plan_with(plan_sinks, causal=True, window_left=4, sm_scale=0.5)
    given = wrapper.run(q, cache, sinks, 0.5)
    torch.testing.assert_close(given, scaled.run(q, cache, sinks), rtol=2**-9, atol=2**-12)
    for run_without in (wrapper.run, wrapper.run_return_lse, wrapper.forward_return_lse):
        with pytest.raises((TypeError, ValueError), match="sinks"):
            run_without(q, cache)


def test_cascade(launches, monkeypatch):
    wrapper = plan_with(plan_cascade, causal=True)
    merge = flashinfer.cascade.merge_states

    def merged(v: torch.Tensor, s: torch.Tensor) -> Any:
        with reference_backend():
            return merge(v, s)

    monkeypatch.setattr(cascade, "merge_states", merged)
    run = _RUNS[plan_cascade][0]
    with reference_backend():
        expected = wrapper.run(**run)
    torch.testing.assert_close(wrapper.run(**run), expected, rtol=2**-8, atol=2**-10)
    assert launches.count("run") == 2


def test_generators_describe_the_modules_of_the_wrappers():
    types = (torch.float16,) * 3
    pod = (*types, 64, 0, False, False, False, torch.int32, 0, False, False)
    with reference_backend():
        single, batch, mixed = plan_pod(), plan_batch_pod(), plan_mixed(causal=True)
        made = {single: plan_pod, batch: plan_batch_pod}
        single.run(**_RUNS[plan_pod][0], causal_p=True)
        batch.run(**_RUNS[plan_batch_pod][0], causal_p=True)
        pairs = [wrapper._problems_of(_call(wrapper, make)) for wrapper, make in made.items()]
    for (prefill, decode), make in zip(
        pairs, (attention_jit.gen_pod_module, attention_jit.gen_batch_pod_module), strict=True
    ):
        key = single._executor._module_key(prefill, decode, PlanOptions())
        assert _without_tile(key.config()) == _without_tile(make(*pod).config)
    choice = KernelChoice("fa2", 64, 16)
    key = mixed._executor._module_key(mixed._problem, None, PlanOptions(), choice)
    generated = attention_jit.gen_batch_attention_module(
        *types, torch.int32, 64, 64, 0, False, False
    )
    assert _without_tile(key.config()) == _without_tile(generated.config)


def _call(wrapper: Any, plan: Any) -> dict[str, Any]:
    """The arguments of a run by their names."""
    parameters = inspect.signature(type(wrapper).run).parameters
    given = {**_RUNS[plan][0], "causal_p": True}
    return {name: given.get(name, parameter.default) for name, parameter in parameters.items()}


def _without_tile(config: Any) -> Any:
    return dataclasses.replace(config, tile_q=64)


def test_head_dim_is_another_name_of_head_dim_qk():
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8)
    )
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    heads = {"num_qo_heads": 2, "num_kv_heads": 1, "q_data_type": torch.float16}
    with flashinfer.reference_backend():
        wrapper.plan(bounds, bounds, **heads, head_dim=64)
        assert wrapper._problem.spec.head_dim_qk == 64
        with pytest.raises(TypeError, match="one argument"):
            wrapper.plan(bounds, bounds, **heads, head_dim=64, head_dim_qk=64)
