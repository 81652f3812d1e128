"""Prefills whose keys are copied before the launch: when that is chosen, and what is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer._attention.plan import gathering
from flashinfer._attention.plan.gathering import Gathering, is_worth_gathering
from flashinfer._attention.plan.launch import NO_OPTIONS, GraphCapacity, PlanOptions
from flashinfer._attention.plan.requests import ArgumentNames, AttentionProblem
from flashinfer.rope import apply_rope
from tests.unit.test_attention_backends import BF16, CUDA, E4M3, int32, problem
from tests.unit.test_attention_backends import on_hopper as on_hopper

ROPE = {"pos_encoding_mode": "ROPE_LLAMA"}


def prefill(qo_lens: list[int], **options: Any) -> AttentionProblem:
    found = problem(qo_lens, **options)
    return found._replace(
        requests=found.requests._replace(argument_names=ArgumentNames.PREFILL),
    )


@pytest.mark.compiler
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("qo_lens", "options", "expected"),
    [
        ([8192], {"page_size": 1}, True),
        ([8192], {"page_size": 1, "backend": "fa3"}, True),
        ([8192], {"page_size": 1, "backend": "fa2"}, False),
        ([8192], {"page_size": 16, "last_page_len": int32(16)}, False),  # boxes of TMA fit
        ([8192], {}, False),  # rows already
        ([16], {"page_size": 1, "kv_indptr": int32(0, 60000)}, False),  # each key is read once
        ([8192], ROPE, True),
        ([8192], {**ROPE, "page_size": 16, "last_page_len": int32(16)}, True),
        ([8192], {**ROPE, "backend": "fa2"}, True),
        ([8192], {**ROPE, "head_dim_qk": 80, "head_dim_vo": 80}, True),
        ([8192], {**ROPE, "backend": "fa3"}, False),  # refused
        ([8192], {**ROPE, "kv_data_type": E4M3}, False),
        ([8192], {**ROPE, "kv_indptr": int32(0, 100)}, False),  # queries before the first key
        ([1], {**ROPE, "kv_indptr": int32(0, 4000)}, False),
    ],
)
def test_what_is_gathered(
    qo_lens: list[int], options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gathering, "is_hopper", lambda device: True)
    found = prefill(qo_lens, **options)
    assert is_worth_gathering(found, CUDA, NO_OPTIONS) is expected
    assert not is_worth_gathering(found, CUDA, PlanOptions(fixed_split_size=512))
    assert not is_worth_gathering(found, CUDA, PlanOptions(capacity=GraphCapacity(1, 8192)))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("page_size", [0, 8, 16, 32, 64, 128, 256])
def test_usual_pages_are_told_without_the_planner(page_size: int, monkeypatch: pytest.MonkeyPatch):
    """Its module need not be there before the kernel of a first plan begins to compile."""

    def need(*_: Any) -> Any:
        raise AssertionError("the planner's module was needed")

    monkeypatch.setattr(gathering, "is_hopper", lambda device: True)
    monkeypatch.setattr(gathering, "hopper_tiles", need)
    monkeypatch.setattr(gathering, "estimate_kernels", need)
    pages = {"page_size": page_size, "last_page_len": int32(page_size)} if page_size else {}
    found = prefill([8192], backend="fa3", **pages)
    assert not is_worth_gathering(found, CUDA, NO_OPTIONS)


def gather_on_the_cpu(k_rows, v_rows, k, v, pages, page_indptr, token_indptr, size, is_hnd, pdl):
    """The module's function, by indexing."""
    for rows, cache in ((k_rows, k), (v_rows, v)):
        cache = cache.transpose(1, 2) if is_hnd else cache
        for b in range(len(token_indptr) - 1):
            begin, end = token_indptr[b : b + 2].tolist()
            numbers = pages[page_indptr[b] : page_indptr[b + 1]].long()
            rows[begin:end] = cache[numbers].flatten(0, 1)[: end - begin]


def rotate_on_the_cpu(out, _, x, __, ___, indptr, offsets, dim, scale, theta, ____):
    """The function of the rope module, by its reference."""
    reference = apply_rope.__flashinfer_trace__.reference
    rotated, _ = reference(x, x, indptr, offsets, dim, False, scale, theta)
    out.copy_(rotated)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [0, 3])
def test_the_launch_sees_rotated_rows(
    page_size: int, kv_layout: str, monkeypatch: pytest.MonkeyPatch
):
    class Module:
        attention_gather = staticmethod(gather_on_the_cpu)
        rope = staticmethod(rotate_on_the_cpu)

        def build_and_load(self) -> Any:
            return self

    monkeypatch.setattr(gathering, "get_attention_gather_module", Module)
    monkeypatch.setattr(gathering, "gen_rope_module", lambda config: Module())
    kv_lens, qo_lens, heads, dim = [7, 0, 5], [2, 0, 5], 2, 64
    pages = {}
    if page_size:
        pages = {
            "page_size": page_size,
            "kv_indptr": int32(0, 3, 3, 5),
            "last_page_len": int32(1, 0, 2),
            "kv_indices": int32(4, 1, 6, 0, 2),
        }
    else:
        pages = {"kv_indptr": int32(0, 7, 7, 12)}
    sizes = {"head_dim_qk": dim, "head_dim_vo": dim, "kv_layout": kv_layout, "rope_theta": 500.0}
    found = prefill(qo_lens, **ROPE, **sizes, **pages)
    copied = Gathering(found, torch.device("cpu"))
    launched = copied.problem
    assert launched.requests.kv_lengths().tolist() == kv_lens
    assert launched.requests.page_size == 0 and launched.tensors.kv_indices is None
    assert launched.spec.pos_encoding_mode == "NONE"
    assert launched.spec.kv_layout == ("NHD" if page_size else kv_layout)

    floats = torch.full((20000,), 7, dtype=torch.int32)
    assert copied.fits(1024, 80000) and (page_size == 0 or not copied.fits(79000, 80000))
    copied.place(floats)
    shape = (7, page_size, heads, dim) if page_size else (12, heads, dim)
    k, v = torch.randn(shape).to(BF16), torch.randn(shape).to(BF16)
    q = torch.randn(7, found.spec.num_qo_heads, dim).to(BF16)
    if page_size:
        pages_of = [[4, 1, 6], [], [0, 2]]
        k_rows, v_rows = (
            torch.cat([x[p].flatten(0, 1)[:n] for p, n in zip(pages_of, kv_lens, strict=True)])
            for x in (k, v)
        )
    else:
        k_rows, v_rows = k, v
    if kv_layout == "HND":
        k, v = k.transpose(-2, -3).contiguous(), v.transpose(-2, -3).contiguous()
    got_q, got_k, got_v = copied.apply(q, k, v)
    if launched.spec.kv_layout == "HND":
        got_k, got_v = got_k.transpose(0, 1), got_v.transpose(0, 1)
    reference = apply_rope.__flashinfer_trace__.reference
    none, theta = int32(0, 0, 0), 500.0
    expected_k, _ = reference(k_rows, k_rows, int32(0, 7, 7, 12), none, dim, False, 1.0, theta)
    first = int32(5, 0, 0)
    expected_q, _ = reference(q, q, int32(0, 2, 2, 7), first, dim, False, 1.0, theta)
    assert torch.equal(got_k, expected_k.to(BF16)) and torch.equal(got_q, expected_q.to(BF16))
    assert torch.equal(got_v, v_rows)
    used = copied.num_bytes // 4
    assert bool((floats[: 19968 - used] == 7).all())  # partial results lie before the rows
