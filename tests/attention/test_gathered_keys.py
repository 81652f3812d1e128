"""Prefills on Hopper whose keys are copied or rotated before the launch, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import gathering
from tests.attention.batches import (
    BF16,
    E4M3,
    FORMS,
    FP16,
    Batch,
    check,
    check_paged,
    check_ragged,
    need_backend,
    plan_paged,
    plan_ragged,
    randn,
)

pytestmark = pytest.mark.gpu

LENGTHS = (70, 0, 300, 1, 129), (70, 9, 515, 64, 1000)
ROPE = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e4, "rope_scale": 2.0}


@pytest.fixture(autouse=True)
def always(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying counts as free: it is chosen for small batches too."""
    need_backend("fa3", device)
    monkeypatch.setattr(gathering, "_copies_us", lambda *_: -1e9)


def is_gathered(wrapper: Any) -> bool:
    return wrapper._executor._gathering is not None


def test_no_keys_are_not_copied(device):
    batch = Batch((130,), (0,), page_size=1)
    wrapper = plan_paged(batch, device, causal=True)
    assert not is_gathered(wrapper)
    check_paged(wrapper, batch, device)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", [*FORMS, "tokens"])
def test_pages_of_one(form, kv_layout, device):
    batch = Batch(*LENGTHS, page_size=1, form=form, kv_layout=kv_layout)
    wrapper = plan_paged(batch, device, causal=True)
    assert is_gathered(wrapper)
    check_paged(wrapper, batch, device)


@pytest.mark.parametrize(
    ("qk", "vo", "dtype", "kv_dtype"),
    [(64, 64, FP16, None), (192, 128, BF16, None), (256, 256, BF16, None), (128, 128, BF16, E4M3)],
)
def test_types_and_sizes(qk, vo, dtype, kv_dtype, device):
    sizes = {"head_dim_qk": qk, "head_dim_vo": vo, "dtype": dtype, "kv_dtype": kv_dtype}
    batch = Batch(*LENGTHS, page_size=5, **sizes)
    wrapper = plan_paged(batch, device, backend="fa3", causal=True)
    assert is_gathered(wrapper)
    check_paged(wrapper, batch, device)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window_left": 40, "logits_soft_cap": 5.0},
        {"custom_mask": True},
    ],
    ids=["causal", "window and cap", "mask"],
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_rotated_pages(page_size, options, device):
    batch = Batch(*LENGTHS, page_size=page_size)
    if "custom_mask" in options:
        size = sum(q * k for q, k in zip(*LENGTHS, strict=True))
        options = {"custom_mask": randn((size,), torch.float32, device, 3) > 0.5}
    wrapper = plan_paged(batch, device, **ROPE, **options)
    assert is_gathered(wrapper)
    if options == {"causal": True}:
        assert wrapper._executor.choice.backend == "fa3"
    sinks = randn((batch.num_qo_heads,), torch.float32, device, 6)
    check_paged(wrapper, batch, device, sinks=sinks)


@pytest.mark.parametrize("backend", ["auto", "fa2"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_rotated_rows(kv_layout, backend, device):
    batch = Batch(*LENGTHS, kv_layout=kv_layout)
    wrapper = plan_ragged(batch, device, backend, causal=True, **ROPE)
    assert is_gathered(wrapper)
    check_ragged(wrapper, batch, device)


def test_rotated_heads_that_only_the_portable_kernel_has(device):
    batch = Batch(*LENGTHS, head_dim_qk=80, head_dim_vo=80, page_size=16)
    wrapper = plan_paged(batch, device, causal=True, **ROPE)
    assert is_gathered(wrapper)
    check_paged(wrapper, batch, device)


def test_a_single_request(device):
    q, k, v = (randn((900, heads, 128), BF16, device, heads) for heads in (8, 2, 2))
    check(
        flashinfer.single_prefill_with_kv_cache,
        **{"q": q, "k": k, "v": v, "causal": True, "return_lse": True, **ROPE},
    )


def test_repeats_and_other_plans_between(device):
    """Rows are copied anew by each run, so that wrappers may share a workspace."""
    batch, other = Batch(*LENGTHS, page_size=1), Batch((600,), (700,), page_size=1, seed=5)
    wrapper = plan_paged(batch, device, causal=True)
    q, cache = batch.query(device), batch.cache(device)
    first = wrapper.run(q, cache)
    second = plan_paged(other, device, causal=True)
    second._executor.move_workspaces(
        wrapper._executor.workspaces.floats, second._executor.workspaces.ints
    )
    assert is_gathered(wrapper) and is_gathered(second)
    second.run(other.query(device), other.cache(device))
    assert torch.equal(wrapper.run(q, cache), first)


def test_a_workspace_without_room_is_no_error(device, monkeypatch):
    """The pages are then read where they are."""
    batch = Batch(*LENGTHS, page_size=1)
    whole = {"causal": True, "disable_split_kv": True}  # no partial results
    roomy = plan_paged(batch, device, **whole)
    monkeypatch.setattr("tests.attention.batches.WORKSPACE_BYTES", 1 << 20)
    tight = plan_paged(batch, device, **whole)
    assert is_gathered(roomy) and not is_gathered(tight)
    check_paged(tight, batch, device)


def test_what_is_wrong_is_said_by_name(device):
    batch = Batch(*LENGTHS, page_size=1)
    wrapper = plan_paged(batch, device, causal=True)
    q, (k, v) = batch.query(device), batch.cache(device)
    assert is_gathered(wrapper)
    with pytest.raises(ValueError, match=r"`paged_kv_cache\[1\]`.*shape"):
        wrapper.run(q, (k, v[:, :, :1]))
    with pytest.raises(ValueError, match=r"`paged_kv_cache\[0\]`.*dtype"):
        wrapper.run(q, (k.half(), v))
