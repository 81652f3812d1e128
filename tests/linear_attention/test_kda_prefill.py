"""Planned and prepared prompts of Kimi Delta Attention: they are calls of `recurrent_kda`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer import (
    KDAPrefillPlanCache,
    RecurrentKDAPrefillWorkspace,
    kda_prefill_supports_fp32_checkpoints,
    prepare_bf16_kda_prefill,
    prepare_tf32_kda_prefill,
)
from flashinfer.kda import RecurrentKDAPrefillWrapper, recurrent_kda
from flashinfer.testing.tensors import clone_arguments

BF16 = torch.bfloat16
HEADS, DIM = 2, 32
GATE = {"use_gate_in_kernel": True, "lower_bound": -5.0, "beta_is_logit": True}


def prompts(device: torch.device, *lengths: int, storage: int = 0) -> dict[str, Any]:
    """Random operands of packed sequences; gates have rows for `storage` tokens more."""
    total = sum(lengths)

    def rows(count: int, *dim: int) -> torch.Tensor:
        return torch.randn(1, count, HEADS, *dim, device=device).to(BF16)

    q, k, v = (rows(total, DIM) for _ in "qkv")
    rates = {
        "A_log": torch.randn(HEADS, device=device),
        "dt_bias": torch.randn(HEADS, DIM, device=device),
    }
    gates = {"g": rows(total + storage, DIM), "beta": rows(total + storage)}
    return {"q": q, "k": k, "v": v, **gates, **rates}


def bounds(device: torch.device, *lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def test_later_plans_change_the_lengths(device: torch.device) -> None:
    torch.manual_seed(0)
    wrapper = RecurrentKDAPrefillWrapper(device)
    call = {**prompts(device, 9), **GATE, "output_final_state": True}
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(**call)
    address = None
    for lengths in ((4, 0, 5), (1, 7, 1)):
        wrapper.plan(bounds(device, *lengths).cpu())
        assert address in (None, wrapper._cu_seqlens.data_ptr())
        address = wrapper._cu_seqlens.data_ptr()
        found = wrapper.run(**call)
        wanted = recurrent_kda(**call, cu_seqlens=bounds(device, *lengths))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for wrong in (bounds(device, 4, 5), bounds(device, 4, 0, 6), bounds(device, 9, -1, 1)):
        with pytest.raises(ValueError, match="cu_seqlens"):
            wrapper.plan(wrong)
    with pytest.raises(ValueError, match="`q`"):
        wrapper.run(**{**call, **prompts(device, 8)})
    with pytest.raises(ValueError, match="cu_seqlens"):
        wrapper.plan(bounds(device, 4, 5).float())


@pytest.mark.parametrize("prepare", [prepare_bf16_kda_prefill, prepare_tf32_kda_prefill])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_prepared_call_is_the_call(device: torch.device, in_place: bool, prepare: Any) -> None:
    """Also with longer gates, slots, checkpoints, and states that go to another pool."""
    torch.manual_seed(1)
    lengths = (4, 5)
    call = prompts(device, *lengths, storage=3)
    pool = torch.randn(6, HEADS, DIM, DIM, device=device)
    slots = torch.tensor([5, 2], dtype=torch.int32, device=device)
    kept = {
        "state_checkpoints": torch.zeros(4, HEADS, DIM, DIM, device=device),
        "checkpoint_cu_starts": torch.tensor([0, 2, 4], device=device),
        "checkpoint_every_n_tokens": 2,
        "cu_seqlens": bounds(device, *lengths),
    }
    out, final = torch.full_like(call["v"], float("nan")), pool if in_place else pool + 1
    wanted_pool, wanted_kept = pool.clone(), clone_arguments(kept)
    wanted, *_ = recurrent_kda(
        **{**call, "g": call["g"][:, :9], "beta": call["beta"][:, :9]}, **GATE, **wanted_kept,
        initial_state=wanted_pool, ssm_state_indices=slots,
    )  # fmt: skip
    launch = prepare(
        **call, **kept, out=out, initial_state=pool, final_state=final, state_indices=slots,
        sequence_lengths=lengths,
    )  # fmt: skip
    assert out.isnan().all()
    before = pool.clone()
    launch.launch()
    assert torch.equal(out, wanted)
    assert torch.equal(kept["state_checkpoints"], wanted_kept["state_checkpoints"])
    assert torch.equal(final[slots.long()], wanted_pool[slots.long()])
    assert in_place or torch.equal(pool, before)
    launch.close()
    with pytest.raises(ValueError, match="close"):
        launch.launch()


def test_states_that_are_only_read(device: torch.device) -> None:
    call, pool = prompts(device, 3), torch.randn(1, HEADS, DIM, DIM, device=device)
    before, out = pool.clone(), torch.empty_like(call["v"])
    prepare_bf16_kda_prefill(**call, out=out, initial_state=pool).launch()
    wanted, _ = recurrent_kda(**call, **GATE, initial_state=pool.clone())
    assert torch.equal(out, wanted) and torch.equal(pool, before)


def test_a_cache_binds_prepared_calls_to_other_tensors(device: torch.device) -> None:
    cache, seen = KDAPrefillPlanCache(capacity=2), []
    for length, lower_bound in ((3, -5.0), (3, -5.0), (4, -5.0), (3, -2.0), (3, -5.0)):
        call = prompts(device, length)
        out = torch.empty_like(call["v"])
        prepared = prepare_bf16_kda_prefill(
            **call, out=out, lower_bound=lower_bound, plan_cache=cache
        )
        prepared.launch()
        seen.append(prepared)
        wanted, _ = recurrent_kda(**call, **{**GATE, "lower_bound": lower_bound})
        assert torch.equal(out, wanted)
    assert seen[0] is seen[1] and len({id(each) for each in seen[1:]}) == 4
    cache.clear()
    assert cache.get({"q": out}, scale=1.0) is None


def test_a_cache_forgets_what_is_too_large() -> None:
    cache, x = KDAPrefillPlanCache(max_bytes=10), torch.zeros(2)
    cache.put("a", {"x": x}, retained_bytes=6, scale=1.0)
    cache.put("b", {"x": x}, retained_bytes=4, scale=2.0)
    assert cache.get({"x": x + 1}, scale=1.0) == "a" and cache.get([x], scale=1.0) is None
    cache.put("c", {"x": x}, retained_bytes=3, scale=3.0)  # "b" was used longest ago
    assert [cache.get({"x": x}, scale=s) for s in (1.0, 2.0, 3.0)] == ["a", None, "c"]
    for wrong in ({"capacity": 0}, {"max_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            KDAPrefillPlanCache(**wrong)


def test_refusals(device: torch.device) -> None:
    call = prompts(device, 4)
    call["out"] = torch.empty_like(call["v"])
    state = torch.zeros(1, HEADS, DIM, DIM, device=device)
    for name, wrong in {
        "q": call["q"][0],
        "g": call["g"][:, :3],
        "beta": None,
        "dt_bias": call["dt_bias"][1:],
        "final_state": state,
        "state_indices": torch.zeros(1, dtype=torch.int32),
        "sequence_lengths": (3,),
    }.items():
        with pytest.raises((TypeError, ValueError), match=name):
            prepare_bf16_kda_prefill(**{**call, name: wrong})
            pytest.fail(f"{name} was accepted")


def test_what_is_true_on_every_device(device: torch.device) -> None:
    assert RecurrentKDAPrefillWorkspace(device).device == device
    assert kda_prefill_supports_fp32_checkpoints(device, lower_bound=-5.0)
